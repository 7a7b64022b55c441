/** A view beside the reader: a heading, a line that tells what is under the pointer, and plots. */
class Panel {
  /** @param {State} state @param {string} name @param {string} title */
  constructor(state, name, title) {
    this.state = state;
    this.tells = true; // of a history; else of the text alone
    this.palette = new Palette(state);
    this.controls = h("span", { className: "tools" });
    this.readout = h("span", { className: "readout" });
    this.live = h("span", { className: "live", "aria-live": "polite" });
    this.plots = h("div", { className: "plots" });
    this.legend = h("div", { className: "legend" });
    const heading = h("b", { role: "heading", "aria-level": state.offline ? "2" : "4" }, title);
    this.element = h(
      "section",
      { className: `panel ${name}`, "aria-label": title },
      h("div", { className: "title" }, heading, this.controls, this.readout),
      this.plots,
      this.legend,
      this.live,
      this.palette.probe,
    );
    this.sizes = new ResizeObserver(() => state.schedule());
    this.sizes.observe(this.plots);
    state.join(this);
  }

  draw() {}

  /** What the line above the plots says of a token. @param {number} token @returns {string} */
  tell(token) {
    return quoted(this.state.sources[this.state.main.text].piece(token));
  }

  look() {
    const { token } = this.state;
    this.readout.textContent = token < 0 ? "" : this.tell(token);
  }

  /**
   * Arrow keys walk over the tokens, `up` and `down` do what `vertical` says.
   * @param {HTMLElement} element @param {(way: 1 | -1) => void} vertical @param {Record<string, () => void>} more keys
   */
  keys(element, vertical, more) {
    element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { state } = this;
      const { column, text } = state.main;
      const last = state.sources[text].length - 1;
      const to = (/** @type {number} */ token) => state.select(column, clamp(0, token, last));
      /** @type {Record<string, () => void>} */
      const acts = {
        ArrowLeft: () => to(state.token - 1),
        ArrowRight: () => to(state.token + 1),
        Home: () => to(0),
        End: () => to(last),
        ArrowUp: () => vertical(-1),
        ArrowDown: () => vertical(1),
        Escape: () => state.select(column, -1),
        ...more,
      };
      if (!acts[event.key]) return;
      event.preventDefault();
      event.stopPropagation();
      acts[event.key]();
      this.look();
      this.live.textContent = this.readout.textContent;
    });
  }

  close() {
    this.sizes.disconnect();
  }
}

/** A panel on its own, with a title and what it shows. */
class Solo {
  /** @param {State} state @param {Panel} panel */
  constructor(state, panel) {
    this.state = state;
    this.panel = panel;
    this.badge = h("span", { className: "badge" });
    this.counts = h("span", { className: "counts" });
    const title = h("strong", { role: "heading", "aria-level": state.offline ? "1" : "3" }, state.meta.title);
    this.root = h(
      "article",
      { className: "epi epi-view", "aria-label": state.meta.title },
      h("header", {}, title, this.badge, this.counts),
      panel.element,
    );
    this.root.dataset.lmSuppressShortcuts = "true";
    state.join(this);
  }

  draw() {
    const { state } = this;
    const { now, shown, tokens } = state;
    this.root.dataset.shown = shown;
    this.badge.hidden = !this.panel.tells;
    this.badge.textContent = state.meta.badges[shown];
    this.root.setAttribute("aria-busy", String(state.missing.length > 0));
    const budget = shown === "replay" ? `${now.method}, budget ${count(now.budget)}, ` : "";
    const step = shown === "static" ? "" : `${budget}step ${count(now.step)} of ${count(tokens)}`;
    this.counts.textContent = !this.panel.tells ? "" : state.missing.length ? state.excuse() : step;
  }

  close() {
    this.panel.close();
  }
}
