// Markdown as models write it, built from elements: nothing of a text is ever taken for markup of the page.
import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** Cuts a text into blocks: sources that are rendered one by one, so that a growing text changes only its last ones. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const close = () => { if (lines.length) found.push(lines.join("\n")); lines = []; };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      lines.push(line);
      if (mark && mark[1].startsWith(fence) && !mark[2]) { fence = null; close(); }
    } else if (mark) {
      close();
      fence = mark[1];
      lines.push(line);
    } else if (!line.trim()) {
      if (lines.length && ITEM.test(lines[0])) lines.push(line);
      else close();
    } else {
      // A list goes on over blank lines as long as items or indented lines follow.
      if (lines.length && ITEM.test(lines[0]) && !lines.at(-1).trim() && !ITEM.test(line) && !/^\s/.test(line)) close();
      const [first, item] = [ITEM.exec(lines[0] ?? ""), ITEM.exec(line)];
      if (first && item && item[1].length <= first[1].length && /\d/.test(first[2]) !== /\d/.test(item[2])) close();
      if (/^#{1,6}\s/.test(line)) { close(); found.push(line); continue; }
      lines.push(line);
    }
  }
  close();
  return found;
}

export function render(source) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(source);
  if (heading) return el(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  if (/^ {0,3}([-*_])( *\1){2,}\s*$/.test(source)) return el("hr");
  if (lines.every((line) => line.startsWith(">"))) {
    return el("blockquote", {}, ...blocks(lines.map((line) => line.replace(/^> ?/, "")).join("\n")).map(render));
  }
  if (lines.length > 1 && lines[0].includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[1])) return table(lines);
  const item = lines.findIndex((line) => ITEM.test(line));
  if (item === 0) return list(lines);
  if (item > 0) {
    const both = document.createElement("div");
    both.append(render(lines.slice(0, item).join("\n")), list(lines.slice(item)));
    return both;
  }
  const paragraph = el("p");
  lines.forEach((line, i) => paragraph.append(...(i ? [el("br")] : []), ...inline(line)));
  return paragraph;
}

function code(lines, fence) {
  const closed = lines.length > 1 && FENCE.exec(lines.at(-1))?.[1].startsWith(fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = el("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  } }, "Copy");
  return el("div.code", {}, el("div.row", {}, fence[2] || "text", copy), el("pre", { tabindex: "0" }, el("code", {}, text)));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  return el("div.scroll", {}, el("table", {},
    el("thead", {}, el("tr", {}, ...cells(lines[0]).map((cell) => el("th", { scope: "col" }, ...inline(cell))))),
    el("tbody", {}, ...lines.slice(2).filter((line) => line.trim()).map((line) => el("tr", {}, ...cells(line).map((cell) => el("td", {}, ...inline(cell))))))));
}

function list(lines) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const made = el(ordered ? "ol" : "ul", ordered && parseInt(first[2], 10) !== 1 ? { start: parseInt(first[2], 10) } : {});
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length + 1) items.push([item[3]]);
    else items.at(-1).push(line);
  }
  for (const [head, ...rest] of items) {
    const entry = el("li", {}, ...inline(head));
    const indent = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)), 99);
    const inner = rest.map((line) => line.slice(indent)).join("\n");
    if (inner.trim()) entry.append(...blocks(inner).map(render));
    made.append(entry);
  }
  return made;
}

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*]*[^\s*])\*(?!\*)|(?<!\w)_(?=\S)([^_]*\S)_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\]]*)\]\(([^()\s]+)(?:\s+"[^"]*")?\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/;

/** Nodes of one line of text. */
export function inline(text) {
  const nodes = [];
  for (let depth = 0; text && depth < 10_000; depth++) {
    const found = INLINE.exec(text);
    if (!found) break;
    if (found.index) nodes.push(text.slice(0, found.index));
    const [whole, , codeText, strong, emphasis, emphasis2, deleted, label, target, address] = found;
    if (codeText != null) nodes.push(el("code", {}, codeText.replace(/^ (.+) $/, "$1")));
    else if (strong) nodes.push(el("strong", {}, ...inline(strong)));
    else if (emphasis ?? emphasis2) nodes.push(el("em", {}, ...inline(emphasis ?? emphasis2)));
    else if (deleted) nodes.push(el("del", {}, ...inline(deleted)));
    else nodes.push(link(target ?? address, label, whole));
    text = text.slice(found.index + whole.length);
  }
  if (text) nodes.push(text);
  return nodes;
}

function link(target, label, whole) {
  if (!/^(https?:|mailto:)/i.test(target)) return whole;
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, label || target);
}
