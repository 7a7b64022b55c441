/**
 * What stands above a text: its name, a note, where it parts from the first text, how much is kept, and its minimap.
 * @param {TextColumn} column @param {boolean} compared with the first text
 * @param {{reveal(token: number): void, goTo(token: number): void}} actions
 */
function columnHead(column, compared, { reveal, goTo }) {
  const [split] = column.info.divergence;
  const parts = !compared
    ? ""
    : split === undefined
      ? h("span", { className: "note" }, "the same text")
      : h("button", { type: "button", className: "link", onclick: () => goTo(split) }, `parts at ${count(split)}`);
  const map = new Minimap(column, reveal);
  const name = h("b");
  const note = h("span", { className: "note" });
  const tally = h("span", { className: "tally" });
  const line = h("div", { className: "name" }, name, note, parts, tally);
  const element = h("div", { className: "head" }, line, map.element);
  return { element, line, name, note, tally, map, section: h("section", {}, column.body) };
}
