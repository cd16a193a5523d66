// Colours for values: tables of 256 entries, and marks for what is not finite.

/** Build a table of 256 colours from a few of them, evenly spaced. */
function blend(stops) {
  const table = new Uint32Array(256);
  for (let at = 0; at < 256; at += 1) {
    const place = (at / 255) * (stops.length - 1), left = Math.min(Math.floor(place), stops.length - 2), share = place - left;
    const [r, g, b] = [0, 1, 2].map((part) => Math.round(stops[left][part] * (1 - share) + stops[left + 1][part] * share));
    table[at] = pack(r, g, b);
  }
  return table;
}

/** A colour as a canvas keeps it: red in the lowest byte. */
export const pack = (r, g, b, a = 255) => ((a << 24) | (b << 16) | (g << 8) | r) >>> 0;

export const MAPS = {
  viridis: blend([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]),
  grey: blend([[0, 0, 0], [255, 255, 255]]),
  heat: blend([[10, 7, 35], [110, 25, 110], [205, 65, 75], [250, 150, 40], [252, 250, 170]]),
  difference: blend([[33, 80, 160], [120, 170, 215], [240, 240, 240], [230, 145, 110], [165, 25, 45]]),
  score: blend([[150, 12, 40], [226, 96, 72], [250, 212, 150], [140, 196, 205], [25, 90, 150]]), // bad to good, distinct for colour-blind readers
};

export const NAN = pack(255, 0, 200), INFINITE = pack(0, 225, 255);

const CLASSES = [[31, 119, 180], [255, 127, 14], [44, 160, 44], [214, 39, 40], [148, 103, 189], [140, 86, 75], [227, 119, 194], [188, 189, 34], [23, 190, 207], [160, 160, 160]];

/** The colour of a class in a mask. */
export const classColour = (number) => {
  const [r, g, b] = CLASSES[((number % CLASSES.length) + CLASSES.length) % CLASSES.length];
  const darker = 1 - 0.25 * (Math.floor(Math.abs(number) / CLASSES.length) % 3);
  return number === 0 ? pack(28, 30, 34) : pack(r * darker, g * darker, b * darker);
};

/** The colour of a value between bounds. */
export function colour(value, low, high, table) {
  if (Number.isNaN(value)) return NAN;
  if (value === Infinity || value === -Infinity) return INFINITE;
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return table[share <= 0 ? 0 : share >= 1 ? 255 : Math.round(share * 255)];
}

/** The smallest and largest finite value; `none` if there is none, and how many are not finite. */
export function bounds(values) {
  let low = Infinity, high = -Infinity, odd = 0;
  for (const value of values) {
    if (!Number.isFinite(value)) { odd += 1; continue; }
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? { low, high, odd, none: false } : { low: 0, high: 0, odd, none: true };
}

/** Paint numbers into a canvas of one pixel each. */
export function paint(canvas, values, width, height, toColour) {
  canvas.width = Math.max(width, 1);
  canvas.height = Math.max(height, 1);
  const pen = canvas.getContext("2d"), image = pen.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const count = Math.min(values.length, width * height);
  for (let at = 0; at < count; at += 1) pixels[at] = toColour(values[at], at);
  pen.putImageData(image, 0, 0);
  return canvas;
}
