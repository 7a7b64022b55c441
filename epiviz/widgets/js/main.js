/** Show one view of a model. @param {{model: Model, el: HTMLElement}} context @returns {() => void} */
function render({ model, el }) {
  const state = new State(model);
  const view = VIEWS[model.get("_view")](state);
  el.replaceChildren(view.root);
  state.draw();
  state.views.forEach((each) => each.settle?.());
  if (state.now.selected >= 0) state.reveal(state.now.column, state.now.selected);
  return () => {
    view.close();
    state.close();
    view.root.remove();
  };
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
