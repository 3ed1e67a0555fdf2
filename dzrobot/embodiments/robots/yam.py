"""YAM: two arms of six joints with grippers, a camera above and one on each arm, at 30 Hz.

Keys, widths and what is relative are those of DreamZero's own recipe (yam_relative.yaml and
yam_training.sh of dreamzero0/dreamzero); here even the grippers are relative. Columns are those of
its converter, and of Ai2's recordings of the robot by their second names. This package has no
environment of it, and no recording was at hand: `dzrobot inspect-data` says whether yours fits.
"""

from dzrobot.embodiments.robots import joined
from dzrobot.embodiments.spec import Embodiment, View
from dzrobot.embodiments.templates import PROMPTS, quadrants
from dzrobot.embodiments.timing import Timing

VIEWS = ("top", "left", "right")

WIDTHS = {
    "left_joint_pos": 6,
    "left_gripper_pos": 1,
    "right_joint_pos": 6,
    "right_gripper_pos": 1,
}
"""Numbers of each part, in the order of the column; state and action have the same."""

YAM = Embodiment(
    tag="yam",
    views=tuple(
        View(
            key=f"video.{name}_camera-images-rgb",
            feature=f"observation.images.{name}_camera-images-rgb",
            aliases=(f"observation.images.{name}",),
            size=(176, 320),
            resolution=(480, 640),
        )
        for name in VIEWS
    ),
    state=joined("state", "observation.state", WIDTHS),
    action=joined("action", "action", WIDTHS, held=True),
    tiles=quadrants(*(f"video.{name}_camera-images-rgb" for name in VIEWS)),
    prompt=PROMPTS["yam"],
    language_features=("annotation.task",),
    timing=Timing(control_hz=30, action_horizon=24),
    # The published servers keep a session's frames.
    history="recent",
)
