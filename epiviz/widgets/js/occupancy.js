/** Slots held by one head, step by step: up with every token, down with every eviction. */
class Occupancy {
  constructor() {
    const box = h("div", { className: "box" });
    // parsed, because creating an SVG element takes the address of its namespace, and pages hold no address
    const line = (/** @type {string} */ name) => `<path class="${name}" vector-effect="non-scaling-stroke"/>`;
    box.innerHTML = `<svg viewBox="0 0 1 1" preserveAspectRatio="none" role="img">${line("area")}${line("curve")}</svg>`;
    this.plot = /** @type {SVGSVGElement} */ (box.firstElementChild);
    [this.area, this.curve] = this.plot.children;
    this.marks = { budget: h("i", { className: "mark" }), peak: h("i", { className: "mark peak" }) };
    this.names = { budget: h("span"), peak: h("span") };
    this.right = h("div", { className: "limits" }, this.names.peak, this.names.budget);
    this.below = h("div", { className: "ends" });
    box.append(this.marks.peak, this.marks.budget);
    this.element = h("div", { className: "occupancy" }, box, this.right, this.below);
  }

  /**
   * @param {{from: number, fed: number, to: number, steps: ArrayLike<number>, dropped: number[],
   *   budget: number | null, peak: number | null}} history steps from the prompt's end to the last that may come
   */
  draw({ from, fed, to, steps, dropped, budget, peak }) {
    const held = heldAt(from, fed, steps, dropped);
    const most = peak ?? Math.max(1, ...held.map(([, slots]) => slots));
    const top = 1.08 * Math.max(most, ...held.map(([, slots]) => slots));
    const x = (/** @type {number} */ step) => ((step - from) / Math.max(1, to - from)).toFixed(5);
    const y = (/** @type {number} */ slots) => (1 - slots / top).toFixed(5);
    const path = held.map(([step, slots]) => `L${x(step)} ${y(slots)}`).join("");
    this.curve.setAttribute("d", path.replace("L", "M"));
    this.area.setAttribute("d", `M0 1${path}L${x(fed)} 1Z`);
    const now = held[held.length - 1][1];
    const limit = peak === null ? "" : `, budget ${count(budget ?? 0)}, at most ${count(peak)}`;
    this.plot.setAttribute("aria-label", `slots held: ${count(now)} at step ${count(fed)}${limit}`);
    for (const [name, slots, text] of /** @type {const} */ ([
      ["budget", budget, `budget ${count(budget ?? 0)}`],
      ["peak", peak, `budget + buffer ${count(peak ?? 0)}`],
    ])) {
      this.marks[name].hidden = slots === null;
      this.names[name].textContent = slots === null ? (name === "peak" ? `${count(most)} slots` : "") : text;
      this.marks[name].style.top = this.names[name].style.top = `${100 * (1 - (slots ?? most) / top)}%`;
    }
    const ends = `${from} ${to}`;
    if (this.below.dataset.ends === ends) return;
    this.below.dataset.ends = ends;
    this.below.replaceChildren(h("span", {}, `step ${count(from)}`), h("span", {}, count(to)));
  }
}

/**
 * Corners of the line of slots held, `[step, slots]`; at an eviction there are two, before and after.
 * @param {number} from @param {number} fed @param {ArrayLike<number>} steps @param {number[]} dropped
 * @returns {[number, number][]}
 */
function heldAt(from, fed, steps, dropped) {
  let gone = 0;
  /** @type {[number, number][]} */ const corners = [];
  dropped.forEach((slots, event) => {
    if (steps[event] > from) corners.push([steps[event], steps[event] - gone]);
    gone += slots;
    corners.push([steps[event], steps[event] - gone]);
  });
  if (!corners.length || steps[0] > from) corners.unshift([from, from]);
  return [...corners, [fed, fed - gone]];
}
