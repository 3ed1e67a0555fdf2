"""The built-in robots, one file each, and what their small variants have in common."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from dzrobot.embodiments.spec import Embodiment, Part, starts_of
from dzrobot.embodiments.timing import Timing


def joined(
    kind: Literal["state", "action"], feature: str, widths: Mapping[str, int], *, held: bool = False
) -> tuple[Part, ...]:
    """Return parts that lie one after the other in a column.

    Args:
        kind: What they are of.
        feature: The column.
        widths: Numbers of each part by its name, in the order of the column.
        held: Whether they are measured from the state of the same name, which is also what holds
            the robot still.
    """
    starts = starts_of(widths)
    return tuple(
        Part(
            key=f"{kind}.{name}", feature=feature, dim=width, start=starts[name],
            reference=f"state.{name}" if held else None, hold=f"state.{name}" if held else None,
        )
        for name, width in widths.items()
    )  # fmt: skip


def small(robot: Embodiment, tag: str, size: tuple[int, int]) -> Embodiment:
    """Return ``robot`` in small images and with a short horizon.

    Args:
        robot: Says all that is not about size: keys, widths, tiles, prompt, rate.
        tag: Of the small one.
        size: Height and width of each view, as the network sees it.
    """
    return replace(
        robot,
        tag=tag,
        views=tuple(replace(view, size=size) for view in robot.views),
        # One frame per action. A block lasts 0.4 s at 20 Hz and 0.8 s at 10; two are remembered.
        timing=Timing(control_hz=robot.timing.control_hz, action_horizon=8, blocks=2),
        # Demonstrations answer to noise that no plan can foresee, so the end of a plan is a guess.
        execute=3,
        # It knows one prompt; away from another one means nothing to it.
        cfg_scale=1.0,
        # What the bundled policy's score was measured with.
        history="recent",
    )
