// Joined behind the module of the views, and so in their scope: measures them from inside. See views.py.

/** A model that counts the bytes it would send to a kernel. */
class CountingModel extends EventTarget {
  /** @param {any} state */
  constructor(state) {
    super();
    this.state = state;
    this.sent = 0;
    /** @type {Set<string>} */ this.changed = new Set();
  }

  get(/** @type {string} */ name) {
    return this.state[name];
  }

  set(/** @type {string} */ name, /** @type {any} */ value) {
    this.state[name] = value;
    this.changed.add(name);
    this.dispatchEvent(new Event(`change:${name}`));
  }

  save_changes() {
    this.sent += JSON.stringify(Object.fromEntries([...this.changed].map((name) => [name, this.state[name]]))).length;
    this.changed.clear();
  }

  send(/** @type {object} */ content) {
    this.sent += JSON.stringify(content).length;
  }

  on(/** @type {string} */ event, /** @type {any} */ callback) {
    this.addEventListener(event, callback);
  }

  off(/** @type {string} */ event, /** @type {any} */ callback) {
    this.removeEventListener(event, callback);
  }
}

const REACH_MS = 500; // that a hand takes from the text to a slider: what scrolling began is over by then

/** The first task after the next frame was painted. */
const painted = () =>
  new Promise((done) =>
    requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = done;
      channel.port2.postMessage(0);
    }),
  );

class Bench {
  /** @param {any} state @param {string} data base64 */
  constructor(state, data) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    this.model = new CountingModel({ ...state, _data: new DataView(bytes.buffer) });
    /** @type {number[]} */ this.frames = [];
    /** @type {(() => void) | undefined} */ this.tell = undefined;
    let pressed = 0;
    const stamp = (/** @type {Event} */ event) => (pressed = event.timeStamp);
    window.addEventListener("pointermove", stamp, true);
    window.addEventListener(
      "input",
      () => {
        const from = pressed;
        painted().then(() => {
          this.frames.push(performance.now() - from);
          this.tell?.();
        });
      },
      true,
    );
  }

  /** Show a view alone in the page; resolves with the time until it was painted. @param {string} view */
  async show(view) {
    this.close?.();
    await painted();
    this.model.set("_view", view);
    const start = performance.now();
    this.close = render({ model: /** @type {any} */ (this.model), el: document.body.appendChild(h("div")) });
    await painted();
    return performance.now() - start;
  }

  /** Forget what was measured, once everything is painted and a hand has reached the slider. */
  async begin() {
    await new Promise((done) => setTimeout(done, REACH_MS));
    await painted();
    this.frames.length = 0;
    this.model.sent = 0;
  }

  /** Resolves when so many moves were painted. @param {number} number */
  async moved(number) {
    while (this.frames.length < number) await new Promise((done) => (this.tell = () => done(undefined)));
  }

  /** The script time of redrawing a timeline with every method, budget and threshold. */
  async timeline() {
    this.close?.();
    const state = new State(/** @type {any} */ (this.model));
    const panel = new Timeline(state);
    const solo = new Solo(state, panel);
    document.body.append(solo.root);
    await painted();
    const times = [];
    for (const { method, budget } of state.stories) {
      for (const threshold of state.meta.thresholds) {
        state.preview({ method, budget, threshold });
        const start = performance.now();
        panel.draw();
        times.push(performance.now() - start);
        await painted();
      }
    }
    solo.close();
    state.close();
    solo.root.remove();
    return times;
  }
}
/** @type {any} */ (window).Bench = Bench;
