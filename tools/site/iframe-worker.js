// A browser runs no worker for a page that was opened from a file. The search of the site is such a worker: here its
// script runs in a hidden frame of the page.
"use strict";
if (location.protocol === "file:") {
    window.Worker = class {
        constructor(address) {
            this.frame = document.createElement("iframe");
            this.frame.hidden = true;
            this.ready = new Promise((resolve) => {
                this.frame.onload = () => {
                    const inner = this.frame.contentWindow;
                    inner.postMessage = (data) => this.onmessage?.({ data }); // what the script says
                    const script = inner.document.createElement("script");
                    script.onload = () => resolve(inner);
                    script.onerror = (event) => this.onerror?.(event);
                    script.src = address;
                    inner.document.body.append(script);
                };
            });
            document.body.append(this.frame);
        }

        postMessage(data) {
            this.ready.then((inner) => inner.onmessage({ data: structuredClone(data) }));
        }

        terminate() {
            this.frame.remove();
        }
    };
}
