const PLAY_MS = 650;

/** The sliders and choices above a text. */
class Controls {
  /** @param {State} state @param {{search(query: string): void, next(way: 1 | -1): void}} actions */
  constructor(state, actions) {
    this.state = state;
    this.actions = actions;
    /** @type {any} */ this.ui = {};
    /** @type {number | undefined} */ this.playing = undefined;
    this.methodKey = "";
    this.build();
    this.listen();
  }

  // ---- building

  build() {
    const { state, ui } = this;
    const { meta } = state;
    const chooser = meta.kind === "generated" ? "text" : "method";
    ui.method = this.select(chooser, [], (method) => ({ method }));
    ui.beside = [0, 1].map((place) =>
      this.select(`beside${place ? " as well" : ""}`, [], (name) => {
        const beside = [...state.now.beside];
        beside.splice(place, 1, ...(name ? [name] : []));
        return { beside };
      }),
    );
    ui.budget = h("input", { type: "range", min: "0", step: "any", "aria-label": "budget" });
    ui.exact = h("input", {
      type: "number",
      min: "1",
      max: String(state.tokens),
      "aria-label": meta.kind === "replay" ? "budget in slots" : "budget in tokens",
    });
    ui.computed = h("output");
    ui.play = h("button", {
      type: "button",
      className: "play",
      "aria-label": "play the evictions",
      onclick: () => this.play(),
    });
    ui.step = h("input", { type: "range", min: "0", step: "1", "aria-label": "step" });
    ui.at = h("output");
    const range = (/** @type {number} */ n) => Array.from({ length: n }, (_, i) => i);
    const layers = Math.max(0, ...state.stories.map((story) => story.layers), meta.layers);
    ui.layer = this.select(
      "layer",
      [[-1, "all heads"], ...range(layers).map((i) => /** @type {[number, string]} */ ([i, `layer ${i}`]))],
      (layer) => ({ layer: Number(layer) }),
    );
    ui.head = this.select("KV head", [], (head) => ({ head: Number(head) }));
    ui.threshold = this.select(
      "share of heads",
      meta.thresholds.map((/** @type {number} */ q) => [q, `${q} % lost it`]),
      (threshold) => ({ threshold: Number(threshold) }),
    );
    ui.color = this.select("colour by", [], (color_by) => ({ color_by }));
    ui.search = h("input", { type: "search", placeholder: "/", "aria-label": "search the text" });
    ui.found = h("span", { className: "found", "aria-live": "polite" });
    ui.fields = {
      method: field(chooser, ui.method),
      beside: field("beside", ...ui.beside),
      budget: field("budget", ui.budget, ui.exact, ui.computed),
      step: field("step", ui.play, ui.step, ui.at),
      scope: field("evicted if", ui.layer, ui.threshold, ui.head),
      color: field("colour by", ui.color),
      search: field("search", ui.search, ui.found),
    };
    ui.fields.method.hidden = meta.methods.length < 2;
    this.element = h("div", { className: "controls" }, ...Object.values(ui.fields));
  }

  /** @param {string} label @param {[any, string][]} pairs @param {(value: string) => object} patch */
  select(label, pairs, patch) {
    const change = (/** @type {any} */ event) => this.state.commit(patch(event.target.value));
    return h("select", { "aria-label": label, onchange: change }, ...options(pairs));
  }

  listen() {
    const { ui, state, actions } = this;
    const { signal } = state.ended;
    const on = (/** @type {EventTarget} */ target, /** @type {string} */ event, /** @type {any} */ act) =>
      target.addEventListener(event, act, { signal });
    const fromSlider = () => {
      if (state.shown !== "static") return state.budgets()[Math.round(Number(ui.budget.value))];
      return clamp(1, Math.round(state.tokens ** (Number(ui.budget.value) / 1000)), state.tokens);
    };
    const typed = () => Math.round(Number(ui.exact.value));
    on(ui.budget, "input", () => state.preview({ budget: fromSlider() }));
    on(ui.budget, "change", () => state.commit());
    on(ui.budget, "keydown", (/** @type {KeyboardEvent} */ event) => this.nudge(event));
    // A history that has to be computed is asked for on release, not with every digit.
    on(ui.exact, "input", () => state.shown === "static" && typed() >= 1 && state.preview({ budget: typed() }));
    const take = () => {
      state.commit(typed() >= 1 ? { budget: typed() } : {});
      ui.exact.value = String(state.now.budget);
    };
    on(ui.exact, "change", take);
    // A notebook may keep the key from ending the input.
    on(ui.exact, "keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && take());
    on(ui.step, "input", () => state.preview({ step: state.stops()[Number(ui.step.value)] }));
    on(ui.step, "change", () => state.commit());
    on(ui.search, "input", () => actions.search(ui.search.value));
    on(ui.search, "keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter") actions.next(event.shiftKey ? -1 : 1);
    });

    const still = window.matchMedia("(prefers-reduced-motion: reduce)");
    const motion = () => {
      if (still.matches && this.playing) this.pause();
      ui.play.disabled = still.matches;
      ui.play.title = still.matches ? "off, because your system asks for reduced motion" : "";
    };
    on(still, "change", motion);
    motion();
  }

  /** Arrow keys move a fine slider by one token, not by a thousandth of its length. @param {KeyboardEvent} event */
  nudge(event) {
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!way || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const { state } = this;
    const { budget } = state.now;
    if (state.shown === "static") return state.commit({ budget: budget + way });
    const budgets = state.budgets();
    const place = way > 0 ? upTo(budgets, budget) : upTo(budgets, budget - 1) - 1;
    state.commit({ budget: budgets[clamp(0, place, budgets.length - 1)] });
  }

  play() {
    if (this.playing) return this.pause();
    const { state } = this;
    const stops = state.stops();
    if (state.now.step >= stops[stops.length - 1]) state.preview({ step: stops[0] });
    this.playing = window.setInterval(() => {
      const next = stops[upTo(stops, state.now.step)];
      if (next === undefined || state.stops() !== stops) return this.pause();
      state.preview({ step: next });
    }, PLAY_MS);
    this.ui.play.setAttribute("aria-label", "pause");
    this.ui.play.dataset.playing = "";
  }

  pause() {
    window.clearInterval(this.playing);
    this.playing = undefined;
    this.ui.play.setAttribute("aria-label", "play the evictions");
    delete this.ui.play.dataset.playing;
    this.state.commit();
  }

  close() {
    window.clearInterval(this.playing);
  }

  // ---- drawing

  draw() {
    const { ui, state } = this;
    const { now, shown } = state;
    this.drawMethods();
    this.drawColors();
    ui.fields.budget.hidden = shown === "generated";
    ui.fields.step.hidden = shown === "static";
    this.drawBudget();
    if (shown !== "static") this.drawStep();
    this.drawScope();
  }

  /** Methods come in two groups where a kernel can compute more of them. */
  drawMethods() {
    const { ui, state } = this;
    const { meta, now } = state;
    const key = `${state.stories.length} ${now.method} ${now.beside}`;
    if (key === this.methodKey) return;
    this.methodKey = key;
    const there = (/** @type {string} */ name) =>
      meta.kind !== "replay" || name === STATIC || state.budgets(name).length;
    const fill = (/** @type {any} */ select, /** @type {string[]} */ names, /** @type {Node[]} */ first) => {
      const ready = options(names.filter(there).map((name) => [name, name]));
      const missing = names.filter((name) => !there(name) && state.computes(name));
      const rest = options(missing.map((name) => [name, name]));
      const groups = rest.length ? [group("computed", ready), group("computed on demand", rest)] : ready;
      select.replaceChildren(...first, ...groups);
    };
    fill(ui.method, meta.methods, []);
    ui.method.value = now.method;
    const others = meta.methods.filter((/** @type {string} */ name) => name !== STATIC && name !== now.method);
    ui.fields.beside.hidden = meta.kind !== "replay" || now.method === STATIC || !others.length;
    ui.beside.forEach((/** @type {any} */ select, /** @type {number} */ place) => {
      const taken = now.beside.filter((/** @type {string} */ _, /** @type {number} */ other) => other !== place);
      const free = others.filter((/** @type {string} */ name) => !taken.includes(name));
      fill(select, free, options([["", "nothing"]]));
      select.value = now.beside[place] ?? "";
      select.hidden = place > now.beside.length || !free.length;
    });
  }

  drawColors() {
    const { ui, state } = this;
    const names = [...state.sources[0].scores.map((score) => score.name), NO_SCORE];
    if (ui.color.options.length !== names.length) {
      ui.color.replaceChildren(...options(names.map((name) => [name, name])));
      ui.fields.color.hidden = names.length < 2;
    }
    ui.color.value = state.now.color_by;
  }

  drawBudget() {
    const { ui, state } = this;
    const { now, shown } = state;
    if (shown === "static") {
      ui.budget.max = "1000";
      ui.budget.value = String(state.tokens > 1 ? (1000 * Math.log(now.budget)) / Math.log(state.tokens) : 0);
      ui.budget.disabled = now.color_by === NO_SCORE;
    } else if (shown === "replay") {
      const budgets = state.budgets();
      ui.budget.max = String(Math.max(0, budgets.length - 1));
      ui.budget.value = String(budgets.indexOf(nearest(budgets, now.budget)));
      ui.budget.disabled = budgets.length < 2;
    }
    ui.budget.hidden = shown === "replay" && ui.budget.disabled && state.computes();
    ui.budget.setAttribute("aria-valuetext", shown === "static" ? `${now.budget} tokens` : `${now.budget} slots`);
    ui.budget.title = shown === "replay" ? `computed: ${state.budgets().map(count).join(", ")}` : "";
    const free = shown === "static" || state.computes();
    ui.exact.hidden = !free;
    ui.computed.hidden = free;
    if (document.activeElement !== ui.exact) ui.exact.value = String(now.budget);
    ui.exact.disabled = shown === "static" && now.color_by === NO_SCORE;
    ui.computed.textContent = count(now.budget);
  }

  drawStep() {
    const { ui, state } = this;
    const stops = state.stops();
    ui.step.max = String(stops.length - 1);
    ui.step.value = String(Math.max(0, upTo(stops, state.now.step) - 1));
    ui.step.setAttribute("aria-valuetext", `step ${state.now.step} of ${state.tokens}`);
    ui.at.textContent = `${count(state.now.step)} / ${count(state.tokens)}`;
  }

  drawScope() {
    const { ui, state } = this;
    const { now } = state;
    const stories = state.panes.flatMap((pane) => state.story(pane) ?? []);
    // A selection evicts nothing, in no head.
    ui.fields.scope.hidden = state.shown === "static" || (stories.length > 0 && stories.every((s) => s.selects));
    if (ui.fields.scope.hidden) return;
    if (ui.head.options.length !== state.heads) {
      const heads = Array.from({ length: state.heads }, (_, i) => /** @type {[number, string]} */ ([i, `head ${i}`]));
      ui.head.replaceChildren(...options(heads));
    }
    const uniform = stories.every((story) => story.uniform);
    const shipped = !unfinished(state.model) && (!state.offline || state.stories.every((story) => story.deaths));
    ui.layer.disabled = (uniform || !shipped) && now.layer < 0; // from a head there is always a way back
    ui.threshold.disabled = uniform;
    ui.fields.scope.title = uniform
      ? "All heads of this method evict the same tokens"
      : shipped
        ? "Whose cache is shown"
        : state.slices.excuse();
    ui.layer.value = String(now.layer);
    ui.head.value = String(now.head);
    ui.threshold.value = String(now.threshold);
    ui.threshold.hidden = now.layer >= 0;
    ui.head.hidden = now.layer < 0;
  }
}

/** @param {string} label @param {...Node} controls */
function field(label, ...controls) {
  return h(
    "div",
    { className: "field" },
    h("span", { className: "label" }, label),
    h("div", { className: "row" }, ...controls),
  );
}

/** @param {[any, string][]} pairs value and label @returns {Node[]} */
const options = (pairs) => pairs.map(([value, label]) => h("option", { value: String(value) }, label));

/** @param {string} label @param {Node[]} children */
const group = (label, children) => h("optgroup", { label }, ...children);
