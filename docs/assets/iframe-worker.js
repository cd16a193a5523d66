// Browsers start no worker for a page that was opened from disk. Search needs one: here its script runs in a hidden frame.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.frame = frame;
    this.ready = new Promise((resolve) => {
      const page = frame.contentDocument;
      page.open();
      page.write("<!doctype html><body></body>");
      page.close();
      frame.contentWindow.postMessage = (data) => this.answer(data);
      frame.contentWindow.importScripts = (...urls) => Promise.all(urls.map((each) => load(page, each)));
      resolve(load(page, new URL(url, location.href).href));
    });
  }

  answer(data) {
    const event = new MessageEvent("message", { data });
    this.dispatchEvent(event);
    this.onmessage?.(event);
  }

  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

function load(page, url) {
  return new Promise((resolve, reject) => {
    const script = page.createElement("script");
    script.src = url;
    script.onload = resolve;
    script.onerror = reject;
    page.body.append(script);
  });
}

if (location.protocol === "file:") window.Worker = FrameWorker;
