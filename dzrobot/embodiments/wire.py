"""What a robot's observations are called between openpi's clients and servers."""

from dataclasses import dataclass
from typing import Literal

ActionSpace = Literal[
    "joint_position", "joint_velocity", "cartesian_position", "cartesian_velocity"
]


@dataclass(frozen=True, kw_only=True)
class RoboArena:
    """What a RoboArena server tells its clients about itself, beyond the images' size."""

    n_external_cameras: int
    needs_wrist_camera: bool = True
    needs_stereo_camera: bool = False
    needs_session_id: bool = True
    action_space: ActionSpace = "joint_position"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Names behind ``observation/`` in the messages of openpi's family of clients."""

    names: tuple[tuple[str, str], ...] = ()
    """Pairs of modality key and name, where it is not the key without its kind."""

    unused: tuple[str, ...] = ()
    """Further names that existing clients send and the robot's policies do not look at."""

    arena: RoboArena | None = None
    """None: the robot is none that RoboArena's clients know."""
