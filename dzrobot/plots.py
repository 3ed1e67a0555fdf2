"""Plots by matplotlib, as PNG and as SVG."""

import io
from typing import Any

from dzrobot.importing import required

KINDS = ("png", "svg")


def check_can_draw() -> None:
    """Check that plots can be drawn, before work whose results are to be.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    required("a plot", "report", "matplotlib")


def new_plot(*widths: float, height: float = 4.5) -> tuple[Any, Any]:
    """Return an empty matplotlib figure and its axes.

    Args:
        widths: Of several axes side by side, relative, which share their rows; none: there is one.
        height: In inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    if not widths:
        return figure, figure.add_subplot()
    return figure, figure.subplots(1, len(widths), sharey=True, width_ratios=widths)


def drawn(figure: Any) -> dict[str, bytes]:
    """Return the figure in each of :data:`KINDS`."""
    images = {}
    for kind in KINDS:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=120)
        images[kind] = buffer.getvalue()
    return images
