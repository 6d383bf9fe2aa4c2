"use strict";
// A click on a heading sorts its table by that column, a second one the other way; what has no value stays below.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const table = heading.closest("table");
    const column = [...heading.parentElement.children].indexOf(heading);
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.children[column].dataset.value;
    const number = heading.classList.contains("number");
    const compare = (a, b) => (number ? Number(a) - Number(b) : a.localeCompare(b));
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (key(a) === "") - (key(b) === "") || (down ? -1 : 1) * compare(key(a), key(b)));
    table.tBodies[0].append(...rows);
  });
}

// The columns that name a row stay in sight, as far as they leave room for the others.
const pin = () => {
  for (const table of document.querySelectorAll("[data-keys] table")) {
    const room = table.parentElement.clientWidth / 2;
    const heads = [...table.tHead.rows[0].cells].slice(0, Number(table.parentElement.dataset.keys));
    let left = 0;
    heads.forEach((head, i) => {
      const fits = i === 0 || left + head.offsetWidth <= room;
      for (const row of table.rows) {
        row.cells[i].classList.toggle("key", fits);
        row.cells[i].style.left = fits ? `${left}px` : "";
      }
      left += fits ? head.offsetWidth : room;
    });
  }
};
pin();
addEventListener("resize", pin);
for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", pin);

// Rows with all words of the filter in what they show stay.
for (const filter of document.querySelectorAll("[data-table]")) {
  const rows = [...document.querySelectorAll(`#${filter.dataset.table} tbody tr`)];
  const texts = rows.map((row) => [...row.querySelectorAll("[data-value]")].map((cell) => cell.textContent).join(" ").toLowerCase());
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => { row.hidden = !words.every((word) => texts[i].includes(word)); });
    filter.parentElement.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  filter.addEventListener("input", show);
  show();
}

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "selected: press Ctrl+C";
    }
  });
}

// The numbers of a point or line, at once and on touch; without a script, the browser shows the same title later.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const mark of document.querySelectorAll(".tip")) {
  const title = mark.querySelector("title");
  const text = title.textContent;
  mark.addEventListener("pointerenter", (event) => {
    title.textContent = "";
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 12)}px`;
  });
  mark.addEventListener("pointerleave", () => { tip.hidden = true; title.textContent = text; });
}
