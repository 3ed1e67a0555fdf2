"""Scenes around the emulated arm, by name, and the objects on its table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.envs.libero.assets import assets_folder, import_libero
from dzrobot.envs.libero.goal_progress import LIFTED_M
from dzrobot.envs.mujoco.lift_scene import (
    EMPTY_SCENE,
    LIFT_SCENE,
    OBJECT,
    ObjectStart,
    TableObject,
    robosuite_asset,
)
from dzrobot.envs.mujoco.simulator import check_versions
from dzrobot.envs.panda.poses import Array
from dzrobot.errors import ConfigError, MissingDependencyError, SimulatorError, suggest
from dzrobot.rng import numpy_generator

EMPTY = EMPTY_SCENE
"""The arm alone, without physics: it follows exactly, and cameras see where the hand is."""

LIFT = LIFT_SCENE
SCENES = (EMPTY, LIFT)
"""Besides, the name of any object of LIBERO whose assets are there: it lies in the cube's place."""


def check_scene(scene: str) -> None:
    """Raise unless ``scene`` is known, and what it needs is installed; imports nothing.

    Raises:
        ConfigError: there is no such scene.
        MissingDependencyError: it needs a simulator that is not installed.
        SimulatorError: the simulator has the wrong version, or LIBERO's assets are not there.
    """
    check_name(scene)
    if scene == EMPTY:
        return
    try:
        check_versions()
    except (MissingDependencyError, SimulatorError) as error:
        raise type(error)(
            f"the emulated arm's scene {scene!r} is simulated: {error} Without it there is the "
            f"arm alone: workcell='emulated:{EMPTY}', or `dzrobot emulate --scene {EMPTY}`."
        ) from error


def check_name(scene: str) -> None:
    """Raise unless there is a scene, or an object of LIBERO, of this name; imports nothing.

    Raises:
        ConfigError: there is none.
    """
    if scene in SCENES:
        return
    known, without = list(SCENES), ""
    try:
        known += sorted(libero_objects())
    except SimulatorError as error:
        without = f" Objects of LIBERO need its assets: {error}"
    if scene not in known:
        raise ConfigError(
            f"unknown scene {scene!r}.{suggest(scene, known)} Known: {', '.join(known)}.{without}"
        )


FAMILIES = ("stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")
"""Folders of LIBERO's assets with objects that can be carried."""

CLEAR_M = 0.02
"""The same of another object: what is then below it, about as much as below the cube."""

_DROP_M = 0.01
_SPREAD_M = 0.03
_HALF_M = (0.020, 0.022)
_TURN_RAD = 0.4
_ALIKE_M = 1e-3
_DENSITY = 1000.0
_COLLISION_GROUP = 0
_OBJECT_JOINT, _HALF_EXTENT = slice(9, 16), slice(16, 19)


class Cube:
    """The red cube of robosuite's Lift, drawn as there.

    Args:
        texture: File of its wood.
    """

    task = "lift the red cube"

    def __init__(self, texture: Path) -> None:
        self._texture = texture

    def add(self, mujoco: Any, spec: Any, stiff: tuple[float, float]) -> None:
        """Add shape and wood."""
        spec.add_texture(
            name="redwood", type=mujoco.mjtTexture.mjTEXTURE_CUBE, file=str(self._texture)
        )
        wood = spec.add_material(name="redwood", specular=0.4, shininess=0.1)
        wood.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "redwood"
        cube = spec.worldbody.add_body(name=OBJECT)
        cube.add_freejoint(name=OBJECT)
        box = {"type": mujoco.mjtGeom.mjGEOM_BOX, "size": self.start(0).half}
        cube.add_geom(name="cube_collision", density=_DENSITY, solref=stiff, group=0, **box)
        cube.add_geom(
            name="cube_visual", density=0.0, group=1, contype=0, conaffinity=0, material="redwood",
            **box,
        )  # fmt: skip

    def start(self, number: int) -> ObjectStart:
        """Return what robosuite's Lift could have drawn."""
        draw = numpy_generator("emulated scene", number)
        x, y = draw.uniform(-_SPREAD_M, _SPREAD_M, 2)
        yaw = float(draw.uniform(0.0, 2.0 * np.pi))
        half = draw.uniform(*_HALF_M, 3)
        return ObjectStart(np.array([x, y, half[2] + _DROP_M]), yaw, half)

    def fit(self, model: Any, half: Array) -> None:
        """Set shape, and mass and inertia of its density."""
        body = model.body(OBJECT).id
        mass = _DENSITY * 8.0 * float(np.prod(half))
        x, y, z = (2.0 * half) ** 2
        model.body_mass[body] = mass
        model.body_inertia[body] = mass / 12.0 * np.array([y + z, x + z, x + y])
        for geom in np.flatnonzero(model.geom_bodyid == body):
            model.geom_size[geom] = half
            model.geom_aabb[geom, 3:] = half
            model.geom_rbound[geom] = np.linalg.norm(half)

    def lifted_m(self, half: Array) -> float:
        """Return robosuite's height, which asks for no size."""
        return LIFTED_M


class LiberoObject:
    """An object of LIBERO, standing as it does there, its narrower side where the fingers close.

    Args:
        name: LIBERO's, such as ``alphabet_soup``.

    Raises:
        ConfigError: LIBERO's code has no such object.
        MissingDependencyError: LIBERO is not installed.
        SimulatorError: there are no assets.
    """

    def __init__(self, name: str) -> None:
        self.task = task_of(name)
        self._file = libero_objects()[name]
        import_libero()
        import mujoco
        from libero.libero.envs.base_object import OBJECTS_DICT

        if name not in OBJECTS_DICT:
            raise ConfigError(f"LIBERO's assets have {name!r}, and its code does not")
        self._upright = _standing(mujoco, OBJECTS_DICT[name]())
        self._middle, self._half = self._extents(mujoco)
        self._turned = float(np.pi / 2 if self._half[1] > self._half[0] + _ALIKE_M else 0.0)

    def add(self, mujoco: Any, spec: Any, stiff: tuple[float, float]) -> None:
        """Add its shapes; contacts are as LIBERO's files have them."""
        body = spec.worldbody.add_body(name=OBJECT)
        body.add_freejoint(name=OBJECT)
        frame = body.add_frame(pos=-self._middle, quat=self._upright)
        spec.attach(self._part(mujoco), frame=frame, prefix="libero_")

    def start(self, number: int) -> ObjectStart:
        """Return a place as far from the middle as Lift's cube has, and a small turn."""
        draw = numpy_generator("emulated scene", number)
        x, y = draw.uniform(-_SPREAD_M, _SPREAD_M, 2)
        yaw = self._turned + float(draw.uniform(-_TURN_RAD, _TURN_RAD))
        return ObjectStart(np.array([x, y, self._half[2] + _DROP_M]), yaw, self._half)

    def fit(self, model: Any, half: Array) -> None:
        """Do nothing: it has one size."""

    def lifted_m(self, half: Array) -> float:
        """Return half of its height, and what is to be below it."""
        return float(half[2]) + CLEAR_M

    def _part(self, mujoco: Any) -> Any:
        part = mujoco.MjSpec.from_file(str(self._file))
        for geom in part.geoms:
            if geom.group != _COLLISION_GROUP:
                # What is only seen weighs nothing: arm and cameras have one body.
                geom.density = 0.0
        return part

    def _extents(self, mujoco: Any) -> tuple[Array, Array]:
        """Return middle and half extents (3,) of its solid shapes, once it stands."""
        spec = mujoco.MjSpec()
        frame = spec.worldbody.add_frame(quat=self._upright)
        spec.attach(self._part(mujoco), frame=frame, prefix="")
        model = spec.compile()
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        solid = np.flatnonzero(model.geom_group == _COLLISION_GROUP)
        turns = data.geom_xmat[solid].reshape(-1, 3, 3)
        boxes = model.geom_aabb[solid]
        centers = data.geom_xpos[solid] + np.einsum("gij,gj->gi", turns, boxes[:, :3])
        halves = np.einsum("gij,gj->gi", np.abs(turns), boxes[:, 3:])
        low, high = (centers - halves).min(axis=0), (centers + halves).max(axis=0)
        return (low + high) / 2, (high - low) / 2


def table_object_of(scene: str) -> TableObject:
    """Return what lies on the table of a scene: of Lift a cube, else an object of LIBERO.

    Raises:
        ConfigError: LIBERO has no such object.
        MissingDependencyError: LIBERO is not installed.
        SimulatorError: its assets are not there.
    """
    return (
        Cube(robosuite_asset("textures/red-wood.png"))
        if scene == LIFT_SCENE
        else LiberoObject(scene)
    )


def libero_objects() -> Mapping[str, Path]:
    """Return the files of all objects whose assets are there, by name.

    Raises:
        SimulatorError: there are no assets.
    """
    folder = assets_folder()
    files = (file for family in FAMILIES for file in sorted((folder / family).glob("*/*.xml")))
    return {file.stem: file for file in files if file.stem == file.parent.name}


def task_of(name: str) -> str:
    """Return what is to be done with an object of LIBERO, in words."""
    return f"lift the {name.replace('_', ' ')}"


def object_in(visible: Array) -> tuple[Array, Array]:
    """Return the object's pose (4, 4) and half of its edges (3,), of `ScenePhysics.visible`."""
    x, y, z, w, i, j, k = visible[_OBJECT_JOINT]
    pose = np.eye(4)
    pose[:3, :3] = (
        (1 - 2 * (j * j + k * k), 2 * (i * j - k * w), 2 * (i * k + j * w)),
        (2 * (i * j + k * w), 1 - 2 * (i * i + k * k), 2 * (j * k - i * w)),
        (2 * (i * k - j * w), 2 * (j * k + i * w), 1 - 2 * (i * i + j * j)),
    )
    pose[:3, 3] = (x, y, z)
    return pose, visible[_HALF_EXTENT].copy()


def _standing(mujoco: Any, listed: Any) -> Array:
    """Return the rotation (w, x, y, z) with which LIBERO puts an object down."""
    turns = listed.rotation
    if not isinstance(turns, Mapping):
        turns = {listed.rotation_axis: turns}
    whole, one = np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4)
    for axis, angles in turns.items():
        mujoco.mju_axisAngle2Quat(one, np.eye(3)["xyz".index(axis)], float(np.mean(angles)))
        mujoco.mju_mulQuat(whole, one, whole.copy())
    # LIBERO's samplers write (x, y, z, w) where MuJoCo reads (w, x, y, z), and its list of objects
    # is such that they stand when it is read so.
    return np.roll(whole, -1)
