"""LIBERO in simulation: one exterior and one wrist camera, end-effector actions at 20 Hz."""

from dzrobot.embodiments.robots import small
from dzrobot.embodiments.spec import Embodiment, Gripper, Groot, Part, View, Wire
from dzrobot.embodiments.templates import PROMPTS, side_by_side
from dzrobot.embodiments.timing import Timing

# GR00T's names say roll, pitch and yaw; the numbers are axis-angle.
_POSE = tuple((name, 1) for name in ("x", "y", "z", "roll", "pitch", "yaw"))

LIBERO_SIM = Embodiment(
    tag="libero_sim",
    views=(
        View(
            key="video.image",
            feature="observation.images.image",
            aliases=("image",),
            size=(256, 256),
            resolution=(256, 256),
        ),
        View(
            key="video.wrist_image",
            feature="observation.images.wrist_image",
            # LeRobot's own LIBERO environment calls its wrist camera image2.
            aliases=("wrist_image", "observation.images.image2", "image2"),
            size=(256, 256),
            resolution=(256, 256),
        ),
    ),
    state=(
        # Position (3), axis-angle (3), finger positions (2).
        Part(key="state.state", feature="observation.state", aliases=("state",), dim=8),
    ),
    action=(
        # Translation (3), rotation (3), gripper: +1 closes.
        Part(
            key="action.actions",
            feature="action",
            aliases=("actions",),
            dim=7,
            gripper=Gripper(index=6),
            hold="zero",
        ),
    ),
    tiles=side_by_side("video.image", "video.wrist_image"),
    prompt=PROMPTS["libero_sim"],
    timing=Timing(control_hz=20, action_horizon=16),
    # Published checkpoints were trained and scored with one frame per call.
    history="off",
    wire=Wire(
        groot=Groot(
            state=(*_POSE, ("gripper", 2)), action=(*_POSE, ("gripper", 1)), opening="gripper"
        )
    ),
)


LIBERO_MINI = small(LIBERO_SIM.at_resolution(128, 128), "libero_mini", (64, 64))
