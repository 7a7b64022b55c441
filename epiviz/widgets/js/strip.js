/** A canvas over all tokens, between two gutters, with lines for what the controls point at. */
class Strip {
  /** @param {State} state @param {string} name what the arrow keys move in it */
  constructor(state, name) {
    this.state = state;
    this.canvas = h("canvas", { width: 1, height: 1 });
    this.future = h("i", { className: "future" });
    this.stepLine = h("i", { className: "line step" });
    this.pointed = h("i", { className: "line pointed" });
    this.selected = h("i", { className: "line selected" });
    this.note = h("span", { className: "note" });
    this.plot = h(
      "div",
      { className: "plot", tabIndex: 0, role: "group", "aria-label": name },
      this.canvas,
      this.future,
      this.pointed,
      this.selected,
      this.stepLine,
      this.note,
    );
    this.left = h("div", { className: "gutter left", "aria-hidden": "true" });
    this.right = h("div", { className: "gutter right", "aria-hidden": "true" });
    this.below = h("div", { className: "gutter below", "aria-hidden": "true" });
    this.element = h("div", { className: "strip" }, this.left, this.plot, this.right, this.below);
    this.key = "";
    /** @type {Pane | undefined} */ this.pane = undefined; // what it shows
    ticks(this.below, state.tokens, "left", "token ");
  }

  /** Give the canvas the pixels of the device; `height` rows if given. @returns {[number, number]} 0 while detached */
  fit(height = Math.round(this.canvas.clientHeight * devicePixelRatio)) {
    const width = Math.round(this.canvas.clientWidth * devicePixelRatio);
    if (!width || !height) return [0, 0];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    return [width, height];
  }

  /** Fill the canvas once per `key`. @param {string} key @param {(pixels: Uint32Array) => void} fill */
  paint(key, fill) {
    const { width, height } = this.canvas;
    key += ` ${width} ${height} ${this.state.theme}`;
    if (key === this.key) return;
    this.key = key;
    const context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    const image = context.createImageData(width, height);
    fill(new Uint32Array(image.data.buffer));
    context.putImageData(image, 0, 0);
  }

  /** Move the lines to the step (if it has one) and to the token under the pointer and the selected one. */
  look(hasSteps = false) {
    const { now, hover, tokens, shown } = this.state;
    const at = (/** @type {number} */ token) => `${(100 * (token + 0.5)) / tokens}%`;
    this.selected.hidden = now.selected < 0;
    this.selected.style.left = at(now.selected);
    this.pointed.hidden = !hover || hover.token === now.selected;
    if (hover) this.pointed.style.left = at(hover.token);
    this.stepLine.hidden = this.future.hidden = !hasSteps || shown === "static";
    this.stepLine.style.top = this.future.style.top = `${(100 * now.step) / tokens}%`;
  }

  /** The token and the step under the pointer. @param {PointerEvent} event */
  at(event) {
    const box = this.plot.getBoundingClientRect();
    const { tokens } = this.state;
    const share = (/** @type {number} */ x, /** @type {number} */ size) => clamp(0, x / (size || 1), 1);
    return {
      token: Math.min(tokens - 1, Math.floor(share(event.clientX - box.left, box.width) * tokens)),
      down: share(event.clientY - box.top, box.height),
    };
  }
}

/** The first token of each pixel column and the one after its last. @param {number} width @param {number} tokens */
function pixelColumns(width, tokens) {
  return Array.from({ length: width }, (_, x) => {
    const from = Math.floor((x * tokens) / width);
    return [from, Math.max(from + 1, Math.floor(((x + 1) * tokens) / width))];
  });
}

/** Round numbers along an axis from 0 to `end`. @param {number} end */
function roundNumbers(end) {
  const rough = end / 5;
  const size = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = [1, 2, 5, 10].map((m) => m * size).find((each) => each >= rough) ?? size;
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => i * step);
}

/** @param {HTMLElement} gutter @param {number} end @param {"left" | "top"} side @param {string} [first] a word */
function ticks(gutter, end, side, first = "") {
  const marks = roundNumbers(end).map((x) => {
    const mark = h("span", {}, (x ? "" : first) + count(x));
    mark.style[side] = `${(100 * x) / end}%`;
    return mark;
  });
  gutter.replaceChildren(...marks);
}
