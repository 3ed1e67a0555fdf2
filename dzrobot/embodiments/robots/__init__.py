"""The built-in robots, one file each, and what their small variants have in common."""

from dataclasses import replace

from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing


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
