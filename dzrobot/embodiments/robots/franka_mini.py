"""The real Franka in small images and with a short horizon: what a tiny policy of it sees."""

from dataclasses import replace

from dzrobot.embodiments.robots.franka_pnp import FRANKA_PNP
from dzrobot.embodiments.timing import Timing

FRANKA_MINI = replace(
    FRANKA_PNP,
    tag="franka_mini",
    views=tuple(replace(view, size=(64, 64)) for view in FRANKA_PNP.views),
    # One frame per action: 0.8 s blocks, of which two are remembered.
    timing=Timing(control_hz=10, action_horizon=8, blocks=2),
    # As libero_mini: the end of a plan is a guess, and it knows one prompt.
    execute=3,
    cfg_scale=1.0,
    history="recent",
)
