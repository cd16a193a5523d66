// A tensor of any rank: which dimensions are drawn, which channel, on what scale; beside another run's, or over an image.
import { choose, h, replace, svg } from "../dom.js";
import { MOST_ELEMENTS, guessDimensions, plane, size } from "../tensors.js";
import { short } from "../words.js";
import { bounds } from "./colours.js";
import { fitting, imageOf, mixed, planeCanvas, scale } from "./plane.js";

const NOTHING_FINITE = "no finite value";

const ROOM = 280, TILE = 44, TILES = 48, BARS = 16, FIRST = 10;
const MOST_PIXELS = 6000; // of a side; browsers draw nothing on a canvas that is too large
const ODD = /cam|saliency|attribution|where/i, ATTENTION = /atten|attn/i;

/**
 * @param {Object} options
 *   `name`, `node` as the server describes it; `read(fix)`; `other` of the same kind in another run, or null;
 *   `view` what the reader chose before, `onview(view)`; `image` a picture `{width, height, image}` to lay it over;
 *   `signal` ends it; `isImage`; `marks` {index: word} for bars; `tokens` texts along an attention
 * @returns {HTMLElement}
 */
export function tensorView(options) {
  const { name, node, view = {} } = options;
  const { shape, dtype, stats } = node;
  const odd = (stats.nan ?? 0) + (stats.pos_inf ?? 0) + (stats.neg_inf ?? 0);
  const facts = h("span", { class: "note mono" }, `${shape.length ? shape.join("×") : "scalar"} ${dtype}`);
  const range = node.numeric && size(shape) > 1 ? h("span", { class: "note" }, `${short(stats.min)} to ${short(stats.max)}, mean ${short(stats.mean)}`) : null;
  const marked = odd ? h("span", { class: "bad" }, `${short(stats.nan)} NaN (pink), ${short(stats.pos_inf + stats.neg_inf)} infinite (cyan)`) : null;
  const body = h("div", { class: "tensorbody" });
  const element = h("section", { class: "tensor", "aria-label": name, dataset: { tensor: name } },
    h("div", { class: "head" }, options.bare ? null : h("h3", {}, name), h("span", { class: "tools" }, facts, range, marked)), body);
  const real = shape.filter((each) => each > 1).length;
  if (!node.numeric || size(shape) === 0) {
    body.append(h("p", { class: "quiet" }, size(shape) ? "These elements are not numbers." : "It has no elements."));
  } else if (size(shape) === 1) {
    body.append(h("p", { class: "single" }, odd ? "not finite" : short(stats.min)));
  } else {
    const draw = real <= 1 && !view.y ? vector(options, body) : planes(options, body);
    onSight(element, options.signal, () => draw().catch((error) => {
      if (error.name !== "AbortError") replace(body, h("p", { class: "problem" }, error.message));
    }));
  }
  return element;
}

/** Read a tensor only once it comes into view. */
function onSight(element, signal, act) {
  const watcher = new IntersectionObserver((entries) => {
    if (entries.some((each) => each.isIntersecting)) { watcher.disconnect(); act(); }
  }, { rootMargin: "200px" });
  watcher.observe(element);
  signal?.addEventListener("abort", () => watcher.disconnect());
}

// Vectors -------------------------------------------------------------------------------------------------------------

function vector({ read, other, marks = {}, name }, body) {
  return async () => {
    const [own, beside] = await Promise.all([read(), other ? other.read().catch(() => null) : null]);
    const values = own.data, isMarked = Object.keys(marks).length > 0;
    if (values.length > BARS) body.append(curve(values, beside?.data, name, own.steps.find((each) => each > 1) ?? 1));
    if (values.length <= BARS || isMarked) body.append(bars(values, beside?.data, marks));
  };
}

/** Bars; of many values only the largest and those that are marked, largest first. */
function bars(values, beside, marks) {
  const { low, high } = bounds(values), from = Math.min(low, 0), to = Math.max(high, 0), reach = to - from || 1;
  const best = values.indexOf(Math.max(...values)), all = [...values.keys()];
  const largest = values.length > BARS ? all.sort((a, b) => values[b] - values[a]).filter((at, place) => place < FIRST || marks[at]) : all;
  return h("div", { class: "bars", role: "list" }, largest.map((at) => {
    const value = values[at];
    const fill = { left: `${((Math.min(value, 0) - from) / reach) * 100}%`, width: `${(Math.abs(value) / reach) * 100}%` };
    return h("div", { class: `bar${at === best ? " best" : ""}`, role: "listitem" }, h("span", { class: "amount" }, at),
      h("span", { class: "bartrack" }, h("span", { class: `barfill${value < 0 ? " below" : ""}`, style: fill })),
      h("span", { class: "amount" }, Number.isFinite(value) ? short(value) : h("b", { class: "bad" }, String(value))),
      h("span", { class: "mark" }, marks[at] ?? "", beside ? h("span", { class: "quiet" }, ` beside ${short(beside[at])}`) : null));
  }));
}

function curve(values, beside, name, step) {
  const { low, high, none } = bounds(beside ? [...values, ...beside] : values), wide = 560, tall = 90;
  const line = (data) => data.reduce((path, value, at) => {
    if (!Number.isFinite(value)) return path;
    return `${path}${path ? "L" : "M"}${((at / Math.max(data.length - 1, 1)) * wide).toFixed(1)},${(tall - 4 - ((value - low) / (high - low || 1)) * (tall - 8)).toFixed(1)}`;
  }, "");
  const status = h("p", { class: "note" }, none ? NOTHING_FINITE : `${short(low)} to ${short(high)}`);
  const drawing = svg("svg", { class: "curve", viewBox: `0 0 ${wide} ${tall}`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}, ${values.length} values` },
    beside ? svg("path", { d: line([...beside]), class: "beside" }) : null, svg("path", { d: line([...values]) }));
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = Math.max(0, Math.min(values.length - 1, Math.round(((event.clientX - box.left) / box.width) * (values.length - 1))));
    status.textContent = `[${at * step}] = ${short(values[at])}${beside ? `, beside ${short(beside[at])}` : ""}`;
  });
  return h("div", {}, drawing, status);
}

// Planes --------------------------------------------------------------------------------------------------------------

function planes(options, body) {
  const { name, node, read, other, image, isImage = false, tokens = null, onview = () => {} } = options;
  const { shape, dtype } = node, rank = shape.length;
  const guess = rank === 1 ? { y: null, x: 0, c: null } : guessDimensions(shape, isImage);
  const isLarge = size(shape) > MOST_ELEMENTS;
  const isMask = /int|bool/.test(dtype) && shape.filter((each) => each > 1).length === 2;
  const isAttention = ATTENTION.test(options.path ?? name) && rank >= 2 && shape[rank - 1] === shape[rank - 2];
  const laid = image && (isMask || ODD.test(options.path ?? name));
  const usual = { y: guess.y, x: guess.x, c: guess.c, index: {}, order: "ranked", range: other ? "both" : "own", map: isMask ? "classes" : laid ? "heat" : isImage ? (rgbAble(shape, guess.c) ? "rgb" : "grey") : "auto", zoom: 0, mode: "beside", wipe: 50, opacity: laid && !isMask ? 60 : 0, all: false };
  const view = sane({ ...usual, ...options.view }, usual, shape);
  let own = null, beside = null, ranked = [], picked = null;
  const controls = h("div", { class: "controls small" }), large = h("div", { class: "large" }), legend = h("div", { class: "legendbox" }), tiles = h("div", { class: "tilebox" });
  const status = h("p", { class: "note mono", role: "status" }), focus = h("div", { class: "focus" });
  body.append(controls, h("div", { class: "planes" }, h("div", {}, large, legend), h("div", { class: "side" }, tiles, focus)), status);

  function change(values) {
    const asks = "y" in values || "x" in values || "c" in values || (isLarge && "index" in values);
    Object.assign(view, values);
    const kept = Object.fromEntries(Object.entries(view).filter(([key, value]) => JSON.stringify(value) !== JSON.stringify(usual[key])));
    onview(kept);
    if (asks) load(); else draw();
  }

  async function load() {
    const fix = {};
    if (isLarge) shape.forEach((_, at) => { if (at !== view.y && at !== view.x) fix[at] = view.index[at] ?? 0; });
    [own, beside] = await Promise.all([read(fix), other ? other.read(fix).catch(() => null) : null]);
    if (beside && String(beside.shape) !== String(own.shape)) beside = null;
    draw();
  }

  const cut = (tensor, index = view.index) => plane(tensor, view.y, view.x, isLarge ? {} : index);
  const channelCount = () => (view.c === null || isLarge ? 0 : own.shape[view.c]);

  function ranking() {
    const found = [];
    for (let at = 0; at < Math.min(channelCount(), 4096); at += 1) {
      const { values } = cut(own, { ...view.index, [view.c]: at });
      let total = 0, odd = 0;
      for (const value of values) { if (Number.isFinite(value)) total += Math.abs(value); else odd += 1; }
      found.push({ at, mean: total / values.length, odd });
    }
    return view.order === "ranked" ? found.sort((a, b) => b.odd - a.odd || b.mean - a.mean || a.at - b.at) : found;
  }

  function draw() {
    ranked = channelCount() > 1 ? ranking() : [];
    if (ranked.length && view.index[view.c] === undefined) view.index = { ...view.index, [view.c]: ranked[0].at };
    drawControls();
    drawLarge();
    drawTiles();
    drawFocus();
  }

  /** The range of colours: of both runs where they stand side by side, of the whole tensor, or null for each plane's own. */
  function shared() {
    if (view.range === "shared") return bounds(own.data);
    if (!beside || view.range === "own") return null;
    const both = [cut(own), cut(beside)].map((each) => bounds(each.values));
    const known = both.filter((each) => !each.none);
    return known.length ? { low: Math.min(...known.map((each) => each.low)), high: Math.max(...known.map((each) => each.high)) } : both[0];
  }

  function paintOf(tensor, index = view.index, range = shared()) {
    const one = cut(tensor, index);
    if (view.map === "rgb" && channelCount() >= 3) return { ...one, image: imageOf(one, mixed([0, 1, 2].map((at) => cut(tensor, { ...index, [view.c]: at })))) };
    const made = scale(one.values, { map: view.map === "rgb" ? "grey" : view.map, range });
    return { ...one, scale: made, image: imageOf(one, made.toColour) };
  }

  function drawLarge() {
    const one = paintOf(own), two = beside ? paintOf(beside) : null;
    const zoom = Math.min(view.zoom || fitting(one.width, one.height, ROOM), MOST_PIXELS / Math.max(one.width, one.height));
    const point = (row, column) => tell(row, column, one, two);
    const pick = isAttention ? (row) => { picked = row; drawFocus(); } : null;
    const make = (label, layers) => {
      const canvas = planeCanvas({ label, onpoint: point, onpick: pick });
      const over = image && view.opacity ? [{ image: image.image }, ...layers.map((each) => ({ ...each, alpha: view.opacity / 100, smooth: true }))] : layers;
      canvas.drawLayers(over, one.width, one.height, zoom);
      return h("figure", { class: "scrollbox" }, canvas, label === name ? null : h("figcaption", { class: "note" }, label));
    };
    replace(legend, one.scale && view.map !== "classes" && view.mode !== "difference" ? colourBar(one.scale) : null, isMask ? null : signedHistogram(one.values));
    if (!two) return replace(large, make(title(), [{ image: one.image }]));
    if (view.mode === "difference") {
      const values = one.values.map((value, at) => value - two.values[at]);
      return replace(large, make(`${title()}: this run less ${other.label}`, [{ image: imageOf({ ...one, values }, scale(values, { map: "difference" }).toColour) }]));
    }
    if (view.mode === "wipe") {
      return replace(large, make(`${title()}: this run left, ${other.label} right`, [{ image: one.image, clip: [0, view.wipe / 100] }, { image: two.image, clip: [view.wipe / 100, 1] }]));
    }
    return replace(large, make(`${title()}, this run`, [{ image: one.image }]), make(other.label, [{ image: two.image }]));
  }

  const title = () => (view.c !== null && shape[view.c] > 1 && view.map !== "rgb" ? `${isAttention ? "head" : "channel"} ${indexOf(view.c)}` : name);
  const indexOf = (at) => (view.index[at] ?? 0) * (own?.steps[at] ?? 1);

  function tell(row, column, one, two) {
    if (row === null) { status.textContent = ""; return; }
    const place = shape.map((_, at) => (at === view.y ? row * own.steps[at] : at === view.x ? column * own.steps[at] : indexOf(at)));
    const value = one.values[row * one.width + column];
    const against = two ? two.values[row * two.width + column] : null;
    const say = (number) => (Number.isFinite(number) ? Number(number.toPrecision(6)) : String(number));
    status.textContent = `[${place.join(", ")}] = ${say(value)}${two ? `, ${other.label} ${say(against)}, difference ${say(value - against)}` : ""}`;
  }

  function drawTiles() {
    const shown = ranked.slice(0, view.all ? 512 : TILES);
    if (!shown.length || view.map === "rgb") return replace(tiles);
    const range = shared();
    return replace(tiles, h("div", { class: "tiles-grid", role: "group", "aria-label": isAttention ? "Heads" : "Channels" }, shown.map(({ at, mean, odd }) => {
      const made = paintOf(own, { ...view.index, [view.c]: at }, range);
      const small = planeCanvas({ label: `channel ${at}` });
      small.drawLayers([{ image: made.image }], made.width, made.height, TILE / Math.max(made.width, made.height));
      return h("button", { type: "button", class: "tilebutton", "aria-pressed": String(at === view.index[view.c]), title: `channel ${at}, mean magnitude ${short(mean)}${odd ? `, ${odd} not finite` : ""}`,
        onclick: () => change({ index: { ...view.index, [view.c]: at } }) }, small, h("span", { class: odd ? "bad" : null }, at));
    })), ranked.length > shown.length ? h("button", { type: "button", onclick: () => change({ all: true }) }, `All ${ranked.length}`) : null);
  }

  function drawControls() {
    const dims = shape.map((length, at) => [String(at), `${at} (${length})`]);
    const pick = (key, value) => {
      const taken = ["y", "x", "c"].find((each) => each !== key && view[each] === value);
      change({ [key]: value, ...(taken ? { [taken]: view[key] } : {}), index: {} });
    };
    const several = shape.filter((each) => each > 1).length > 2 || rank > 2;
    const slider = (label, at, length) => {
      const said = h("output", {}, view.index[at] ?? 0);
      const input = h("input", { type: "range", min: 0, max: length - 1, value: view.index[at] ?? 0, "aria-label": label, onchange: () => change({ index: { ...view.index, [at]: Number(input.value) } }), oninput: () => { said.textContent = input.value; } });
      return h("label", { class: "field" }, h("span", {}, label), input, said);
    };
    const word = isAttention ? "Head" : "Channel";
    const rest = shape.map((length, at) => ({ length, at })).filter(({ length, at }) => length > 1 && at !== view.y && at !== view.x && (at !== view.c || isLarge));
    const over = image ? percentSlider("Over the image", "opacity", 0, 100, (value) => (value ? `${value}%` : "off")) : null;
    const options = h("details", { class: "options", open: view.open || null, ontoggle: () => { view.open = options.open; } }, h("summary", {}, "View"), h("div", { class: "controls small" },
      several ? [choose("Rows", dims, String(view.y), (value) => pick("y", Number(value))), choose("Columns", dims, String(view.x), (value) => pick("x", Number(value)))] : null,
      several && rank > 2 ? choose(`${word}s`, dims, String(view.c), (value) => pick("c", Number(value))) : null,
      choose("Range", [["own", "its own"], ...(other ? [["both", "of both runs"]] : []), ["shared", "of the whole tensor"]], view.range, (value) => change({ range: value })),
      choose("Colours", [["auto", "automatic"], ["viridis", "viridis"], ["grey", "grey"], ["heat", "heat"], ["difference", "around zero"], ["classes", "classes"], ...(rgbAble(shape, view.c) ? [["rgb", "red green blue"]] : [])], view.map, (value) => change({ map: value })),
      percentSlider("Zoom", "zoom", 0, 32, (value) => (value ? `${value}×` : "fit")), laid ? null : over));
    replace(controls, options,
      rest.map(({ at, length }) => slider(at === view.c ? word : `Dimension ${at}`, at, length)),
      ranked.length && view.map !== "rgb" ? choose("Order", [["ranked", "most active first"], ["plain", "in order"]], view.order, (value) => change({ order: value })) : null,
      laid ? over : null,
      beside ? choose("Runs", [["beside", "side by side"], ["difference", "difference"], ["wipe", "wipe"]], view.mode, (value) => change({ mode: value })) : null,
      beside && view.mode === "wipe" ? percentSlider("Wipe", "wipe", 0, 100, (value) => `${value}%`) : null);
  }

  function percentSlider(label, key, low, high, say) {
    const said = h("output", {}, say(view[key]));
    const input = h("input", { type: "range", min: low, max: high, value: view[key], "aria-label": label,
      oninput: () => { view[key] = Number(input.value); said.textContent = say(view[key]); drawLarge(); }, onchange: () => change({ [key]: Number(input.value) }) });
    return h("label", { class: "field" }, h("span", {}, label), input, said);
  }

  /** Where one token looks: over the tokens themselves, or over the patches of an image. */
  function drawFocus() {
    if (!isAttention) return;
    if (picked === null) { replace(focus, h("p", { class: "note" }, "Click a row to see where that token looks.")); return; }
    const one = cut(own), row = one.values.subarray(picked * one.width, (picked + 1) * one.width);
    const most = Math.max(...row, 1e-12), said = h("p", { class: "note" }, `Where token ${picked}${tokens ? ` (${tokens[picked]})` : ""} looks`);
    if (tokens && tokens.length === one.width) {
      replace(focus, said, h("div", { class: "tokens" }, tokens.map((word, at) => h("span", { class: "token", title: short(row[at]), style: { "--share": `${Math.round((row[at] / most) * 100)}%` } }, word))));
      return;
    }
    const side = [one.width, one.width - 1].map((each) => Math.sqrt(each)).find(Number.isInteger);
    if (!side) { replace(focus, said, bars(row.slice(0, BARS), null, {})); return; }
    const patches = { values: row.slice(one.width - side * side), width: side, height: side };
    const canvas = planeCanvas({ label: `attention of token ${picked} over ${side}×${side} patches` });
    const map = imageOf(patches, scale(patches.values, { map: "heat" }).toColour);
    canvas.drawLayers(image ? [{ image: image.image }, { image: map, alpha: 0.6, smooth: true }] : [{ image: map }], side, side, fitting(side, side, 160));
    replace(focus, said, canvas);
  }

  return load;
}

/** The colours of a scale, from its least to its greatest value. */
function colourBar({ toColour, low, high, none }) {
  if (none) return h("p", { class: "note colourbar" }, NOTHING_FINITE);
  const values = Float32Array.from({ length: 128 }, (_, at) => low + (at / 127) * (high - low));
  const bar = planeCanvas({ label: `colours from ${short(low)} to ${short(high)}` });
  bar.drawLayers([{ image: imageOf({ values, width: 128, height: 1 }, toColour) }], 128, 1, 1);
  bar.style.height = "10px";
  return h("p", { class: "note colourbar" }, short(low), bar, short(high));
}

/** How many values lie where, from the least to the greatest; a line marks zero. */
function signedHistogram(values) {
  const { low, high } = bounds(values), bins = 40, counts = new Array(bins).fill(0), wide = 200, tall = 40;
  if (!(high > low)) return null;
  for (const value of values) if (Number.isFinite(value)) counts[Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins))] += 1;
  const most = Math.max(...counts, 1), at = (value) => ((value - low) / (high - low)) * wide;
  return svg("svg", { class: "planehistogram", viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `histogram from ${short(low)} to ${short(high)}` },
    counts.map((number, bin) => svg("rect", { x: (bin * wide) / bins, width: wide / bins - 0.6, y: tall - (number / most) * tall, height: (number / most) * tall, class: low + ((bin + 0.5) / bins) * (high - low) < 0 ? "below" : null }, svg("title", {}, `${short(low + (bin / bins) * (high - low))} to ${short(low + ((bin + 1) / bins) * (high - low))}: ${number}`))),
    low < 0 && high > 0 ? svg("line", { x1: at(0), x2: at(0), y1: 0, y2: tall }) : null);
}

/** A view from a link may say anything: keep of it what this tensor has. */
function sane(view, usual, shape) {
  const isDimension = (at) => Number.isInteger(at) && at >= 0 && at < shape.length;
  const within = (key, low, high) => { if (!(view[key] >= low && view[key] <= high)) view[key] = usual[key]; };
  if (!["y", "x", "c"].every((key) => view[key] === usual[key] || isDimension(view[key])) || new Set([view.y, view.x, view.c]).size < 3) {
    Object.assign(view, { y: usual.y, x: usual.x, c: usual.c });
  }
  within("zoom", 0, 32);
  within("wipe", 0, 100);
  within("opacity", 0, 100);
  const index = view.index && typeof view.index === "object" ? Object.entries(view.index) : [];
  view.index = Object.fromEntries(index.filter(([at, value]) => isDimension(Number(at)) && Number.isInteger(value) && value >= 0 && value < shape[at]));
  if (!["auto", "viridis", "grey", "heat", "difference", "classes", "rgb"].includes(view.map)) view.map = usual.map;
  return view;
}

const rgbAble = (shape, c) => c !== null && c !== undefined && shape[c] === 3;
