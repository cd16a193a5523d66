// The place that an address names. All state of a page is in the hash, so a link shows exactly what its sender saw.
//   #/runs   #/run/<id>/<page>/...?query   #/compare?run=a&run=b

/**
 * @typedef {Object} Route
 * @property {string} page    name of the page
 * @property {?string} run    id of a run
 * @property {string[]} rest  what follows the page in the path
 * @property {URLSearchParams} query
 */

/** @returns {Route} */
export function parse(hash) {
  const [path, words = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(unquote);
  const query = new URLSearchParams(words);
  if (parts[0] === "run" && parts[1]) {
    return { page: parts[2] ?? "overview", run: parts[1], rest: parts.slice(3), query };
  }
  return { page: parts[0] ?? "runs", run: null, rest: parts.slice(1), query };
}

function unquote(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The hash of a place. Empty values are left out of the query. */
export function link(page, { run = null, rest = [], query = {} } = {}) {
  const parts = run === null ? [page] : ["run", run, page];
  const words = query instanceof URLSearchParams ? query : toQuery(query);
  const text = words.toString();
  return `#/${[...parts, ...rest].map((each) => encodeURIComponent(String(each))).join("/")}${text ? `?${text}` : ""}`;
}

export function toQuery(values) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") words.append(name, each);
    }
  }
  return words;
}
