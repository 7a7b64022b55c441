/** What is known about one token. It lives in the top layer, so that no notebook cell can clip it. */
class Card {
  constructor() {
    this.element = h("div", { className: "card", popover: "manual", role: "group", "aria-label": "about this token" });
    /** @type {HTMLElement | null} */ this.anchor = null;
  }

  /** @param {HTMLElement} anchor @param {Node[]} content @param {boolean} pinned */
  show(anchor, content, pinned) {
    if (!this.element.isConnected) return; // a notebook builds outputs before they are in the page, and takes them out
    this.anchor = anchor;
    this.element.replaceChildren(...content);
    this.element.toggleAttribute("data-pinned", pinned);
    if (!this.element.matches(":popover-open")) this.element.showPopover();
    this.place();
  }

  words() {
    return Array.from(this.element.querySelectorAll("dt, dd"), (/** @type {Element} */ part) => part.textContent).join(
      " ",
    );
  }

  place() {
    if (!this.anchor) return;
    const at = this.anchor.getClientRects()[0] ?? this.anchor.getBoundingClientRect();
    const box = this.element.getBoundingClientRect();
    const below = at.bottom + 8;
    const top = below + box.height < window.innerHeight ? below : Math.max(4, at.top - box.height - 8);
    this.element.style.left = `${clamp(4, at.left - 12, Math.max(4, window.innerWidth - box.width - 8))}px`;
    this.element.style.top = `${top}px`;
  }

  hide() {
    this.anchor = null;
    if (this.element.isConnected && this.element.matches(":popover-open")) this.element.hidePopover();
  }
}
