// A small curve, built of SVG elements.
import { svg } from "../dom.js";

/** Draw values as a line; gaps stay gaps. */
export function spark(values, { width = 120, height = 26, label = "" } = {}) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return svg("svg", { width, height, class: "spark", "aria-hidden": "true" });
  const low = Math.min(...known), high = Math.max(...known), span = high - low || 1;
  let path = "", pen = "M";
  values.forEach((value, at) => {
    if (value === null) { pen = "M"; return; }
    const x = 1 + (at / (values.length - 1)) * (width - 2), y = 2 + (1 - (value - low) / span) * (height - 4);
    path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "spark", role: "img", "aria-label": label },
    svg("path", { d: path, fill: "none" }));
}
