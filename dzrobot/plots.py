"""Plots by matplotlib, as PNG and as SVG."""

import io
from typing import Any

from dzrobot.errors import MissingDependencyError
from dzrobot.importing import install

KINDS = ("png", "svg")


def new_plot() -> tuple[Any, Any]:
    """Return an empty matplotlib figure and its axes.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(f"plots need matplotlib: {install('report')}") from error
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
