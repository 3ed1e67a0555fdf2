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


def new_plot() -> tuple[Any, Any]:
    """Return an empty matplotlib figure and its axes.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def drawn(figure: Any) -> dict[str, bytes]:
    """Return the figure in each of :data:`KINDS`."""
    images = {}
    for kind in KINDS:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=120)
        images[kind] = buffer.getvalue()
    return images
