const [BLOCK_MIN, BLOCK_MAX] = [192, 512]; // tokens; a block ends at the first line break in between
const REST_MS = 80; // after a move: the pause before spans out of view follow
const STRUCK = 1 << 8;
const WAITING = 1 << 9;
const HIT = 1 << 10;

/** One column: a text as spans in blocks, and the state of each token. */
class TextColumn {
  /** @param {Source} source @param {number} index */
  constructor(source, index) {
    this.source = source;
    this.info = source.info;
    this.index = index;
    this.length = 0; // tokens that have a span
    this.codes = new Uint16Array(0); // the state of each token, and …
    this.painted = new Uint16Array(0); // … the one its span shows
    this.blockOf = new Uint32Array(0);
    /** @type {Set<number>} */ this.inView = new Set();
    this.hits = new Uint8Array(0);
    this.settled = new Uint8Array(0); // struck at the last release, and …
    this.before = new Uint8Array(0); // … at the one before it: "n" walks over the difference
    this.tally = { kept: 0, struck: 0, waiting: 0 };
    this.body = h("div", { className: "text" });
    /** @type {number[]} */ this.starts = [];
    /** @type {HTMLElement[]} */ this.blocks = [];
    /** @type {HTMLElement[]} */ this.spans = [];
    this.last = "\n"; // the last text that a span shows
    /** @type {IntersectionObserver | undefined} */ this.observer = undefined;
    /** @type {(() => void) | undefined} */ this.later = undefined; // calls off the work that waits for a pause
    this.stale = new Uint8Array(0); // blocks whose spans do not show the states of their tokens yet
    this.take(source);
  }

  /** The span that shows token `i`. @param {number} i */
  shows(i) {
    return this.spans[this.source.whole(clamp(0, i, this.length - 1))];
  }

  /** Show a source that begins with the tokens shown so far. @param {Source} source */
  take(source) {
    const [from, old] = [this.length, this.source];
    [this.source, this.info, this.length] = [source, source.info, source.length];
    for (const name of /** @type {const} */ (["codes", "painted", "blockOf", "hits", "settled", "before"])) {
      /** @type {any} */ (this)[name] = longer(this[name], this.length);
    }
    if (source !== old) {
      for (let i = 0; i < from; i++) if (source.piece(i) !== old.piece(i)) this.write(this.spans[i], source.piece(i));
    }
    const known = Math.max(0, this.blocks.length - 1);
    this.build(from);
    this.stale = longer(this.stale, this.blocks.length);
    this.blocks.slice(known).forEach((each) => {
      const lines = (each.textContent ?? "").split("\n").reduce((sum, line) => sum + 1 + line.length / 90, 0);
      each.style.containIntrinsicSize = `auto ${Math.round(lines * 26)}px`;
      each.dir = "auto"; // now that it is full: with every span added, a browser would look for its direction again
      this.observer?.observe(each);
    });
  }

  /** @param {HTMLElement} span @param {string} piece @param {boolean} [plain] nothing in it is invisible */
  write(span, piece, plain = !UNSEEN.test(piece)) {
    if (plain) span.textContent = piece;
    else span.replaceChildren(...written(piece));
    if (piece.includes("\n") && !piece.trim()) span.dataset.nl = "";
  }

  /** Make the spans of the tokens from `from` on, and the blocks they stand in. @param {number} from */
  build(from) {
    const divergence = new Set(this.info.divergence);
    // One search of the text is quicker than one of each token, and most texts have nothing to find.
    const plain = !UNSEEN.test(this.source.text.slice(this.source.offsets[from]));
    let block = this.blocks.at(-1) ?? this.body;
    for (let i = from; i < this.length; i++) {
      const size = i - (this.starts.at(-1) ?? -BLOCK_MAX);
      if (size >= BLOCK_MAX || (size >= BLOCK_MIN && this.last.endsWith("\n"))) {
        block = h("div", { className: "block" });
        block.dataset.start = String(i);
        if (!this.last.endsWith("\n")) block.dataset.cut = "";
        this.starts.push(i);
        this.blocks.push(block);
        this.body.append(block);
      }
      const span = document.createElement("span");
      const piece = this.source.piece(i);
      this.write(span, piece, plain || undefined);
      if (divergence.has(i)) span.dataset.split = "";
      block.append(span);
      this.spans.push(span);
      this.blockOf[i] = this.blocks.length - 1;
      if (piece) this.last = piece;
    }
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
    const { text, offsets } = this.source;
    const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
    for (const match of text.matchAll(pattern)) {
      const first = upTo(offsets, match.index) - 1;
      found.push(first);
      for (let i = first; i < this.length && offsets[i] < match.index + match[0].length; i++) this.hits[i] = 1;
    }
    return found;
  }
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
