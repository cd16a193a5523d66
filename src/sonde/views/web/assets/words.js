// Numbers, times and sizes as people read them.

/** A number in at most four digits; `–` where it is not known. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

/** A whole number with its thousands apart. */
export const count = (value) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en"));

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`);

/** Seconds as a length of time. */
export function lasting(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 90) return `${seconds.toPrecision(3)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

/** A path as a shell takes it. */
export const shell = (path) => (/^[\w./+:@-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`);

/** How long ago, in one unit. */
export function ago(time, now = Date.now() / 1000) {
  if (time === null || time === undefined) return "–";
  const seconds = now - time;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return seconds < 730 * 86400 ? `${Math.floor(seconds / 86400)} d ago` : `${Math.floor(seconds / (365.25 * 86400))} y ago`;
}

export function clock(time) {
  const date = new Date(time * 1000);
  return Number.isNaN(date.getTime()) ? "–" : date.toISOString().replace("T", " ").slice(0, 19);
}

export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (size >= 1000 && at < units.length - 1) { size /= 1000; at += 1; }
  return `${at ? size.toPrecision(3) : size} ${units[at]}`;
}

const ACRONYMS = Object.fromEntries(["DDP", "EMA", "FP16", "LR", "NaN", "ReLU", "RNG", "RNN"].map((word) => [word.toLowerCase(), word]));
/** The kind of a finding as words, as reports and the terminal write it: `bad_batch_spike` is "Bad batch spike". */
export const kindWords = (kind) => kind.split("_").map((word, at) => ACRONYMS[word] ?? (at ? word : word.charAt(0).toUpperCase() + word.slice(1))).join(" ");
