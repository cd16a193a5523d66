// Layers over the shared step axis as colours, on a canvas; rows are named by block and role.
import { h, replace } from "./dom.js";
import { RIGHT, drawUnits, fittedAll, ink, lastUpTo, leftOf, sheet, steer } from "./timeaxis.js";
import { onTheme } from "./theme.js";
import { MAPS, colour, pack, paint as paintCells } from "./canvas/colours.js";
import { count, short } from "./words.js";

const AROUND = 6, LONG_GAP = 6, ZERO = pack(128, 132, 138); // a logarithm has no place for zero
const middleOf = (numbers) => [...numbers].sort((a, b) => a - b)[numbers.length >> 1];

/**
 * @param {Object} made  as `run/<id>/heat` answers
 * @param {Object} axis
 * @param {Object} options `signal`; `height`; `byRow` whether each row has a scale of its own; `onrow(key, step)`
 */
export function heatMap(made, axis, { signal, height = 200, byRow = () => false, onrow = null, title = null, tools = [] } = {}) {
  const said = h("span", { class: "legend" }), heading = h("h2", {}, title ?? made.what);
  const canvas = sheet(height, paint, { signal, label: made.what });
  const element = h("section", { class: "panel figure heat", "aria-label": made.what }, h("div", { class: "head" }, heading, said, h("div", { class: "tools" }, tools)), canvas);
  let values, whole, zeros = false, picture = null, pointed = null, pale = false;
  steer(canvas, axis, stepAt, { onclick: (event) => { const row = rowAt(event.offsetY); if (row >= 0) onrow?.(made.keys[row], axis.cursor); } });
  canvas.addEventListener("pointermove", (event) => { pointed = rowAt(event.offsetY); canvas.title = made.keys[pointed] ?? ""; tell(); });
  canvas.addEventListener("pointerleave", () => { pointed = null; tell(); });
  axis.subscribe(() => { canvas.redraw(); tell(); });
  const forget = onTheme(canvas.redraw);
  signal?.addEventListener("abort", forget);

  const rowAt = (y) => { const row = Math.floor((y / (height - 18)) * made.keys.length); return row >= 0 && row < made.keys.length ? row : -1; };

  function stepAt(x) {
    const left = leftOf(canvas.clientWidth, axis.room);
    return axis.stepAt((x - left) / (canvas.clientWidth - left - RIGHT));
  }

  function paint(pen, width) {
    if (!picture) ({ values, picture, whole, zeros } = painted(made, byRow()));
    const colours = ink(), [first, last] = axis.range(), left = leftOf(width, axis.room), inner = width - left - RIGHT, floor = height - 18, rows = made.keys.length;
    const steps = made.steps, x = (step) => left + axis.share(step) * inner;
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, inner + RIGHT / 2, floor); // a little of the last column, which begins where the steps end
    pen.clip();
    pen.imageSmoothingEnabled = false;
    pale = false;
    // Columns need not be evenly spaced: each is drawn from its step to the next, pale where nothing was recorded.
    const gaps = steps.slice(1).map((step, column) => step - steps[column]), usual = gaps[0] ?? last - first;
    if (axis.unit === "step" && gaps.length && gaps.every((gap) => gap === usual)) pen.drawImage(picture, 0, 0, steps.length, rows, x(steps[0]), 0, x(steps.at(-1) + usual) - x(steps[0]), floor);
    else {
      for (let column = 0; column < steps.length; column += 1) {
        const from = x(steps[column]), next = steps[column + 1] ?? last + 1, to = x(next);
        if (to < left || from > width) continue;
        // Recording becomes rarer or denser as a run goes on: a gap is long where it is so for both of its sides.
        const sides = [gaps.slice(Math.max(column - AROUND, 0), column), gaps.slice(column + 1, column + 1 + AROUND)].filter((side) => side.length);
        const longest = LONG_GAP * Math.max(...sides.map(middleOf), sides.length ? 0 : next - steps[column]);
        const isLong = next - steps[column] > longest, own = isLong ? x(steps[column] + longest) - from : to - from;
        pale ||= isLong;
        pen.drawImage(picture, column, 0, 1, rows, from, 0, Math.max(own, 1) + 0.5, floor);
        if (own < to - from) { pen.globalAlpha = 0.25; pen.drawImage(picture, column, 0, 1, rows, from + own, 0, to - from - own, floor); pen.globalAlpha = 1; }
      }
    }
    pen.strokeStyle = colours.bad;
    pen.lineWidth = 1.5;
    const high = floor / rows;
    for (const [row, column] of made.bad) {
      const at = x(steps[column]) + 2, y = (row + 0.5) * high;
      pen.beginPath();
      pen.moveTo(at - 2.5, y - 2.5); pen.lineTo(at + 2.5, y + 2.5); pen.moveTo(at - 2.5, y + 2.5); pen.lineTo(at + 2.5, y - 2.5);
      pen.stroke();
    }
    pen.restore();
    names(pen, colours, floor / rows, left);
    drawUnits(pen, axis, { left, width, floor: floor - 2 });
    if (axis.cursor !== null) {
      pen.strokeStyle = colours.cursor;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x(axis.cursor), 0);
      pen.lineTo(x(axis.cursor), floor);
      pen.stroke();
    }
    canvas.dataset.drawn = "true";
    if (pointed === null) tell();
    element.setAttribute("aria-busy", "false");
  }

  function names(pen, colours, high, left) {
    pen.font = "11px ui-monospace, monospace";
    pen.fillStyle = colours.text;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(13 / high)), first = Math.max(0, Math.ceil(6 / high - 0.5)), room = Math.floor((left - 8) / 6.7);
    fittedAll(made.names, room).forEach((name, row) => { if (row >= first && (row - first) % every === 0) pen.fillText(name, left - 6, (row + 0.5) * high); });
  }

  const colours = () => (byRow() ? ", colour: each row by itself" : whole ? `, colour from ${short(whole[0])} to ${short(whole[1])}${made.log ? ", logarithmic" : ""}` : "");

  function tell() {
    if (pointed === null || pointed < 0 || axis.cursor === null || !values) return replace(said, h("span", { class: "quiet" }, `${count(made.keys.length)}${made.total > made.keys.length ? ` of ${count(made.total)}` : ""} rows${colours()}${zeros ? "; grey: zero" : ""}${pale ? "; pale: nothing was recorded" : ""}`));
    const column = Math.max(lastUpTo(made.steps, axis.cursor), 0), value = values[pointed * made.steps.length + column];
    const bad = made.bad.some(([row, at]) => row === pointed && at === column);
    return replace(said, h("span", { class: "entry", title: made.keys[pointed] }, `${made.names[pointed]} `, h("b", { class: bad ? "bad" : null }, Number.isNaN(value) ? (bad ? "NaN or ∞" : "not recorded") : short(value)), bad && !Number.isNaN(value) ? h("b", { class: "bad" }, ", NaN or ∞ inside") : "", h("span", { class: "quiet" }, ` at step ${count(made.steps[column])}`)));
  }

  element.show = (next) => { made = next; picture = null; heading.textContent = title ?? made.what; canvas.setAttribute("aria-label", made.what); element.setAttribute("aria-label", made.what); canvas.redraw(); tell(); };
  element.recolour = () => { picture = null; canvas.redraw(); tell(); };
  tell();
  return element;
}

/** The ends of a scale: rows or cells that are far off (Tukey's outer fences) must not flatten the differences of all others. */
export function ends(values) {
  const known = Float32Array.from(values).filter((value) => !Number.isNaN(value)).sort();
  if (!known.length) return [0, 1];
  const at = (share) => known[Math.round(share * (known.length - 1))], middle = at(0.75) - at(0.25);
  const low = Math.max(at(0.02), at(0.25) - 3 * middle), high = Math.min(at(0.98), at(0.75) + 3 * middle);
  return high > low ? [low, high] : at(0.98) > at(0.02) ? [at(0.02), at(0.98)] : [low - 0.5, low + 0.5];
}

const pictures = new WeakMap(); // by answer: an answer that is kept is coloured once

/** Colour every cell, in a picture of one pixel a cell; a canvas stretches it. */
function painted(made, byRow) {
  const known = pictures.get(made) ?? {};
  if (known[byRow]) return known[byRow];
  const raw = Uint8Array.from(atob(made.values), (sign) => sign.charCodeAt(0)), values = new Float32Array(raw.buffer);
  const rows = made.keys.length, columns = made.steps.length, shaped = values.map((value) => (made.log ? (value ? Math.log10(Math.abs(value)) : NaN) : value)), zeros = made.log && values.some((value) => value === 0);
  const whole = ends(shaped);
  const scales = Array.from({ length: rows }, (_, row) => (byRow ? ends(shaped.subarray(row * columns, (row + 1) * columns)) : whole));
  const picture = paintCells(document.createElement("canvas"), shaped, columns, rows, (value, at) => (Number.isNaN(value) ? (values[at] === 0 ? ZERO : 0) : colour(value, ...scales[Math.floor(at / columns)], MAPS.viridis)));
  known[byRow] = { values, picture, zeros, whole: whole.map((end) => (made.log ? 10 ** end : end)) };
  pictures.set(made, known);
  return known[byRow];
}
