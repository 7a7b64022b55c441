// @ts-check
/**
 * The views in the browser. These files are joined in the order of epiviz/widgets/page.py into one ES module, so they
 * share one scope. They draw what Python has packed and decide nothing: which tokens are struck follows from ranks,
 * deaths and event steps alone. While a control is held only these files work; the model hears of it on release.
 *
 * @typedef {{get(name: string): any, set(name: string, value: any): void, save_changes(): void,
 *   on(event: string, callback: Function): void, off(event: string, callback?: Function): void,
 *   send(content: object): void}} Model
 * @typedef {Uint8Array | Uint16Array | Uint32Array | Float32Array} Numbers
 * @typedef {{name: string, kind: "signed" | "magnitude", unit: string, clip: [number, number], values: Float32Array,
 *   buckets: Uint8Array, ranks: () => Uint32Array}} Score
 * @typedef {{name: string, kind: "signed" | "magnitude", unit: string, clip: [number, number],
 *   values: Uint8Array}} LayerScore
 * @typedef {{method: string, budget: number, column: number, layers: number, heads: number, evicts: number[],
 *   uniform: boolean, selects: boolean, fed: number, events: Uint32Array, majority: Numbers, reason: Uint8Array,
 *   deaths: Numbers | null, reasons: Uint8Array | null}} Story
 * @typedef {{death: Numbers, reason: Uint8Array}} Slice
 * @typedef {{score?: Score, step: number, ranking?: {ranks: Uint32Array, budget: number}, slice?: Slice,
 *   events?: Uint32Array}} Look
 * @typedef {{column: number, text: number, method: string, story: number, exact: boolean}} Pane
 *   one text on screen: its history (−1: none yet, or a static ranking), and whether that is the one asked for
 * @typedef {{draw(): void, look?(): void, settle?(): void, reveal?(column: number, token: number): void}} View
 *   draws the state, follows the token that is looked at, notices the release of a control, brings a token into sight
 */

const CONTROLS = [
  "color_by",
  "layer_by",
  "method",
  "beside",
  "budget",
  "step",
  "layer",
  "head",
  "threshold",
  "selected",
  "column",
];
const STATIC = "static ranking";
const ALL = "side by side";
const NO_SCORE = "none";
const REASONS = ["", "sink", "recent", "prompt", "reserved value", "sampled", "top score"];

const SLICE_MS = 8; // the share that work on spans out of view may take of a frame

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

/** A copy with room for `length` entries. @template {Numbers} T @param {T} array @param {number} length @returns {T} */
function longer(array, length) {
  const copy = new /** @type {any} */ (array.constructor)(length);
  copy.set(array);
  return copy;
}

/** Whether a text is still being written, or never was to its end. @param {Model} model */
const unfinished = (model) => ![undefined, "done"].includes(model.get("_live")?.state);

/** Whether two values of a control are the same; lists are compared by what they hold. @param {any} a @param {any} b */
const same = (a, b) => a === b || (Array.isArray(a) && Array.isArray(b) && String(a) === String(b));

/** The entry closest to `x`, or `x` if there is none. @param {number[]} list @param {number} x */
const nearest = (list, x) => (list.length ? list.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a)) : x);

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

/** @param {number} n @param {string} one */
const plural = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;

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

/** @template T @param {() => T} make @returns {() => T} */
function once(make) {
  /** @type {T | undefined} */
  let made;
  return () => (made ??= make());
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
