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

/** Ask for JSON. */
export const getJson = async (path, query, signal) => (await ask(path, query, signal)).json();

/** Ask for raw bytes, which a canvas draws. */
export const getBytes = async (path, query, signal) => (await ask(path, query, signal)).arrayBuffer();
