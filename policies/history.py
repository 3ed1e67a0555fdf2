"""Which frames of an episode a policy is shown when it plans."""

import math

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
