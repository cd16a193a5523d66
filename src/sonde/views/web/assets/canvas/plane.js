// One plane of numbers, drawn large, with the value under the pointer.
import { h } from "../dom.js";
import { MAPS, bounds, classColour, colour, paint } from "./colours.js";

/** Choose bounds and a table of colours for values. */
export function scale(values, { map = "auto", range = null } = {}) {
  const { low, high, none = false } = range ?? bounds(values);
  if (map === "classes") return { toColour: (value) => (Number.isFinite(value) ? classColour(Math.round(value)) : colour(value, 0, 1, MAPS.viridis)), low, high, none };
  const signed = low < 0 && high > 0;
  const name = map === "auto" ? (signed ? "difference" : "viridis") : map;
  const reach = Math.max(Math.abs(low), Math.abs(high));
  const [from, to] = name === "difference" ? [-reach, reach] : [low, high];
  return { toColour: (value) => colour(value, from, to, MAPS[name]), low: from, high: to, none, name };
}

/** Three planes as one picture. */
export function mixed(planes) {
  const { low, high } = bounds(planes.flatMap((each) => [bounds(each.values).low, bounds(each.values).high]));
  const level = (value) => (high > low ? Math.max(0, Math.min(255, Math.round(((value - low) / (high - low)) * 255))) : 128);
  const [r, g, b] = planes.map((each) => each.values);
  return (value, at) => (Number.isFinite(value) ? ((255 << 24) | (level(b[at]) << 16) | (level(g[at]) << 8) | level(r[at])) >>> 0 : colour(value, 0, 1, MAPS.viridis));
}

/** How many pixels an element gets so that a plane fills its room. */
export const fitting = (width, height, room) => Math.max(0.05, Math.min(48, room / Math.max(width, height, 1)));

/**
 * A large plane.
 * @param {Object} options `label`; `onpoint(row, column)` when the pointer or an arrow key moves (null when it leaves);
 *   `onpick(row, column)` on a click or Enter. With neither it is a picture, and no stop for Tab
 * @returns {HTMLElement} with `draw(layers, width, height, zoom)`; a layer is `{image, alpha, smooth, clip}`
 */
export function planeCanvas({ label, onpoint = null, onpick = null }) {
  const canvas = h("canvas", { class: "plane", role: "img", "aria-label": label, tabindex: onpoint || onpick ? "0" : null });
  let wide = 1, high = 1, zoom = 1, cell = null;
  canvas.drawLayers = (layers, width, height, pixels) => {
    [wide, high, zoom] = [width, height, pixels];
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(width * pixels * ratio));
    canvas.height = Math.max(1, Math.round(height * pixels * ratio));
    canvas.style.width = `${canvas.width / ratio}px`;
    canvas.style.height = `${canvas.height / ratio}px`;
    const pen = canvas.getContext("2d");
    for (const { image, alpha = 1, smooth = false, clip = null } of layers) {
      pen.save();
      if (clip) {
        pen.beginPath();
        pen.rect(clip[0] * canvas.width, 0, (clip[1] - clip[0]) * canvas.width, canvas.height);
        pen.clip();
      }
      pen.globalAlpha = alpha;
      pen.imageSmoothingEnabled = smooth;
      pen.drawImage(image, 0, 0, canvas.width, canvas.height);
      pen.restore();
    }
  };
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / zoom), row = Math.floor((event.clientY - box.top) / zoom);
    return row >= 0 && row < high && column >= 0 && column < wide ? [row, column] : null;
  };
  if (onpoint) {
    canvas.addEventListener("pointermove", (event) => { const found = at(event); if (found) onpoint(...found); });
    canvas.addEventListener("pointerleave", () => onpoint(null, null));
    canvas.addEventListener("blur", () => onpoint(null, null));
  }
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (by) {
      const within = (value, most) => Math.min(Math.max(value, 0), most - 1);
      cell = cell === null ? [0, 0] : [within(cell[0] + by[0], high), within(cell[1] + by[1], wide)];
      event.preventDefault();
      event.stopPropagation();
      onpoint?.(...cell);
    } else if (event.key === "Enter" && cell) {
      onpick?.(...cell);
    }
  });
  if (onpick) canvas.addEventListener("click", (event) => { const found = at(event); if (found) onpick(...found); });
  return canvas;
}

/** An image of one pixel a value. */
export function imageOf({ values, width, height }, toColour) {
  return paint(document.createElement("canvas"), values, width, height, toColour);
}
