const EVEN_STOPS = 50;

/** What is shown, shared by all views of one model in one place: data, controls, and who draws. */
class State {
  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    /** @type {Set<View>} */
    this.views = new Set();
    /** @type {any} */ this.meta = {};
    /** @type {Story[]} */ this.stories = [];
    /** @type {(name: string) => any} */ this.array = () => null;
    /** @type {Source[]} */ this.sources = [];
    /** @type {LayerScore[]} */ this.layerScores = [];
    this.layers = this.heads = this.tokens = 0;
    /** @type {Map<string, any>} */ this.known = new Map(); // what follows from the controls, until they change
    this.read();
    this.slices = new Slices(
      model,
      () => this.stories,
      () => this.schedule(),
    );
    /** @type {any} */ this.now = Object.fromEntries(CONTROLS.map((name) => [name, model.get(name)]));
    /** @type {{column: number, token: number} | null} */ this.hover = null;
    this.followed = false; // the controls were changed outside this place
    this.theme = 0; // grows with every change of colours
    /** @type {number | undefined} */ this.frame = undefined;
    /** @type {number | undefined} */ this.waiting = undefined; // for the kernel to start computing
    this.late = false; // the kernel has not begun to compute what it was asked for
    this.ended = new AbortController();
    this.listen();
  }

  /** Read everything Python has packed; it packs again when it has computed another history. */
  read() {
    this.meta = this.model.get("_meta");
    this.array = unpack(this.meta, this.model.get("_data"));
    this.stories = readStories(this.meta, this.array);
    this.layers = Math.max(this.meta.layers, ...this.stories.map((story) => story.layers));
    this.heads = Math.max(0, ...this.stories.map((story) => story.heads));
    if (!this.sources.length || this.meta.live) this.readTexts(); // others do not change
    this.known.clear();
  }

  readTexts() {
    this.sources = this.meta.columns.map(
      (/** @type {any} */ info, /** @type {number} */ i) => new Source(info, (name) => this.array(`c${i}.${name}`)),
    );
    this.layerScores = this.meta.layer_scores.map((/** @type {any} */ score, /** @type {number} */ i) => ({
      ...score,
      values: this.array(`l${i}.values`),
    }));
    this.tokens = Math.max(...this.sources.map((source) => source.length));
  }

  /** Whether the step stays at the end of a text that grows. */
  get follows() {
    return unfinished(this.model) && this.now.step >= this.tokens;
  }

  /** Change the texts; a step at the end goes along with it. @param {() => void} change */
  grow(change) {
    const follows = this.now.step >= this.tokens;
    change();
    this.tokens = Math.max(...this.sources.map((source) => source.length));
    this.known.clear();
    this.preview(follows ? { step: this.tokens } : {});
  }

  get offline() {
    return this.slices.offline;
  }

  /** Whether a kernel computes what is missing of a method. @param {string} [method] */
  computes(method = this.now.method) {
    return !this.offline && this.meta.computes.includes(method);
  }

  /** What the kernel is computing, or why it could not: `{method, budget, done, total}`, `{error}`, or nothing. */
  get task() {
    return this.model.get("_task") ?? {};
  }

  get shown() {
    return this.now.method === STATIC ? "static" : this.meta.kind;
  }

  /** @template T @param {string} what @param {() => T} make @returns {T} */
  memo(what, make) {
    const { method, beside, budget } = this.now;
    const key = JSON.stringify([method, beside, budget]);
    if (this.known.get("") !== key) {
      this.known.clear();
      this.known.set("", key);
    }
    if (!this.known.has(what)) this.known.set(what, make());
    return this.known.get(what);
  }

  /** The texts on screen. @returns {Pane[]} */
  get panes() {
    return this.memo("panes", () => {
      const { method, beside } = this.now;
      if (this.shown === "generated") {
        return this.meta.columns
          .map((/** @type {any} */ { label }, /** @type {number} */ i) => ({
            column: i,
            text: i,
            method: label,
            story: this.stories.findIndex((story) => story.column === i),
            exact: true,
          }))
          .filter((/** @type {Pane} */ pane) => method === ALL || this.sources.length < 2 || pane.method === method);
      }
      if (this.shown === "static") return [{ column: 0, text: 0, method, story: -1, exact: true }];
      return [method, ...beside].map((name, column) => ({ column, text: 0, method: name, ...this.nearestStory(name) }));
    });
  }

  /** The history of a method under the budget, or under the nearest one that was computed. @param {string} method */
  nearestStory(method) {
    const computed = this.budgets(method);
    if (!computed.length) return { story: -1, exact: false };
    const budget = nearest(computed, this.now.budget);
    const story = this.stories.findIndex((each) => each.method === method && each.budget === budget);
    // Without a kernel the nearest is the one that is meant.
    return { story, exact: budget === this.now.budget || !this.computes(method) };
  }

  /** @param {Pane} pane @returns {Story | undefined} */
  story(pane) {
    return this.stories[pane.story];
  }

  budgets(method = this.now.method) {
    const totals = this.stories.filter((s) => s.method === method).map((s) => s.budget);
    return totals.sort((a, b) => a - b);
  }

  /**
   * Where the step may stop: the prompt, every eviction on screen (even steps if there is none), and the end.
   * @returns {number[]}
   */
  stops() {
    return this.memo("stops", () => {
      const stops = new Set([this.tokens]);
      for (const pane of this.panes) {
        stops.add(this.sources[pane.text].info.prompt);
        const events = this.story(pane)?.events ?? [];
        events.forEach((step) => stops.add(step));
        if (!events.length) for (let i = 1; i < EVEN_STOPS; i++) stops.add(Math.round((i * this.tokens) / EVEN_STOPS));
      }
      return [...stops].sort((a, b) => a - b);
    });
  }

  /** Change controls on screen. @param {Record<string, any>} patch */
  preview(patch) {
    const { now, meta } = this;
    Object.assign(now, patch);
    // Other front ends may set anything; Python brings its own copy into range, a page has to do so itself.
    if (!meta.methods.includes(now.method)) now.method = meta.methods[0];
    const others = meta.kind === "replay" && now.method !== STATIC ? now.beside : [];
    now.beside = others
      .filter((/** @type {string} */ name) => name !== STATIC && name !== now.method && meta.methods.includes(name))
      .slice(0, 2);
    if (this.shown === "static" || this.computes()) now.budget = clamp(1, now.budget, Math.max(this.tokens, ...this.budgets()));
    else if (this.shown === "replay") now.budget = nearest(this.budgets(), now.budget);
    now.step = clamp(0, now.step, this.tokens);
    now.selected = clamp(-1, now.selected, this.tokens - 1);
    now.layer = clamp(-1, now.layer, this.layers - 1);
    now.head = clamp(0, now.head, Math.max(0, this.heads - 1));
    now.threshold = nearest(meta.thresholds, now.threshold);
    now.column = clamp(0, now.column, Math.max(this.sources.length, this.panes.length) - 1);
    this.schedule();
  }

  /** Change controls for good: the model, and so Python, hears of it. @param {Record<string, any>} [patch] */
  commit(patch = {}) {
    this.preview(patch);
    this.draw();
    this.views.forEach((view) => view.settle?.());
    const moving = (/** @type {string} */ name) => name === "step" && this.follows;
    const changed = CONTROLS.filter((name) => !same(this.model.get(name), this.now[name]) && !moving(name));
    changed.forEach((name) => this.model.set(name, this.now[name]));
    this.expect(); // first, because a model whose kernel is gone may refuse to save
    if (changed.length) this.model.save_changes();
  }

  /** The panes whose history is still to be computed. @returns {Pane[]} */
  get missing() {
    return this.panes.filter((pane) => !pane.exact);
  }

  /** Why something is not on screen yet, in words. */
  excuse() {
    const [first] = this.missing;
    if (!first) return this.slices.excuse();
    const what = `${first.method} at ${plural(this.now.budget, "slot")}`;
    if (this.late && this.task.method) return `no news of ${what} from the kernel: it is busy or gone`;
    if (this.late) return `the kernel is busy or gone: it has not begun to compute ${what}`;
    return `computing ${what} …`;
  }

  /** Notice when the kernel does not begin to compute what is missing, or no longer tells of it. */
  expect() {
    window.clearTimeout(this.waiting);
    this.late = false;
    if (!this.missing.length) return;
    this.waiting = window.setTimeout(() => {
      this.late = true;
      this.schedule();
    }, ANSWER_MS);
  }

  /** Stop computing and go back to what there is. */
  stop() {
    const { method, beside } = this.now;
    const has = (/** @type {string} */ name) => name === STATIC || this.budgets(name).length > 0;
    const [chosen = this.meta.methods.find(has), ...others] = [method, ...beside].filter(has);
    const budget = nearest(this.budgets(chosen), this.now.budget);
    const ready = (/** @type {string} */ name) => this.budgets(name).includes(budget) || !this.computes(name);
    this.commit({ method: chosen, beside: others.filter(ready), budget });
    this.model.send({ ask: "stop" });
  }

  /** A control changed outside this place. @param {string} name */
  follow(name) {
    if (same(this.now[name], this.model.get(name))) return;
    this.preview({ [name]: this.model.get(name) });
    this.followed = true;
    const { column, selected } = this.now;
    if (name === "selected" && selected >= 0) this.reveal(column, selected);
  }

  /** @param {number} column @param {number} token */
  reveal(column, token) {
    this.views.forEach((view) => view.reveal?.(column, token));
  }

  /** Select a token, or none (−1), and bring it into sight. @param {number} column @param {number} token */
  select(column, token) {
    this.commit(token < 0 ? { selected: -1 } : { selected: token, column });
    if (token >= 0) this.reveal(column, token);
  }

  /** The pointer or the keyboard is at a token. @param {{column: number, token: number} | null} at */
  point(at) {
    this.hover = at;
    this.views.forEach((view) => view.look?.());
  }

  /** To the eviction before or after. @param {1 | -1} way */
  moveStep(way) {
    if (this.shown === "static") return;
    const stops = this.stops();
    const place = upTo(stops, this.now.step) - 1;
    const exact = stops[place] === this.now.step;
    this.commit({ step: stops[clamp(0, place + (way > 0 || exact ? way : 0), stops.length - 1)] });
  }

  /** What a pane loses and why it keeps, null while it is on its way. @param {Pane} pane @returns {Slice | null} */
  slice(pane) {
    return pane.story < 0 ? null : this.slices.scope(pane.story, this.now, this.meta.thresholds);
  }

  /** The pane a view of single tokens looks at. @returns {Pane} */
  get main() {
    const { selected, column } = this.now;
    const at = selected >= 0 ? column : (this.hover?.column ?? column);
    return this.panes.find((pane) => pane.column === at) ?? this.panes[0];
  }

  /** The token that views look at: the selected one, else the one under the pointer; −1 where their text has none. */
  get token() {
    const token = this.now.selected >= 0 ? this.now.selected : (this.hover?.token ?? -1);
    return token < this.sources[this.main.text].length ? token : -1;
  }

  // ---- drawing

  /** @param {View} view */
  join(view) {
    this.views.add(view);
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = undefined;
    this.views.forEach((view) => view.draw());
    if (!this.followed) return;
    this.followed = false;
    this.views.forEach((view) => view.settle?.());
    this.expect();
  }

  listen() {
    const { signal } = this.ended;
    const recolour = () => {
      this.theme += 1;
      this.schedule();
    };
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour, { signal });
    this.themes = new MutationObserver(recolour);
    this.themes.observe(document.body, {
      attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-kind"],
    });
    this.handlers = CONTROLS.map(
      (name) => /** @type {[string, Function]} */ ([`change:${name}`, () => this.follow(name)]),
    );
    const reread = () => {
      this.grow(() => this.read());
      this.followed = true;
    };
    const news = () => {
      this.expect();
      this.schedule();
    };
    this.handlers.push(["change:_data", reread], ["change:_task", news], ["change:_live", () => this.schedule()]);
    this.handlers.forEach(([event, handler]) => this.model.on(event, handler));
  }

  close() {
    if (this.frame) cancelAnimationFrame(this.frame);
    window.clearTimeout(this.waiting);
    this.ended.abort();
    this.themes?.disconnect();
    this.handlers?.forEach(([event, handler]) => this.model.off(event, handler));
    this.slices.close();
    this.views.clear();
  }
}
