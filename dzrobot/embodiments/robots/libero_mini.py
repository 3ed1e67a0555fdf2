"""LIBERO's robot in small images and with a short horizon: what the tiny policy sees."""

from dataclasses import replace

from dzrobot.embodiments.robots.libero_sim import LIBERO_SIM
from dzrobot.embodiments.timing import Timing

LIBERO_MINI = replace(
    LIBERO_SIM,
    tag="libero_mini",
    views=tuple(replace(view, resolution=(128, 128), size=(64, 64)) for view in LIBERO_SIM.views),
    # One frame per action: 0.4 s blocks, of which two are remembered.
    timing=Timing(control_hz=20, action_horizon=8, blocks=2),
    # Demonstrations answer to noise that no plan can foresee, so the end of a plan is a guess.
    execute=3,
    # It knows one prompt; away from another one means nothing to it.
    cfg_scale=1.0,
    # What the bundled policy's score was measured with.
    history="recent",
)
