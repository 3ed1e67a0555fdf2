"""DROID: two exterior cameras, one in the wrist; joint actions relative to the state, at 15 Hz."""

from dzrobot.embodiments.robots import small
from dzrobot.embodiments.spec import Embodiment, Gripper, Part, RoboArena, View, Wire
from dzrobot.embodiments.templates import PROMPTS, wrist_on_top
from dzrobot.embodiments.timing import Timing


def _view(name: str) -> View:
    return View(
        key=f"video.{name}",
        feature=f"observation.images.{name}",
        aliases=(name,),
        size=(176, 320),
        resolution=(180, 320),
    )


OXE_DROID = Embodiment(
    tag="oxe_droid",
    views=(
        _view("exterior_image_1_left"),
        _view("exterior_image_2_left"),
        _view("wrist_image_left"),
    ),
    # The columns of the published dataset also hold Cartesian values and velocities.
    state=(
        Part(
            key="state.joint_position",
            feature="observation.state",
            aliases=("state",),
            dim=7,
            start=7,
        ),
        Part(
            key="state.gripper_position",
            feature="observation.state",
            aliases=("state",),
            dim=1,
            start=6,
        ),
    ),
    action=(
        Part(
            key="action.joint_position",
            feature="action",
            aliases=("actions",),
            dim=7,
            start=14,
            reference="state.joint_position",
            hold="state.joint_position",
        ),
        Part(
            key="action.gripper_position",
            feature="action",
            aliases=("actions",),
            dim=1,
            start=12,
            gripper=Gripper(index=0, threshold=0.5, low=0.0, high=1.0),
            hold="state.gripper_position",
        ),
    ),
    tiles=wrist_on_top(
        left="video.exterior_image_1_left",
        right="video.exterior_image_2_left",
        wrist="video.wrist_image_left",
    ),
    prompt=PROMPTS["oxe_droid"],
    language_features=(
        "annotation.language.language_instruction",
        "annotation.language.language_instruction_2",
        "annotation.language.language_instruction_3",
    ),
    timing=Timing(control_hz=15, action_horizon=24),
    # The published servers keep a session's frames.
    history="recent",
    wire=Wire(
        # RoboArena counts exterior cameras from 0, the dataset from 1.
        names=(
            ("video.exterior_image_1_left", "exterior_image_0_left"),
            ("video.exterior_image_2_left", "exterior_image_1_left"),
        ),
        # Sent by RoboArena's clients, whose policies may act in other spaces.
        unused=("cartesian_position", "wrist_image_right"),
        # One exterior camera, under the dataset's name.
        openpi=(
            ("video.exterior_image_1_left", "exterior_image_1_left"),
            ("video.wrist_image_left", "wrist_image_left"),
            ("state.joint_position", "joint_position"),
            ("state.gripper_position", "gripper_position"),
        ),
        arena=RoboArena(n_external_cameras=2),
    ),
)


DROID_MINI = small(OXE_DROID, "droid_mini", (64, 80))
