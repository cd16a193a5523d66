// A map of samples by what was captured of each: colours by class, value on hover, a lasso that becomes a filter.
import { getJson, runPath } from "./api.js";
import { classColour } from "./canvas/colours.js";
import { choose, h, isCopy, replace } from "./dom.js";
import { inList } from "./samplegrid.js";
import { onTheme } from "./theme.js";
import { count, percent, plural } from "./words.js";

const WIDE = 560, TALL = 380, EDGE = 14, MOST = 800;

/** Whether a point lies in a polygon. */
export function inside([x, y], polygon) {
  let is = false;
  for (let at = 0, before = polygon.length - 1; at < polygon.length; before = at, at += 1) {
    const [[x1, y1], [x2, y2]] = [polygon[at], polygon[before]];
    if ((y1 > y) !== (y2 > y) && x < ((x2 - x1) * (y - y1)) / (y2 - y1) + x1) is = !is;
  }
  return is;
}

const MOST_LABELS = 24;
const css = (number) => `rgb(${number & 255}, ${(number >> 8) & 255}, ${(number >> 16) & 255})`;

/**
 * @param {Object} options `run`, `signal`, `state` (`of`, `method`), `change(values)`, `open(idx)`, `canOpen(idx)`, `addFilter(text)`
 * @returns {HTMLElement} with `show(evaluation, chosen)`, where `chosen` is a set of ids or null for all
 */
export function embeddingMap({ run, signal, state, change, open, canOpen, addFilter }) {
  const tools = h("div", { class: "tools" }), says = h("p", { class: "note", role: "status" }), legend = h("div", { class: "legend", "aria-label": "Colours of labels" });
  const canvas = h("canvas", { class: "embedding", width: WIDE, height: TALL, role: "img", "aria-label": "Map of samples", tabindex: "0" });
  const element = h("section", { class: "panel", "aria-label": "Map of samples", hidden: true }, h("div", { class: "head" }, h("h2", {}, "Map of samples"), tools), canvas, legend, says);
  let found = null, placed = [], chosen = null, lasso = null, turn = 0;

  function draw() {
    if (!found?.ids.length) return;
    const pen = canvas.getContext("2d"), labels = [...new Set(found.labels.filter((each) => each !== null).map(String))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    replace(legend, labels.length > MOST_LABELS ? null : labels.map((label, at) => h("span", { class: "entry" }, h("i", { style: { background: css(classColour(1 + at)) } }), label)));
    pen.clearRect(0, 0, WIDE, TALL);
    placed.forEach(([x, y], at) => {
      const isChosen = chosen === null || chosen.has(found.ids[at]);
      pen.globalAlpha = isChosen ? 0.85 : 0.12;
      pen.fillStyle = found.labels[at] === null ? "#7a8894" : css(classColour(1 + labels.indexOf(String(found.labels[at]))));
      pen.beginPath();
      pen.arc(x, y, 3.4, 0, 7);
      pen.fill();
      if (found.wrong[at]) { pen.strokeStyle = getComputedStyle(canvas).color; pen.lineWidth = 1.2; pen.stroke(); }
    });
    pen.globalAlpha = 1;
    if (lasso?.length > 1) {
      pen.strokeStyle = getComputedStyle(canvas).color;
      pen.setLineDash([4, 3]);
      pen.beginPath();
      lasso.forEach(([x, y], at) => (at ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.closePath();
      pen.stroke();
      pen.setLineDash([]);
    }
  }

  const at = (event) => { const box = canvas.getBoundingClientRect(); return [((event.clientX - box.left) / box.width) * WIDE, ((event.clientY - box.top) / box.height) * TALL]; };
  function nearest([x, y]) {
    let best = -1, least = 100;
    placed.forEach(([px, py], index) => { const far = (px - x) ** 2 + (py - y) ** 2; if (far < least) [best, least] = [index, far]; });
    return best;
  }

  canvas.addEventListener("pointerdown", (event) => { lasso = isCopy ? null : [at(event)]; if (lasso) canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (lasso) { lasso.push(at(event)); draw(); return; }
    const index = nearest(at(event));
    if (index >= 0) says.textContent = `sample ${found.ids[index]}${found.labels[index] === null ? "" : `, label ${found.labels[index]}`}${found.wrong[index] ? ", misclassified" : ""}. Click to open it${isCopy ? "" : ", draw around samples to select them"}.`;
    canvas.style.cursor = index >= 0 ? "pointer" : "crosshair";
  });
  canvas.addEventListener("pointerup", (event) => {
    const path = lasso ?? [];
    lasso = null;
    if (path.length < 5) {
      draw();
      const index = nearest(at(event));
      if (index >= 0 && canOpen(found.ids[index])) open(found.ids[index]);
      return;
    }
    const ids = found.ids.filter((_, index) => inside(placed[index], path) && (chosen === null || chosen.has(found.ids[index])));
    draw();
    if (!ids.length) says.textContent = "No sample inside.";
    else if (ids.length > MOST) says.textContent = `${count(ids.length)} samples are inside; a filter takes at most ${count(MOST)}.`;
    else addFilter(inList(ids));
  });

  element.show = async (evaluation, picked) => {
    const mine = ++turn;
    chosen = picked;
    const answer = await getJson(runPath(run, "embedding"), { evaluation, of: state.of, method: state.method }, signal)
      .catch((error) => { if (error.name === "AbortError") throw error; return null; });
    if (mine !== turn) return;
    element.hidden = !answer?.ids.length;
    if (element.hidden) return;
    found = answer;
    const xs = found.points.map(([x]) => x), ys = found.points.map(([, y]) => y);
    const fit = (values, room) => { const low = Math.min(...values), span = Math.max(...values) - low || 1; return (value) => EDGE + ((value - low) / span) * (room - 2 * EDGE); };
    const [x, y] = [fit(xs, WIDE), fit(ys, TALL)];
    placed = found.points.map(([left, up]) => [x(left), TALL - y(up)]);
    replace(tools, found.choices.length > 1 ? choose("Of", found.choices, found.of, (of) => change({ of })) : null,
      found.methods.length > 1 ? choose("By", found.methods, found.method, (method) => change({ method })) : h("span", { class: "note", title: "pip install umap-learn adds UMAP" }, found.method.toUpperCase()));
    const share = found.explained ? ` The two directions hold ${percent(found.explained[0] + found.explained[1])} of the variance.` : "";
    says.textContent = `${plural(found.ids.length, "captured sample")}${found.ids.length < found.total ? ` of ${count(found.total)}` : ""}; colour: label, ring: misclassified.${share}${isCopy ? "" : " Draw around samples to select them."}`;
    draw();
  };
  const forget = onTheme(draw);
  signal.addEventListener("abort", forget);
  return element;
}
