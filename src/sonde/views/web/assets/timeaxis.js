// The axis that the curves, heat maps and tables of a page share: one step cursor, one zoom, one unit.
// The address holds the step and the unit; a page that is opened without a step takes the last one of the same run.
import { lasting, short } from "./words.js";

const remembered = new Map();

/**
 * @param {import("./main.js").Context} context
 * @returns {Object} `cursor` (a step or null), `pinned`, `unit`, `zoom`; `point(step)` while the mouse moves, `pin(step)`
 *   to keep it, `subscribe(draw)`, `place(step)` in the unit
 */
export function timeAxis(context) {
  const listeners = new Set(), asked = context.query.get("step");
  const axis = {
    pinned: asked === null || asked === "" ? remembered.get(context.run) ?? null : Number(asked),
    hovered: null, zoom: null, unit: context.query.get("x") ?? "step", knots: {}, first: 0, last: 1, room: 128,
    get cursor() { return axis.hovered ?? axis.pinned; },
    subscribe(draw) { listeners.add(draw); context.signal.addEventListener("abort", () => listeners.delete(draw)); },
    tell(what = "cursor") { for (const draw of listeners) draw(what); },
    point(step) { if (step !== axis.hovered) { axis.hovered = step; axis.tell(); } },
    pin(step) {
      axis.pinned = step;
      axis.hovered = null;
      if (step === null) remembered.delete(context.run); else remembered.set(context.run, step);
      context.keep({ step: step === null ? "" : String(step) });
      axis.tell();
    },
    setUnit(unit) { axis.unit = unit; context.keep({ x: unit === "step" ? "" : unit }); axis.tell("unit"); },
    setZoom(zoom) { axis.zoom = zoom; axis.tell("zoom"); },
    /** A step in the unit of the axis. */
    place(step) {
      const known = axis.knots[axis.unit];
      return known ? interpolate(known, step) : step;
    },
    /** The units that the run was measured in. */
    get units() { return ["step", ...["epoch", "tokens", "samples", "time"].filter((each) => axis.knots[each])]; },
    /** Where a step lies in what is shown: 0 at its beginning, 1 at its end. */
    share(step) {
      const [first, last] = axis.range(), from = axis.place(first), to = axis.place(last);
      return to > from ? (axis.place(step) - from) / (to - from) : (step - first) / Math.max(last - first, 1);
    },
    /** The step at a place in what is shown. */
    stepAt(share) {
      const [first, last] = axis.range(), wanted = Math.min(Math.max(share, 0), 1);
      if (axis.unit === "step" || axis.place(last) <= axis.place(first)) return Math.round(first + wanted * (last - first));
      let low = first, high = last; // the unit rises with the steps, so halving finds the step
      for (let turn = 0; turn < 40 && high - low > 0.5; turn += 1) { const middle = (low + high) / 2; if (axis.share(middle) < wanted) low = middle; else high = middle; }
      return Math.round((low + high) / 2);
    },
    range() { return axis.zoom ?? [axis.first, Math.max(axis.last, axis.first + 1)]; },
  };
  if (!Number.isFinite(axis.pinned)) axis.pinned = null;
  if (axis.pinned !== null && asked === null) context.keep({ step: String(axis.pinned) });
  return axis;
}

function interpolate({ steps, values }, step) {
  let low = 0, high = steps.length - 1;
  if (!steps.length || step <= steps[0]) return values[0] ?? 0;
  if (step >= steps[high]) return values[high];
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
  return values[low] + ((values[high] - values[low]) * (step - steps[low])) / (steps[high] - steps[low]);
}

/** The place of the last of some rising numbers that is not above one; -1 where all are. */
export function lastUpTo(numbers, wanted) {
  let low = -1, high = numbers.length;
  while (high - low > 1) { const middle = (low + high) >> 1; if (numbers[middle] <= wanted) low = middle; else high = middle; }
  return low;
}

/** Round numbers between two ends, some `wanted` of them. */
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 1), power = 10 ** Math.floor(Math.log10(rough)), over = rough / power;
  const step = (over < 1.5 ? 1 : over < 3.5 ? 2 : over < 7.5 ? 5 : 10) * power, out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9 && out.length < 50; at += step) out.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return out;
}

/** Let a canvas move the cursor: hovering points, a click keeps the step, dragging zooms, a double click shows all. */
export function steer(canvas, axis, stepAt, { onclick = null } = {}) {
  let from = null;
  canvas.addEventListener("pointermove", (event) => axis.point(stepAt(event.offsetX)));
  canvas.addEventListener("pointerleave", () => { if (from === null) axis.point(null); });
  canvas.addEventListener("pointerdown", (event) => { from = event.offsetX; });
  canvas.addEventListener("pointerup", (event) => {
    const begin = from, end = event.offsetX;
    from = null;
    if (begin !== null && Math.abs(end - begin) > 12) axis.setZoom([Math.min(stepAt(begin), stepAt(end)), Math.max(stepAt(begin), stepAt(end)) + 1]);
    else { axis.pin(stepAt(end)); onclick?.(event); }
  });
  canvas.addEventListener("dblclick", () => axis.setZoom(null));
}

/** A canvas that fits its place, sharp on any screen; `paint(pen, width, height)` is called when it must be drawn. */
export function sheet(height, paint, { signal, label }) {
  const canvas = document.createElement("canvas");
  canvas.className = "sheet";
  canvas.style.height = `${height}px`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  let due = 0;
  const draw = () => {
    due = 0;
    const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    if (!width) return;
    if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    paint(pen, width, height);
  };
  canvas.redraw = () => { due ||= requestAnimationFrame(draw); };
  const watcher = new ResizeObserver(canvas.redraw);
  watcher.observe(canvas);
  signal?.addEventListener("abort", () => { watcher.disconnect(); cancelAnimationFrame(due); });
  return canvas;
}

/** Colours of the theme, for a canvas. */
export function ink() {
  const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--quiet"), strong: of("--ink"), grid: of("--line"), soft: of("--soft"), bad: of("--critical"), odd: of("--warning"), info: of("--info"), cursor: of("--ink") };
}

export const COLOURS = ["#2f81c7", "#d55e00", "#009e73", "#cc79a7", "#c98a00", "#56b4e9", "#8c6bb1", "#8b8f98"];
export const RIGHT = 12;
/** Room for numbers and names on the left, the same in every picture so that steps stand below each other. */
export const leftOf = (width, wide = 128) => (width < 600 ? (wide > 150 ? 104 : 58) : wide);

/** A name cut to some signs: the block stays, and of the role the last parts that fit, or the ends of its last part. */
export function fitted(name, room) {
  if (name.length <= room) return name;
  const at = name.indexOf(" · "), head = at > 0 ? name.slice(0, at + 3) : "", left = room - head.length;
  const whole = name.slice(head.length).replace(/(^|\.)(?:(w)eight|(b)ias)$/, "$1$2$3"), parts = whole.split(".");
  if (at > 0 && whole.length === 1) return `${bothEnds(name.slice(0, at), room - 2)} ${whole}`; // the weight or bias of a layer
  if (left < 6) return at > 0 ? bothEnds(name.slice(0, at), room) : `…${name.slice(1 - room)}`;
  if (whole.length <= left) return head + whole;
  while (parts.length > 1 && parts.join(".").length > left) parts.shift();
  const role = parts.join(".");
  return head + (role.length <= left && role.length > left / 3 ? role : bothEnds(whole, left));
}

function bothEnds(name, room) {
  const kept = Math.max(Math.ceil((room - 1) * 0.6), 1);
  return name.length <= room ? name : `${name.slice(0, room - 1 - kept)}…${name.slice(name.length - kept)}`;
}

/** Names cut to some signs; those of two blocks that would read the same keep both their ends. */
export function fittedAll(names, room) {
  const cut = names.map((name) => fitted(name, room)), blocks = new Map();
  cut.forEach((each, at) => blocks.set(each, (blocks.get(each) ?? new Set()).add(names[at].split(" · ")[0])));
  return cut.map((each, at) => (blocks.get(each).size > 1 ? bothEnds(names[at], room) : each));
}

/** Write the numbers of the axis below a picture, and what they are. */
export function drawUnits(pen, axis, { left, width, floor }) {
  const [first, last] = axis.range(), from = axis.place(first), to = axis.place(last), inner = width - left - RIGHT;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = ink().text;
  pen.textBaseline = "top";
  pen.textAlign = "center";
  for (const at of ticks(from, to, Math.max(2, Math.floor((width - left) / 110)))) pen.fillText(axis.unit === "time" ? lasting(at) : short(at), Math.min(Math.max(left + ((at - from) / Math.max(to - from, 1e-12)) * inner, left + 8), width - 18), floor + 5);
  pen.textAlign = "left";
  pen.fillText(axis.unit, 4, floor + 5);
}
