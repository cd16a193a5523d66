// Answers the viewer's questions from files beside the page, in the place of a server. Runs before the viewer does.
(() => {
  "use strict";
  const copy = window.sondeCopy, waiting = new Map();
  const about = JSON.parse(copy.about), files = new Map(JSON.parse(copy.index));
  copy.refused = [];

  /** A question as the copy spells it: its path, and what it asks sorted by name. */
  function spell(url) {
    const asked = new URL(url, "http://copy/");
    const words = [...asked.searchParams].sort(([left], [right]) => (left < right ? -1 : left > right ? 1 : 0));
    return JSON.stringify([decodeURIComponent(asked.pathname.slice(1)), words]);
  }

  /** Load a file of answers. A script is the one thing that a page from disk may load. */
  function load(file) {
    if (!waiting.has(file)) {
      waiting.set(file, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `data/${file}.js`;
        script.onload = () => { script.remove(); resolve(); };
        script.onerror = () => { waiting.delete(file); reject(new TypeError(`data/${file}.js is missing from this copy.`)); };
        document.head.append(script);
      }));
    }
    return waiting.get(file);
  }

  /** Whether the copy answers a question; what is empty is not asked, as in the viewer. */
  copy.holds = (path, query) => {
    const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().filter((one) => one !== null && one !== undefined && one !== "").map((one) => [name, String(one)]));
    return files.has(spell(`api/${path}?${new URLSearchParams(pairs)}`));
  };

  const answers = new Map();
  copy.put = (question, headers, body) => answers.set(question, { headers: JSON.parse(headers), body });

  const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const isText = (headers) => headers["Content-Type"].startsWith("application/json");

  window.fetch = async (url, { signal } = {}) => {
    const question = spell(url);
    signal?.throwIfAborted();
    if (!files.has(question)) {
      copy.refused.push(question);
      const error = `This copy does not hold it. The run itself does: ${about.command}`;
      return new Response(JSON.stringify({ error, kind: "NotInCopy" }), { status: 404, headers: { "Content-Type": "application/json" } });
    }
    await load(files.get(question));
    signal?.throwIfAborted();
    const { headers, body } = answers.get(question);
    return new Response(isText(headers) ? body : bytesOf(body), { headers });
  };
  window.EventSource = undefined; // nothing changes here any more

  // A link to something the server would send, such as a trace.
  document.addEventListener("click", (event) => {
    const to = event.target.closest?.("a[href^='api/']");
    if (!to) return;
    event.preventDefault();
    note.open = true;
    note.scrollIntoView();
  });

  const element = (tag, text = "") => Object.assign(document.createElement(tag), { textContent: text });
  const note = element("details");
  note.id = "copy";
  note.append(element("summary", `A copy of ${about.name}, taken ${about.made}. What it leaves out`), element("ul"));
  for (const line of about.left_out) note.lastChild.append(element("li", line));
  note.append(element("p", `All of it, where the run is: ${about.command}`));
  document.getElementById("bar").after(note);
})();
