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

// Rows with all words of the filter in what names them stay.
const filter = document.getElementById("filter");
if (filter) {
  const rows = [...document.querySelectorAll("#table-cells tbody tr")];
  const texts = rows.map((row) => [...row.querySelectorAll("[data-value]")].map((cell) => cell.textContent).join(" ").toLowerCase());
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => { row.hidden = !words.every((word) => texts[i].includes(word)); });
    document.getElementById("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} cells`;
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

document.getElementById("theme").addEventListener("click", () => {
  const style = document.documentElement.style;
  const dark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = dark ? "light" : "dark";
});
