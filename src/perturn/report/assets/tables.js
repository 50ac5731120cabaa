// Tables that sort by a click on a column's head.

function watchTables() {
  document.querySelectorAll("table[data-sortable]").forEach(makeSortable);
}

function makeSortable(table) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const label = head.textContent;
    const button = element("button", { type: "button", class: "sort", click: () => sortTable(table, column) }, label);
    head.replaceChildren(button);
  });
}

// A missing value is empty, or shown as a dash.
const cellValue = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.replace(/^–$/, "");

function sortTable(table, column) {
  const heads = [...table.querySelectorAll("thead th")];
  const down = heads[column].getAttribute("aria-sort") !== "descending";
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = table.tBodies[0];
  const collator = new Intl.Collator("en", { numeric: true });
  const rows = [...body.rows].sort((one, other) => {
    const [left, right] = [cellValue(one, column), cellValue(other, column)];
    if (!left || !right) return Boolean(right) - Boolean(left); // missing values last, in both directions
    const numbers = [Number(left), Number(right)];
    const order = numbers.some(Number.isNaN) ? collator.compare(left, right) : numbers[0] - numbers[1];
    return down ? -order : order;
  });
  body.append(...rows);
  announce(`Sorted by ${heads[column].textContent}, ${down ? "descending" : "ascending"}.`);
}
