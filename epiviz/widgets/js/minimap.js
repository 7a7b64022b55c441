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
