"""A real Franka that picks and places: LIBERO's cameras and tiling, another state and horizon."""

from dataclasses import replace

from dzrobot.embodiments.prompts import PROMPTS
from dzrobot.embodiments.robots.libero_sim import LIBERO_SIM
from dzrobot.embodiments.spec import Part
from dzrobot.embodiments.timing import Timing

_EXTERIOR, _WRIST = LIBERO_SIM.views

FRANKA_PNP = replace(
    LIBERO_SIM,
    tag="franka_pnp",
    views=(
        replace(_EXTERIOR, resolution=(128, 128)),
        replace(_WRIST, aliases=("wrist_image", "extra_view_image"), resolution=(128, 128)),
    ),
    state=(
        # Gripper (1), force (3), position (3), Euler angles (3), torque (3), velocity (6).
        Part(key="state.state", feature="observation.state", aliases=("state",), dim=19),
    ),
    # The action is LIBERO's, except that a gripper of +1 opens.
    action_frame="ee_adjoint",
    prompt=PROMPTS["franka_pnp"],
    timing=Timing(control_hz=10, action_horizon=12),
    # As LIBERO's: one frame per call.
    history="off",
)
