/** Every token's life, from its birth on the diagonal down to the step at which it left. */
class Timeline extends Panel {
  /** @param {State} state */
  constructor(state) {
    super(state, "timeline", "Timeline");
    /** @type {Strip[]} */ this.strips = [];
    this.legendKey = "";
    this.zoom = new Zoom(state);
    this.controls.append(this.zoom.element);
    this.step = state.now.step;
  }

  draw() {
    const { state } = this;
    const panes = state.panes.filter((pane) => pane.story >= 0);
    if (this.step !== state.now.step) this.zoom.stretch.include(undefined, (this.step = state.now.step) / state.tokens);
    while (this.strips.length < panes.length) this.strips.push(this.strip());
    this.plots.dataset.strips = String(Math.max(1, panes.length));
    const none = state.shown === "static" ? "a static ranking has no history" : "nothing is computed yet";
    const parts = panes.length ? panes.map((_, i) => this.strips[i].element) : [h("p", { className: "hint" }, none)];
    // Only if they change: a strip that is put back has lost the focus.
    if (
      !panes.length ||
      parts.some((part, i) => part !== this.plots.children[i]) ||
      this.plots.children[parts.length]
    ) {
      this.plots.replaceChildren(...parts);
    }
    panes.forEach((pane, i) => this.drawStrip(this.strips[i], pane, panes.length > 1));
    this.legend.hidden = !panes.length;
    this.zoom.draw();
    this.drawLegend(panes);
    this.look();
  }

  /** @param {number} _column @param {number} token */
  reveal(_column, token) {
    this.zoom.stretch.include((token + 0.5) / this.state.tokens);
    this.state.schedule();
  }

  look() {
    super.look();
    this.strips.forEach((strip) => strip.look());
  }

  /** @param {Pane[]} panes */
  drawLegend(panes) {
    const { state } = this;
    const { layer, head, threshold } = state.now;
    const uniform = panes.every((pane) => state.stories[pane.story].uniform);
    const whose = uniform
      ? ""
      : layer < 0
        ? ` until ${threshold} % of the heads lost it`
        : ` in layer ${layer}, head ${head}`;
    const swatch = (/** @type {string} */ look, /** @type {string} */ text) =>
      h("span", { className: "swatch" }, h("i", { className: look }), text);
    const gone = panes.some((pane) => !state.stories[pane.story].selects);
    if (this.legendKey === `${whose} ${gone}`) return;
    this.legendKey = `${whose} ${gone}`;
    this.legend.replaceChildren(
      swatch("alive", `held${whose}`),
      ...(gone ? [swatch("lost", "evicted")] : []),
      h("span", {}, "steps run down, tokens across"),
    );
  }

  /** @param {Strip} strip @param {Pane} pane @param {boolean} named */
  drawStrip(strip, pane, named) {
    const { state } = this;
    const slice = state.slice(pane);
    const story = state.stories[pane.story];
    strip.pane = pane;
    const under = story.events.length || story.selects ? `budget ${count(story.budget)}` : "nothing evicted";
    const what = slice ? under : state.slices.excuse();
    strip.note.textContent = named ? `${pane.method}, ${what}` : slice ? "" : what;
    strip.element.setAttribute("aria-busy", String(!slice)); // what is drawn there may be another head's
    strip.tick();
    const [width, height] = strip.fit();
    if (!width || !slice) return;
    const { layer, head, threshold } = state.now;
    strip.paint(`${pane.story} ${layer} ${head} ${threshold}`, (pixels) => {
      const colours = this.palette.ramp([this.palette.pixel("lost"), this.palette.pixel("alive")], 65);
      const later = this.palette.pixel("page");
      const { length } = state.sources[pane.text];
      rasterLives(pixels, width, height, state.tokens, length, strip.stretch, story.events, slice.death, colours, later);
    });
  }

  strip() {
    const { state } = this;
    const strip = new Strip(
      state,
      "timeline: left and right select a token, up and down move the step, plus and minus zoom",
      true,
    );
    const snap = (/** @type {number} */ step) => nearest(state.stops(), step);
    const { plot } = strip;
    plot.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      if (event.button) return; // the others open menus
      plot.setPointerCapture(event.pointerId);
      state.preview({ step: snap(strip.at(event).step) });
    });
    plot.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      const { token, step } = strip.at(event);
      if (event.buttons & 1) state.preview({ step: snap(step) });
      state.point({ column: strip.pane?.column ?? 0, token });
    });
    plot.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => {
      if (event.button) return;
      const { token, step } = strip.at(event);
      state.preview({ step: snap(step) });
      state.select(strip.pane?.column ?? 0, token);
    });
    plot.addEventListener("pointerleave", () => state.point(null));
    this.keys(plot, (way) => state.moveStep(way), this.zoom.keys);
    return strip;
  }

  /** @param {number} token */
  tell(token) {
    const { state } = this;
    const pane = state.main;
    const story = state.story(pane);
    const what = `${super.tell(token)} · token ${count(token)}`;
    const slice = story && state.slice(pane);
    if (!slice || story.selects) return what;
    if (token >= story.fed) return `${what} · never fed back`;
    const event = slice.death[token];
    return `${what} · ${event < story.events.length ? `evicted at step ${count(story.events[event])}` : "never evicted"}`;
  }
}

/**
 * Token × step: each pixel is the share of its tokens still held, from births and deaths alone. In every column of
 * pixels a difference array counts births up and deaths down; its running sum is the number held at each row.
 * @param {Uint32Array} pixels @param {number} width @param {number} height @param {number} tokens that the plot is for
 * @param {number} length tokens that there are @param {Stretch} stretch @param {Uint32Array} events @param {Numbers} death
 * @param {Uint32Array} colours from none held to all held @param {number} later the colour of what does not exist yet
 */
function rasterLives(pixels, width, height, tokens, length, stretch, events, death, colours, later) {
  // Row y stands for the step in its middle; a token is held from step "index + 1" on, until an event fires at a step.
  const [top, scale] = [stretch.y * tokens, height / (stretch.size * tokens)];
  const rowOf = (/** @type {number} */ step) => clamp(0, Math.ceil((step - top) * scale - 0.5), height);
  const eventRows = Int32Array.from(events, rowOf);
  const change = new Int32Array(height + 1);
  const shades = colours.length - 1;
  pixels.fill(later);
  pixelColumns(width, tokens, stretch).forEach(([from, next], x) => {
    const to = Math.min(next, length);
    const first = rowOf(from + 1);
    if (first === height || from >= to) return;
    change.fill(0);
    for (let i = from; i < to; i++) {
      const birth = rowOf(i + 1);
      const end = i < death.length && death[i] < eventRows.length ? eventRows[death[i]] : height;
      change[birth] += 1;
      change[Math.max(birth, end)] -= 1;
    }
    const each = shades / (to - from);
    let held = 0;
    let colour = colours[0];
    for (let y = first, pixel = first * width + x; y < height; y++, pixel += width) {
      if (change[y]) {
        held += change[y];
        colour = colours[Math.round(each * held)];
      }
      pixels[pixel] = colour;
    }
  });
}
