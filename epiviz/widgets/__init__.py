"""Interactive views: plain ES modules on anywidget, no build step."""

from epiviz.widgets.reader import TraceReader

__all__ = ["TraceReader"]
