const FLASH_MS = 1600;
const ASK_MS = 2000; // between two questions for what is missing
const AT_END_PX = 60; // a text that is scrolled to its end stays there while it grows
const NEVER = 2 ** 32 - 1;
const STATES = /** @type {Record<string, string>} */ ({
  reading: "reading the prompt …",
  writing: "writing",
  paused: "paused",
  stopping: "stopping …",
  done: "written",
  failed: "failed",
});

/** The reader of a text that is being written: spans and deaths come in messages, and the cache is drawn above. */
class Live extends Reader {
  /** @param {State} state */
  constructor(state) {
    if (unfinished(state.model)) openEnded(state);
    super(state);
    /** @type {number[]} */ this.dropped = [...state.meta.live.dropped];
    /** @type {number | null} */ this.rate = null; // tokens per second
    this.asked = -ASK_MS;
    /** @type {HTMLElement[]} */ this.flashed = [];
    /** @type {number | undefined} */ this.fading = undefined;
    this.phase = "";
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
    this.buildPulse();
    this.receive = this.receive.bind(this);
    this.finish = this.finish.bind(this);
    state.model.on("msg:custom", this.receive);
    state.model.on("change:_data", this.finish); // after the state has read it
    if (unfinished(state.model)) this.ask();
  }

  buildPulse() {
    const { ui, state } = this;
    const send = (/** @type {string} */ ask) => state.model.send({ ask });
    const button = (/** @type {string} */ text, /** @type {() => void} */ onclick) =>
      h("button", { type: "button", className: "stop", onclick }, text);
    ui.pause = button("Pause", () => send(this.phase === "paused" ? "resume" : "pause"));
    ui.end = button("Stop", () => send("stop"));
    ui.phase = h("b");
    ui.numbers = h("span", { className: "numbers" });
    ui.eviction = h("span", { className: "eviction" });
    this.occupancy = new Occupancy();
    const line = h("div", { className: "told" }, ui.phase, ui.numbers, ui.eviction, ui.pause, ui.end);
    ui.pulse = h("section", { className: "pulse", "aria-label": "the cache" }, line, this.occupancy.element);
    this.controls.element.before(ui.pulse);
  }

  draw() {
    super.draw();
    const { ui, state } = this;
    const phase = state.model.get("_live")?.state ?? "done";
    const ended = ["done", "failed"].includes(phase);
    if (phase !== this.phase) {
      if (this.phase) this.say(STATES[phase]);
      this.phase = phase;
      ui.phase.textContent = STATES[phase];
      ui.pause.textContent = phase === "paused" ? "Resume" : "Pause";
      ui.pause.hidden = ui.end.hidden = ended;
      ui.pause.disabled = ui.end.disabled = phase === "stopping";
      ui.pulse.dataset.phase = phase;
    }
    this.drawPulse(ended);
  }

  /** @param {boolean} ended */
  drawPulse(ended) {
    const { ui, state, dropped } = this;
    const { limit, budget, peak, seconds } = state.meta.live;
    const { info, length } = state.sources[0];
    const { events } = state.stories[0];
    const last = dropped.length ? events[dropped.length - 1] : 0;
    const fed = Math.max(info.prompt, length - 1, last); // the newest token is fed with the next step
    const written = length - info.prompt;
    const held = fed - dropped.reduce((sum, slots) => sum + slots, 0);
    const rate = ended ? (seconds ? written / seconds : null) : this.phase === "writing" ? this.rate : null;
    ui.numbers.textContent = [
      ended ? plural(written, "token") : `${count(written)} of ${plural(limit - info.prompt, "token")}`,
      rate === null ? "" : `${number(Number(rate.toPrecision(3)))} tokens/s`,
      `${count(held)}${peak === null ? "" : ` of ${count(peak)}`} slots held`,
    ]
      .filter(Boolean)
      .join(" · ");
    ui.eviction.textContent = dropped.length
      ? `${plural(dropped.length, "eviction")}, the last at step ${count(last)}: −${count(dropped[dropped.length - 1])}`
      : "";
    const to = ended ? fed : limit;
    this.occupancy?.draw({ from: info.prompt, fed, to, steps: events, dropped, budget, peak });
  }

  // ---- what comes

  /** Ask for what follows the tokens and events that are here. */
  ask() {
    if (performance.now() - this.asked < ASK_MS) return;
    this.asked = performance.now();
    const { model, sources } = this.state;
    model.send({ ask: "live", token: sources[0].length, event: this.dropped.length });
  }

  /** @param {any} content @param {DataView[]} buffers */
  receive(content, buffers) {
    const { state, dropped } = this;
    if (content?.tell !== "live" || !unfinished(state.model)) return;
    this.rate = content.rate;
    const [source, column] = [state.sources[0], this.columns[0]];
    if (content.token > source.length || content.event > dropped.length) return this.ask();
    const { scroller } = this.ui;
    const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < AT_END_PX;
    const [ids, lengths, text, lost] = buffers.map((b) => new Uint8Array(b.buffer, b.byteOffset, b.byteLength).slice());
    state.grow(() => {
      const known = source.length - content.token; // other pages may have asked for what is here already
      const units = new Uint32Array(lengths.buffer);
      const skip = units.subarray(0, known).reduce((sum, n) => sum + n, 0);
      const more = toText(new Uint16Array(text.buffer).subarray(skip));
      source.append(new Uint32Array(ids.buffer).subarray(known), units.subarray(known), more);
      column.take(source);
    });
    this.evict(content, new Uint32Array(lost.buffer));
    if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  }

  /** @param {any} content @param {Uint32Array} lost */
  evict(content, lost) {
    const { state, dropped } = this;
    const [story] = state.stories;
    const { thresholds } = state.meta;
    let at = 0;
    content.steps.forEach((/** @type {number} */ step, /** @type {number} */ i) => {
      const here = content.event + i < dropped.length;
      if (!here) {
        this.calm();
        /** @type {any} */ (story.events).push(step);
      }
      thresholds.forEach((/** @type {number} */ threshold, /** @type {number} */ row) => {
        const tokens = lost.subarray(at, (at += content.lost[i * thresholds.length + row]));
        if (here) return;
        tokens.forEach((token) => (story.majority[row * story.fed + token] = dropped.length));
        if (threshold === state.now.threshold) this.flash(tokens);
      });
      if (!here) dropped.push(content.dropped[i]);
    });
  }

  /** Let the tokens of the last eviction light up. @param {Uint32Array} tokens */
  flash(tokens) {
    const { spans } = this.columns[0];
    tokens.forEach((token) => {
      if (spans[token]) this.flashed.push(spans[token]);
    });
    this.flashed.forEach((span) => (span.dataset.flash = ""));
    window.clearTimeout(this.fading);
    // Without motion they stay marked until the next eviction.
    if (!this.still.matches) this.fading = window.setTimeout(() => this.calm(), FLASH_MS);
  }

  calm() {
    this.flashed.forEach((span) => delete span.dataset.flash);
    this.flashed = [];
  }

  /** All is there: the text with its scores, and the fate of each head. */
  finish() {
    const { state } = this;
    this.calm();
    this.columns[0].take(state.sources[0]);
    this.dropped = [...state.meta.live.dropped];
    this.legendKey = "";
    state.commit(); // where the step has come to
  }

  /** A text that grows keeps the tall box. */
  fit() {
    if (!unfinished(this.state.model)) super.fit();
  }

  close() {
    super.close();
    window.clearTimeout(this.fading);
    this.state.model.off("msg:custom", this.receive);
    this.state.model.off("change:_data", this.finish);
  }
}

/** Give the only history of a state room for what comes. @param {State} state */
function openEnded(state) {
  const { limit } = state.meta.live;
  const majority = new Uint32Array(state.meta.thresholds.length * limit).fill(NEVER);
  Object.assign(state.stories[0], {
    ...{ events: [], majority, fed: limit, reason: new Uint8Array(limit) },
    ...{ uniform: false, deaths: null, reasons: null },
  });
}
