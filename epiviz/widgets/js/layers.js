/** Layer × token: in each pixel the strongest score of its tokens, because epiphanies are spikes. */
class LayerMap extends Panel {
  /** @param {State} state */
  constructor(state) {
    super(state, "layers", "Layers");
    this.tells = false;
    const names = state.layerScores.map((score) => score.name);
    this.choice = h(
      "select",
      {
        "aria-label": "score of the layers",
        onchange: (/** @type {any} */ event) => state.commit({ layer_by: event.target.value }),
      },
      ...options(names.map((name) => [name, name])),
    );
    this.zoom = new Zoom(state);
    if (names.length > 1) this.controls.append(this.choice);
    // Beside a timeline its buttons zoom both.
    if (![...state.views].some((view) => view instanceof Timeline)) this.controls.append(this.zoom.element);
    this.strip = new Strip(state, "layers: left and right select a token, up and down a layer, plus and minus zoom");
    this.row = h("i", { className: "layer" });
    this.strip.plot.append(this.row);
    this.plots.append(this.strip.element);
    this.drawGutters();
    this.listen();
  }

  get score() {
    const { layerScores, now } = this.state;
    return layerScores.find((score) => score.name === now.layer_by) ?? layerScores[0];
  }

  get depth() {
    return this.state.meta.layers;
  }

  /** Layer numbers on the left; on the right the bands of EpiKV and the two layers of its score. */
  drawGutters() {
    const { left, right, plot } = this.strip;
    const { depth } = this;
    const middle = (/** @type {number} */ layer) => `${(100 * (layer + 0.5)) / depth}%`;
    const every = Math.max(1, Math.ceil(depth / 6));
    for (let layer = 0; layer < depth; layer += every) {
      const mark = h("span", {}, (layer ? "" : "layer ") + layer);
      mark.style.top = middle(layer);
      left.append(mark);
    }
    plot.style.height = `${clamp(96, 7 * depth, 240)}px`;
    const { bands, reference } = this.state.meta;
    bands.forEach((/** @type {[number, number]} */ [first, last], /** @type {number} */ i) => {
      const band = h("i", { className: "band" });
      band.style.top = `${(100 * first) / depth}%`;
      band.style.height = `${(100 * (last - first + 1)) / depth}%`;
      band.title = `band ${"ab"[i]} of EpiKV: layers ${first}–${last}`;
      const name = h("span", { className: "name" }, `${first}–${last}`);
      name.style.top = middle((first + last) / 2);
      right.append(band, name);
    });
    for (const layer of reference) {
      const mark = h("i", { className: "reference", title: `layer ${layer} of the epiphany score` });
      mark.style.top = middle(layer);
      right.append(mark);
    }
  }

  draw() {
    const { state, score, strip, depth } = this;
    this.choice.value = score.name;
    if (this.legend.dataset.score !== score.name) {
      this.legend.dataset.score = score.name;
      const marks = state.meta.bands.length ? [h("span", {}, "] bands and ◂ layers of EpiKV")] : [];
      this.legend.replaceChildren(scale(score, state.meta.clip), ...marks);
    }
    this.zoom.draw();
    strip.tick();
    const [width] = strip.fit(depth);
    if (!width) return;
    strip.paint(score.name, (pixels) => {
      const colours = this.palette.ramp(this.palette.score(score.kind), 255);
      rasterLayers(pixels, width, depth, state.tokens, strip.stretch, score, colours, this.palette.pixel("page"));
    });
    this.row.hidden = state.now.layer < 0;
    this.row.style.top = `${(100 * state.now.layer) / depth}%`;
    this.row.style.height = `${100 / depth}%`;
    this.look();
  }

  /** @param {number} _column @param {number} token */
  reveal(_column, token) {
    this.zoom.stretch.include((token + 0.5) / this.state.tokens);
    this.state.schedule();
  }

  look() {
    super.look();
    this.strip.look();
  }

  listen() {
    const { state, strip } = this;
    const { plot } = strip;
    plot.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      const { token, down } = strip.at(event);
      this.under = Math.min(this.depth - 1, Math.floor(down * this.depth));
      state.point({ column: state.main.column, token });
    });
    plot.addEventListener("pointerleave", () => {
      this.under = undefined;
      state.point(null);
    });
    plot.addEventListener("click", (/** @type {PointerEvent} */ event) => {
      state.select(state.main.column, strip.at(event).token);
    });
    this.keys(plot, (way) => state.commit({ layer: clamp(-1, state.now.layer + way, this.depth - 1) }), this.zoom.keys);
  }

  /** @param {number} token */
  tell(token) {
    const { state, score } = this;
    const at = this.under === undefined ? token : (state.hover?.token ?? token);
    const layer = this.under ?? state.now.layer;
    const what = `${super.tell(at)} · token ${count(at)}`;
    if (layer < 0) return what;
    const value = score.values[layer * state.tokens + at];
    const [low, high] = score.clip;
    const shown = value === 255 ? "–" : number(Number((low + (value / 254) * (high - low)).toPrecision(3)));
    const bound = value === 254 ? "≥ " : value === 0 ? "≤ " : "";
    return `${what} · layer ${layer}: ${bound}${shown}${score.unit ? ` ${score.unit}` : ""}`;
  }
}

/**
 * @param {Uint32Array} pixels one row of pixels per layer @param {number} width @param {number} layers
 * @param {number} tokens @param {Stretch} stretch @param {LayerScore} score @param {Uint32Array} colours
 * @param {number} none no score
 */
function rasterLayers(pixels, width, layers, tokens, stretch, { values, kind }, colours, none) {
  const neutral = kind === "signed" ? 127 : 0;
  const columns = pixelColumns(width, tokens, stretch);
  for (let layer = 0; layer < layers; layer++) {
    const row = values.subarray(layer * tokens, (layer + 1) * tokens);
    columns.forEach(([from, to], x) => {
      let best = -1;
      for (let i = from; i < to; i++) {
        if (row[i] !== 255 && (best < 0 || Math.abs(row[i] - neutral) > Math.abs(best - neutral))) best = row[i];
      }
      pixels[layer * width + x] = best < 0 ? none : colours[best];
    });
  }
}
