"""Which frames of an episode a policy is shown when it plans."""

import math
from collections.abc import Sequence

from dzrobot.embodiments.spec import Embodiment, History

RECENT = 4
"""Frames of ``recent``, and of what is sent to a server at a time."""


def frame_offsets(embodiment: Embodiment, history: History) -> tuple[int, ...]:
    """Return the steps, from the newest frame, that the network is shown after its first call.

    Args:
        embodiment: Its horizon H is what one block of latent frames stands for.
        history: ``recent``: four frames spread over the last H, as published servers send them
            (-23, -16, -8, 0 for a horizon of 24). ``grid``: all frames that training takes from one
            block, with the closing frame of the block before. ``off``: the newest alone.
    """
    timing = embodiment.timing
    match history:
        case "off":
            return (0,)
        case "recent":
            span = timing.action_horizon - 1
            return tuple(math.floor(-span + i * span / (RECENT - 1)) for i in range(RECENT))
        case "grid":
            return (*(offset - timing.action_horizon for offset in timing.frame_offsets), 0)


def reads_next(offsets: Sequence[int], left: int, every: int) -> bool:
    """Return whether any coming plan is made from the next frame.

    Args:
        offsets: Steps from the newest frame that a plan is made from; see :func:`frame_offsets`.
        left: Steps from that frame to the one that the next plan is due at.
        every: Steps from plan to plan after that.
    """
    # The plan at step `left + i * every` is shown frames from there on back; the frame is step 0.
    return any(-offset >= left and (-offset - left) % every == 0 for offset in offsets)
