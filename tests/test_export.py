"""Pages of executed notebooks, made without a kernel."""

from __future__ import annotations

import warnings

import nbformat

from epiviz.export import PLOTLY, UNSEEN, write_page


def test_a_page_says_what_it_cannot_show(tmp_path):
    figure = nbformat.v4.new_output("display_data", {PLOTLY: {"data": [], "layout": {}}})
    told = nbformat.v4.new_output("execute_result", {"text/plain": "42"}, execution_count=1)
    printed = nbformat.v4.new_output("stream", text="hello")
    cells = [nbformat.v4.new_markdown_cell("# T"), nbformat.v4.new_code_cell("f()", outputs=[figure, told, printed])]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "executed.ipynb")
    with warnings.catch_warnings(action="error"):
        write_page(tmp_path / "executed.ipynb", tmp_path / "page.html", "T")
    page = (tmp_path / "page.html").read_text()
    assert page.count(UNSEEN) == 1 and "42" in page and "hello" in page
