"""A real Franka that picks and places: LIBERO's cameras and tiling, another state and horizon."""

from dataclasses import replace

from dzrobot.embodiments.robots import small
from dzrobot.embodiments.robots.libero_sim import LIBERO_SIM
from dzrobot.embodiments.spec import Part
from dzrobot.embodiments.templates import PROMPTS
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
        Part(
            key="state.state",
            feature="observation.state",
            aliases=("state",),
            dim=19,
            quantities=(
                "gripper_width",
                "force",
                "position_from_start",
                "euler_from_start",
                "torque",
                "hand_velocity",
            ),
        ),
    ),
    # The action is LIBERO's, except that a gripper of +1 opens.
    action=(replace(LIBERO_SIM.action[0], quantities=("hand_step", "gripper_change")),),
    action_frame="ee_adjoint",
    # As the published recordings were made. Data of one's own says what it was made with.
    action_anchor="measured",
    prompt=PROMPTS["franka_pnp"],
    timing=Timing(control_hz=10, action_horizon=12),
    # As LIBERO's: one frame per call.
    history="off",
)


FRANKA_MINI = small(FRANKA_PNP, "franka_mini", (64, 64))
