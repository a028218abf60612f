// Puts a search field above each table that wants one, and sorts it by the column whose heading is pressed.
for (const table of document.querySelectorAll("table[data-search]")) {
  const body = table.tBodies[0], rows = [...body.rows], said = document.createElement("p");
  const label = document.createElement("label"), field = document.createElement("input");
  field.type = "search";
  label.append("Search ", field);
  said.setAttribute("role", "status");
  const tools = document.createElement("div");
  tools.className = "tools";
  tools.append(label, said);
  table.parentElement.before(tools);
  const text = (row, place) => row.cells[place].textContent.trim();
  const number = cell => Number(cell.replace(/[\s\u202f]/g, "").replace("\u2212", "-").replace("%", ""));
  const search = () => {
    const words = field.value.toLowerCase().split(" ").filter(word => word);
    let shown = 0;
    for (const row of rows) {
      const whole = row.textContent.toLowerCase();
      row.hidden = !words.every(word => whole.includes(word));
      shown += !row.hidden;
    }
    said.textContent = shown + " of " + rows.length + " rows";
  };
  field.addEventListener("input", search);
  search();
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      const order = (a, b) => {
        const first = text(a, place), second = text(b, place), gap = number(first) - number(second);
        return Number.isNaN(gap) ? first.localeCompare(second) : gap;
      };
      rows.sort((a, b) => (down ? order(a, b) : order(b, a)));
      body.append(...rows);
    });
  });
}
