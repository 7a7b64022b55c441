"""What the browser tests do with a page of a view."""

import numpy as np


def settle(page):
    """Wait until the spans out of view have followed, too."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait_for_selector("[data-behind]", state="detached")


def put(page, **controls):
    """Set controls as Python would, and wait for the frame."""
    page.evaluate(
        "(controls) => { for (const entry of Object.entries(controls)) window.epiviz.model.set(...entry); }", controls
    )
    settle(page)


def trait(page, name):
    return page.evaluate("(name) => window.epiviz.model.get(name)", name)


def struck(page, column=0):
    """Return the struck tokens of a column as the page shows them."""
    spans = f"document.querySelectorAll('.columns:not(.top) section')[{column}].querySelectorAll('.block > span')"
    settle(page)
    return np.array(page.evaluate(f"Array.from({spans}, (span) => span.classList.contains('x'))"))
