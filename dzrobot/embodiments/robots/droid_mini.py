"""DROID's arm in small images and with a short horizon: what a tiny policy of it sees."""

from dataclasses import replace

from dzrobot.embodiments.robots.oxe_droid import OXE_DROID
from dzrobot.embodiments.timing import Timing

DROID_MINI = replace(
    OXE_DROID,
    tag="droid_mini",
    views=tuple(replace(view, size=(48, 64)) for view in OXE_DROID.views),
    # One frame per action: 0.53 s blocks, of which two are remembered.
    timing=Timing(control_hz=15, action_horizon=8, blocks=2),
    # As libero_mini: the end of a plan is a guess, and it knows one prompt.
    execute=3,
    cfg_scale=1.0,
)
