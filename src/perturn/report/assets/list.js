// A list of any length: only the rows in sight are in the page.

const ROW = 56; // pixels, as `episodes.css` has it
const SPARE = 8; // rows drawn above and below

class LongList {
  constructor(place, drawRow) {
    this.place = place;
    this.drawRow = drawRow;
    this.rows = [];
    this.inner = element("div", { class: "rows", role: "list" });
    place.append(this.inner);
    place.addEventListener("scroll", () => this.draw(), { passive: true });
    place.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(place);
  }

  set(rows) {
    this.rows = rows;
    this.inner.style.height = `${rows.length * ROW}px`;
    this.place.scrollTop = 0;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.place.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((this.place.scrollTop + this.place.clientHeight) / ROW) + SPARE);
    const focused = document.activeElement?.dataset?.index;
    const had = this.inner.contains(document.activeElement);
    this.inner.replaceChildren(...this.rows.slice(first, last).map((row, offset) => this.item(row, first + offset)));
    if (had && focused !== undefined) this.inner.querySelector(`[data-index="${focused}"]`)?.focus({ preventScroll: true });
  }

  item(row, index) {
    const item = element("div", { class: "item", role: "listitem", "aria-setsize": this.rows.length, "aria-posinset": index + 1 }, this.drawRow(row, index));
    item.firstChild.dataset.index = index;
    item.style.top = `${index * ROW}px`;
    return item;
  }

  /** Bring a row into sight. */
  reveal(index) {
    const { scrollTop, clientHeight } = this.place;
    if (index * ROW < scrollTop) this.place.scrollTop = index * ROW;
    if ((index + 1) * ROW > scrollTop + clientHeight) this.place.scrollTop = (index + 1) * ROW - clientHeight;
    this.draw();
  }

  onKey(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !this.rows.length) return;
    event.preventDefault();
    const now = Number(document.activeElement?.dataset?.index ?? -1);
    const next = Math.min(this.rows.length - 1, Math.max(0, now + steps[event.key]));
    this.reveal(next);
    this.inner.querySelector(`[data-index="${next}"]`)?.focus({ preventScroll: true });
  }
}
