// A map of scores: one cell a sample, in order. A hundred thousand cells are one small image that the browser scales.
import { h } from "../dom.js";
import { short } from "../words.js";
import { MAPS, colour, pack, paint } from "./colours.js";

const MOST_HEIGHT = 420, LARGEST = 22;
const UNKNOWN = pack(128, 128, 128, 90);

/**
 * @param {Object} options `label`; `onopen(row)`; `describe(row)` says what a cell is
 * @returns {HTMLElement} with `draw({values, mask, low, high, direction, table})`
 */
export function scoreMap({ label, onopen, describe, height = MOST_HEIGHT }) {
  const image = document.createElement("canvas");
  const canvas = h("canvas", { class: "scoremap", tabindex: "0", role: "img", "aria-label": label });
  const status = h("p", { class: "note", role: "status" }, "Point at a cell; click or Enter opens the sample.");
  const element = h("div", { class: "mapbox" }, canvas, status);
  let shown = null, columns = 1, cell = 1, at = -1;

  element.draw = (next) => {
    shown = next;
    paintCells();
    layOut();
  };

  function paintCells() {
    const { values, mask, low, high, direction, table = MAPS.score } = shown;
    const count = values.length, started = performance.now();
    measure(count);
    const [bad, good] = direction < 0 ? [high, low] : [low, high];
    paint(image, values, columns, Math.ceil(count / columns) || 1, (value, row) => {
      const found = Number.isNaN(value) ? UNKNOWN : table[level(value, bad, good)];
      return mask && !mask[row] ? (found & 0x00ffffff) | (26 << 24) : found;
    });
    element.dataset.cells = String(count);
    element.dataset.ms = (performance.now() - started).toFixed(2);
  }

  const level = (value, bad, good) => {
    const share = good === bad ? 1 : (value - bad) / (good - bad);
    return share <= 0 ? 0 : share >= 1 ? 255 : Math.round(share * 255);
  };

  function measure(count) {
    const room = Math.max(element.clientWidth || 600, 60);
    const whole = Math.sqrt((room * height) / Math.max(count, 1)), step = whole < 4 ? 0.5 : 1;
    cell = Math.max(1, Math.min(LARGEST, Math.floor(whole / step) * step));
    while (cell > 1 && Math.ceil(count / Math.floor(room / cell)) * cell > height) cell -= step;
    columns = Math.max(1, Math.min(count || 1, Math.floor(room / cell)));
  }

  function layOut() {
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [image.width * cell, image.height * cell];
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(image, 0, 0, canvas.width, canvas.height);
    if (cell >= 6) grid(pen, ratio);
    if (at >= 0) {
      const [x, y] = [at % columns, Math.floor(at / columns)].map((each) => each * cell * ratio);
      pen.lineWidth = 2 * ratio;
      pen.strokeStyle = getComputedStyle(element).color;
      pen.strokeRect(x, y, Math.max(cell, 3) * ratio, Math.max(cell, 3) * ratio);
    }
  }

  function grid(pen, ratio) {
    pen.fillStyle = getComputedStyle(element).getPropertyValue("--raised") || "#fff";
    for (let x = 1; x < image.width; x += 1) pen.fillRect(x * cell * ratio - ratio / 2, 0, ratio, canvas.height);
    for (let y = 1; y < image.height; y += 1) pen.fillRect(0, y * cell * ratio - ratio / 2, canvas.width, ratio);
  }

  function move(row) {
    if (!shown || row < 0 || row >= shown.values.length) return;
    at = row;
    layOut();
    status.textContent = describe(row, shown.values[row]);
  }

  const rowAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / cell), y = Math.floor((event.clientY - box.top) / cell);
    return x >= 0 && x < columns ? y * columns + x : -1;
  };

  canvas.addEventListener("pointermove", (event) => move(rowAt(event)));
  canvas.addEventListener("click", (event) => { const row = rowAt(event); if (row >= 0 && row < shown.values.length) onopen(row); });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (by) { event.preventDefault(); event.stopPropagation(); move(at < 0 ? 0 : at + by); }
    if (event.key === "Enter" && at >= 0) onopen(at);
  });
  let stood = false;
  const watcher = new ResizeObserver(() => {
    if (element.isConnected) {
      stood = true;
      if (shown) { paintCells(); layOut(); }
    } else if (stood) {
      watcher.disconnect(); // else a map that was replaced would be kept forever
    }
  });
  watcher.observe(element);
  return element;
}

/** What the colours of a map mean: in the words for the worst and the best, or in scores. */
export function legend(low, high, direction, words = null, table = MAPS.score) {
  const strip = document.createElement("canvas");
  paint(strip, Float32Array.from({ length: 64 }, (_, at) => at), 64, 1, (value) => colour(value, 0, 63, table));
  strip.className = "strip";
  const [bad, good] = direction < 0 ? [high, low] : [low, high];
  const [worst, best] = words ?? [`worse ${short(bad)}`, `${short(good)} better`];
  return h("span", { class: "legend" }, h("span", {}, worst), strip, h("span", {}, best));
}
