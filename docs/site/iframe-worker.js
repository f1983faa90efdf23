// A page that was opened as a file may not start workers, and the search is one: there it runs in a frame. As between
// threads, what is told is copied, and is not heard before the teller has ended.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(address) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => tell((event) => this.onmessage?.(event), data);
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(address, document.baseURI);
      const loaded = new Promise((done) => (script.onload = done));
      frame.contentDocument.body.append(script);
      const tell = (hears, data) => {
        const event = new MessageEvent("message", { data: structuredClone(data) });
        setTimeout(() => hears(event));
      };
      this.postMessage = (data) => loaded.then(() => tell((event) => inside.dispatchEvent(event), data));
      this.terminate = () => frame.remove();
    }
  };
