"""Export: an executed notebook as one page that needs no network."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from traitlets.config import Config

from epiviz.results import write_text_atomically

PLOTLY = "application/vnd.plotly.v1+json"
UNSEEN = "A figure to hover over: open the executed notebook in JupyterLab."

# nbconvert's page loads require.js, MathJax, Mermaid and the widget manager from the network; all of them are left out,
# and widgets show the HTML that they carry.
_TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""
_PRIORITY = [
    "text/html",
    "text/markdown",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "text/latex",
    "text/plain",
]


def write_page(notebook: str | os.PathLike, page: str | os.PathLike, title: str) -> None:
    """Write an executed notebook as an HTML page with code, outputs and no reference to the network."""
    executed = nbformat.read(notebook, as_version=4)
    # the stored state serves a widget manager, which the page does not have
    executed.metadata.pop("widgets", None)
    for output in (output for cell in executed.cells for output in cell.get("outputs", ())):
        if PLOTLY in output.get("data", ()):  # plotly's script is larger than the page
            output["data"] = {"text/plain": UNSEEN} | output["data"]
    exporter = HTMLExporter(
        raw_template=_TEMPLATE, config=Config({"NbConvertBase": {"display_data_priority": _PRIORITY}})
    )
    body, _ = exporter.from_notebook_node(executed, resources={"metadata": {"name": title}})
    write_text_atomically(Path(page), body)
