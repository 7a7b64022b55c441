/** Layers × KV heads: which of them still hold the token that is looked at, and why. */
class HeadMap extends Panel {
  /** @param {State} state */
  constructor(state) {
    super(state, "heads", "Heads");
    /** @type {Map<number, HeadGrid>} */ this.grids = new Map();
    /** @type {string | null} */ this.legendKey = null;
  }

  draw() {
    const { state } = this;
    const panes = state.panes.filter((pane) => pane.story >= 0);
    const key = panes.map((pane) => `${pane.column} ${pane.story}`).join();
    if (this.legendKey !== key) {
      this.legendKey = key;
      const stories = panes.map((pane) => state.stories[pane.story]);
      const square = (/** @type {string} */ look, /** @type {string} */ text) =>
        h("span", { className: "swatch" }, h("i", { className: `cell ${look}` }), text);
      const gone = stories.some((story) => !story.selects) ? [square("gone", "evicted")] : [];
      this.legend.replaceChildren(square("held", "held"), ...gone, ...reasons(stories));
      this.legend.hidden = !panes.length;
      this.plots.replaceChildren(...panes.map((pane) => this.grid(pane).element), this.hint());
    }
    this.look();
  }

  hint() {
    const text = this.state.shown === "static" ? "a static ranking has no heads" : "point at a token, or select one";
    return h("p", { className: "hint" }, text);
  }

  /** @param {Pane} pane */
  grid(pane) {
    const { layers, heads } = this.state.stories[pane.story];
    let grid = this.grids.get(pane.column);
    if (!grid || grid.layers !== layers || grid.heads !== heads) {
      grid = new HeadGrid(this.state, layers, heads);
      this.grids.set(pane.column, grid);
    }
    return grid;
  }

  look() {
    const { state } = this;
    const { token } = state;
    const panes = state.panes.filter((pane) => pane.story >= 0);
    this.plots.toggleAttribute("data-empty", token < 0 || !panes.length);
    this.readout.textContent = token < 0 ? "" : `${super.tell(token)} at step ${count(state.now.step)}`;
    for (const pane of panes) this.grids.get(pane.column)?.draw(pane, token, panes.length > 1);
  }
}

/** The heads of one history as a grid of cells; a click on one shows its cache in the text. */
class HeadGrid {
  /** @param {State} state @param {number} layers @param {number} heads */
  constructor(state, layers, heads) {
    Object.assign(this, { state, layers, heads });
    /** @type {State} */ this.state;
    /** @type {number} */ this.layers;
    /** @type {number} */ this.heads;
    this.current = 0; // the cell that Tab reaches
    /** @type {HTMLElement[]} */
    this.cells = Array.from({ length: layers * heads }, (_, i) =>
      h("span", { className: "cell", role: "gridcell", tabIndex: i ? -1 : 0 }),
    );
    const rows = Array.from({ length: heads }, (_, head) =>
      h("div", { role: "row", className: "cells" }, ...this.cells.filter((_, i) => i % heads === head)),
    );
    this.caption = h("div", { className: "caption" });
    this.body = h("div", { role: "grid", className: "grid-of-heads", "aria-label": "heads" }, ...rows);
    this.body.style.setProperty("--layers", String(layers));
    const across = h("div", { className: "across", "aria-hidden": "true" });
    across.style.setProperty("--layers", String(layers));
    const every = Math.max(1, Math.ceil(layers / 8));
    for (let layer = 0; layer < layers; layer++) {
      across.append(h("span", {}, layer % every ? "" : String(layer)));
    }
    this.element = h("div", { className: "head-map" }, this.caption, across, this.body);
    this.body.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      const cell = this.cells.indexOf(/** @type {any} */ (event.target));
      if (cell >= 0) this.choose(cell);
    });
    this.body.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.key(event));
  }

  /** Show the cache of one head in the text, or of all heads again. @param {number} cell */
  choose(cell) {
    const [layer, head] = [Math.floor(cell / this.heads), cell % this.heads];
    const { now } = this.state;
    this.focus(cell);
    this.state.commit(now.layer === layer && now.head === head ? { layer: -1 } : { layer, head });
  }

  /** @param {number} cell */
  focus(cell) {
    this.cells[this.current].tabIndex = -1;
    this.current = cell;
    this.cells[cell].tabIndex = 0;
    this.cells[cell].focus();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { heads, cells, current } = this;
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: heads, ArrowLeft: -heads, ArrowDown: 1, ArrowUp: -1 };
    const to = current + (moves[event.key] ?? 0);
    const edge = Math.abs(moves[event.key]) === 1 && Math.floor(to / heads) !== Math.floor(current / heads);
    if (event.key in moves) {
      if (to >= 0 && to < cells.length && !edge) this.focus(to);
    } else if (event.key === "Enter" || event.key === " ") this.choose(current);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** @param {Pane} pane @param {number} token @param {boolean} named */
  draw(pane, token, named) {
    const { state, heads, cells } = this;
    const story = state.stories[pane.story];
    const { step, layer, head } = state.now;
    const fate = token >= 0 && token < story.fed ? state.slices.token(pane.story, token) : null;
    const fired = upTo(story.events, step);
    const last = fired ? story.events[fired - 1] : 0;
    /** @type {boolean[]} */ const held = [];
    cells.forEach((cell, i) => {
      const [l, k] = [Math.floor(i / heads), i % heads];
      const evicts = story.evicts.includes(l);
      const death = fate ? fate.death[i] : 0;
      const alive = Boolean(fate) && (!evicts || death >= fired);
      const reason = fate && alive && evicts && token < last ? fate.reason[i] : 0;
      let [look, words] = ["none", "not known yet"];
      if (token >= step) [look, words] = ["later", "not there yet"];
      else if (fate && alive) {
        look = `held r${reason}`;
        words = evicts ? (reason ? `kept as ${REASONS[reason]}` : "held") : "held: this layer never evicts";
      } else if (fate) [look, words] = ["gone", `evicted at step ${count(story.events[death])}`];
      if (fate && evicts && token < step) held.push(alive);
      const chosen = l === layer && k === head ? " chosen" : "";
      const [name, label] = [`cell ${look}${chosen}`, `layer ${l}, head ${k}: ${words}`];
      if (cell.className !== name) cell.className = name;
      if (cell.title !== label) {
        cell.title = label;
        cell.setAttribute("aria-label", label);
      }
    });
    const excuse = token >= story.fed ? "never fed back" : token >= step ? "not there yet" : state.slices.excuse();
    const text = held.length ? `held by ${holding(held)} · layers across, heads down` : excuse;
    this.caption.textContent = (named ? `${pane.method}: ` : "") + text;
  }
}
