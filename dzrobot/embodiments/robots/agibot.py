"""AgiBot G1: a camera in the head and one in each hand; two arms, head and waist, at 30 Hz.

Keys, widths and what is relative are those that DreamZero-AgiBot was published with. This package
has no environment of it, and no recording of the robot was at hand: `dzrobot inspect-data` says
whether yours has these columns.
"""

from dzrobot.embodiments.robots import joined
from dzrobot.embodiments.spec import HOLD_ZERO, Embodiment, Part, View
from dzrobot.embodiments.templates import PROMPTS, quadrants
from dzrobot.embodiments.timing import Timing

VIEWS = ("top_head", "hand_left", "hand_right")

WIDTHS = {
    "left_arm_joint_position": 7,
    "right_arm_joint_position": 7,
    "left_effector_position": 1,
    "right_effector_position": 1,
    "head_position": 2,
    "waist_position": 2,
}
"""Numbers of each part of the state, in the order of the column; the action's begin the same."""

AGIBOT = Embodiment(
    tag="agibot",
    views=tuple(
        View(
            key=f"video.{name}",
            feature=f"observation.images.{name}",
            aliases=(name,),
            size=(176, 320),
            resolution=(480, 640),
        )
        for name in VIEWS
    ),
    state=joined("state", "observation.state", WIDTHS),
    action=(
        *joined("action", "action", WIDTHS, held=True),
        # Forward and turning speed of the base: the one part that is not relative.
        Part(
            key="action.robot_velocity",
            feature="action",
            dim=2,
            start=sum(WIDTHS.values()),
            hold=HOLD_ZERO,
        ),
    ),
    tiles=quadrants(*(f"video.{name}" for name in VIEWS)),
    prompt=PROMPTS["agibot"],
    language_features=("annotation.language.action_text",),
    timing=Timing(control_hz=30, action_horizon=24),
    # The published servers keep a session's frames.
    history="recent",
)
