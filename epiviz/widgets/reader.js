// @ts-check
/**
 * The reader in the browser: text, controls, minimap and card of one model. It draws what Python has packed and
 * decides nothing: which tokens are struck follows from ranks, deaths and event steps alone. While a control is held
 * only this file works; the model hears of it on release.
 *
 * @typedef {{get(name: string): any, set(name: string, value: any): void, save_changes(): void,
 *   on(event: string, callback: Function): void, off(event: string, callback?: Function): void,
 *   send(content: object): void}} Model
 * @typedef {Uint8Array | Uint16Array | Uint32Array | Float32Array} Numbers
 * @typedef {{name: string, kind: "signed" | "magnitude", unit: string, clip: [number, number], values: Float32Array,
 *   buckets: Uint8Array, ranks: () => Uint32Array}} Score
 * @typedef {{method: string, budget: number, column: number, layers: number, heads: number, evicts: number[],
 *   uniform: boolean, fed: number, events: Uint32Array, majority: Numbers, reason: Uint8Array,
 *   deaths: Numbers | null, reasons: Uint8Array | null}} Story
 * @typedef {{death: Numbers, reason: Uint8Array}} Slice
 * @typedef {{score?: Score, step: number, ranking?: {ranks: Uint32Array, budget: number}, slice?: Slice,
 *   events?: Uint32Array}} Look
 */

const CONTROLS = ["color_by", "method", "budget", "step", "layer", "head", "threshold", "selected", "column"];
const STATIC = "static ranking";
const ALL = "side by side";
const NO_SCORE = "none";
const REASONS = ["", "sink", "recent", "prompt", "reserved value", "sampled", "top score"];

const [BLOCK_MIN, BLOCK_MAX] = [192, 512]; // tokens; a block ends at the first line break in between
const CACHE_BYTES = 32 * 2 ** 20;
const ANSWER_MS = 10000;
const PLAY_MS = 650;
const [REST_MS, SLICE_MS] = [80, 8]; // after a move: the pause before spans out of view follow, and their share of it
const PEAK_SHARE = 0.01; // "e" walks over the highest 1 % of the scores

const STRUCK = 1 << 8;
const WAITING = 1 << 9;
const HIT = 1 << 10;

// ---------------------------------------------------------------------------------------------- small tools

/** @param {string} tag @param {Record<string, any>} [set] @param {...(Node | string)} children @returns {any} */
function h(tag, set = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(set)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list") /** @type {any} */ (element)[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const count = (/** @type {number} */ n) => String(n).replace(/\B(?=(\d{3})+$)/g, ",");
const clamp = (/** @type {number} */ low, /** @type {number} */ x, /** @type {number} */ high) =>
  Math.max(low, Math.min(x, high));

/** Significant digits enough to tell two tokens apart. @param {number} x */
function number(x) {
  if (!Number.isFinite(x)) return "–";
  return String(Number(x.toPrecision(4))).replace("-", "−");
}

/** How many entries of the ascending `list` are ≤ `x`. @param {ArrayLike<number>} list @param {number} x */
function upTo(list, x) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** @param {number[]} list @param {number} x */
const nearest = (list, x) => list.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));

const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]|\p{Cs}/u;
const code = (/** @type {string} */ c) => `U+${(c.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;

/** A token in quotes, with everything invisible written out. @param {string} text */
function quoted(text) {
  const cut = text.length > 80 ? text.slice(0, 80) + "…" : text;
  const shown = cut
    .replaceAll("\n", "\\n")
    .replaceAll("\t", "\\t")
    .replace(new RegExp(UNSEEN, "gu"), (c) => `⟨${code(c)}⟩`);
  return `“${shown}”` + (text.length > 80 ? ` (${count(text.length)} characters)` : "");
}

/** Text with each invisible character in an element of its own, where bidi marks end. @param {string} text */
function* written(text) {
  let end = 0;
  for (const match of text.matchAll(new RegExp(UNSEEN, "gu"))) {
    yield document.createTextNode(text.slice(end, match.index));
    yield h("bdi", { "data-mark": code(match[0]) }, match[0]);
    end = match.index + match[0].length;
  }
  yield document.createTextNode(text.slice(end));
}

// ---------------------------------------------------------------------------------------------- data

/** Return a function from array names to typed arrays. @param {any} meta @param {DataView} data */
function unpack(meta, data) {
  const types = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };
  // A copy, because a message buffer may start at any byte and typed arrays may not.
  const block = new Uint8Array(data.buffer, data.byteOffset, data.byteLength).slice().buffer;
  return (/** @type {string} */ name) => {
    if (!(name in meta.arrays)) return null;
    const [type, shape, offset] = meta.arrays[name];
    const length = shape.reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1);
    return new types[/** @type {keyof types} */ (type)](block, offset, length);
  };
}

/** UTF-16 units to a string; TextDecoder would replace lone surrogates. @param {Uint16Array} units */
function toText(units) {
  let text = "";
  for (let i = 0; i < units.length; i += 8192) text += String.fromCharCode(...units.subarray(i, i + 8192));
  return text;
}

/**
 * Rank 0 is the highest; ties go to the newer token, tokens without a score come last. Value and index become one
 * double each (32 + 21 bits), because sorting numbers without a comparator is several times faster.
 * @param {Float32Array} values
 */
function rank(values) {
  const bits = new Uint32Array(Float32Array.from(values, (value) => value + 0).buffer); // −0 becomes 0
  const ordered = (/** @type {number} */ b) => (b >>> 31 ? ~b : b | (1 << 31)) >>> 0;
  const keys = Float64Array.from(bits, (b, i) => (Number.isNaN(values[i]) ? 0 : ordered(b)) * 2 ** 21 + i).sort();
  const ranks = new Uint32Array(keys.length);
  keys.forEach((key, place) => (ranks[key % 2 ** 21] = keys.length - 1 - place));
  return ranks;
}

/** @template T @param {() => T} make @returns {() => T} */
function once(make) {
  /** @type {T | undefined} */
  let made;
  return () => (made ??= make());
}

/** @param {any} meta @param {ReturnType<typeof unpack>} array @returns {Story[]} */
function readStories(meta, array) {
  const parts = ["events", "majority", "reason", "deaths", "reasons"];
  return meta.stories.map((/** @type {any} */ info, /** @type {number} */ i) => ({
    ...info,
    ...Object.fromEntries(parts.map((part) => [part, array(`s${i}.${part}`)])),
  }));
}

/** Per-head deaths: from the block, from the cache, or asked for. */
class Slices {
  /** @param {Model} model @param {Story[]} stories @param {() => void} arrived */
  constructor(model, stories, arrived) {
    Object.assign(this, { model, stories, arrived });
    /** @type {Model} */ this.model;
    /** @type {Story[]} */ this.stories;
    /** @type {() => void} */ this.arrived;
    /** @type {Map<string, Slice>} */ this.cache = new Map();
    /** @type {Map<string, number>} */ this.asked = new Map();
    /** @type {Set<string>} */ this.silent = new Set();
    this.offline = Boolean(model.get("_offline"));
    this.receive = this.receive.bind(this);
    model.on("msg:custom", this.receive);
  }

  /** What one scope loses and why it keeps. @returns {Slice | null} null while it is on its way */
  scope(/** @type {number} */ s, /** @type {any} */ { layer, head, threshold }, /** @type {number[]} */ thresholds) {
    const story = this.stories[s];
    if (layer < 0) {
      const row = story.uniform ? 0 : thresholds.indexOf(threshold);
      return { death: story.majority.subarray(row * story.fed, (row + 1) * story.fed), reason: story.reason };
    }
    if (!story.evicts.includes(layer)) {
      return { death: new Uint32Array(story.fed).fill(2 ** 32 - 1), reason: new Uint8Array(story.fed) };
    }
    if (!story.deaths || !story.reasons) return this.fetch({ ask: "head", story: s, layer, head });
    const start = (layer * story.heads + head) * story.fed;
    return {
      death: story.deaths.subarray(start, start + story.fed),
      reason: story.reasons.subarray(start, start + story.fed),
    };
  }

  /** The deaths of one token in all heads, `[layers · heads]`. @returns {Numbers | null} */
  token(/** @type {number} */ s, /** @type {number} */ token) {
    const story = this.stories[s];
    const cells = story.layers * story.heads;
    if (story.deaths) {
      const { deaths, fed } = story;
      return Uint32Array.from({ length: cells }, (_, cell) => deaths[cell * fed + token]);
    }
    return this.fetch({ ask: "token", story: s, token })?.death ?? null;
  }

  /** @param {Record<string, any>} question @returns {Slice | null} */
  fetch(question) {
    const key = JSON.stringify(question);
    const known = this.cache.get(key);
    if (known) {
      this.cache.delete(key); // put it back as the most recently used
      this.cache.set(key, known);
      return known;
    }
    if (!this.offline && !this.asked.has(key) && !this.silent.has(key)) {
      const give_up = () => {
        this.asked.delete(key);
        this.silent.add(key);
        this.arrived();
      };
      this.asked.set(key, window.setTimeout(give_up, ANSWER_MS));
      this.model.send(question);
    }
    return null;
  }

  /** @param {any} content @param {DataView[]} buffers */
  receive(content, buffers) {
    if (!content?.tell) return;
    const { tell: _, ...question } = content;
    const key = JSON.stringify(question);
    window.clearTimeout(this.asked.get(key));
    this.asked.delete(key);
    this.silent.delete(key);
    const [death, reason] = buffers.map((b) => new Uint8Array(b.buffer, b.byteOffset, b.byteLength).slice());
    const wide = death.byteLength === 4 * reason.byteLength;
    this.cache.set(key, { death: new (wide ? Uint32Array : Uint16Array)(death.buffer), reason });
    let bytes = 0;
    for (const [old, slice] of [...this.cache].reverse()) {
      bytes += slice.death.byteLength + slice.reason.byteLength;
      if (bytes > CACHE_BYTES && old !== key) this.cache.delete(old);
    }
    this.arrived();
  }

  /** Why a slice is missing, in words. */
  excuse() {
    if (this.offline) return "single heads were too big for this file: open it from a notebook";
    return this.silent.size ? "the kernel does not answer: single heads need it" : "loading this head …";
  }

  close() {
    this.model.off("msg:custom", this.receive);
    this.asked.forEach((timer) => window.clearTimeout(timer));
  }
}

// ---------------------------------------------------------------------------------------------- one text

/** The text of one column as spans in blocks, and the state of each token. */
class TextColumn {
  /** @param {any} meta @param {ReturnType<typeof unpack>} array @param {number} index */
  constructor(meta, array, index) {
    const get = (/** @type {string} */ name) => /** @type {any} */ (array(`c${index}.${name}`));
    this.info = meta.columns[index];
    this.index = index;
    this.text = toText(get("text"));
    /** @type {Uint32Array} */ this.offsets = get("offsets");
    /** @type {Uint32Array} */ this.ids = get("ids");
    /** @type {Score[]} */
    this.scores = this.info.scores.map((/** @type {any} */ score, /** @type {number} */ i) => {
      const values = get(`values${i}`);
      return { ...score, values, buckets: get(`buckets${i}`), ranks: once(() => rank(values)) };
    });
    this.length = this.ids.length;
    this.codes = new Uint16Array(this.length); // the state of each token, and …
    this.painted = new Uint16Array(this.length); // … the one its span shows
    this.blockOf = new Uint32Array(this.length);
    /** @type {Set<number>} */ this.inView = new Set();
    this.hits = new Uint8Array(this.length);
    this.settled = new Uint8Array(this.length); // struck at the last release, and …
    this.before = new Uint8Array(this.length); // … at the one before it: "n" walks over the difference
    this.tally = { kept: this.length, struck: 0, waiting: 0 };
    this.body = h("div", { className: "text" });
    /** @type {number[]} */ this.starts = [];
    /** @type {HTMLElement[]} */ this.blocks = [];
    /** @type {HTMLElement[]} */ this.spans = new Array(this.length);
    /** @type {IntersectionObserver | undefined} */ this.observer = undefined;
    /** @type {(() => void) | undefined} */ this.later = undefined; // calls off the work that waits for a pause
    this.build();
    this.stale = new Uint8Array(this.blocks.length); // blocks whose spans do not show the states of their tokens yet
  }

  piece(/** @type {number} */ i) {
    return this.text.slice(this.offsets[i], this.offsets[i + 1]);
  }

  empty(/** @type {number} */ i) {
    return this.offsets[i] === this.offsets[i + 1];
  }

  /** The token that shows token `i`: itself, or the one that completes its character. @param {number} i */
  whole(i) {
    let j = i;
    while (j < this.length - 1 && this.empty(j)) j++;
    return this.empty(j) ? i : j;
  }

  /** The span that shows token `i`. @param {number} i */
  shows(i) {
    return this.spans[this.whole(clamp(0, i, this.length - 1))];
  }

  /** The first of the tokens that together write the character token `i` completes. @param {number} i */
  firstPart(i) {
    while (i > 0 && this.empty(i - 1)) i--;
    return i;
  }

  build() {
    const divergence = new Set(this.info.divergence);
    let block = this.body;
    let last = "\n";
    for (let i = 0; i < this.length; i++) {
      const size = i - (this.starts.at(-1) ?? -BLOCK_MAX);
      if (size >= BLOCK_MAX || (size >= BLOCK_MIN && last.endsWith("\n"))) {
        block = h("div", { className: "block", dir: "auto" });
        if (!last.endsWith("\n")) block.dataset.cut = "";
        this.starts.push(i);
        this.blocks.push(block);
        this.body.append(block);
      }
      const span = document.createElement("span");
      const piece = this.piece(i);
      if (UNSEEN.test(piece)) span.append(...written(piece));
      else span.textContent = piece;
      if (/^\s*\n\s*$/.test(piece)) span.dataset.nl = "";
      if (divergence.has(i)) span.dataset.split = "";
      block.append(span);
      this.spans[i] = span;
      this.blockOf[i] = this.blocks.length - 1;
      if (piece) last = piece;
    }
    this.blocks.forEach((each, b) => {
      const lines = (each.textContent ?? "").split("\n").reduce((sum, line) => sum + 1 + line.length / 90, 0);
      each.style.containIntrinsicSize = `auto ${Math.round(lines * 26)}px`;
      each.dataset.start = String(this.starts[b]);
    });
  }

  /** The token under an element of the text, −1 if there is none. @param {Element | null} span */
  indexOf(span) {
    const block = /** @type {HTMLElement | null} */ (span?.closest(".block"));
    if (!span || span === block || !block || !this.body.contains(block)) return -1;
    const whole = span.closest(".block > span");
    return whole ? Number(block.dataset.start) + Array.prototype.indexOf.call(block.children, whole) : -1;
  }

  /**
   * Bring every token to its state. The spans of blocks in view follow at once, the others when there is time.
   * @param {Look} look
   */
  paint({ score, step, ranking, slice, events }) {
    const fired = events ? upTo(events, step) : 0;
    const lastEvent = events && fired ? events[fired - 1] : 0;
    const fed = slice ? slice.death.length : 0;
    const { codes, hits, blockOf, stale } = this;
    let [struck, waiting] = [0, 0];
    for (let i = 0; i < this.length; i++) {
      let code = hits[i] ? HIT : 0;
      if (i >= step) {
        code |= WAITING;
        waiting++;
      } else if (slice ? i < fed && slice.death[i] < fired : ranking && ranking.ranks[i] >= ranking.budget) {
        code |= STRUCK;
        struck++;
      } else {
        if (score && score.buckets[i] !== 255) code |= score.buckets[i] + 1;
        if (slice && i < lastEvent) code |= slice.reason[i] << 4;
      }
      if (code !== codes[i]) {
        codes[i] = code;
        stale[blockOf[i]] = 1;
      }
    }
    this.tally = { kept: this.length - struck - waiting, struck, waiting };
    this.inView.forEach((b) => this.refresh(b));
    this.later?.();
    this.later = soon(REST_MS, (enough) => this.refreshRest(enough));
    this.body.dataset.behind = "";
  }

  /** Bring the spans of a block to the states of their tokens, and touch only those that changed. @param {number} b */
  refresh(b) {
    if (!this.stale[b]) return;
    this.stale[b] = 0;
    const { codes, painted, spans } = this;
    const end = this.starts[b + 1] ?? this.length;
    for (let i = this.starts[b]; i < end; i++) {
      if (painted[i] !== codes[i]) spans[i].className = className((painted[i] = codes[i]));
    }
  }

  /** @param {() => boolean} enough */
  refreshRest(enough) {
    this.later = undefined;
    for (let b = this.stale.indexOf(1); b >= 0; b = this.stale.indexOf(1, b)) {
      this.refresh(b);
      if (enough()) {
        this.later = soon(0, (stop) => this.refreshRest(stop));
        return;
      }
    }
    delete this.body.dataset.behind;
  }

  /** Know which blocks are in view. @param {HTMLElement} scroller */
  watch(scroller) {
    const see = (/** @type {IntersectionObserverEntry[]} */ entries) => {
      for (const { target, isIntersecting } of entries) {
        const b = this.blocks.indexOf(/** @type {HTMLElement} */ (target));
        this.inView[isIntersecting ? "add" : "delete"](b);
        if (isIntersecting) this.refresh(b);
      }
    };
    this.observer = new IntersectionObserver(see, { root: scroller, rootMargin: "300px 0px" });
    this.blocks.forEach((block) => this.observer?.observe(block));
  }

  close() {
    this.observer?.disconnect();
    this.later?.();
  }

  settle() {
    [this.before, this.settled] = [this.settled, this.before];
    for (let i = 0; i < this.length; i++) this.settled[i] = Number((this.codes[i] & STRUCK) > 0);
  }

  /** Mark the tokens that touch an occurrence of `query`; return the first token of each. @param {string} query */
  search(query) {
    this.hits.fill(0);
    /** @type {number[]} */
    const found = [];
    if (!query) return found;
    const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
    for (const match of this.text.matchAll(pattern)) {
      const first = upTo(this.offsets, match.index) - 1;
      found.push(first);
      for (let i = first; i < this.length && this.offsets[i] < match.index + match[0].length; i++) this.hits[i] = 1;
    }
    return found;
  }
}

/**
 * Work once the moves are over, in slices of a few milliseconds; `enough` tells when a slice is full. Returns a
 * function that calls it off.
 * @param {number} wait @param {(enough: () => boolean) => void} work
 */
function soon(wait, work) {
  const timer = setTimeout(() => {
    const start = performance.now();
    work(() => performance.now() - start > SLICE_MS);
  }, wait);
  return () => clearTimeout(timer);
}

/** @type {Map<number, string>} */
const classNames = new Map();

function className(/** @type {number} */ code) {
  let name = classNames.get(code);
  if (name === undefined) {
    const parts = [code & STRUCK && "x", code & WAITING && "y", code & HIT && "hit"];
    if (code & 15) parts.push(`b${(code & 15) - 1}`);
    if ((code >> 4) & 15) parts.push(`r${(code >> 4) & 15}`);
    classNames.set(code, (name = parts.filter(Boolean).join(" ")));
  }
  return name;
}

// ---------------------------------------------------------------------------------------------- minimap

/** The whole text as a strip: the strongest colour of each pixel above, the share that is kept below. */
class Minimap {
  /** @param {TextColumn} column @param {(token: number) => void} jump */
  constructor(column, jump) {
    this.column = column;
    this.canvas = h("canvas", { height: 1, width: 1 });
    this.window = h("i");
    this.element = h("div", { className: "map", title: "the whole text · click to jump" }, this.canvas, this.window);
    const go = (/** @type {PointerEvent} */ event) => {
      const box = this.canvas.getBoundingClientRect();
      const share = clamp(0, (event.clientX - box.left) / box.width, 1);
      jump(Math.min(column.length - 1, Math.floor(share * column.length)));
    };
    this.element.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      this.element.setPointerCapture(event.pointerId);
      go(event);
    });
    this.element.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => event.buttons && go(event));
  }

  /** @param {(name: string) => number} colour @param {string} kind */
  draw(colour, kind) {
    const width = Math.round(this.canvas.clientWidth * devicePixelRatio);
    const height = Math.round(this.canvas.clientHeight * devicePixelRatio);
    if (!width || !height) return;
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    const image = context.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const [page, ink, lost, hit] = ["page", "kept", "lost", "hit"].map(colour);
    const buckets = Array.from({ length: 9 }, (_, b) => colour(`b${b}`));
    const { codes, length } = this.column;
    const split = kind === NO_SCORE ? 0 : Math.round(height * 0.55);
    const neutral = kind === "signed" ? 4 : 0;
    const tops = new Uint32Array(width);
    const bars = new Int16Array(width); // where the kept share begins; −1 where no token exists yet
    for (let x = 0; x < width; x++) {
      const from = Math.floor((x * length) / width);
      const to = Math.max(from + 1, Math.floor(((x + 1) * length) / width));
      let best = neutral;
      let struck = 0;
      let waiting = 0;
      let found = 0;
      for (let i = from; i < to; i++) {
        const state = codes[i];
        const bucket = (state & 15) - 1;
        if (state & STRUCK) struck++;
        else if (state & WAITING) waiting++;
        else if (bucket >= 0 && Math.abs(bucket - neutral) > Math.abs(best - neutral)) best = bucket;
        found |= state & HIT;
      }
      tops[x] = found ? hit : best === neutral ? page : buckets[best];
      const present = to - from - waiting;
      bars[x] = present ? split + Math.round(((height - split) * struck) / present) : -1;
    }
    for (let y = 0; y < height; y++) {
      const row = pixels.subarray(y * width, (y + 1) * width);
      if (y < split - 1) row.set(tops);
      else if (y < split) row.fill(page);
      else for (let x = 0; x < width; x++) row[x] = bars[x] < 0 ? page : y < bars[x] ? lost : ink;
    }
    context.putImageData(image, 0, 0);
  }

  /** @param {HTMLElement} scroller */
  follow(scroller) {
    const view = scroller.getBoundingClientRect();
    const { blocks, starts, length } = this.column;
    let [first, last] = [0, length];
    blocks.forEach((block, b) => {
      const box = block.getBoundingClientRect();
      const size = (starts[b + 1] ?? length) - starts[b];
      const at = (/** @type {number} */ y) => starts[b] + size * clamp(0, (y - box.top) / (box.height || 1), 1);
      if (box.top <= view.top && box.bottom >= view.top) first = at(view.top);
      if (box.top <= view.bottom && box.bottom >= view.bottom) last = at(view.bottom);
    });
    this.window.style.left = `${(100 * first) / length}%`;
    this.window.style.width = `${(100 * Math.max(0, last - first)) / length}%`;
  }
}

// ---------------------------------------------------------------------------------------------- card

/** What is known about one token. It lives in the top layer, so that no notebook cell can clip it. */
class Card {
  constructor() {
    this.element = h("div", { className: "card", popover: "manual", role: "group", "aria-label": "about this token" });
    /** @type {HTMLElement | null} */ this.anchor = null;
  }

  /** @param {HTMLElement} anchor @param {Node[]} content @param {boolean} pinned */
  show(anchor, content, pinned) {
    this.anchor = anchor;
    this.element.replaceChildren(...content);
    this.element.toggleAttribute("data-pinned", pinned);
    if (!this.element.matches(":popover-open")) this.element.showPopover();
    this.place();
  }

  words() {
    return Array.from(this.element.querySelectorAll("dt, dd"), (/** @type {Element} */ part) => part.textContent).join(
      " ",
    );
  }

  place() {
    if (!this.anchor) return;
    const at = this.anchor.getClientRects()[0] ?? this.anchor.getBoundingClientRect();
    const box = this.element.getBoundingClientRect();
    const below = at.bottom + 8;
    const top = below + box.height < window.innerHeight ? below : Math.max(4, at.top - box.height - 8);
    this.element.style.left = `${clamp(4, at.left - 12, Math.max(4, window.innerWidth - box.width - 8))}px`;
    this.element.style.top = `${top}px`;
  }

  hide() {
    this.anchor = null;
    if (this.element.isConnected && this.element.matches(":popover-open")) this.element.hidePopover();
  }
}

// ---------------------------------------------------------------------------------------------- the reader

/** One view of one model. */
class Reader {
  /** @param {Model} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.meta = model.get("_meta");
    const array = unpack(this.meta, model.get("_data"));
    /** @type {TextColumn[]} */
    this.columns = this.meta.columns.map(
      (/** @type {any} */ _, /** @type {number} */ i) => new TextColumn(this.meta, array, i),
    );
    this.stories = readStories(this.meta, array);
    this.layers = Math.max(0, ...this.stories.map((story) => story.layers));
    this.heads = Math.max(0, ...this.stories.map((story) => story.heads));
    this.tokens = Math.max(...this.columns.map((column) => column.length));
    this.slices = new Slices(model, this.stories, () => this.schedule());
    /** @type {any} */ this.now = Object.fromEntries(CONTROLS.map((name) => [name, model.get(name)]));
    this.cursor = { column: 0, token: 0 };
    /** @type {{column: number, token: number} | null} */ this.hover = null;
    /** @type {[number, number][]} */ this.found = [];
    this.pending = false;
    this.walking = false; // the keyboard is in the text: the current token is outlined
    this.followed = false; // the controls were changed outside this view
    this.scrolled = 0;
    this.kind = NO_SCORE;
    /** @type {HTMLElement[]} */ this.outlined = [];
    /** @type {HTMLElement | undefined} */ this.pointed = undefined;
    /** @type {{key: string, list: number[]}} */ this.known = { key: "", list: [] }; // the stops of the step slider
    this.legendKey = "";
    /** @type {number | undefined} */ this.frame = undefined;
    /** @type {number | undefined} */ this.scrollFrame = undefined;
    /** @type {number | undefined} */ this.playing = undefined;
    /** @type {Map<string, number>} */ this.colours = new Map();
    this.ended = new AbortController();
    this.card = new Card();
    this.build(el);
    this.listen();
    this.draw();
    this.settle();
  }

  // ---- state

  get shown() {
    return this.now.method === STATIC ? "static" : this.meta.kind;
  }

  /** The columns on screen. @returns {TextColumn[]} */
  get visible() {
    const { method } = this.now;
    if (this.meta.kind !== "generated" || method === ALL || this.columns.length < 2) return this.columns;
    return this.columns.filter((column) => column.info.label === method);
  }

  /** The index of the history behind a column, −1 for a static ranking. @param {number} column */
  storyOf(column) {
    const { method, budget } = this.now;
    if (this.shown === "static") return -1;
    return this.stories.findIndex((story) =>
      this.shown === "generated" ? story.column === column : story.method === method && story.budget === budget,
    );
  }

  budgets(method = this.now.method) {
    const totals = this.stories.filter((s) => s.method === method).map((s) => s.budget);
    return totals.sort((a, b) => a - b);
  }

  /** Where the step slider may stop: every eviction on screen, the prompt, and the end. @returns {number[]} */
  stops() {
    const key = `${this.now.method} ${this.now.budget}`;
    if (this.known.key !== key) {
      const stops = new Set([this.tokens]);
      for (const column of this.visible) {
        stops.add(column.info.prompt);
        this.stories[this.storyOf(column.index)]?.events.forEach((step) => stops.add(step));
      }
      this.known = { key, list: [...stops].sort((a, b) => a - b) };
    }
    return this.known.list;
  }

  /** Change controls on screen. @param {Record<string, any>} patch */
  preview(patch) {
    const { now, meta } = this;
    Object.assign(now, patch);
    // Other front ends may set anything; Python brings its own copy into range, a page has to do so itself.
    if (!meta.methods.includes(now.method)) now.method = meta.methods[0];
    if (this.shown === "static") now.budget = clamp(1, now.budget, this.tokens);
    else if (this.shown === "replay") now.budget = nearest(this.budgets(), now.budget);
    now.step = clamp(0, now.step, this.tokens);
    now.layer = clamp(-1, now.layer, this.layers - 1);
    now.head = clamp(0, now.head, Math.max(0, this.heads - 1));
    now.threshold = nearest(meta.thresholds, now.threshold);
    now.column = clamp(0, now.column, this.columns.length - 1);
    this.schedule();
  }

  /** Change controls for good: the model, and so Python, hears of it. @param {Record<string, any>} [patch] */
  commit(patch = {}) {
    this.preview(patch);
    this.draw();
    this.settle();
    const changed = CONTROLS.filter((name) => this.model.get(name) !== this.now[name]);
    changed.forEach((name) => this.model.set(name, this.now[name]));
    if (changed.length) this.model.save_changes();
    this.say(this.summary());
  }

  settle() {
    this.columns.forEach((column) => column.settle());
  }

  /** A control changed outside this view. @param {string} name */
  follow(name) {
    if (this.now[name] === this.model.get(name)) return;
    this.preview({ [name]: this.model.get(name) });
    this.followed = true;
    if (name === "selected" && this.now.selected >= 0) this.reveal(this.now.column, this.now.selected);
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  // ---- drawing

  draw() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = undefined;
    const { now, meta } = this;
    const visible = this.visible;
    let pending = false;
    for (const column of visible) {
      const score = column.scores.find((each) => each.name === now.color_by);
      const s = this.storyOf(column.index);
      if (s < 0) {
        const ranking = score && { ranks: score.ranks(), budget: now.budget };
        column.paint({ score, step: this.tokens, ranking });
      } else {
        const slice = this.slices.scope(s, now, meta.thresholds);
        if (slice) column.paint({ score, step: now.step, slice, events: this.stories[s].events });
        else pending = true;
      }
    }
    this.pending = pending;
    this.kind = this.columns[0].scores.find((each) => each.name === now.color_by)?.kind ?? NO_SCORE;
    this.mark("data-kind", this.kind);
    this.mark("data-columns", String(visible.length));
    this.mark("data-shown", this.shown);
    this.mark("aria-busy", String(pending));
    this.drawControls();
    this.drawHeads();
    this.drawLegend();
    this.drawMaps();
    this.drawCard();
    if (this.followed) {
      this.followed = false;
      this.settle();
      this.say(this.summary());
    }
  }

  /** Set an attribute of the root only if it changes: whatever it says concerns the style of every token. */
  mark(/** @type {string} */ name, /** @type {string} */ value) {
    if (this.root.getAttribute(name) !== value) this.root.setAttribute(name, value);
  }

  drawHeads() {
    const visible = this.visible;
    this.ui.badge.textContent = this.meta.badges[this.shown];
    this.ui.counts.textContent = this.pending
      ? this.slices.excuse()
      : visible.length === 1
        ? this.counts(visible[0])
        : this.stepText();
    this.columns.forEach((column, i) => {
      this.ui.sections[i].hidden = this.ui.heads[i].hidden = !visible.includes(column);
      this.ui.tallies[i].textContent = visible.length > 1 && !this.pending ? this.counts(column) : "";
    });
  }

  stepText() {
    return this.shown === "static" ? "" : `step ${count(this.now.step)} of ${count(this.tokens)}`;
  }

  /** @param {TextColumn} column */
  counts(column) {
    const { kept, struck, waiting } = column.tally;
    const parts = [`${count(kept)} kept`, `${count(struck)} struck`];
    if (waiting) parts.push(`${count(waiting)} not there yet`);
    if (this.shown === "static" && this.now.color_by === NO_SCORE) return "choose a score to rank by";
    if (this.visible.length > 1) return parts.join(", ");
    const story = this.stories[this.storyOf(column.index)];
    const step = this.shown === "static" ? "" : `, step ${count(this.now.step)}`;
    return `budget ${count(story?.budget ?? this.now.budget)}${step}: ${parts.join(", ")}`;
  }

  summary() {
    return this.visible
      .map((column) => (this.visible.length > 1 ? `${column.info.label}, ` : "") + this.counts(column))
      .join("; ");
  }

  drawControls() {
    const { ui, now, shown } = this;
    const still = shown === "static";
    ui.method.value = now.method;
    ui.color.value = now.color_by;
    ui.fields.budget.hidden = shown === "generated";
    ui.fields.step.hidden = still;
    ui.fields.scope.hidden = still;
    if (shown === "static") {
      ui.budget.max = "1000";
      ui.budget.value = String(this.tokens > 1 ? (1000 * Math.log(now.budget)) / Math.log(this.tokens) : 0);
      ui.budget.disabled = now.color_by === NO_SCORE;
    } else if (shown === "replay") {
      const budgets = this.budgets();
      ui.budget.max = String(budgets.length - 1);
      ui.budget.value = String(budgets.indexOf(now.budget));
      ui.budget.disabled = budgets.length < 2;
    }
    ui.budget.setAttribute("aria-valuetext", `${now.budget} tokens`);
    ui.exact.hidden = !still;
    ui.computed.hidden = still;
    if (document.activeElement !== ui.exact) ui.exact.value = String(now.budget);
    ui.exact.disabled = ui.budget.disabled;
    ui.computed.textContent = count(now.budget);
    if (still) return;
    const stops = this.stops();
    ui.step.max = String(stops.length - 1);
    ui.step.value = String(Math.max(0, upTo(stops, now.step) - 1));
    ui.step.setAttribute("aria-valuetext", `step ${now.step} of ${this.tokens}`);
    ui.at.textContent = `${count(now.step)} / ${count(this.tokens)}`;
    const uniform = this.visible.every((column) => this.stories[this.storyOf(column.index)].uniform);
    const shipped = !this.slices.offline || this.stories.every((story) => story.deaths);
    ui.layer.disabled = uniform || !shipped;
    ui.threshold.disabled = uniform;
    ui.fields.scope.title = uniform
      ? "All heads of this method evict the same tokens"
      : shipped
        ? "Whose cache is shown"
        : this.slices.excuse();
    ui.layer.value = String(now.layer);
    ui.head.value = String(now.head);
    ui.threshold.value = String(now.threshold);
    ui.threshold.hidden = now.layer >= 0;
    ui.head.hidden = now.layer < 0;
  }

  drawLegend() {
    const column = this.columns[0];
    const score = column.scores.find((each) => each.name === this.now.color_by);
    const key = `${this.now.color_by} ${this.shown}`;
    if (this.legendKey === key) return;
    this.legendKey = key;
    /** @type {Node[]} */
    const parts = [];
    if (score) {
      const n = score.kind === "signed" ? 9 : 6;
      const [low, high] = score.clip;
      const ramp = Array.from({ length: n }, (_, b) => h("span", { className: `b${b}` }));
      const [first, last] = this.meta.clip;
      parts.push(
        h(
          "span",
          { className: "scale", title: `colours end at the ${first}st and ${last}th percentile` },
          h("b", {}, score.name),
          score.unit ? h("span", { className: "unit" }, score.unit) : "",
          h("span", { className: "end" }, `≤ ${number(low)}`),
          h("span", { className: "ramp" }, ...ramp),
          h("span", { className: "end" }, `≥ ${number(high)}`),
          h("span", { className: "unit" }, `percentiles ${first}–${last}`),
        ),
      );
    }
    const sample = (/** @type {string} */ name, /** @type {string} */ text) =>
      h("span", { className: `sample ${name}` }, text);
    parts.push(sample("x", "evicted"));
    if (this.shown !== "static") {
      parts.push(sample("y", "not there yet"));
      const seen = new Set();
      this.stories.forEach((story) => story.reason.forEach((reason) => seen.add(reason)));
      const why = [...seen]
        .filter((reason) => reason > 0)
        .sort()
        .map((reason) => sample(`r${reason}`, REASONS[reason]));
      if (why.length) parts.push(h("span", { className: "why" }, "kept as", ...why));
    }
    this.ui.legend.replaceChildren(...parts);
  }

  drawMaps() {
    this.visible.forEach((column) => {
      const map = this.ui.maps[column.index];
      map.draw((/** @type {string} */ name) => this.colour(name), this.kind);
      map.follow(this.ui.scroller);
    });
  }

  /** A theme colour as a pixel. @param {string} name */
  colour(name) {
    const key = `${this.kind} ${name}`;
    let pixel = this.colours.get(key);
    if (pixel === undefined) {
      this.ui.probe.className = `probe ${name}`;
      const [r, g, b, a = 1] = (getComputedStyle(this.ui.probe).backgroundColor.match(/[\d.]+/g) ?? []).map(Number);
      pixel = ((Math.round(a * 255) << 24) | (b << 16) | (g << 8) | r) >>> 0;
      this.colours.set(key, pixel);
    }
    return pixel;
  }

  // ---- card

  drawCard() {
    for (const old of this.outlined) {
      delete old.dataset.pin;
      delete old.dataset.cur;
    }
    this.outlined = [];
    const { selected } = this.now;
    const pin = selected >= 0 && this.columns[this.now.column];
    const outline = (/** @type {HTMLElement} */ span, /** @type {string} */ name) => {
      span.dataset[name] = "";
      this.outlined.push(span);
    };
    if (pin) outline(pin.shows(selected), "pin");
    if (this.walking) outline(this.columns[this.cursor.column].shows(this.cursor.token), "cur");
    const at = pin ? { column: this.now.column, token: selected } : this.hover;
    const column = at && this.columns[at.column];
    if (!at || !column || !this.visible.includes(column) || at.token >= column.length) return this.card.hide();
    this.card.show(column.shows(at.token), this.describe(column, column.whole(at.token)), Boolean(pin));
  }

  /** @param {TextColumn} column @param {number} token @returns {Node[]} */
  describe(column, token) {
    const first = column.firstPart(token);
    const ids = Array.from(column.ids.subarray(first, token + 1));
    const part = token < column.info.prompt ? "prompt" : "generated";
    const rows = [
      ["token", `${quoted(column.piece(token))}`],
      ["id", ids.join(" + ") + (ids.length > 1 ? " (they share one character)" : "")],
    ];
    rows.push([
      "position",
      `${first < token ? `${count(first)}–` : ""}${count(token)} of ${count(column.length)} · ${part}`,
    ]);
    for (const score of column.scores) {
      const share = 1 - score.ranks()[token] / Math.max(1, column.length - 1);
      const known = !Number.isNaN(score.values[token]);
      const value = `${number(score.values[token])} · percentile ${Math.round(100 * share)}`;
      rows.push([score.name, known ? value : "–"]);
    }
    if (column.info.divergence.includes(token)) {
      rows.push([
        "differs",
        column.index ? `the first difference from ${this.columns[0].info.label}` : "another text parts here",
      ]);
    }
    /** @type {Node[]} */
    const extra = [];
    const s = this.storyOf(column.index);
    if (s >= 0) extra.push(...this.describeStory(column, s, token, rows));
    else if (this.shown === "static" && this.now.color_by !== NO_SCORE) {
      const score = column.scores.find((each) => each.name === this.now.color_by);
      if (score) rows.push(["rank", `${count(score.ranks()[token] + 1)} of ${count(column.length)}`]);
    }
    const list = h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    return [list, ...extra];
  }

  /** @param {TextColumn} column @param {number} s @param {number} token @param {string[][]} rows @returns {Node[]} */
  describeStory(column, s, token, rows) {
    const story = this.stories[s];
    const { step } = this.now;
    if (token >= story.fed) {
      rows.push(["evicted", "never fed back to the model"]);
      return [];
    }
    const slice = this.slices.scope(s, this.now, this.meta.thresholds);
    if (slice) {
      const event = slice.death[token];
      const gone = event < story.events.length;
      rows.push([
        "evicted",
        gone ? `at step ${count(story.events[event])} (event ${event + 1} of ${story.events.length})` : "never",
      ]);
      if (!gone && slice.reason[token]) rows.push(["kept as", REASONS[slice.reason[token]]]);
    }
    if (token >= step) return [];
    const fired = upTo(story.events, step);
    const deaths = story.uniform ? null : this.slices.token(s, token);
    if (story.uniform) {
      rows.push(["held by", story.majority[token] < fired ? "no head" : "all heads"]);
      return [];
    }
    if (!deaths) {
      const lost = this.meta.thresholds.filter(
        (/** @type {number} */ _, /** @type {number} */ q) => story.majority[q * story.fed + token] < fired,
      );
      rows.push([
        "held by",
        lost.length
          ? `at most ${100 - lost.at(-1)} % of heads`
          : `more than ${100 - this.meta.thresholds[0]} % of heads`,
      ]);
      return [];
    }
    const held = Array.from(story.evicts, (layer) =>
      Array.from({ length: story.heads }, (_, head) => deaths[layer * story.heads + head] >= fired),
    );
    const total = held.flat().length;
    const holding = held.flat().filter(Boolean).length;
    rows.push(["held by", `${Math.round((100 * holding) / total)} % of heads (${holding} of ${total})`]);
    const grid = h("div", { className: "grid", "aria-hidden": "true" });
    grid.style.setProperty("--layers", String(held.length));
    for (let head = 0; head < story.heads; head++) {
      held.forEach((layer) => grid.append(h("i", { className: layer[head] ? "held" : "" })));
    }
    const caption = h(
      "div",
      { className: "caption" },
      `layers ${story.evicts[0]}–${story.evicts.at(-1)} across, heads down`,
    );
    return [grid, caption];
  }

  // ---- moving about

  /** Bring a token into the middle of the text. @param {number} c @param {number} token */
  reveal(c, token) {
    const column = this.columns[c];
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
    this.walking = true;
    const column = this.columns[c];
    this.cursor = { column: c, token: column.whole(clamp(0, token, column.length - 1)) };
    this.hover = this.cursor;
    this.reveal(c, this.cursor.token);
    this.point();
    this.schedule();
    const state = column.codes[this.cursor.token];
    const fate = state & STRUCK ? ", evicted" : state & WAITING ? ", not there yet" : "";
    this.say(`${quoted(column.piece(this.cursor.token))}, token ${this.cursor.token}${fate}`);
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
  moveStep(way) {
    if (this.shown === "static") return;
    const stops = this.stops();
    const place = upTo(stops, this.now.step) - 1;
    const exact = stops[place] === this.now.step;
    this.commit({ step: stops[clamp(0, place + (way > 0 || exact ? way : 0), stops.length - 1)] });
  }

  /** @param {1 | -1} way */
  nextHit(way) {
    if (!this.found.length) return;
    const { column, token } = this.cursor;
    const after = (/** @type {[number, number]} */ [c, i]) => (c - column || i - token) * way > 0;
    const list = way > 0 ? this.found : [...this.found].reverse();
    const [c, i] = (this.walking ? list.find(after) : undefined) ?? list[0];
    this.ui.found.textContent = `${this.found.findIndex(([d, j]) => d === c && j === i) + 1} of ${this.found.length}`;
    this.goTo(c, i);
  }

  search() {
    this.found = this.visible.flatMap((column) =>
      column.search(this.ui.search.value).map((token) => /** @type {[number, number]} */ ([column.index, token])),
    );
    this.ui.found.textContent = this.ui.search.value ? `${count(this.found.length)} found` : "";
    this.schedule();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inText = event.target === this.ui.scroller;
    const typing = /^(INPUT|SELECT)$/.test(/** @type {Element} */ (event.target).tagName);
    if (event.key === "Escape") {
      if (this.now.selected >= 0) this.commit({ selected: -1 });
      this.hover = null;
      this.schedule();
      return;
    }
    if (typing) return;
    const column = this.columns[this.cursor.column];
    const state = (/** @type {number} */ i) => !column.empty(i);
    const changed = (/** @type {number} */ i) => column.before[i] !== column.settled[i] && !column.empty(i);
    const score = column.scores.find((each) => each.name === this.now.color_by);
    const peak = (/** @type {number} */ i) =>
      Boolean(score && score.ranks()[i] < Math.max(1, PEAK_SHARE * column.length));
    const split = (/** @type {number} */ i) => column.info.divergence.includes(i);
    /** @type {Record<string, () => void>} */
    const anywhere = {
      "/": () => this.ui.search.focus(),
      "[": () => this.moveStep(-1),
      "]": () => this.moveStep(1),
    };
    /** @type {Record<string, () => void>} */
    const text = {
      ArrowRight: () => this.walk(1, state),
      ArrowLeft: () => this.walk(-1, state),
      ArrowDown: () => this.line(1),
      ArrowUp: () => this.line(-1),
      Home: () => this.goTo(column.index, 0),
      End: () => this.goTo(column.index, column.length - 1),
      n: () => this.walk(1, changed),
      p: () => this.walk(-1, changed),
      e: () => this.walk(1, peak),
      E: () => this.walk(-1, peak),
      d: () => this.walk(1, split),
      D: () => this.walk(-1, split),
      c: () => this.otherColumn(),
      Enter: () => this.pin(this.cursor.column, this.cursor.token),
    };
    const act = anywhere[event.key] ?? (inText ? text[event.key] : undefined);
    if (!act) return;
    event.preventDefault();
    act();
  }

  otherColumn() {
    const visible = this.visible;
    const place = visible.findIndex((column) => column.index === this.cursor.column);
    const next = visible[(place + 1) % visible.length];
    this.goTo(next.index, Math.min(this.cursor.token, next.length - 1));
  }

  /** @param {number} column @param {number} token */
  pin(column, token) {
    const same = this.now.selected === token && this.now.column === column;
    this.cursor = { column, token };
    this.commit(same ? { selected: -1 } : { selected: token, column });
    if (!same) this.say(this.card.words());
  }

  play() {
    if (this.playing) return this.pause();
    const stops = this.stops();
    if (this.now.step >= stops[stops.length - 1]) this.preview({ step: stops[0] });
    this.playing = window.setInterval(() => {
      const next = stops[upTo(stops, this.now.step)];
      if (next === undefined || this.stops() !== stops) return this.pause();
      this.preview({ step: next });
    }, PLAY_MS);
    this.ui.play.setAttribute("aria-label", "pause");
    this.ui.play.dataset.playing = "";
  }

  pause() {
    window.clearInterval(this.playing);
    this.playing = undefined;
    this.ui.play.setAttribute("aria-label", "play the evictions");
    delete this.ui.play.dataset.playing;
    this.commit();
  }

  say(/** @type {string} */ text) {
    this.ui.live.textContent = text;
  }

  // ---- building

  /** @param {HTMLElement} el */
  build(el) {
    this.name = `epi-${Math.random().toString(36).slice(2, 8)}`;
    /** @type {any} */ const ui = (this.ui = {});
    const { meta } = this;
    const options = (/** @type {[any, string][]} */ pairs) =>
      pairs.map(([value, label]) => h("option", { value: String(value) }, label));
    const field = (/** @type {string} */ label, /** @type {Node[]} */ ...controls) =>
      h(
        "div",
        { className: "field" },
        h("span", { className: "label" }, label),
        h("div", { className: "row" }, ...controls),
      );
    const select = (
      /** @type {string} */ label,
      /** @type {[any, string][]} */ pairs,
      /** @type {(value: string) => object} */ patch,
    ) =>
      h(
        "select",
        { "aria-label": label, onchange: (/** @type {any} */ event) => this.commit(patch(event.target.value)) },
        ...options(pairs),
      );

    ui.badge = h("span", { className: "badge" });
    ui.counts = h("span", { className: "counts" });
    const chooser = meta.kind === "generated" ? "text" : "method";
    ui.method = select(
      chooser,
      meta.methods.map((/** @type {string} */ name) => [name, name]),
      (method) => ({ method }),
    );
    ui.budget = h("input", { type: "range", min: "0", step: "any", "aria-label": "budget" });
    ui.exact = h("input", { type: "number", min: "1", max: String(this.tokens), "aria-label": "budget in tokens" });
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
    ui.layer = select(
      "layer",
      [[-1, "all heads"], ...range(this.layers).map((i) => /** @type {[number, string]} */ ([i, `layer ${i}`]))],
      (layer) => ({ layer: Number(layer) }),
    );
    ui.head = select(
      "KV head",
      range(this.heads).map((i) => [i, `head ${i}`]),
      (head) => ({ head: Number(head) }),
    );
    ui.threshold = select(
      "share of heads",
      meta.thresholds.map((/** @type {number} */ q) => [q, `${q} % lost it`]),
      (threshold) => ({ threshold: Number(threshold) }),
    );
    const names = [...this.columns[0].scores.map((score) => score.name), NO_SCORE];
    ui.color = select(
      "colour by",
      names.map((name) => [name, name]),
      (color_by) => ({ color_by }),
    );
    ui.search = h("input", { type: "search", placeholder: "/", "aria-label": "search the text" });
    ui.found = h("span", { className: "found", "aria-live": "polite" });
    ui.fields = {
      method: field(chooser, ui.method),
      budget: field("budget", ui.budget, ui.exact, ui.computed),
      step: field("step", ui.play, ui.step, ui.at),
      scope: field("evicted if", ui.layer, ui.threshold, ui.head),
      color: field("colour by", ui.color),
      search: field("search", ui.search, ui.found),
    };
    ui.fields.method.hidden = meta.methods.length < 2;
    ui.fields.color.hidden = names.length < 2;

    ui.maps = this.columns.map((column) => new Minimap(column, (token) => this.reveal(column.index, token)));
    ui.tallies = this.columns.map(() => h("span", { className: "tally" }));
    ui.heads = this.columns.map((column, i) => this.columnHead(column, i));
    ui.sections = this.columns.map((column) => h("section", { "aria-label": column.info.label }, column.body));
    ui.columns = h("div", { className: "columns" }, ...ui.sections);
    ui.top = h("div", { className: "columns top" }, ...ui.heads);
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
    ui.probe = h("i", { className: "probe" });
    this.root = h(
      "article",
      { className: "epi-reader", "aria-label": meta.title },
      h(
        "header",
        {},
        h("strong", { role: "heading", "aria-level": this.slices.offline ? "1" : "3" }, meta.title),
        ui.badge,
        ui.counts,
      ),
      h("div", { className: "controls" }, ...Object.values(ui.fields)),
      ui.top,
      ui.scroller,
      ui.legend,
      ui.live,
      ui.probe,
      this.card.element,
    );
    this.root.dataset.lmSuppressShortcuts = "true";
    el.replaceChildren(this.root);
    this.columns.forEach((column) => column.watch(ui.scroller));
  }

  /** @param {TextColumn} column @param {number} i */
  columnHead(column, i) {
    const { label, note, divergence } = column.info;
    const alone = this.columns.length === 1;
    const split =
      i && divergence.length
        ? h(
            "button",
            { type: "button", className: "link", onclick: () => this.goTo(i, divergence[0]) },
            `parts at ${count(divergence[0])}`,
          )
        : i
          ? h("span", { className: "note" }, "the same text")
          : "";
    const name = alone ? "" : h("b", {}, label);
    const line = h(
      "div",
      { className: "name" },
      name,
      note ? h("span", { className: "note" }, note) : "",
      split,
      this.ui.tallies[i],
    );
    return h("div", { className: "head" }, alone && !note ? "" : line, this.ui.maps[i].element);
  }

  listen() {
    const { ui, root } = this;
    const { signal } = this.ended;
    const on = (/** @type {EventTarget} */ target, /** @type {string} */ event, /** @type {any} */ act, options = {}) =>
      target.addEventListener(event, act, { signal, ...options });
    const fromSlider = () => {
      if (this.shown !== "static") return this.budgets()[Math.round(Number(ui.budget.value))];
      return clamp(1, Math.round(this.tokens ** (Number(ui.budget.value) / 1000)), this.tokens);
    };
    const fromStep = () => this.stops()[Number(ui.step.value)];
    on(ui.budget, "input", () => this.preview({ budget: fromSlider() }));
    on(ui.budget, "change", () => this.commit());
    on(ui.budget, "keydown", (/** @type {KeyboardEvent} */ event) => this.nudge(event));
    on(
      ui.exact,
      "input",
      () => Number(ui.exact.value) >= 1 && this.preview({ budget: Math.round(Number(ui.exact.value)) }),
    );
    on(ui.exact, "change", () => {
      this.commit();
      ui.exact.value = String(this.now.budget);
    });
    on(ui.step, "input", () => this.preview({ step: fromStep() }));
    on(ui.step, "change", () => this.commit());
    on(ui.search, "input", () => this.search());
    on(ui.search, "keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1);
    });
    on(root, "keydown", (/** @type {KeyboardEvent} */ event) => this.key(event));
    on(ui.scroller, "pointermove", (/** @type {PointerEvent} */ event) => this.over(event));
    on(ui.scroller, "pointerleave", () => {
      this.hover = null;
      this.schedule();
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
      if (this.now.selected < 0) this.hover = null;
      this.schedule();
    });
    on(ui.scroller, "scroll", () => this.onScroll(), { passive: true });
    on(window, "scroll", () => this.card.place(), { passive: true, capture: true });

    const still = window.matchMedia("(prefers-reduced-motion: reduce)");
    const motion = () => {
      if (still.matches && this.playing) this.pause();
      ui.play.disabled = still.matches;
      ui.play.title = still.matches ? "off, because your system asks for reduced motion" : "";
    };
    on(still, "change", motion);
    motion();

    const recolour = () => {
      this.colours.clear();
      this.schedule();
    };
    on(window.matchMedia("(prefers-color-scheme: dark)"), "change", recolour);
    this.themes = new MutationObserver(recolour);
    this.themes.observe(document.body, {
      attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-kind"],
    });
    this.sizes = new ResizeObserver(() => {
      // A notebook may detach an output and bring it back: canvases and the scroll position do not survive that.
      if (ui.scroller.clientHeight && !ui.scroller.style.height) this.fit();
      if (ui.scroller.clientHeight && this.scrolled && !ui.scroller.scrollTop) ui.scroller.scrollTop = this.scrolled;
      this.schedule();
    });
    this.sizes.observe(ui.scroller);

    this.handlers = CONTROLS.map(
      (name) => /** @type {[string, Function]} */ ([`change:${name}`, () => this.follow(name)]),
    );
    this.handlers.forEach(([event, handler]) => this.model.on(event, handler));
  }

  /** Short texts need no tall box; afterwards its height is the reader's to drag. */
  fit() {
    const text = Math.max(...this.visible.map((column) => column.body.offsetHeight));
    this.ui.scroller.style.height = `${clamp(160, text + 4, this.ui.scroller.clientHeight)}px`;
  }

  /** Arrow keys move a fine slider by one token, not by a thousandth of its length. @param {KeyboardEvent} event */
  nudge(event) {
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!way || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const budgets = this.budgets();
    const budget =
      this.shown === "static"
        ? this.now.budget + way
        : budgets[clamp(0, budgets.indexOf(this.now.budget) + way, budgets.length - 1)];
    this.commit({ budget });
  }

  /** @param {any} target */
  tokenAt(target) {
    for (const column of this.visible) {
      const token = column.indexOf(target);
      if (token >= 0) return { column: column.index, token };
    }
    return null;
  }

  /** @param {PointerEvent} event */
  over(event) {
    if (event.buttons || this.now.selected >= 0) return;
    const at = this.tokenAt(event.target);
    if (at?.token === this.hover?.token && at?.column === this.hover?.column) return;
    this.hover = at;
    this.drawCard();
  }

  onScroll() {
    this.scrolled = this.ui.scroller.scrollTop;
    this.scrollFrame ??= requestAnimationFrame(() => {
      this.scrollFrame = undefined;
      this.visible.forEach((column) => this.ui.maps[column.index].follow(this.ui.scroller));
      this.card.place();
    });
  }

  close() {
    window.clearInterval(this.playing);
    if (this.frame) cancelAnimationFrame(this.frame);
    if (this.scrollFrame) cancelAnimationFrame(this.scrollFrame);
    this.ended.abort();
    this.themes?.disconnect();
    this.sizes?.disconnect();
    this.handlers?.forEach(([event, handler]) => this.model.off(event, handler));
    this.slices.close();
    this.columns.forEach((column) => column.close());
    this.card.hide();
    this.root.remove();
  }
}

// ---------------------------------------------------------------------------------------------- entry points

/** @param {{model: Model, el: HTMLElement}} context @returns {() => void} */
function render({ model, el }) {
  const reader = new Reader(model, el);
  return () => reader.close();
}

/** Show an exported page: its state and data instead of a kernel. @param {Document} page */
export async function mount(page) {
  const read = (/** @type {string} */ id) => page.getElementById(id)?.textContent ?? "";
  const state = JSON.parse(read("epi-state"));
  const packed = Uint8Array.from(atob(read("epi-data")), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  state._data = new DataView(await new Response(stream).arrayBuffer());
  const events = new EventTarget();
  /** @type {Map<Function, EventListener>} */
  const wrapped = new Map();
  const model = {
    get: (/** @type {string} */ name) => state[name],
    set(/** @type {string} */ name, /** @type {any} */ value) {
      if (state[name] === value) return;
      state[name] = value;
      events.dispatchEvent(new Event(`change:${name}`));
    },
    save_changes() {},
    send() {},
    on(/** @type {string} */ event, /** @type {Function} */ callback) {
      const listener = wrapped.get(callback) ?? (() => callback());
      wrapped.set(callback, listener);
      events.addEventListener(event, listener);
    },
    off(/** @type {string} */ event, /** @type {Function} */ callback) {
      const listener = wrapped.get(callback);
      if (listener) events.removeEventListener(event, listener);
    },
  };
  const el = /** @type {HTMLElement} */ (page.getElementById("epi-reader"));
  /** @type {any} */ (window).epiviz = { model, close: render({ model, el }) };
}

export default { render };
