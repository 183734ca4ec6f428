"use strict";
const form = document.getElementById("filters");
const runs = [...document.querySelectorAll("article[data-run]")];

/** Whether a run fits what is chosen in every filter; an empty choice fits all. */
function fits(run) {
  return [...form.elements].every((one) => {
    if (!one.value) return true;
    const own = run.dataset[one.name];
    return one.name === "arm" ? JSON.parse(own).includes(one.value) : own === one.value;
  });
}

function filter() {
  const shown = new Set();
  for (const run of runs) {
    run.hidden = !fits(run);
    if (!run.hidden) shown.add(run.dataset.run);
  }
  for (const part of document.querySelectorAll("[data-from]")) part.toggleAttribute("hidden", !shown.has(part.dataset.from));
  for (const plot of document.querySelectorAll("#quality figure")) {
    plot.hidden = ![...plot.querySelectorAll("li")].some((one) => !one.hidden);
  }
  for (const part of document.querySelectorAll(".serving")) {
    part.hidden = ![...part.querySelectorAll("tbody tr")].some((one) => !one.hidden);
  }
  document.getElementById("count").textContent = `${shown.size} of ${runs.length} runs shown`;
}

form.hidden = false;
form.addEventListener("change", filter);
form.addEventListener("submit", (event) => event.preventDefault());
for (const chooser of document.querySelectorAll(".chooser")) {
  chooser.hidden = false;
  const select = chooser.querySelector("select");
  const choose = () => {
    for (const part of chooser.closest("article").querySelectorAll("[data-baseline]")) {
      part.hidden = part.dataset.baseline !== select.value;
    }
  };
  select.addEventListener("change", choose);
  choose();
}
filter();
