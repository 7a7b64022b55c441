const PEAK_SHARE = 0.01; // "e" walks over the highest 1 % of the scores

/** The reader: texts with what is struck in them, their minimaps, a card and the controls. */
class Reader {
  /** @param {State} state */
  constructor(state) {
    this.state = state;
    this.palette = new Palette(state);
    /** @type {TextColumn[]} */ this.columns = [];
    this.cursor = { column: 0, token: 0 };
    /** @type {[number, number][]} */ this.found = [];
    this.searched = ""; // the texts that were
    this.pending = false;
    this.walking = false; // the keyboard is in the text: the current token is outlined
    this.inside = false; // so is the pointer: the card follows it
    this.scrolled = 0;
    this.kind = NO_SCORE;
    /** @type {HTMLElement[]} */ this.outlined = [];
    /** @type {HTMLElement | undefined} */ this.pointed = undefined;
    this.legendKey = "";
    /** @type {number | undefined} */ this.scrollFrame = undefined;
    this.card = new Card();
    this.controls = new Controls(state, {
      search: () => this.search(),
      next: (way) => this.nextHit(way),
    });
    this.build();
    this.columnsFor(state.panes.length);
    this.listen();
    state.join(this);
  }

  /** The columns on screen, each with what it shows. @returns {[TextColumn, Pane][]} */
  get visible() {
    return this.state.panes.map((pane) => [this.columns[pane.column], pane]);
  }

  // ---- drawing

  draw() {
    const { state } = this;
    const { now, panes } = state;
    this.columnsFor(panes.length);
    this.stay();
    this.searchNew();
    let pending = state.missing.length > 0;
    for (const [column, pane] of this.visible) {
      const score = column.source.score(now.color_by);
      if (state.shown === "static") {
        const ranking = score && { ranks: score.ranks(), budget: now.budget };
        column.paint({ score, step: state.tokens, ranking });
        continue;
      }
      const slice = state.slice(pane);
      if (slice) column.paint({ score, step: now.step, slice, events: state.stories[pane.story].events });
      else pending = true;
    }
    this.pending = pending;
    this.kind = state.sources[0].score(now.color_by)?.kind ?? NO_SCORE;
    this.mark("data-kind", this.kind);
    this.mark("data-columns", String(panes.length));
    this.mark("data-shown", state.shown);
    this.mark("aria-busy", String(pending));
    this.controls.draw();
    this.drawHeads();
    this.drawTask();
    this.drawLegend();
    this.drawMaps();
    this.look();
  }

  /** Set an attribute of the root only if it changes: whatever it says concerns the style of every token. */
  mark(/** @type {string} */ name, /** @type {string} */ value) {
    if (this.root.getAttribute(name) !== value) this.root.setAttribute(name, value);
  }

  settle() {
    this.columns.forEach((column) => column.settle());
    this.say(this.summary());
  }

  drawHeads() {
    const { state, ui, visible } = this;
    ui.badge.textContent = state.meta.badges[state.shown];
    ui.counts.textContent = this.pending
      ? state.excuse()
      : visible.length === 1
        ? this.counts(...visible[0])
        : state.shown === "static"
          ? ""
          : `step ${count(state.now.step)} of ${count(state.tokens)}`;
    const shown = new Map(visible.map(([column, pane]) => [column, pane]));
    for (const column of this.columns) {
      const pane = shown.get(column);
      const head = ui.heads[column.index];
      head.section.hidden = head.element.hidden = !pane;
      if (!pane) continue;
      const alone = visible.length === 1;
      const label = state.meta.kind === "replay" && state.story(pane);
      head.name.textContent = alone && state.sources.length === 1 ? "" : pane.method;
      head.section.setAttribute("aria-label", state.meta.kind === "generated" ? pane.method : column.info.label);
      head.note.textContent = column.info.note || (label && !alone ? `budget ${count(label.budget)}` : "");
      head.tally.textContent = alone || this.pending ? "" : this.counts(column, pane) + this.overlap(column, pane);
      head.line.hidden = !head.line.textContent;
    }
  }

  drawTask() {
    const { state, ui } = this;
    const { method, done, total, error } = state.task;
    ui.task.hidden = !state.missing.length && !error;
    ui.stop.hidden = ui.progress.hidden = !state.missing.length;
    ui.error.textContent = error && !state.missing.length ? error : "";
    ui.error.hidden = !ui.error.textContent;
    if (method && done) ui.progress.value = done / total;
    else ui.progress.removeAttribute("value");
  }

  /** @param {TextColumn} column @param {Pane} pane */
  counts(column, pane) {
    const { state } = this;
    const { kept, struck, waiting } = column.tally;
    const story = state.story(pane);
    if (state.shown === "static" && state.now.color_by === NO_SCORE) return "choose a score to rank by";
    const parts = story?.selects
      ? [`${count(Math.min(story.budget, kept))} of ${count(kept)} attended`]
      : [`${count(kept)} kept`, `${count(struck)} struck`];
    if (waiting) parts.push(`${count(waiting)} not there yet`);
    if (this.state.panes.length > 1) return parts.join(", ");
    const step = state.shown === "static" ? "" : `, step ${count(state.now.step)}`;
    return `budget ${count(story?.budget ?? state.now.budget)}${step}: ${parts.join(", ")}`;
  }

  /** How much a replay keeps in common with the first one. @param {TextColumn} column @param {Pane} pane */
  overlap(column, pane) {
    if (this.state.meta.kind !== "replay" || pane.column === 0) return "";
    const [first, other] = [this.columns[0].codes, column.codes];
    let [both, either] = [0, 0];
    for (let i = 0; i < Math.min(column.length, this.state.now.step); i++) {
      const [a, b] = [!(first[i] & STRUCK), !(other[i] & STRUCK)];
      if (a && b) both++;
      if (a || b) either++;
    }
    return either ? ` · shares ${Math.round((100 * both) / either)} % with ${this.state.panes[0].method}` : "";
  }

  summary() {
    const { visible } = this;
    if (this.pending) return this.state.excuse();
    return visible
      .map(([column, pane]) => (visible.length > 1 ? `${pane.method}, ` : "") + this.counts(column, pane))
      .join("; ");
  }

  drawLegend() {
    const { now, shown, panes } = this.state;
    const key = JSON.stringify([now.color_by, shown, panes]);
    if (this.legendKey === key) return;
    this.legendKey = key;
    this.ui.legend.replaceChildren(...legend(this.state));
  }

  drawMaps() {
    for (const [column] of this.visible) {
      const { map } = this.ui.heads[column.index];
      map.draw((/** @type {string} */ name) => this.palette.pixel(name, this.kind), this.kind);
      map.follow(this.ui.scroller);
    }
  }

  /** Follow the token that is looked at, with the card and the outlines. */
  look() {
    for (const old of this.outlined) {
      delete old.dataset.pin;
      delete old.dataset.cur;
    }
    this.outlined = [];
    const { now, hover, panes } = this.state;
    const pinned = now.selected >= 0;
    const outline = (/** @type {HTMLElement} */ span, /** @type {string} */ name) => {
      span.dataset[name] = "";
      this.outlined.push(span);
    };
    const at = pinned ? { column: now.column, token: now.selected } : hover;
    const pane = at && panes.find((each) => each.column === at.column);
    if (this.walking) outline(this.columns[this.cursor.column].shows(this.cursor.token), "cur");
    if (!at || !pane || at.token >= this.columns[pane.column].length) return this.card.hide();
    const span = this.columns[pane.column].shows(at.token);
    if (pinned) outline(span, "pin");
    if (!pinned && !this.inside) return this.card.hide(); // the pointer is in another view
    const token = this.columns[pane.column].source.whole(at.token);
    this.card.show(span, describe(this.state, pane, token), pinned);
  }

  // ---- moving about

  /** Bring a token into the middle of the text. @param {number} c @param {number} token */
  reveal(c, token) {
    const column = this.columns[c];
    if (!column) return;
    const span = column.shows(token);
    const centre = () => {
      const view = this.ui.scroller.getBoundingClientRect();
      const at = span.getBoundingClientRect();
      if (at.top < view.top + 60 || at.bottom > view.bottom - 20) {
        this.ui.scroller.scrollTop += at.top - view.top - view.height / 2;
      }
    };
    centre();
    requestAnimationFrame(centre); // blocks on the way there had estimated heights
  }

  /** @param {number} c @param {number} token */
  goTo(c, token) {
    this.walking = this.inside = true;
    const column = this.columns[c];
    this.cursor = { column: c, token: column.source.whole(clamp(0, token, column.length - 1)) };
    this.reveal(c, this.cursor.token);
    this.point();
    this.state.point(this.cursor);
    const code = column.codes[this.cursor.token];
    const fate = code & STRUCK ? ", evicted" : code & WAITING ? ", not there yet" : "";
    this.say(`${quoted(column.source.piece(this.cursor.token))}, token ${this.cursor.token}${fate}`);
  }

  /** The keyboard walks over a text on screen. */
  stay() {
    const { panes } = this.state;
    if (panes.some(({ column }) => column === this.cursor.column)) return;
    const { index, length, source } = this.columns[panes[0].column];
    this.cursor = { column: index, token: source.whole(Math.min(this.cursor.token, length - 1)) };
    if (this.pointed) this.point();
  }

  /** Give the current token the id that the text container points to. */
  point() {
    const span = this.columns[this.cursor.column].spans[this.cursor.token];
    this.pointed?.removeAttribute("id");
    span.id = `${this.name}-token`;
    this.pointed = span;
    this.ui.scroller.setAttribute("aria-activedescendant", span.id);
  }

  /** The next token in a direction for which `test` holds. @param {1 | -1} way @param {(i: number) => boolean} test */
  walk(way, test) {
    const column = this.columns[this.cursor.column];
    for (let i = this.cursor.token + way; i >= 0 && i < column.length; i += way) {
      if (test(i)) return this.goTo(column.index, i);
    }
  }

  /** The token above or below. @param {1 | -1} way */
  line(way) {
    const column = this.columns[this.cursor.column];
    const box = (/** @type {number} */ i) => column.spans[i].getClientRects()[0];
    const here = box(this.cursor.token);
    let best = -1;
    let top = 0;
    for (let i = this.cursor.token + way; here && i >= 0 && i < column.length; i += way) {
      const at = box(i);
      if (!at || Math.abs(at.top - here.top) < here.height / 2) continue;
      if (best >= 0 && Math.abs(at.top - top) > at.height / 2) break;
      if (best < 0 || Math.abs(at.left - here.left) < Math.abs(box(best).left - here.left)) [best, top] = [i, at.top];
    }
    if (best >= 0) this.goTo(column.index, best);
  }

  /** @param {1 | -1} way */
  nextHit(way) {
    if (!this.found.length) return;
    const { column, token } = this.cursor;
    const after = (/** @type {[number, number]} */ [c, i]) => (c - column || i - token) * way > 0;
    const list = way > 0 ? this.found : [...this.found].reverse();
    const [c, i] = (this.walking ? list.find(after) : undefined) ?? list[0];
    const place = this.found.findIndex(([d, j]) => d === c && j === i) + 1;
    this.controls.ui.found.textContent = `${place} of ${this.found.length}`;
    this.goTo(c, i);
  }

  search() {
    this.find();
    this.state.schedule();
  }

  /** Texts that came, went or grew since the last search are searched, too. */
  searchNew() {
    const texts = this.visible.map(([column]) => `${column.index} ${column.length}`).join();
    if (texts === this.searched) return;
    this.searched = texts;
    this.find();
  }

  find() {
    const query = this.controls.ui.search.value;
    this.found = this.visible.flatMap(([column]) =>
      column.search(query).map((token) => /** @type {[number, number]} */ ([column.index, token])),
    );
    this.controls.ui.found.textContent = query ? `${count(this.found.length)} found` : "";
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inText = event.target === this.ui.scroller;
    const typing = /^(INPUT|SELECT)$/.test(/** @type {Element} */ (event.target).tagName);
    if (event.key === "Escape") {
      if (this.state.now.selected >= 0) this.state.commit({ selected: -1 });
      this.state.point(null);
      return;
    }
    if (typing) return;
    const act = this.keysAnywhere()[event.key] ?? (inText ? this.keysInText()[event.key] : undefined);
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** @returns {Record<string, () => void>} */
  keysAnywhere() {
    return {
      "/": () => this.controls.ui.search.focus(),
      "[": () => this.state.moveStep(-1),
      "]": () => this.state.moveStep(1),
    };
  }

  /** @returns {Record<string, () => void>} */
  keysInText() {
    const column = this.columns[this.cursor.column];
    const { source } = column;
    const there = (/** @type {number} */ i) => !source.empty(i);
    const changed = (/** @type {number} */ i) => column.before[i] !== column.settled[i] && there(i);
    const score = source.score(this.state.now.color_by);
    const peak = (/** @type {number} */ i) =>
      Boolean(score && score.ranks()[i] < Math.max(1, PEAK_SHARE * column.length));
    return {
      ArrowRight: () => this.walk(1, there),
      ArrowLeft: () => this.walk(-1, there),
      ArrowDown: () => this.line(1),
      ArrowUp: () => this.line(-1),
      Home: () => this.goTo(column.index, 0),
      End: () => this.goTo(column.index, column.length - 1),
      n: () => this.walk(1, changed),
      p: () => this.walk(-1, changed),
      e: () => this.walk(1, peak),
      E: () => this.walk(-1, peak),
      d: () => this.walk(1, (i) => this.differs(i)),
      D: () => this.walk(-1, (i) => this.differs(i)),
      c: () => this.otherColumn(),
      Enter: () => this.pin(this.cursor.column, this.cursor.token),
    };
  }

  /** Whether texts part at a token of the current column, or replays tell another fate of it. @param {number} i */
  differs(i) {
    const column = this.columns[this.cursor.column];
    if (this.state.meta.kind !== "replay") return column.info.divergence.includes(i);
    const fates = new Set(this.visible.map(([each]) => each.codes[i] & STRUCK));
    return fates.size > 1 && !column.source.empty(i);
  }

  otherColumn() {
    const { panes } = this.state;
    const place = panes.findIndex((pane) => pane.column === this.cursor.column);
    const { column } = panes[(place + 1) % panes.length];
    this.goTo(column, Math.min(this.cursor.token, this.columns[column].length - 1));
  }

  /** @param {number} column @param {number} token */
  pin(column, token) {
    const { now } = this.state;
    const same = now.selected === token && now.column === column;
    this.cursor = { column, token };
    this.state.commit(same ? { selected: -1 } : { selected: token, column });
    if (!same) this.say(this.card.words());
  }

  say(/** @type {string} */ text) {
    this.ui.live.textContent = text;
  }

  // ---- building

  build() {
    this.name = `epi-${Math.random().toString(36).slice(2, 8)}`;
    /** @type {any} */ const ui = (this.ui = {});
    const { meta, offline } = this.state;
    ui.badge = h("span", { className: "badge" });
    ui.counts = h("span", { className: "counts" });
    ui.progress = h("progress", { max: 1, "aria-label": "computing" });
    ui.stop = h("button", { type: "button", className: "stop", onclick: () => this.state.stop() }, "Stop");
    ui.error = h("span", { className: "error", role: "status" });
    ui.task = h("div", { className: "task" }, ui.progress, ui.stop, ui.error);
    ui.heads = [];
    ui.columns = h("div", { className: "columns" });
    ui.top = h("div", { className: "columns top" });
    ui.scroller = h(
      "div",
      {
        className: "scroller",
        tabIndex: 0,
        role: "group",
        "aria-label": "text: arrow keys walk over tokens, Enter pins",
      },
      ui.columns,
    );
    ui.legend = h("footer");
    ui.live = h("div", { className: "live", "aria-live": "polite" });
    ui.main = h("div", { className: "main" }, ui.top, ui.scroller, ui.legend);
    ui.body = h("div", { className: "body" }, ui.main);
    const title = h("strong", { role: "heading", "aria-level": offline ? "1" : "3" }, meta.title);
    this.root = h(
      "article",
      { className: "epi epi-reader", "aria-label": meta.title },
      h("header", {}, title, ui.badge, ui.counts, ui.task),
      this.controls.element,
      ui.body,
      ui.live,
      this.palette.probe,
      this.card.element,
    );
    this.root.dataset.lmSuppressShortcuts = "true";
  }

  /** Texts are built when they are first shown. @param {number} panes */
  columnsFor(panes) {
    const generated = this.state.meta.kind === "generated";
    const wanted = generated ? this.state.sources.length : panes;
    while (this.columns.length < wanted) {
      const index = this.columns.length;
      const column = new TextColumn(this.state.sources[generated ? index : 0], index);
      const head = columnHead(column, generated && index > 0, {
        reveal: (token) => this.reveal(index, token),
        goTo: (token) => this.goTo(index, token),
      });
      this.columns.push(column);
      this.ui.heads.push(head);
      this.ui.columns.append(head.section);
      this.ui.top.append(head.element);
      column.watch(this.ui.scroller);
    }
  }

  listen() {
    const { ui, root, state } = this;
    const { signal } = state.ended;
    const on = (/** @type {EventTarget} */ target, /** @type {string} */ event, /** @type {any} */ act, options = {}) =>
      target.addEventListener(event, act, { signal, ...options });
    on(root, "keydown", (/** @type {KeyboardEvent} */ event) => this.key(event));
    on(ui.scroller, "pointermove", (/** @type {PointerEvent} */ event) => this.over(event));
    on(ui.scroller, "pointerleave", () => {
      this.inside = false;
      state.point(null);
    });
    on(ui.scroller, "click", (/** @type {MouseEvent} */ event) => {
      const at = this.tokenAt(event.target);
      if (!at || !window.getSelection()?.isCollapsed) return;
      ui.scroller.focus({ preventScroll: true });
      this.pin(at.column, at.token);
    });
    on(ui.scroller, "focus", () => this.point());
    on(ui.scroller, "blur", () => {
      this.walking = false;
      state.point(state.now.selected < 0 ? null : state.hover);
    });
    on(ui.scroller, "scroll", () => this.onScroll(), { passive: true });
    on(window, "scroll", () => this.card.place(), { passive: true, capture: true });
    this.sizes = new ResizeObserver(() => {
      // A notebook may detach an output and bring it back: canvases and the scroll position do not survive that.
      if (ui.scroller.clientHeight && !ui.scroller.style.height) this.fit();
      if (ui.scroller.clientHeight && this.scrolled && !ui.scroller.scrollTop) ui.scroller.scrollTop = this.scrolled;
      state.schedule();
    });
    this.sizes.observe(ui.scroller);
  }

  /** Short texts need no tall box; afterwards its height is the reader's to drag. */
  fit() {
    const text = Math.max(...this.visible.map(([column]) => column.body.offsetHeight));
    this.ui.scroller.style.height = `${clamp(160, text + 4, this.ui.scroller.clientHeight)}px`;
  }

  /** @param {any} target */
  tokenAt(target) {
    for (const [column] of this.visible) {
      const token = column.indexOf(target);
      if (token >= 0) return { column: column.index, token };
    }
    return null;
  }

  /** @param {PointerEvent} event */
  over(event) {
    if (event.buttons || this.state.now.selected >= 0) return;
    this.inside = true;
    const [at, old] = [this.tokenAt(event.target), this.state.hover];
    if (at?.token !== old?.token || at?.column !== old?.column) this.state.point(at);
  }

  onScroll() {
    this.scrolled = this.ui.scroller.scrollTop;
    this.scrollFrame ??= requestAnimationFrame(() => {
      this.scrollFrame = undefined;
      this.visible.forEach(([column]) => this.ui.heads[column.index].map.follow(this.ui.scroller));
      this.card.place();
    });
  }

  close() {
    if (this.scrollFrame) cancelAnimationFrame(this.scrollFrame);
    this.sizes?.disconnect();
    this.controls.close();
    this.columns.forEach((column) => column.close());
    this.card.hide();
  }
}
