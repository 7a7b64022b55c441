const CACHE_BYTES = 32 * 2 ** 20;
const ANSWER_MS = 10000; // a kernel that has not answered by then is taken to be gone

/** Per-head deaths: from the block, from the cache, or asked for. */
class Slices {
  /** @param {Model} model @param {() => Story[]} stories @param {() => void} arrived */
  constructor(model, stories, arrived) {
    /** @type {Model} */ this.model = model;
    /** @type {() => Story[]} */ this.stories = stories;
    /** @type {() => void} */ this.arrived = arrived;
    /** @type {Map<string, Slice>} */ this.cache = new Map();
    /** @type {Map<string, number>} */ this.asked = new Map();
    /** @type {Set<string>} */ this.silent = new Set();
    this.offline = Boolean(model.get("_offline"));
    this.receive = this.receive.bind(this);
    model.on("msg:custom", this.receive);
  }

  /** What one scope loses and why it keeps. @returns {Slice | null} null while it is on its way */
  scope(/** @type {number} */ s, /** @type {any} */ { layer, head, threshold }, /** @type {number[]} */ thresholds) {
    const story = this.stories()[s];
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

  /** The deaths and reasons of one token in all heads, `[layers · heads]`. @returns {Slice | null} */
  token(/** @type {number} */ s, /** @type {number} */ token) {
    const { deaths, reasons, fed, layers, heads } = this.stories()[s];
    if (!deaths || !reasons) return this.fetch({ ask: "token", story: s, token });
    const cells = { length: layers * heads };
    return {
      death: Uint32Array.from(cells, (_, cell) => deaths[cell * fed + token]),
      reason: Uint8Array.from(cells, (_, cell) => reasons[cell * fed + token]),
    };
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
    if (unfinished(this.model)) return null;
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
    if (unfinished(this.model)) return "single heads can be told once the text is written";
    if (this.offline) return "single heads were too big for this file: open it from a notebook";
    return this.silent.size ? "the kernel does not answer: single heads need it" : "loading this head …";
  }

  close() {
    this.model.off("msg:custom", this.receive);
    this.asked.forEach((timer) => window.clearTimeout(timer));
  }
}
