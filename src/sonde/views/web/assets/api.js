// Asks the server. All addresses are relative, so the page works below any prefix.

/** An answer that says what is wrong. */
export class Refusal extends Error {
  constructor(status, message, kind = "") {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

/** What is thrown when there is no answer. */
export const silence = () => new Refusal(0, "The viewer does not answer. Is `sonde view` still running?", "NoAnswer");

/** Add a query to a path; null and empty values are left out, and lists are repeated. */
export function address(path, query = {}) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") words.append(name, each);
    }
  }
  const text = words.toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

export const runPath = (run, rest = "") => `run/${encodeURIComponent(run)}${rest ? `/${rest}` : ""}`;

/** Ask once more where a connection broke: a server may close one that it kept open just as it is used again. */
async function reach(where, signal) {
  const options = { signal, headers: { Accept: "application/json" } };
  const failed = (error) => { if (error.name === "AbortError") throw error; return null; };
  const answer = await fetch(where, options).catch(failed) ?? await fetch(where, options).catch(failed);
  if (!answer) throw silence();
  return answer;
}

/** Ask, and return the answer with its headers. */
export async function ask(path, query, signal) {
  const answer = await reach(address(path, query), signal);
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Refusal(answer.status, said.error ?? `The viewer answered ${answer.status}.`, said.kind);
  }
  return answer;
}

// Answers that hold until their run changes are kept, so that going back to a page asks for nothing. Each says which
// version of the run it is of; the run that is followed reports its version; of other runs nothing is kept.
const MOST_KEPT = 40, VERSION = "Sonde-Version";
let followed = null, pulse = null;
const kept = new Map();

/** Keep the answers of a run while it is in this state; null is not known, as without a connection. */
export function keepAnswers(run, state) {
  const isSame = followed === run && pulse !== null && state !== null && pulse.version === state.version;
  if (followed !== run || (pulse !== null && !isSame)) kept.clear();
  followed = run;
  pulse = state;
}

/** Return a kept answer that still holds, or undefined. */
export function keptAnswer(path, query = {}) {
  const found = kept.get(address(path, query));
  return found && pulse?.version === found.version ? found.made : undefined;
}

/** Ask for JSON. */
export async function getJson(path, query, signal) {
  const held = keptAnswer(path, query);
  if (held !== undefined) return held;
  const answer = await ask(path, query, signal), made = await answer.json(), version = Number(answer.headers.get(VERSION));
  if (version && followed !== null && `${path}/`.startsWith(`${runPath(followed)}/`)) {
    kept.set(address(path, query), { version, made });
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  }
  return made;
}

/** Ask for raw bytes, which a canvas draws. */
export const getBytes = async (path, query, signal) => (await ask(path, query, signal)).arrayBuffer();
