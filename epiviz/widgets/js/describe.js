/**
 * What is known about one token, for the card.
 * @param {State} state @param {Pane} pane @param {number} token @returns {Node[]}
 */
function describe(state, pane, token) {
  const source = state.sources[pane.text];
  const { info, length } = source;
  const first = source.firstPart(token);
  const ids = Array.from(source.ids.subarray(first, token + 1));
  const part = token < info.prompt ? "prompt" : "generated";
  const rows = [
    ["token", quoted(source.piece(token))],
    ["id", ids.join(" + ") + (ids.length > 1 ? " (they share one character)" : "")],
    ["position", `${first < token ? `${count(first)}–` : ""}${count(token)} of ${count(length)} · ${part}`],
  ];
  for (const score of source.scores) {
    const share = 1 - score.ranks()[token] / Math.max(1, length - 1);
    const known = !Number.isNaN(score.values[token]);
    rows.push([score.name, known ? `${number(score.values[token])} · percentile ${Math.round(100 * share)}` : "–"]);
  }
  if (info.divergence.includes(token)) {
    rows.push([
      "differs",
      pane.text ? `the first difference from ${state.sources[0].info.label}` : "another text parts here",
    ]);
  }
  /** @type {Node[]} */
  const extra = [];
  if (pane.story >= 0) extra.push(...describeFate(state, pane, token, rows));
  else if (state.shown === "static") {
    const score = source.score(state.now.color_by);
    if (score) rows.push(["rank", `${count(score.ranks()[token] + 1)} of ${count(length)}`]);
  }
  return [h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), ...extra];
}

/** @param {State} state @param {Pane} pane @param {number} token @param {string[][]} rows @returns {Node[]} */
function describeFate(state, pane, token, rows) {
  const story = state.stories[pane.story];
  const { step } = state.now;
  if (token >= story.fed) {
    rows.push(["fate", "never fed back to the model"]);
    return [];
  }
  if (story.selects) {
    if (token < step) rows.push(["held by", "all heads"]);
    return [];
  }
  const slice = state.slice(pane);
  if (slice) {
    const event = slice.death[token];
    const gone = event < story.events.length;
    const when = gone
      ? `at step ${count(story.events[event])} (event ${event + 1} of ${story.events.length})`
      : "never";
    rows.push(["evicted", when]);
    if (!gone && slice.reason[token]) rows.push(["kept as", REASONS[slice.reason[token]]]);
  }
  if (token >= step) return [];
  const fired = upTo(story.events, step);
  if (story.uniform) {
    rows.push(["held by", story.majority[token] < fired ? "no head" : "all heads"]);
    return [];
  }
  const deaths = state.slices.token(pane.story, token)?.death;
  if (!deaths) {
    const { thresholds } = state.meta;
    const lost = thresholds.filter(
      (/** @type {number} */ _, /** @type {number} */ q) => story.majority[q * story.fed + token] < fired,
    );
    rows.push([
      "held by",
      lost.length ? `at most ${100 - lost.at(-1)} % of heads` : `more than ${100 - thresholds[0]} % of heads`,
    ]);
    return [];
  }
  const held = Array.from(story.evicts, (layer) =>
    Array.from({ length: story.heads }, (_, head) => deaths[layer * story.heads + head] >= fired),
  );
  rows.push(["held by", holding(held.flat())]);
  const grid = h("div", { className: "grid", "aria-hidden": "true" });
  grid.style.setProperty("--layers", String(held.length));
  for (let head = 0; head < story.heads; head++) {
    held.forEach((layer) => grid.append(h("i", { className: layer[head] ? "held" : "" })));
  }
  const across = `layers ${story.evicts[0]}–${story.evicts.at(-1)} across, heads down`;
  return [grid, h("div", { className: "caption" }, across)];
}

/** How many heads hold a token, in words. @param {boolean[]} held */
function holding(held) {
  const n = held.filter(Boolean).length;
  return `${Math.round((100 * n) / held.length)} % of heads (${n} of ${held.length})`;
}
