/** The style sheet's colours as pixels of a canvas. */
class Palette {
  /** @param {State} state */
  constructor(state) {
    this.state = state;
    this.probe = h("i", { className: "probe" });
    this.theme = -1;
    /** @type {Map<string, number>} */ this.known = new Map();
  }

  /** One colour as 0xAABBGGRR. @param {string} name @param {string} [kind] of the score that b0 … b8 stand for */
  pixel(name, kind = NO_SCORE) {
    if (this.theme !== this.state.theme) {
      this.theme = this.state.theme;
      this.known.clear();
    }
    const key = `${kind} ${name}`;
    let pixel = this.known.get(key);
    if (pixel === undefined) {
      this.probe.dataset.kind = kind;
      this.probe.className = `probe ${name}`;
      const [r, g, b, a = 1] = (getComputedStyle(this.probe).backgroundColor.match(/[\d.]+/g) ?? []).map(Number);
      pixel = ((Math.round(a * 255) << 24) | (b << 16) | (g << 8) | r) >>> 0;
      this.known.set(key, pixel);
    }
    return pixel;
  }

  /** `steps` colours through the given ones. @param {number[]} stops pixels @param {number} steps */
  ramp(stops, steps) {
    return Uint32Array.from({ length: steps }, (_, i) => {
      const at = (i / Math.max(1, steps - 1)) * (stops.length - 1);
      const [from, to] = [stops[Math.floor(at)], stops[Math.ceil(at)]];
      const mix = (/** @type {number} */ shift) => {
        const [a, b] = [(from >>> shift) & 255, (to >>> shift) & 255];
        return Math.round(a + (b - a) * (at % 1)) << shift;
      };
      return (mix(0) | mix(8) | mix(16) | (255 << 24)) >>> 0;
    });
  }

  /** The colours of a score, those of its neutral bucket being the page's. @param {string} kind @returns {number[]} */
  score(kind) {
    const [buckets, neutral] = kind === "signed" ? [9, 4] : [6, 0];
    return Array.from({ length: buckets }, (_, b) => (b === neutral ? this.pixel("page") : this.pixel(`b${b}`, kind)));
  }
}
