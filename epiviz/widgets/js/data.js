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

/** @param {any} meta @param {ReturnType<typeof unpack>} array @returns {Story[]} */
function readStories(meta, array) {
  const parts = ["events", "majority", "reason", "deaths", "reasons"];
  return meta.stories.map((/** @type {any} */ info, /** @type {number} */ i) => ({
    ...info,
    ...Object.fromEntries(parts.map((part) => [part, array(`s${i}.${part}`)])),
  }));
}

/** One text with its scores, as Python packed it. */
class Source {
  /** @param {any} info @param {(name: string) => any} get */
  constructor(info, get) {
    this.info = info;
    this.text = toText(get("text"));
    /** @type {Uint32Array} */ this.offsets = get("offsets");
    /** @type {Uint32Array} */ this.ids = get("ids");
    this.length = this.ids.length;
    /** @type {Score[]} */
    this.scores = info.scores.map((/** @type {any} */ score, /** @type {number} */ i) => {
      const values = get(`values${i}`);
      return { ...score, values, buckets: get(`buckets${i}`), ranks: once(() => rank(values)) };
    });
  }

  /** Take in more tokens. @param {Uint32Array} ids @param {Uint32Array} lengths UTF-16 units @param {string} text */
  append(ids, lengths, text) {
    const [first, from] = [this.length, this.text.length];
    this.text += text;
    this.ids = longer(this.ids, first + ids.length);
    this.ids.set(ids, first);
    this.offsets = longer(this.offsets, first + ids.length + 1);
    this.offsets[first] = from;
    lengths.forEach((units, i) => (this.offsets[first + i + 1] = this.offsets[first + i] + units));
    this.length = this.ids.length;
  }

  /** @param {string} name @returns {Score | undefined} */
  score(name) {
    return this.scores.find((score) => score.name === name);
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

  /** The first of the tokens that together write the character token `i` completes. @param {number} i */
  firstPart(i) {
    while (i > 0 && this.empty(i - 1)) i--;
    return i;
  }
}
