// The status page: /stats as it changes. The stream is asked for again whenever it ends, so a restart of the server only interrupts it.
import { events, key } from "./api.js";
import { $, el } from "./dom.js";

const HISTORY = 120;
const speeds = [];
let before = null;
let model = null;
let stop = new AbortController();

const number = (value, digits = 0) => (value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits }));
const bytes = (value) => {
  if (value == null) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (value >= size) return `${number(value / size, 1)} ${unit}`;
  return `${value} B`;
};
const duration = (seconds) => (seconds == null ? "–" : seconds < 120 ? `${number(seconds)} s` : seconds < 7200 ? `${number(seconds / 60)} min` : `${number(seconds / 3600, 1)} h`);
const share = (part, whole) => (whole ? `${number((100 * part) / whole)} %` : "–");

function figures(id, pairs) {
  $(id).replaceChildren(...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function state(text, kind) {
  $("state").textContent = text;
  $("state").className = `state ${kind}`;
}

/** The models of a pool. */
function pool(about) {
  $("pool").hidden = !about;
  if (!about) return;
  $("models").replaceChildren(...about.models.map((one) => el("tr", {}, ...[
    one.id, one.pinned ? `${one.state}, pinned` : one.reason ? `${one.state}: ${one.reason}` : one.state, number(one.leases), number(one.waiting),
    number(one.requests), number(one.loads), one.loads ? `${number(one.load_seconds, 1)} s` : "–", bytes(one.share_bytes),
  ].map((cell) => el("td", {}, cell)))));
  $("room").textContent = `${number(about.resident)} of ${number(about.places)} places taken, ${bytes(about.taken_bytes)} of ${bytes(about.room_bytes)} reckoned${about.budget ? "" : " (advice)"}`;
  const names = ["", ...about.models.map((one) => one.id)];
  // Made anew only when it has to be: someone may have it open.
  if ($("shown").children.length !== names.length) $("shown").replaceChildren(...names.map((name) => el("option", { value: name, selected: name === (model ?? "") }, name || "the model asked last")));
}

$("shown").addEventListener("change", () => {
  model = $("shown").value || null;
  speeds.length = 0;
  stop.abort();
});

function show(stats) {
  pool(stats.pool);
  const { batch = {}, admission = {}, requests = {}, rates = {}, tokens = {}, memory = {}, proposals = {}, prompt_cache: cache = {} } = stats;
  $("model-name").textContent = stats.server.model;
  state(stats.health.status === "ok" ? "running" : `${stats.health.status}: ${stats.health.reason}`, stats.health.status === "ok" ? "ok" : "bad");
  const now = performance.now();
  const made = (tokens.generated ?? 0);
  if (before) speeds.push(Math.max(0, (made - before.made) / ((now - before.at) / 1000)));
  before = { made, at: now };
  if (speeds.length > HISTORY) speeds.shift();
  figures("now", [
    ["rows decoding", `${number(batch.active_rows)} of ${number(batch.configured)}`],
    ["waiting", `${number(admission.waiting_requests)} of ${number(admission.queue_limit)}`],
    ["tokens per second now", number(speeds.at(-1), 1)],
    ["decode, while busy", number(rates.decode_tokens_per_second, 1)],
    ["prefill, while busy", number(rates.prefill_tokens_per_second, 1)],
    ["finished", number(requests.finished)],
    ["cancelled", number(requests.cancelled)],
    ["failed", number(requests.failed)],
    ["refused", number(requests.refused)],
  ]);
  const rows = stats.rows ?? [];
  $("rows").replaceChildren(...(rows.length ? rows.map((row) => el("tr", {}, ...[row.id, row.state, number(row.prompt_tokens), number(row.cached_tokens), number(row.generated_tokens), `${number(row.seconds, 1)} s`].map((cell) => el("td", {}, cell)))) : [el("tr", {}, el("td", { colspan: 6 }, "none under way"))]));
  chart();
  figures("cache", [
    ["hits", share(cache.hits, cache.hits + cache.misses)],
    ["tokens reused", number(cache.reused_tokens)],
    ["held", `${bytes(cache.bytes)} of ${bytes(cache.max_bytes)}`],
    ["evictions", number(cache.evictions)],
    ...(stats.ssd_cache ? [["on disk", `${bytes(stats.ssd_cache.bytes)} of ${bytes(stats.ssd_cache.max_bytes)}`]] : []),
  ]);
  const misses = (cache.recent_misses ?? []).slice(-8).reverse();
  $("misses").replaceChildren(...(misses.length ? misses.map((miss) => el("li", {}, explain(miss))) : [el("li", {}, "nothing was missed")]));
  const sources = Object.entries(memory).filter(([name, value]) => typeof value === "number" && name !== "limit");
  const most = Math.max(admission.usable_bytes ?? 0, ...sources.map(([, value]) => value), 1);
  $("memory").replaceChildren(...[["weights", admission.weights_bytes], ["rows' states", batch.kv_bytes], ["prefix cache", cache.bytes], ...sources].filter(([, value]) => value != null).map(([name, value]) =>
    el("div.meter", {}, el("div", {}, el("span", {}, name.replaceAll("_", " ")), el("span", {}, bytes(value))), el("progress", { max: most, value, "aria-label": name.replaceAll("_", " ") }))));
  pressure(stats.memory_pressure);
  figures("speculation", [["proposed", number(proposals.proposed)], ["accepted", number(proposals.accepted)], ["acceptance", share(proposals.accepted, proposals.proposed)], ["windows", number(stats.steps?.windows)]]);
  $("all").textContent = JSON.stringify(stats, null, 2);
}

const STEPS = { none: "nothing gives way", cache: "the cache gives way", chunk: "prefill windows are smaller", queue: "requests wait their turn" };

/** What gave way when memory ran short, and when. */
function pressure(about) {
  if (!about) return $("pressure").replaceChildren(el("div", {}, el("dt", {}, "step"), el("dd", {}, "–")));
  figures("pressure", [
    ["step", STEPS[about.step] ?? about.step],
    ["for", duration(about.step_seconds)],
    ["in use", `${bytes(about.used_bytes)} of ${bytes(about.ceiling_bytes)}`],
    ["prefill windows", `${number(about.chunk_tokens)} of ${number(about.full_chunk_tokens)} tokens`],
    ["cache given up", `${bytes(about.reclaimed_bytes)} in ${number(about.reclaims)}`],
    ["windows halved", number(about.chunk_halvings)],
    ["doors closed", number(about.holds)],
    ["allocations failed", number(about.allocation_failures)],
  ]);
  const steps = (about.history ?? []).slice(-8).reverse();
  $("steps").replaceChildren(...(steps.length ? steps.map((one) => el("li", {}, `${duration(one.seconds_ago)} ago: ${STEPS[one.step] ?? one.step}, windows of ${number(one.chunk_tokens)} tokens, at ${bytes(one.used_bytes)}`)) : [el("li", {}, about.enabled ? "none" : "none: --no-memory-steps leaves only the cache to give way")]));
}

function explain(miss) {
  // With several keys the words are not told.
  const sides = miss.stored != null || miss.prompt != null ? `: stored ${JSON.stringify(miss.stored)}, asked ${JSON.stringify(miss.prompt)}` : "";
  return `${miss.kind} at token ${miss.position}${sides}`;
}

function chart() {
  if (speeds.length < 2) return;
  const top = Math.max(...speeds, 1);
  const points = speeds.map((speed, i) => `${((i + HISTORY - speeds.length) / (HISTORY - 1)) * 100},${(1 - speed / top) * 96 + 2}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `between ${number(Math.min(...speeds), 1)} and ${number(top, 1)} tokens per second`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", `M${points.join("L")}`);
  svg.append(path);
  $("chart").replaceChildren(svg, el("p.quiet.small", {}, `most ${number(top, 1)}`));
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key-form").hidden = true;
  watch();
});

async function watch() {
  for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
    try {
      stop = new AbortController();
      const path = model ? `stats/stream?model=${encodeURIComponent(model)}` : "stats/stream";
      for await (const stats of events(path, { signal: stop.signal })) { show(stats); wait = 500; }
    } catch (error) {
      if (stop.signal.aborted) {
        before = null;
        continue;
      }
      // A server that was started anew may have other models.
      if (error.status === 404) model = null;
      if (error.status === 401) {
        state(error.message, "bad");
        $("key-form").hidden = false;
        return;
      }
    }
    before = null;
    state("the server does not answer; asking again", "bad");
    await new Promise((done) => setTimeout(done, wait));
  }
}
watch();
