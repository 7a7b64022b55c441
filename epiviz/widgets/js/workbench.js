/** Reader, timeline, layers and heads of one state, beside or under one another. */
class Workbench extends Reader {
  /** @param {State} state */
  constructor(state) {
    super(state);
    this.root.classList.add("epi-workbench");
    this.panels = [
      ...(state.stories.length || state.meta.computes.length ? [new Timeline(state)] : []),
      ...(state.layerScores.length ? [new LayerMap(state)] : []),
      ...(state.stories.length || state.meta.computes.length ? [new HeadMap(state)] : []),
    ];
    this.ui.body.append(h("div", { className: "panels" }, ...this.panels.map((panel) => panel.element)));
  }

  close() {
    super.close();
    this.panels.forEach((panel) => panel.close());
  }
}

/** What each widget of Python shows. @type {Record<string, (state: State) => {root: HTMLElement, close(): void}>} */
const VIEWS = {
  reader: (state) => new Reader(state),
  live: (state) => new Live(state),
  workbench: (state) => new Workbench(state),
  timeline: (state) => new Solo(state, new Timeline(state)),
  layers: (state) => new Solo(state, new LayerMap(state)),
  heads: (state) => new Solo(state, new HeadMap(state)),
};
