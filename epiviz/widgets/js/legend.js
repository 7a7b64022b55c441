/** A score's scale: its name, unit, colours and ends. @param {Score | LayerScore} score @param {[number, number]} clip */
function scale(score, clip) {
  const buckets = Array.from({ length: score.kind === "signed" ? 9 : 6 }, (_, b) => h("span", { className: `b${b}` }));
  const [low, high] = score.clip;
  const [first, last] = clip;
  return h(
    "span",
    { className: "scale", "data-kind": score.kind, title: `colours end at the ${first}st and ${last}th percentile` },
    h("b", {}, score.name),
    score.unit ? h("span", { className: "unit" }, score.unit) : "",
    h("span", { className: "end" }, `≤ ${number(low)}`),
    h("span", { className: "ramp" }, ...buckets),
    h("span", { className: "end" }, `≥ ${number(high)}`),
    h("span", { className: "unit" }, `percentiles ${first}–${last}`),
  );
}

/** A word in the look that it explains. @param {string} look @param {string} text */
const sample = (look, text) => h("span", { className: `sample ${look}` }, text);

/** The reasons that occur, in their underlines. @param {Story[]} stories @returns {Node[]} */
function reasons(stories) {
  const occurs = (/** @type {number} */ reason) => stories.some((story) => story.reason.includes(reason));
  const why = REASONS.flatMap((text, reason) => (reason && occurs(reason) ? [sample(`r${reason}`, text)] : []));
  return why.length ? [h("span", { className: "why" }, "kept as", ...why)] : [];
}

/** What the looks of the text mean. @param {State} state @returns {Node[]} */
function legend(state) {
  const score = state.sources[0].score(state.now.color_by);
  const parts = score ? [scale(score, state.meta.clip)] : [];
  if (state.shown === "static") return [...parts, sample("x", "beyond the budget")];
  const stories = state.panes.flatMap((pane) => state.story(pane) ?? []);
  if (stories.some((story) => !story.selects)) parts.push(sample("x", "evicted"));
  return [...parts, sample("y", "not there yet"), ...reasons(stories)];
}
