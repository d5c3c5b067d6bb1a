// Browsers start no worker on pages that are opened from the disk, and the search of this site runs in one. On such
// pages a hidden frame runs the worker's script in its place and exchanges the same messages with the page.
"use strict";

if (location.protocol === "file:") {
  const load = (inside, url) =>
    new Promise((resolve) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.addEventListener("load", resolve);
      inside.document.body.append(script);
    });

  window.Worker = class FrameWorker extends EventTarget {
    onmessage = null;
    frame = document.createElement("iframe");

    constructor(url) {
      super();
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => {
        const start = () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.receive(data);
          inside.importScripts = (...urls) =>
            urls.reduce((before, each) => before.then(() => load(inside, each)), Promise.resolve());
          load(inside, url).then(() => resolve(inside));
        };
        this.frame.addEventListener("load", start, { once: true });
      });
      document.body.append(this.frame);
    }

    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      const copy = structuredClone(data);
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data: copy })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
