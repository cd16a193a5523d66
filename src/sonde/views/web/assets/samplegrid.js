// Samples as pictures: a grid of thumbnails with an overlay, what the pointer is on, and a selection that becomes a filter.
import { getJson, runPath } from "./api.js";
import { spark } from "./canvas/spark.js";
import { choose, h, isCopy, replace } from "./dom.js";
import { short } from "./words.js";

const FIRST = 48, SIDE = 84;

const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

/** A picture as the server packs it, drawn to fill a tile; an overlay in warm colours over it. */
export function thumbnail(picture, label, side = SIDE, opacity = 0.55) {
  if (!picture) return h("span", { class: "nopicture" }, "no picture");
  if (picture.kind === "text") return h("span", { class: "textpicture" }, picture.text);
  if (picture.kind === "curve") return spark([...picture.values], { width: side, height: side, label });
  const canvas = h("canvas", { width: picture.width, height: picture.height, role: "img", "aria-label": label, style: { width: `${side}px`, height: `${Math.min(side, (side * picture.height) / picture.width)}px` } });
  const pen = canvas.getContext("2d"), data = bytesOf(picture.data), colours = pen.createImageData(picture.width, picture.height);
  const step = picture.kind === "rgb" ? 3 : 1;
  for (let at = 0; at < picture.width * picture.height; at += 1) {
    for (let part = 0; part < 3; part += 1) colours.data[4 * at + part] = data[step * at + (step === 3 ? part : 0)];
    colours.data[4 * at + 3] = 255;
  }
  pen.putImageData(colours, 0, 0);
  if (picture.overlay) layOver(canvas, picture.overlay, opacity);
  return canvas;
}

function layOver(canvas, { width, height, data }, opacity) {
  const over = h("canvas", { width, height }), pen = over.getContext("2d"), levels = bytesOf(data), colours = pen.createImageData(width, height);
  for (let at = 0; at < width * height; at += 1) colours.data.set([255, Math.round(200 * (levels[at] / 255)), 0, Math.round(255 * opacity * (levels[at] / 255))], 4 * at);
  pen.putImageData(colours, 0, 0);
  canvas.getContext("2d").drawImage(over, 0, 0, canvas.width, canvas.height);
}

/**
 * @param {Object} options `run`, `signal`, `state` (`overlay`), `change(values)`, `hrefOf(idx)`, `addFilter(text)`, `metric()`
 * @returns {HTMLElement} with `show(rows, evaluation)`
 */
export function sampleGrid({ run, signal, state, change, hrefOf, addFilter, metric }) {
  const tools = h("div", { class: "controls small" }), tiles = h("div", { class: "samplegrid", role: "list", "aria-label": "Pictures of samples" });
  const says = h("p", { class: "note", role: "status" }), more = h("button", { type: "button", hidden: true, onclick: () => { shown += FIRST; draw(); } }, "More pictures");
  const element = h("div", {}, tools, tiles, says, more);
  const selected = new Set();
  let rows = [], evaluation = "", shown = FIRST, turn = 0, overlays = [];

  function describe(row) {
    const answer = row.label === null || row.label === undefined ? "" : `, label ${row.label}${row.prediction === null || row.prediction === undefined ? "" : `, predicted ${row.prediction}`}`;
    const scores = Object.entries(row.scores).slice(0, 4).map(([name, value]) => `${name} ${value === null ? "nan" : short(value)}`).join(", ");
    return `sample ${row.idx}${answer}: ${scores}`;
  }

  function drawTools() {
    replace(tools,
      overlays.length ? choose("Overlay", [["", "none"], ...overlays], state.overlay ?? "", (overlay) => change({ overlay })) : null,
      selected.size ? [h("button", { type: "button", onclick: () => { addFilter(inList([...selected])); selected.clear(); drawTools(); } }, `Only these ${selected.size}`),
        h("button", { type: "button", onclick: () => { selected.clear(); draw(); } }, "Clear selection")] : null);
  }

  function tile(row, picture) {
    const wrong = row.prediction !== null && row.prediction !== undefined && row.label !== row.prediction;
    const mark = h("button", { type: "button", class: "select", "aria-pressed": String(selected.has(row.idx)), title: "Select", "aria-label": `Select sample ${row.idx}`, onclick: () => {
      if (selected.has(row.idx)) selected.delete(row.idx); else selected.add(row.idx);
      mark.setAttribute("aria-pressed", String(selected.has(row.idx)));
      drawTools();
    } }, "✓");
    const caption = row.label === null || row.label === undefined ? String(row.idx) : row.prediction === null || row.prediction === undefined ? `${row.label}` : wrong ? `${row.label} → ${row.prediction}` : `${row.label}`;
    const score = row.scores[metric()];
    return h("div", { class: `sampletile${wrong ? " wrong" : ""}`, role: "listitem", "data-idx": row.idx, onpointerenter: () => { says.textContent = describe(row); }, onfocusin: () => { says.textContent = describe(row); } },
      h("a", { href: hrefOf(row.idx), title: describe(row) }, thumbnail(picture, describe(row)), picture?.of ? h("span", { class: "of", title: `Its input was not kept; this is ${picture.of}` }, picture.of.split("/").pop()) : null, h("span", { class: "caption" }, h("b", {}, caption), h("span", { class: "quiet" }, score === null ? "nan" : short(score)))), isCopy ? null : mark);
  }

  async function draw() {
    const mine = ++turn, some = rows.slice(0, shown);
    if (!some.length) { replace(tiles); more.hidden = true; return; }
    const parts = [];
    for (let at = 0; at < some.length; at += FIRST) parts.push(some.slice(at, at + FIRST).map((row) => row.idx));
    const answers = await Promise.all(parts.map((idx) => getJson(runPath(run, "thumbnails"), { evaluation, idx, overlay: state.overlay }, signal)
      .catch((error) => { if (error.name === "AbortError") throw error; return { pictures: {}, overlays: [] }; })));
    const answer = { pictures: Object.assign({}, ...answers.map((each) => each.pictures)), overlays: answers[0].overlays };
    if (mine !== turn) return;
    overlays = answer.overlays;
    element.hidden = !Object.values(answer.pictures).some(Boolean);
    drawTools();
    replace(tiles, some.map((row) => tile(row, answer.pictures[row.idx])));
    more.hidden = rows.length <= shown;
  }

  element.show = (next, name) => {
    if (name !== evaluation) shown = FIRST;
    [rows, evaluation] = [next, name];
    return draw();
  };
  return element;
}

/** A filter that selects samples by their ids. */
export const inList = (ids) => `idx in (${ids.map((each) => (/^-?\d+$/.test(each) ? each : /^".*"$/.test(each) ? each : JSON.stringify(each))).join(", ")}${ids.length === 1 ? "," : ""})`;
