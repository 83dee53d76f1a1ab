// Tables: sorting by a click or key on a heading, and filters by text and by value.

function cellValue(row, column) {
  const value = row.cells[column].dataset.value;
  if (value === undefined) return null;
  const number = Number(value);
  return value !== "" && !Number.isNaN(number) ? number : value;
}

// Numbers sort before text. Missing values come last in both directions.
function compareCells(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  return direction * order;
}

function sortTable(table, heading) {
  const column = heading.cellIndex;
  const before = heading.getAttribute("aria-sort");
  const first = heading.classList.contains("number") ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const now = before === first ? other : first;
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", now);
  const direction = now === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => compareCells(cellValue(a, column), cellValue(b, column), direction));
  table.tBodies[0].append(...rows);
}

function setUpSorting(table) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = element("button", { type: "button" }, heading.textContent);
    button.addEventListener("click", () => sortTable(table, heading));
    heading.replaceChildren(button);
  }
}

function setUpFilters(section) {
  const table = section.querySelector("table");
  const place = section.querySelector(".filters");
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 3) return;
  const caption = section.querySelector("h3").textContent;
  const search = element("input", { type: "search", placeholder: "words", "aria-label": `Rows of ${caption} with these words` });
  const count = element("output", { "aria-live": "polite" });
  const choices = [];
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits =
        words.every((word) => text.includes(word)) &&
        choices.every(({ column, select }) => !select.value || row.cells[column].dataset.value === select.value);
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  };
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    if (!("choose" in heading.dataset)) return;
    const values = [...new Set(rows.map((row) => row.cells[column].dataset.value))].sort();
    if (values.length < 2) return;
    const name = heading.textContent;
    const select = element("select", {}, new Option("all", ""), ...values.map((value) => new Option(value, value)));
    select.addEventListener("change", apply);
    choices.push({ column, select });
    place.append(element("label", {}, name, select));
  });
  search.addEventListener("input", apply);
  place.append(element("label", {}, "filter", search), count);
  apply();
}

function setUpTables() {
  for (const section of document.querySelectorAll("div.table")) {
    setUpFilters(section);
    setUpSorting(section.querySelector("table"));
  }
}
