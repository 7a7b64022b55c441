"""The views' script and style, and the page that holds both for readers without a kernel."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from pathlib import Path

HERE = Path(__file__).parent
# Joined in this order into one ES module: anywidget and an offline page take one each, and there is no build step.
SCRIPTS = (
    "tools",
    "data",
    "slices",
    "state",
    "palette",
    "text",
    "minimap",
    "head",
    "card",
    "describe",
    "legend",
    "controls",
    "reader",
    "strip",
    "panel",
    "timeline",
    "layers",
    "heads",
    "occupancy",
    "live",
    "workbench",
    "main",
)  # fmt: skip
STYLES = ("theme", "reader", "panels", "live")

PAGE = """<!doctype html>
<html lang="en" class="epi-page">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main id="epi-reader"><noscript>{fallback}</noscript></main>
<script type="application/json" id="epi-state">{state}</script>
<script type="application/octet-stream" id="epi-data">{data}</script>
<script type="module">{module}</script>
</body>
</html>
"""


def script() -> str:
    """Return the ES module of all views."""
    return "\n".join((HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)


def style() -> str:
    """Return the style sheet of all views."""
    return "\n".join((HERE / "css" / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)


def write(path: Path, title: str, fallback: str, state: dict, data: bytes) -> None:
    """Write a page that shows a view in the given state and asks no network."""
    module = script() + "\nmount(document);\n"
    if "</script" in module:
        raise ValueError("a script must not contain the end tag of a script: it is embedded in a page")
    page = PAGE.format(
        title=html.escape(title or "epiviz"),
        css=style(),
        fallback=fallback,
        state=json.dumps(state | {"_offline": True}).replace("<", "\\u003c"),
        data=base64.b64encode(gzip.compress(data, mtime=0)).decode(),
        module=module,
        digest=base64.b64encode(hashlib.sha256(module.encode()).digest()).decode(),
    )
    path.write_text(page, encoding="utf-8", newline="")
