"""What LIBERO-Plus changes in a task: its files encode it in the task's name."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dzrobot.envs.libero.sim import Simulation
from dzrobot.envs.libero.task_packages import PLUS
from dzrobot.errors import SimulatorError

_NAME = re.compile(
    r"(?P<base>.+?)(?:_language_(?P<language>\d+))?"
    r"(?:_view_(?P<view>\d+(?:_\d+){4})_initstate_(?P<arm>\d+)(?:_noise_(?P<noise>\d+))?"
    r"|_(?P<texture>table|tb)_\d+|_light_(?P<light>\d+)"
    r"|_(?P<layout>add_\d+|level\d+_sample\d+))?"
)
_PIVOT = np.array([0.0, 0.0, 0.8])
"""Point (3,) m that the exterior camera is moved around."""


@dataclass(frozen=True, kw_only=True)
class PlusVariant:
    """One task of LIBERO-Plus: one of LIBERO's, changed along one axis."""

    axis: str
    """``camera``, ``robot_init``, ``language``, ``light``, ``texture``, ``noise`` or ``layout``."""

    problem: str
    """Name of the file with its problem."""

    states: str
    """File with its starts, in the folder of starts."""

    view: tuple[int, int, int, int, int] = (0, 0, 100, 0, 0)
    """How the exterior camera is moved: turn about the vertical and tilt, both around a point above
    the table (degrees), distance from it (per cent), turn and tilt in place (degrees)."""

    arm: int = 0
    """Number of the pose that the arm begins from; 0: the stored one."""

    noise: int = 0
    """Number of the noise on the exterior image; 0: none."""


def variant_of(folder: str, name: str) -> PlusVariant:
    """Return what the name of a task says.

    Args:
        folder: Of the suite in the package.
        name: Of the task.

    Raises:
        SimulatorError: nothing, or several things.
    """
    found = _NAME.fullmatch(name)
    assert found is not None, "the base takes any text"
    view = tuple(int(number) for number in (found["view"] or "0_0_100_0_0").split("_"))
    arm, noise = int(found["arm"] or 0), int(found["noise"] or 0)
    changed = {
        "camera": view != PlusVariant.view,
        "robot_init": arm != 0,
        "language": found["language"] is not None,
        "light": found["light"] is not None,
        "texture": found["texture"] is not None,
        "noise": noise != 0,
        "layout": found["layout"] is not None,
    }
    axes = [axis for axis, is_so in changed.items() if is_so]
    if len(axes) != 1:
        raise SimulatorError(f"{name} does not say which one thing LIBERO-Plus changes in it")
    own = f"libero_newobj/{folder}/{name}" if axes == ["layout"] else f"{folder}/{found['base']}"
    # The view is not part of the file's name, the wording is.
    problem = name.split("_view_")[0]
    return PlusVariant(
        axis=axes[0],
        problem=problem,
        states=f"{own}.pruned_init",
        view=view,  # type: ignore[arg-type]
        arm=arm,
        noise=noise,
    )


def apply_variant(sim: Simulation, variant: PlusVariant) -> None:
    """Move camera and arm of a scene at its initial state.

    The stored state holds the pose of the arm, so the arm is moved after it was restored.
    """
    if variant.view != PlusVariant.view:
        _move_camera(sim.env, variant.view)
    if variant.arm:
        _bend_arm(sim.env, variant.arm)


def _move_camera(env: Any, view: tuple[int, int, int, int, int]) -> None:
    # Without scipy until a camera is moved: it is slow to import.
    from scipy.spatial.transform import Rotation

    model = env.sim.model._model
    number = env.sim.model.camera_name2id(env.camera_names[0])
    place, w_first = np.array(model.cam_pos[number]), np.array(model.cam_quat[number])
    about, tilt, distance, own_about, own_tilt = view
    for axis, degrees, around_pivot in (
        *([("y", -tilt, True)] if tilt else []),
        ("z", about, True),
        *([("z", own_about, False)] if own_about else []),
        *([("y", -own_tilt, False)] if own_tilt else []),
    ):
        turn = Rotation.from_euler(axis, degrees, degrees=True)
        turned = (turn * Rotation.from_quat(np.roll(w_first, -1))).as_quat()
        # LIBERO-Plus rounds after every turn, a turn about the vertical by nothing included, and
        # its cameras are where that leaves them.
        w_first = np.round(np.roll(turned, 1), 4)
        if around_pivot:
            place = np.round(_PIVOT + turn.apply(place - _PIVOT), 4)
    if distance != 100:
        place = np.round(_PIVOT + distance / 100 * (place - _PIVOT), 4)
    model.cam_pos[number] = place
    model.cam_quat[number] = w_first / np.linalg.norm(w_first)


def _bend_arm(env: Any, number: int) -> None:
    robot = env.robots[0]
    poses = PLUS.module("envs/robots", "mounted_panda")
    # A property of a class that needs a robot; it reads nothing of it.
    pose = getattr(poses, f"MountedPanda{number}").init_qpos.fget(None)
    env.sim.data.qpos[list(robot._ref_joint_pos_indexes)] = pose
    env.sim.forward()
    robot.controller.update(force=True)
    robot.controller.reset_goal()
