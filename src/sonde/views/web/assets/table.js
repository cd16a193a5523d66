// A table that sorts, can be gone through with j and k, and shows many rows a part at a time.
import { h, replace } from "./dom.js";

const PART = 200;

/**
 * @typedef {Object} Column
 * @property {string} name
 * @property {string} title
 * @property {(row: any) => any} [value]  what it sorts by; by default the row's field of that name
 * @property {(row: any) => (Node|string)} [cell]
 * @property {boolean} [number]  aligned right
 */

/**
 * @param {Column[]} columns
 * @param {Object} options `label` for screen readers; `sort` as `name` or `-name`; `onsort(sort)`; `onopen(row)`;
 *   `key(row)` names a row; `empty` is said where there are none
 * @returns {HTMLElement} with `show(rows, columns)`. A row with `children` is followed by them while it is `open`. On a
 *   small screen each row becomes a card, in which every value stands beside the title of its column
 */
export function table(columns, { label, sort = "", onsort = () => {}, onopen = null, key = (row) => row.id, empty = "Nothing." } = {}) {
  const head = h("tr"), body = h("tbody");
  const more = h("button", { type: "button", class: "more", hidden: true, onclick: () => { shown += PART; draw(); } });
  const element = h("div", { class: "scroll" }, h("table", { class: "cards", "aria-label": label }, h("thead", {}, head), body), more);
  let rows = [], shown = PART, current = null;

  const valueOf = (column, row) => (column.value ? column.value(row) : row[column.name]);

  const sorted = () => inOrder(rows).flatMap((row) => (row.children && row.open ? [row, ...inOrder(row.children)] : [row]));

  function inOrder(some) {
    const column = columns.find((each) => each.name === sort.replace(/^-/, ""));
    if (!column) return some;
    const sign = sort.startsWith("-") ? -1 : 1;
    // What is not known comes last, whichever way it is sorted.
    return [...some].sort((a, b) => {
      const [left, right] = [valueOf(column, a), valueOf(column, b)];
      const [noLeft, noRight] = [left === null || left === undefined, right === null || right === undefined];
      if (noLeft || noRight) return noLeft - noRight;
      return sign * (typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right);
    });
  }

  function drawHead() {
    replace(head, columns.map((column) => {
      const way = sort === column.name ? "ascending" : sort === `-${column.name}` ? "descending" : null;
      const turn = () => { sort = sort === column.name ? `-${column.name}` : column.name; onsort(sort); draw(); };
      const mark = way ? h("span", { class: "way", "aria-hidden": "true" }, way === "ascending" ? " ▲" : " ▼") : null;
      const title = column.title && column.sortable !== false
        ? h("button", { type: "button", onclick: turn }, column.title, mark) : column.title;
      return h("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": way, title: column.hint }, title);
    }));
  }

  function draw() {
    const back = focusIn();
    drawHead();
    const all = sorted();
    replace(body, all.slice(0, shown).map((row) => {
      const line = h("tr", { "data-key": key(row), class: key(row) === current ? "current" : null, tabindex: onopen ? "-1" : null, "data-group": row.children ? "" : null },
        columns.map((column) => cellOf(column, column.cell ? column.cell(row) : valueOf(column, row))));
      if (onopen) {
        line.addEventListener("dblclick", () => onopen(row));
        line.addEventListener("focus", () => mark(line));
        line.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target === line) onopen(row); });
      }
      return line;
    }));
    if (!all.length) body.append(h("tr", {}, h("td", { colspan: columns.length, class: "quiet" }, empty)));
    more.hidden = all.length <= shown;
    more.textContent = `Show more of ${all.length.toLocaleString("en")} rows`;
    back();
  }

  /** A cell; a card leaves those out that hold nothing. */
  function cellOf(column, content) {
    const cell = h("td", { class: column.number ? "number" : null, "data-title": column.title || null }, content);
    if (cell.textContent === "–") cell.dataset.none = "";
    return cell;
  }

  /** Remember what has the focus, by its row and its place in it; returns what gives it back after a redraw. */
  function focusIn() {
    const held = document.activeElement, line = held?.closest?.("tr");
    if (!line || !element.contains(held)) return () => {};
    const inside = (row) => [row, ...row.querySelectorAll("a, button, input")];
    const at = inside(line).indexOf(held), name = line.dataset.key;
    return () => {
      const again = name === undefined ? head : [...body.children].find((each) => each.dataset.key === name);
      if (again) inside(again)[at]?.focus({ preventScroll: true });
    };
  }

  function mark(line) {
    current = line.dataset.key;
    for (const each of body.children) each.classList.toggle("current", each === line);
  }

  /** Go some rows on; for the keys j and k. */
  element.move = (by) => {
    const lines = [...body.querySelectorAll("tr[tabindex]")];
    const at = lines.findIndex((each) => each.classList.contains("current"));
    const line = lines[Math.min(Math.max(at < 0 ? (by > 0 ? 0 : lines.length - 1) : at + by, 0), lines.length - 1)];
    line?.focus();
    line?.scrollIntoView({ block: "nearest" });
  };
  element.show = (next, nextColumns = columns) => { rows = next; columns = nextColumns; draw(); };
  return element;
}
