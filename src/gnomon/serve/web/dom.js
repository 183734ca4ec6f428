// Elements without markup in strings: text is always text.

/** `el("p.quiet", {title: "x", onclick: f}, "text", node)` */
export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [attribute, value] of Object.entries(attributes)) {
    if (attribute.startsWith("on")) made.addEventListener(attribute.slice(2), value);
    else if (value === true) made.setAttribute(attribute, "");
    else if (value !== false && value != null) made.setAttribute(attribute, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export const $ = (id) => document.getElementById(id);
