/* Makes the site's search work from a folder: browsers start no worker for a file:// page. The theme's worker then runs
   in a hidden frame. Its name keeps mkdocs-material's plugin `offline` from loading a script of this name from unpkg. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = address;
      this.ready = new Promise((resolve) => (script.onload = resolve));
      inside.document.body.append(script);
      this.inside = inside;
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
