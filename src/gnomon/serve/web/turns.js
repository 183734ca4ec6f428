// One turn of a conversation on the page. A turn under way is updated in place, and only the blocks that changed.
import { el } from "./dom.js";
import { blocks, render } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

/** `actions`: {copy, edit, again, results}, each called with the message. `running`: the answer is still coming. */
export class Turn {
  constructor(message, actions, running = false) {
    this.message = message;
    this.actions = actions;
    this.sources = [];
    this.said = el("div.said");
    this.thought = el("div.thought");
    this.thinking = el("details", { hidden: true }, el("summary", {}, "Thinking"), this.thought);
    this.calls = el("div");
    this.foot = el("div.tools");
    this.element = el(`article.turn.${message.role}`, {}, el("h2", {}, NAMES[message.role]), this.thinking, this.said, this.calls, this.foot);
    this.update(running);
  }

  update(running) {
    const { message } = this;
    this.thinking.hidden = !message.reasoning;
    if (this.thought.textContent !== (message.reasoning ?? "")) this.thought.textContent = message.reasoning ?? "";
    this.thinking.firstChild.textContent = running && !message.content ? "Thinking …" : "Thinking";
    if (message.role === "assistant") this.renderMarkdown(message.content ?? "");
    else this.said.textContent = message.content;
    this.said.classList.toggle("cursor", running);
    if (message.tool_calls?.length || this.calls.childNodes.length) this.renderCalls(running);
    this.foot.replaceChildren(...(running ? [] : this.tools()));
  }

  renderMarkdown(text) {
    const sources = blocks(text);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.said.childNodes.length > same) this.said.lastChild.remove();
    for (const source of sources.slice(same)) this.said.append(render(source));
    this.sources = sources;
  }

  renderCalls(running) {
    const calls = this.message.tool_calls ?? [];
    const inputs = [];
    const shown = calls.map((call) => {
      let text = call.function.arguments;
      try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* still growing, or not JSON: as it is */ }
      const box = el("div.call", {}, el("strong", {}, `Calls ${call.function.name}`), el("pre", {}, el("code", {}, text)));
      if (!running && this.message.open) {
        const input = el("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}`, placeholder: "Result" });
        inputs.push([call, input]);
        box.append(input);
      }
      return box;
    });
    this.calls.replaceChildren(...shown);
    if (inputs.length) {
      const send = () => this.actions.results(this.message, inputs.map(([call, input]) => ({ role: "tool", tool_call_id: call.id, content: input.value })));
      this.calls.append(el("button", { type: "button", onclick: send }, "Send results"));
    }
  }

  tools() {
    const { message, actions } = this;
    const button = (text, act) => el("button", { type: "button", onclick: () => act(message) }, text);
    const made = [];
    for (const file of message.attachments ?? []) made.push(el("span.quiet.small", {}, `📎 ${file.name} (${file.text.length} characters)`));
    if (message.content) made.push(button("Copy", actions.copy));
    if (message.role === "user") made.push(button("Edit and resend", actions.edit));
    if (message.role === "assistant") made.push(button("Again", actions.again), el("span.quiet.small", {}, summary(message)));
    if (message.error) made.push(el("span.error", { role: "alert" }, message.error));
    return made;
  }
}

function summary({ usage, finish, seconds }) {
  const parts = [];
  if (finish === "length") parts.push("cut at the token limit");
  if (finish === "stopped") parts.push("stopped");
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`);
    if (seconds > 0) parts.push(`${(usage.completion_tokens / seconds).toFixed(1)} per second with the prompt`);
    if (usage.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens reused`);
  }
  return parts.join(" · ");
}
