"""Robots as values: what one sees, reports and does."""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if TYPE_CHECKING:
    from dzrobot.embodiments.registry import load_embodiment
    from dzrobot.embodiments.spec import Embodiment, Gripper, Part, View
    from dzrobot.embodiments.timing import Timing

__all__ = [
    "Embodiment",
    "Gripper",
    "Part",
    "Timing",
    "View",
    "load_embodiment",
]

__getattr__, __dir__ = lazy_exports(__name__)
