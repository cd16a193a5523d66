// Hears when a run changes: from a stream of events, or by asking now and then where a stream does not get through.
import { address, getJson, runPath } from "./api.js";

const ASK_MS = 2000, TRIES = 3;

/**
 * Listen to a run until the signal aborts.
 * @param {string} run
 * @param {(pulse: {version: number, status: string, last_step: ?number, findings: number}) => void} tell
 * @param {(word: string) => void} how  called with `stream`, `asking`, `lost` when there is no answer, or `gone` when there is no such run
 * @param {AbortSignal} signal
 */
export function listen(run, tell, how, signal) {
  if (new URLSearchParams(location.search).has("poll") || !window.EventSource) return ask();
  let failed = 0;
  const stream = new EventSource(address(runPath(run, "live")));
  stream.onmessage = (event) => { failed = 0; how("stream"); tell(JSON.parse(event.data)); };
  stream.onerror = () => {
    failed += 1;
    // A stream does not say why it failed; an answer does.
    if (failed >= TRIES || stream.readyState === EventSource.CLOSED) { stream.close(); ask(); } else getJson(runPath(run, "pulse"), {}, signal).catch(missed);
  };
  signal.addEventListener("abort", () => stream.close());

  /** Say why there is no answer; returns whether asking again makes sense. */
  function missed(error) {
    if (error.name === "AbortError") return false;
    how(error.status === 404 ? "gone" : "lost");
    return error.status !== 404;
  }

  function ask() {
    let last = "";
    const look = async () => {
      if (signal.aborted) return;
      try {
        const pulse = await getJson(runPath(run, "pulse"), {}, signal);
        how("asking");
        if (JSON.stringify(pulse) !== last) { last = JSON.stringify(pulse); tell(pulse); }
      } catch (error) {
        if (!missed(error)) return;
      }
      const timer = setTimeout(look, ASK_MS);
      signal.addEventListener("abort", () => clearTimeout(timer), { once: true });
    };
    look();
  }
}
