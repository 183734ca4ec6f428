// The chat page: conversations at the side, one of them in the log, settings in a dialog.
import { events, getJSON, key } from "./api.js";
import * as conversations from "./conversations.js";
import { $, el } from "./dom.js";
import { Turn } from "./turns.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const MAX_FILE = 4 << 20;

let known = [];
let current = conversations.fresh(defaults());
let turns = [];
let attached = [];
let running = null;
let models = [];
let states = {};

const log = $("log");
const message = $("message");
const actions = {
  copy: (one) => navigator.clipboard.writeText(one.content).catch((error) => notify(`Copying failed: ${error.message}`)),
  edit: (one) => edit(one),
  again: (one) => { if (!running) { cut(one); answer(); } },
  results: (one, results) => { if (!running) { delete one.open; for (const result of results) add(result); answer(); } },
};

function notify(text) { $("notice").textContent = text; }

// --- conversations

async function save(one = current) {
  one.updated = Date.now();
  if (!one.title) one.title = one.messages.find((each) => each.role === "user")?.content.trim().split("\n")[0].slice(0, 60) ?? "";
  if (!known.includes(one)) known.unshift(one);
  try {
    await conversations.put(one);
  } catch (error) {
    notify(`This browser could not keep the conversation: ${error.message}`);
  }
}

function list() {
  $("conversations").replaceChildren(...known.map((one) => el("li", {},
    el("button.open", { type: "button", "aria-current": one === current ? "true" : null, onclick: () => open(one) }, one.title || "Untitled"),
    el("button.delete", { type: "button", "aria-label": `Delete ${one.title || "Untitled"}`, onclick: () => drop(one) }, "✕"))));
}

async function drop(one) {
  if (!confirm(`Delete "${one.title || "Untitled"}"?`)) return;
  known = known.filter((other) => other !== one);
  await conversations.remove(one.id);
  if (one === current) open(known[0] ?? conversations.fresh(one.settings));
  list();
}

function open(one) {
  running?.abort();
  current = one;
  history.replaceState(null, "", `#${one.id}`);
  turns = one.messages.map((each) => new Turn(each, actions));
  log.replaceChildren(...turns.map((turn) => turn.element));
  log.scrollTop = log.scrollHeight;
  notify("");
  list();
  toggleSide(false);
  showModel();
  message.focus();
}

function add(one, running = false) {
  current.messages.push(one);
  const turn = new Turn(one, actions, running);
  turns.push(turn);
  log.append(turn.element);
  log.scrollTop = log.scrollHeight;
  return turn;
}

/** Takes this message and everything after it off the conversation. */
function cut(one) {
  const at = current.messages.indexOf(one);
  current.messages.length = at;
  for (const turn of turns.splice(at)) turn.element.remove();
}

function edit(one) {
  if (running) return;
  message.value = one.content;
  attached = [...(one.attachments ?? [])];
  cut(one);
  showAttached();
  grow();
  message.focus();
}

// --- asking

function wire(one) {
  if (one.role === "user") {
    const files = (one.attachments ?? []).map((file) => `File ${file.name}:\n\`\`\`\n${file.text}\n\`\`\`\n\n`).join("");
    return { role: "user", content: files + one.content };
  }
  if (one.role === "tool") return { role: "tool", tool_call_id: one.tool_call_id, content: one.content };
  const sent = { role: "assistant", content: one.content || (one.tool_calls?.length ? null : "") };
  if (one.reasoning) sent.reasoning_content = one.reasoning;
  if (one.tool_calls?.length) sent.tool_calls = one.tool_calls;
  return sent;
}

function body() {
  const { settings } = current;
  const messages = current.messages.slice(0, -1).map(wire);
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  const asked = { model: settings.model || models[0], messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (settings[name] != null) asked[name] = settings[name];
  if (settings.thinking) asked.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.tools) asked.tools = JSON.parse(settings.tools);
  return asked;
}

async function answer() {
  const mine = current;
  const one = { role: "assistant", content: "" };
  const turn = add(one, true);
  running = new AbortController();
  const { signal } = running;
  const begun = performance.now();
  let drawn = 0;
  let saved = begun;
  busy(true);
  notify("");
  const draw = () => {
    drawn = 0;
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    turn.update(running?.signal === signal);
    if (follow) log.scrollTop = log.scrollHeight;
  };
  try {
    for await (const event of events("v1/chat/completions", { body: body(), signal })) {
      if (event.warning) { notify(event.warning); continue; }
      if (event.error) throw new Error(event.error.message ?? "the server broke the answer off");
      if (event.usage) one.usage = event.usage;
      for (const choice of event.choices ?? []) take(one, choice);
      drawn ||= requestAnimationFrame(draw);
      // A page that is closed or reloaded finds what had come by then.
      if (performance.now() - saved > 1000) { saved = performance.now(); save(mine); }
    }
    if (!one.finish) throw new Error("the connection ended before the answer did");
  } catch (error) {
    if (signal.aborted) one.finish = "stopped";
    else { one.finish ??= "error"; one.error = error.status === 401 ? `${error.message} (Settings has a place for it)` : error.message; }
  }
  cancelAnimationFrame(drawn);
  one.seconds = (performance.now() - begun) / 1000;
  if (one.tool_calls?.length && !one.error && one.finish !== "stopped") one.open = true;
  running = null;
  busy(false);
  if (current === mine) draw();
  await save(mine);
  list();
}

function take(one, { delta, finish_reason }) {
  if (delta?.content) one.content += delta.content;
  const thought = delta?.reasoning_content ?? delta?.reasoning;
  if (thought) one.reasoning = (one.reasoning ?? "") + thought;
  for (const part of delta?.tool_calls ?? []) {
    one.tool_calls ??= [];
    const call = (one.tool_calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  if (finish_reason) one.finish = finish_reason;
}

function busy(on) {
  $("stop").hidden = !on;
  $("send").disabled = on;
  log.setAttribute("aria-busy", String(on));
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value.trim();
  if (running || (!text && !attached.length)) return;
  const one = { role: "user", content: text };
  if (attached.length) one.attachments = attached;
  attached = [];
  message.value = "";
  for (const turn of turns) if (turn.message.open) { delete turn.message.open; turn.update(false); }
  showAttached();
  grow();
  add(one);
  answer();
});
$("stop").addEventListener("click", () => running?.abort());

// --- composer

function grow() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}
message.addEventListener("input", grow);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
  if (event.key === "ArrowUp" && !message.value && !running) {
    const last = current.messages.findLast((one) => one.role === "user");
    if (last) { event.preventDefault(); edit(last); }
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if ($("side").classList.contains("shown")) { toggleSide(false); $("menu").focus(); } else running?.abort();
});

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  for (const file of $("file").files) await attach(file);
  $("file").value = "";
  showAttached();
});
message.addEventListener("dragover", (event) => event.preventDefault());
message.addEventListener("drop", async (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  for (const file of event.dataTransfer.files) await attach(file);
  showAttached();
});

async function attach(file) {
  if (file.size > MAX_FILE) return notify(`${file.name} has ${file.size} bytes; at most ${MAX_FILE} can be attached`);
  const text = new TextDecoder("utf-8", { fatal: true });
  try {
    attached.push({ name: file.name, text: text.decode(await file.arrayBuffer()) });
  } catch {
    notify(`${file.name} is not text in UTF-8`);
  }
}

function showAttached() {
  $("attachments").hidden = !attached.length;
  $("attachments").replaceChildren(...attached.map((file) => el("li", {}, file.name,
    el("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: () => { attached = attached.filter((one) => one !== file); showAttached(); } }, "✕"))));
}

// --- settings

function showModel() {
  $("model-name").textContent = current.settings.model || models[0] || "";
}

async function findModels() {
  try {
    const { data } = await getJSON("v1/models");
    models = data.map((one) => one.id);
    states = Object.fromEntries(data.map((one) => [one.id, one.state]));
    if (!current.messages.length) notify("");
  } catch (error) {
    notify(error.status === 401 ? `${error.message} (Settings has a place for it)` : error.status ? error.message : "The server does not answer.");
  }
  showModel();
}

function listModels(chosen) {
  const names = models.includes(chosen) || !chosen ? models : [chosen, ...models];
  const label = (name) => (!states[name] || states[name] === "resident" ? name : `${name} (${states[name]})`);
  $("s-model").replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, label(name))));
}

$("open-settings").addEventListener("click", () => {
  const { settings } = current;
  listModels(settings.model);
  // Which of several are loaded changes all the time.
  if (models.length > 1) findModels().then(() => listModels($("s-model").value));
  for (const name of ["system", "thinking", "tools", ...NUMBERS]) $(`s-${name}`).value = settings[name] ?? "";
  $("s-key").value = key.get();
  $("tools-error").textContent = "";
  $("settings").showModal();
});

$("settings").querySelector("form").addEventListener("submit", (event) => {
  const tools = $("s-tools").value.trim();
  try {
    if (tools && !Array.isArray(JSON.parse(tools))) throw new Error("the tools have to be a list");
  } catch (error) {
    event.preventDefault();
    $("tools-error").textContent = `Tools: ${error.message}`;
    $("s-tools").focus();
  }
});

$("settings").addEventListener("close", async () => {
  const tools = $("s-tools").value.trim();
  const settings = { model: $("s-model").value, system: $("s-system").value.trim(), thinking: $("s-thinking").value };
  try { if (tools && Array.isArray(JSON.parse(tools))) settings.tools = tools; } catch { /* left by Escape: the tools stay out */ }
  for (const name of NUMBERS) if ($(`s-${name}`).value !== "") settings[name] = Number($(`s-${name}`).value);
  current.settings = settings;
  localStorage.setItem("settings", JSON.stringify(settings));
  key.set($("s-key").value.trim());
  if (current.messages.length) await save();
  await findModels();
});

function toggleSide(shown) {
  $("side").classList.toggle("shown", shown);
  $("menu").setAttribute("aria-expanded", String(shown));
}
$("menu").addEventListener("click", () => toggleSide(!$("side").classList.contains("shown")));

function defaults() {
  try { return JSON.parse(localStorage.getItem("settings")) ?? {}; } catch { return {}; }
}
$("new").addEventListener("click", () => open(conversations.fresh(defaults())));

try {
  known = await conversations.all();
} catch (error) {
  notify(`This browser keeps no conversations: ${error.message}`);
}
// Who was quicker than the browser's storage is already in a conversation.
if (current.messages.length) list();
else open(known.find((one) => `#${one.id}` === location.hash) ?? current);
await findModels();
