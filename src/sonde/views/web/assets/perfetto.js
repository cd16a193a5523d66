// Hands a trace to Perfetto, which draws it in a window of its own. The one thing here that leads to another site, and
// only when somebody asks for it: the page comes from there, the trace goes from window to window.
const PLACE = "https://ui.perfetto.dev", PATIENCE_MS = 30_000, ASK_MS = 100;
const INSTEAD = "Download the trace, and open it at ui.perfetto.dev.";

/**
 * @param {string} name
 * @param {() => Promise<ArrayBuffer>} read
 * @param {(words: string) => void} say
 * @param {AbortSignal} signal
 */
export async function openInPerfetto(name, read, say, signal) {
  const page = window.open(PLACE); // at once: a window that is opened later is blocked as a pop-up
  if (!page) {
    say(`The browser opened no window. ${INSTEAD}`);
    return;
  }
  say("Waiting for ui.perfetto.dev…");
  try {
    const buffer = await read();
    await listening(page, signal);
    page.postMessage({ perfetto: { buffer, title: name, fileName: name } }, PLACE);
    say("Open in another window.");
  } catch (error) {
    if (error.name !== "AbortError") say(`${error.message} ${INSTEAD}`);
  }
}

/** Wait until Perfetto listens: it answers a PING with a PONG. */
function listening(page, signal) {
  return new Promise((resolve, reject) => {
    const ask = setInterval(() => page.postMessage("PING", PLACE), ASK_MS);
    const late = setTimeout(() => end(() => reject(new Error("ui.perfetto.dev does not answer."))), PATIENCE_MS);
    const hear = (event) => { if (event.source === page && event.origin === PLACE && event.data === "PONG") end(resolve); };
    const end = (act) => { clearInterval(ask); clearTimeout(late); window.removeEventListener("message", hear); act(); };
    window.addEventListener("message", hear);
    signal.addEventListener("abort", () => end(() => reject(new DOMException("left", "AbortError"))), { once: true });
  });
}
