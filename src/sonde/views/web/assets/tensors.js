// Tensors from the server: raw float32 with their shape, and planes cut out of them.
import { ask, runPath } from "./api.js";

export const MOST_ELEMENTS = 1 << 20; // the server thins what is larger; then one plane is asked for at a time

/**
 * @typedef {Object} Tensor
 * @property {Float32Array} data
 * @property {number[]} shape  with dimensions that are held at one index as 1
 * @property {number[]} steps  by which each dimension was thinned
 * @property {number[]} full   the shape as it was captured
 */

/** Read one tensor. `fix` holds dimensions at an index. @returns {Promise<Tensor>} */
export async function readTensor(run, query, fix = {}, signal) {
  const held = Object.entries(fix).map(([dimension, at]) => `${dimension}:${at}`).join(",");
  const answer = await ask(runPath(run, "tensor"), { ...query, fix: held }, signal);
  const header = (name) => JSON.parse(answer.headers.get(`X-Sonde-${name}`));
  const shape = header("Shape"), steps = header("Steps");
  for (const [dimension] of header("Held").sort((a, b) => a[0] - b[0])) {
    shape.splice(dimension, 0, 1);
    steps.splice(dimension, 0, 1);
  }
  return { data: new Float32Array(await answer.arrayBuffer()), shape, steps, full: header("Full-Shape") };
}

export const size = (shape) => shape.reduce((product, each) => product * each, 1);

function strides(shape) {
  const found = new Array(shape.length).fill(1);
  for (let at = shape.length - 2; at >= 0; at -= 1) found[at] = found[at + 1] * shape[at + 1];
  return found;
}

/** Cut out the plane of dimensions `y` and `x` at an index of the others. */
export function plane(tensor, y, x, index) {
  const { data, shape } = tensor, step = strides(shape);
  let start = 0;
  shape.forEach((length, at) => { if (at !== y && at !== x) start += Math.min(index[at] ?? 0, length - 1) * step[at]; });
  const height = y === null ? 1 : shape[y], width = shape[x], values = new Float32Array(height * width);
  for (let row = 0, to = 0; row < height; row += 1) {
    const from = start + (y === null ? 0 : row * step[y]);
    for (let column = 0; column < width; column += 1, to += 1) values[to] = data[from + column * step[x]];
  }
  return { values, height, width };
}

/** Which dimensions are rows, columns and channels of a shape, as one would guess. */
export function guessDimensions(shape, isImage = false) {
  const rank = shape.length;
  const last = shape[rank - 1];
  if (rank >= 3 && isImage && [1, 3, 4].includes(last) && shape[rank - 2] > 4 && shape[rank - 3] > 4) return { y: rank - 3, x: rank - 2, c: rank - 1 };
  let c = rank - 3;
  while (c > 0 && shape[c] === 1) c -= 1;
  return { y: rank - 2, x: rank - 1, c: rank >= 3 ? c : null };
}
