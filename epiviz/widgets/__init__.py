"""Interactive views: plain ES modules on anywidget, no build step."""

from epiviz.widgets.reader import TraceReader
from epiviz.widgets.workbench import HeadMap, LayerMap, Timeline, Workbench

__all__ = ["HeadMap", "LayerMap", "Timeline", "TraceReader", "Workbench"]
