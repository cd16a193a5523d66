// Curves over the shared step axis, on a canvas. Curves, hover and legend show recorded values: a smoothed line is a second
// line and is called smoothed, thinned points have a band from the lowest to the highest, NaN and infinity are marked.
import { h, replace } from "./dom.js";
import { COLOURS, RIGHT, drawUnits, ink, lastUpTo, leftOf, sheet, steer, ticks } from "./timeaxis.js";
import { onTheme } from "./theme.js";
import { count, short } from "./words.js";

const TOP = 8, BOTTOM = 20;
const FEW = 30; // points of which no average is drawn

/**
 * @param {{title: string, lines: Object[], log: boolean, held: boolean, smooths: boolean}} made  as the server answers
 * @param {Object} axis  from `timeAxis`
 * @param {Object} options `signal`; `height`; `smoothing()` in 0 to 1; `log` as kept, `onlog(log)`; `marks()` events along the steps; `room` for numbers on the left
 * @returns {HTMLElement} with `show(made)`
 */
export function chart(made, axis, { signal, height = 150, smoothing = () => 0, log = null, onlog = () => {}, marks = () => [], room = axis.room } = {}) {
  let isLog = log ?? wantsLog(made), scale = null;
  const legend = h("div", { class: "legend" });
  const scaleBox = h("button", { type: "button", class: "scale", title: "Linear or logarithmic", onclick: () => { isLog = !isLog; onlog(isLog); fit(); canvas.redraw(); } });
  const canvas = sheet(height, paint, { signal, label: made.title });
  const element = h("section", { class: "panel figure chart", "aria-label": made.title, "data-role": made.role ?? null },
    h("div", { class: "head" }, h("h2", {}, made.title), legend, h("div", { class: "tools" }, scaleBox)), canvas);
  steer(canvas, axis, stepAt);
  axis.subscribe((what) => { if (what !== "cursor") fit(); canvas.redraw(); tell(); });
  const forget = onTheme(canvas.redraw);
  signal?.addEventListener("abort", forget);

  function stepAt(x) {
    const left = leftOf(canvas.clientWidth, room);
    return axis.stepAt((x - left) / (canvas.clientWidth - left - RIGHT));
  }

  /** The lowest and highest of what is seen. */
  function fit() {
    const [first, last] = axis.range();
    let low = Infinity, high = -Infinity;
    for (const line of made.lines) {
      line.smooth = smoothed(line, made.smooths ? smoothing() : 0);
      line.steps.forEach((step, at) => {
        if (step < first || step > last) return;
        for (const value of line.thinned ? [line.low[at], line.high[at]] : [line.values[at]]) {
          if (isLog && value <= 0) continue;
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      });
    }
    if (low > high) [low, high] = isLog ? [0.1, 1] : [0, 1];
    if (low === high) { const reach = Math.abs(low) / 10 || 1; low -= isLog ? low / 2 : reach; high += reach; }
    scale = isLog ? [Math.log10(low), Math.log10(high)] : [low, high];
    const room = (scale[1] - scale[0]) * 0.06;
    scale = [scale[0] - room, scale[1] + room];
    scaleBox.textContent = isLog ? "log" : "linear";
    scaleBox.setAttribute("aria-pressed", String(isLog));
  }

  function paint(pen, width) {
    const colours = ink(), [first, last] = axis.range(), left = leftOf(width, room), inner = width - left - RIGHT, floor = height - BOTTOM;
    const x = (step) => left + axis.share(step) * inner;
    const y = (value) => floor - (((isLog ? Math.log10(value) : value) - scale[0]) / (scale[1] - scale[0])) * (floor - TOP);
    pen.font = "11px system-ui, sans-serif";
    drawAxes(pen, { colours, width, floor });
    for (const mark of marks()) drawMark(pen, mark, x, floor, colours);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, inner, height - BOTTOM + 1);
    pen.clip();
    made.lines.forEach((line, number) => drawLine(pen, line, COLOURS[number % COLOURS.length], x, y));
    made.lines.forEach((line) => drawBad(pen, line, x, floor, colours));
    pen.restore();
    if (axis.cursor !== null && axis.cursor >= first && axis.cursor <= last) {
      pen.strokeStyle = colours.cursor;
      pen.globalAlpha = 0.6;
      line(pen, x(axis.cursor), TOP - 6, x(axis.cursor), floor);
      pen.globalAlpha = 1;
    }
    canvas.dataset.drawn = "true";
    element.setAttribute("aria-busy", "false");
  }

  function drawAxes(pen, { colours, width, floor }) {
    const left = leftOf(width, room);
    pen.fillStyle = colours.text;
    pen.strokeStyle = colours.grid;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const [value, text] of valueTicks(scale, isLog)) {
      const at = floor - ((value - scale[0]) / (scale[1] - scale[0])) * (floor - TOP);
      line(pen, left, at, width - RIGHT, at);
      pen.fillText(text, left - 6, at);
    }
    drawUnits(pen, axis, { left, width, floor });
  }

  function drawLine(pen, each, colour, x, y) {
    const drawable = (value) => Number.isFinite(value) && (!isLog || value > 0);
    if (each.thinned) {
      pen.fillStyle = colour;
      pen.globalAlpha = 0.22;
      pen.beginPath();
      each.steps.forEach((step, at) => { const value = isLog ? Math.max(each.high[at], 10 ** scale[0]) : each.high[at]; pen[at ? "lineTo" : "moveTo"](x(step), y(value)); });
      for (let at = each.steps.length - 1; at >= 0; at -= 1) pen.lineTo(x(each.steps[at]), y(isLog ? Math.max(each.low[at], 10 ** scale[0]) : each.low[at]));
      pen.fill();
    }
    const hasSmooth = each.smooth !== null;
    trace(pen, each, each.values, colour, { alpha: hasSmooth ? 0.35 : 1, width: hasSmooth ? 1 : 1.6, x, y, drawable });
    if (hasSmooth) trace(pen, each, each.smooth, colour, { alpha: 1, width: 2, x, y, drawable });
    pen.globalAlpha = 1;
    if (each.steps.length <= 20) for (const [at, step] of each.steps.entries()) if (drawable(each.values[at])) { pen.fillStyle = colour; pen.beginPath(); pen.arc(x(step), y(each.values[at]), 3, 0, 7); pen.fill(); }
  }

  function trace(pen, each, values, colour, { alpha, width, x, y, drawable }) {
    pen.strokeStyle = colour;
    pen.globalAlpha = alpha;
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.beginPath();
    let open = false, before = 0, gap = 0;
    each.steps.forEach((step, at) => {
      while (gap < each.bad.length && each.bad[gap][0] < step) { open = false; gap += 1; } // a curve is broken where it was not finite
      if (!drawable(values[at])) { open = false; return; }
      if (open && made.held) pen.lineTo(x(step), before);
      pen[open ? "lineTo" : "moveTo"](x(step), y(values[at]));
      before = y(values[at]);
      open = true;
    });
    pen.stroke();
  }

  /** Mark what is not finite at the edge it left through: NaN as a cross at the foot, infinities as arrows. */
  function drawBad(pen, each, x, floor, colours) {
    pen.fillStyle = pen.strokeStyle = colours.bad;
    pen.lineWidth = 1.6;
    pen.textAlign = "center";
    for (const [step, what] of each.bad) {
      const at = x(step), edge = what === "∞" ? TOP : floor - 7;
      if (what === "∞" || what === "−∞") {
        const way = what === "∞" ? -4 : 4;
        pen.beginPath();
        pen.moveTo(at - 4, edge - way); pen.lineTo(at + 4, edge - way); pen.lineTo(at, edge + way);
        pen.fill();
      } else {
        line(pen, at - 3.5, edge - 3.5, at + 3.5, edge + 3.5);
        line(pen, at - 3.5, edge + 3.5, at + 3.5, edge - 3.5);
      }
    }
  }

  /** Say in the legend what was recorded at the cursor, or last. */
  function tell() {
    replace(legend, made.lines.map((each, number) => {
      const swatch = h("i", { style: { background: COLOURS[number % COLOURS.length] } });
      return h("span", { class: "entry", title: each.key || each.name }, swatch, made.lines.length > 1 || each.name !== made.title ? `${each.name} ` : "", reading(each));
    }));
  }

  function reading(each) {
    const { value, from, at } = readingAt(each, axis.cursor ?? Infinity);
    if (from === null) return h("span", { class: "quiet" }, "–");
    if (typeof value === "string") return [h("b", { class: "bad" }, value), h("span", { class: "quiet" }, ` at step ${count(from)}`)];
    const inside = each.thinned ? `, ${short(each.low[at])} to ${short(each.high[at])} in steps ${count(each.from[at])}–${count(from)}` : "";
    const even = each.smooth === null ? "" : ` · smoothed ${short(each.smooth[at])}`;
    return [h("b", {}, short(value)), h("span", { class: "quiet" }, ` at step ${count(from)}${inside}${even}`)];
  }

  element.show = (next) => { made = next; fit(); canvas.redraw(); tell(); };
  element.resmooth = () => { fit(); canvas.redraw(); tell(); };
  fit();
  tell();
  return element;
}

/** What a curve last recorded up to a step: a number, or the word for one that is not finite; `from` is its step. */
export function readingAt(each, step) {
  const at = lastUpTo(each.steps, step), bad = each.bad[lastUpTo(each.bad.map(([where]) => where), step)];
  if (bad && (at < 0 || bad[0] > each.steps[at])) return { value: bad[1], from: bad[0], at };
  return at < 0 ? { value: null, from: null, at } : { value: each.values[at], from: each.steps[at], at };
}

/** The running average of recorded values: only what came before has a say, and a weight of 0 is raw. */
export function smoothed(each, weight) {
  if (!weight || each.steps.length < FEW) return null;
  const values = each.thinned ? each.mean : each.values;
  let total = 0, known = 0;
  return values.map((value) => {
    total = weight * total + value;
    known = weight * known + 1;
    return total / known;
  });
}

const wantsLog = (made) => {
  let low = Infinity, high = 0;
  for (const each of made.lines) for (const value of each.values) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > 0 && high / low > (made.log ? 10 : 30);
};

function valueTicks([low, high], isLog) {
  if (!isLog) return ticks(low, high, 4).map((value) => [value, short(value)]);
  if (high - low < 1) return ticks(10 ** low, 10 ** high, 3).filter((value) => value > 0).map((value) => [Math.log10(value), short(value)]);
  const every = Math.max(1, Math.round((high - low) / 4)), out = [];
  for (let power = Math.ceil(low); power <= high; power += every) out.push([power, Math.abs(power) < 4 ? short(10 ** power) : `1e${power}`]);
  return out;
}

function line(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

function drawMark(pen, mark, x, floor, colours) {
  pen.strokeStyle = colours[mark.level] ?? colours.info;
  pen.globalAlpha = 0.55;
  pen.setLineDash([2, 3]);
  line(pen, x(mark.step), TOP, x(mark.step), floor);
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}
