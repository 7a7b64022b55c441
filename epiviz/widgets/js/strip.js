const SMALLEST = 32; // tokens that a plot may show
const ZOOM = 1.6; // per press of a key or a button
const WHEEL = 0.002; // of a zoom's exponent, per pixel of the wheel

/**
 * The stretch of the text that plots show, in shares of it: as many steps down as tokens across. All plots of a state
 * share one.
 */
class Stretch {
  constructor() {
    this.size = 1;
    this.x = this.y = 0; // where it begins
  }

  /** @param {State} state @returns {Stretch} */
  static of(state) {
    let stretch = Stretch.all.get(state);
    if (!stretch) Stretch.all.set(state, (stretch = new Stretch()));
    return stretch;
  }

  get whole() {
    return this.size === 1;
  }

  /** Make it `factor` times as large; the given point of the text stays where it is on screen. */
  zoom(/** @type {number} */ factor, /** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ smallest) {
    const size = clamp(Math.min(smallest, 1), this.size * factor, 1);
    const start = (/** @type {number} */ at, /** @type {number} */ from) => at - ((at - from) * size) / this.size;
    [this.x, this.y] = [start(x, this.x), start(y, this.y)];
    this.size = size;
    this.pan(0, 0);
  }

  /** Move it by shares of the text. @param {number} x @param {number} y */
  pan(x, y) {
    this.x = clamp(0, this.x + x, 1 - this.size);
    this.y = clamp(0, this.y + y, 1 - this.size);
  }

  /** Move it until a token (a share of the text), and until a step, is inside. @param {number} [x] @param {number} [y] */
  include(x, y) {
    const start = (/** @type {number | undefined} */ at, /** @type {number} */ from) =>
      at === undefined || (at >= from && at <= from + this.size) ? from : at - this.size / 2;
    [this.x, this.y] = [start(x, this.x), start(y, this.y)];
    this.pan(0, 0);
  }

  reset() {
    [this.size, this.x, this.y] = [1, 0, 0];
  }
}
/** @type {WeakMap<State, Stretch>} */
Stretch.all = new WeakMap();

/** A canvas over all tokens, between two gutters, with lines for what the controls point at. */
class Strip {
  /** @param {State} state @param {string} name what the keys do in it @param {boolean} [steps] run down in it */
  constructor(state, name, steps = false) {
    this.state = state;
    this.steps = steps;
    this.stretch = Stretch.of(state);
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
    this.key = this.ticked = "";
    /** @type {ImageData | undefined} */ this.image = undefined;
    /** @type {Pane | undefined} */ this.pane = undefined; // what it shows
    this.plot.addEventListener("wheel", (/** @type {WheelEvent} */ event) => this.wheel(event), { passive: false });
    this.plot.addEventListener("dblclick", () => {
      this.stretch.reset();
      state.schedule();
    });
  }

  /** Give the canvas the pixels of the device; `height` rows if given. @returns {[number, number]} 0 while detached */
  fit(height = Math.round(this.canvas.clientHeight * devicePixelRatio)) {
    const width = Math.round(this.canvas.clientWidth * devicePixelRatio);
    if (!width || !height) return [0, 0];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    return [width, height];
  }

  /** Number the tokens below, and the steps on the left. */
  tick() {
    const { tokens } = this.state;
    const { x, y, size } = this.stretch;
    const key = `${tokens} ${x} ${y} ${size}`;
    if (key === this.ticked) return;
    this.ticked = key;
    ticks(this.below, x * tokens, (x + size) * tokens, "left", "token ");
    if (this.steps) ticks(this.left, y * tokens, (y + size) * tokens, "top", "step ");
  }

  /** The wheel zooms with Ctrl or ⌘, as a pinch does, and moves along a part sideways; else it is the page's. */
  wheel(/** @type {WheelEvent} */ event) {
    const { stretch, state } = this;
    const [across, down] = event.shiftKey ? [event.deltaX || event.deltaY, 0] : [event.deltaX, event.deltaY];
    if (event.ctrlKey || event.metaKey) {
      const box = this.plot.getBoundingClientRect();
      const x = stretch.x + (stretch.size * (event.clientX - box.left)) / box.width;
      const y = this.steps ? stretch.y + (stretch.size * (event.clientY - box.top)) / box.height : x;
      stretch.zoom(Math.exp(WHEEL * down), x, y, SMALLEST / state.tokens);
    } else if (!stretch.whole && Math.abs(across) > Math.abs(down)) {
      stretch.pan((stretch.size * across) / this.plot.clientWidth, 0);
    } else return;
    event.preventDefault();
    state.schedule();
  }

  /** Fill the canvas once per `key`. @param {string} key @param {(pixels: Uint32Array) => void} fill */
  paint(key, fill) {
    const { width, height } = this.canvas;
    const { x, y, size } = this.stretch;
    key += ` ${width} ${height} ${x} ${y} ${size} ${this.state.theme}`;
    if (key === this.key) return;
    this.key = key;
    const context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    if (this.image?.width !== width || this.image.height !== height) this.image = new ImageData(width, height);
    fill(new Uint32Array(this.image.data.buffer));
    context.putImageData(this.image, 0, 0);
  }

  /** Move the lines to the step, to the token under the pointer and to the selected one. */
  look() {
    const { now, hover, tokens, shown } = this.state;
    const { x, y, size } = this.stretch;
    const at = (/** @type {number} */ token) => `${(100 * ((token + 0.5) / tokens - x)) / size}%`;
    this.selected.hidden = now.selected < 0;
    this.selected.style.left = at(now.selected);
    this.pointed.hidden = !hover || hover.token === now.selected;
    if (hover) this.pointed.style.left = at(hover.token);
    this.stepLine.hidden = this.future.hidden = !this.steps || shown === "static";
    this.stepLine.style.top = this.future.style.top = `${(100 * (now.step / tokens - y)) / size}%`;
  }

  /** The token and the step under the pointer, and how far down it is. @param {PointerEvent} event */
  at(event) {
    const box = this.plot.getBoundingClientRect();
    const { tokens, sources } = this.state;
    const { length } = sources[this.pane?.text ?? 0]; // of several texts some may be shorter than the plot
    const { x, y, size } = this.stretch;
    const share = (/** @type {number} */ at, /** @type {number} */ length) => clamp(0, at / (length || 1), 1);
    const down = share(event.clientY - box.top, box.height);
    return {
      token: Math.min(length - 1, Math.floor((x + size * share(event.clientX - box.left, box.width)) * tokens)),
      step: Math.round((y + size * down) * tokens),
      down,
    };
  }
}

/** Buttons, and keys of a plot, that zoom all plots of a state around the selected token. */
class Zoom {
  /** @param {State} state */
  constructor(state) {
    this.state = state;
    this.stretch = Stretch.of(state);
    const button = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ onclick) =>
      h("button", { type: "button", "aria-label": label, title: label, onclick }, text);
    this.closer = button("+", "zoom in (+, or Ctrl and the wheel)", () => this.by(1 / ZOOM));
    this.further = button("−", "zoom out (−)", () => this.by(ZOOM));
    this.all = button("whole text", "the whole text (0, or a double click)", () => this.reset());
    this.element = h("span", { className: "zoom" }, this.all, this.further, this.closer);
  }

  /** @type {Record<string, () => void>} */
  get keys() {
    const closer = () => this.by(1 / ZOOM);
    return { "+": closer, "=": closer, "-": () => this.by(ZOOM), 0: () => this.reset() };
  }

  /** @param {number} factor */
  by(factor) {
    const { stretch, state } = this;
    const { selected, step } = state.now;
    const middle = (/** @type {number} */ from) => from + stretch.size / 2;
    const inside = (/** @type {number} */ at, /** @type {number} */ from) => at >= from && at <= from + stretch.size;
    const [x, y] = [(selected + 0.5) / state.tokens, step / state.tokens];
    stretch.zoom(
      factor,
      selected >= 0 && inside(x, stretch.x) ? x : middle(stretch.x),
      inside(y, stretch.y) ? y : middle(stretch.y),
      SMALLEST / state.tokens,
    );
    state.schedule();
  }

  reset() {
    this.stretch.reset();
    this.state.schedule();
  }

  draw() {
    // A button that is switched off would lose the focus.
    this.further.setAttribute("aria-disabled", String(this.stretch.whole));
    this.all.setAttribute("aria-disabled", String(this.stretch.whole));
    this.closer.setAttribute("aria-disabled", String(this.stretch.size * this.state.tokens <= SMALLEST));
  }
}

/**
 * The first token of each pixel column and the one after its last. @param {number} width @param {number} tokens
 * @param {Stretch} stretch
 */
function pixelColumns(width, tokens, { x, size }) {
  const [start, span] = [x * tokens, size * tokens];
  return Array.from({ length: width }, (_, column) => {
    const from = Math.min(tokens - 1, Math.floor(start + (column * span) / width));
    return [from, Math.max(from + 1, Math.min(tokens, Math.floor(start + ((column + 1) * span) / width)))];
  });
}

/** Round numbers from `start` to `end`. @param {number} start @param {number} end */
function roundNumbers(start, end) {
  const rough = (end - start) / 5;
  const size = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = [1, 2, 5, 10].map((m) => m * size).find((each) => each >= rough) ?? size;
  const first = Math.ceil(start / step);
  return Array.from({ length: Math.floor(end / step) - first + 1 }, (_, i) => (first + i) * step);
}

/**
 * @param {HTMLElement} gutter @param {number} start @param {number} end @param {"left" | "top"} side
 * @param {string} word before the first number
 */
function ticks(gutter, start, end, side, word) {
  const marks = roundNumbers(start, end).map((at, i) => {
    const mark = h("span", {}, (i ? "" : word) + count(at));
    mark.style[side] = `${(100 * (at - start)) / (end - start)}%`;
    return mark;
  });
  gutter.replaceChildren(...marks);
}
