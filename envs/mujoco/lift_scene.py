"""The scene of robosuite's Lift as a MuJoCo model: arm, hand, table and an object.

Shapes, poses and sizes are those of robosuite's Lift, but the origin is the arm's base, as it is
for the arm's clients. Masses of the arm are those of the URDF that its clients get: robosuite's
wrist turns several times as hard. Only robosuite's files are used, none of its code.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dzrobot.envs.mujoco.simulator import check_versions, choose_backend
from dzrobot.envs.panda.poses import Array

Point = tuple[float, float, float]

EMPTY_SCENE = "empty"
"""Name of the scene without anything around the arm."""

LIFT_SCENE = "lift"
"""Name of robosuite's Lift: a table with a red cube."""

OBJECT = "object"
"""Name of the body on the table, and of its free joint, whose pose is that of its middle."""

BASE = (-0.56, 0.0, 0.912)
"""Where the arm's base stands in robosuite's Lift (m)."""

TABLE = (0.0, 0.0, 0.8)
"""Where the middle of the table's top is there (m)."""

TABLE_HALF = (0.4, 0.4, 0.025)
"""Half of the table's size (m)."""

TABLE_TOP_M = TABLE[2] - BASE[2]
"""Height of the table's top above the arm's base."""

READY = np.array([0.0, np.pi / 16, 0.0, -5 * np.pi / 6, 0.0, np.pi - 0.2, np.pi / 4])
"""Joint angles that robosuite's Lift begins with (rad)."""

ARM = tuple(f"joint{number}" for number in range(1, 8))
FINGERS = ("finger_joint1", "finger_joint2")
CAMERAS = ("agentview", "eye_in_hand", "sideview")
"""The exterior camera, the one in the wrist, and another exterior."""

HAND_KG, FINGER_KG = 0.53, 0.1
"""Masses of the Franka Hand without its fingers, and of one finger."""

HAND_INERTIA = (0.001, 0.0025, 0.0017)
FINGER_INERTIA = (2.4e-5, 2.4e-5, 1e-5)
"""About their centers (kg m^2)."""

ROTOR_INERTIA = np.array([0.6, 0.6, 0.5, 0.5, 0.2, 0.2, 0.1])
"""Inertia of the motors, seen through their gears (kg m^2)."""

VISCOUS = np.array([1.5, 1.5, 1.2, 1.2, 0.5, 0.4, 0.3])
"""Nm per rad/s."""

COULOMB = np.array([0.3, 0.3, 0.25, 0.25, 0.12, 0.1, 0.08])
"""Dry friction that is left after the arm's own compensation (Nm)."""

LINK_SPHERE_M = 0.08
"""A solid sphere of this radius is close enough for the inertia of each link."""

LINK_INERTIA_M2 = 0.4 * LINK_SPHERE_M**2
"""Inertia of a link of 1 kg about any axis through its joint (kg m^2)."""

STIFF = (0.002, 1.0)
"""Time (s) and damping of what the fingers hold: robosuite's are for a sixth of their force."""

_MOUNT_M = 0.01
_BEYOND_RAD = 0.05
_LEG_RADIUS_M, _LEG_INSET_M = 0.025, 0.1
_NOTHING = 1e-6
_MEMORY = 64 << 20


@dataclass(frozen=True)
class ObjectStart:
    """Where the object of an episode is at first, and how large it is."""

    position: Array
    """Position of its middle above the middle of the table's top, (3,), m."""

    yaw: float
    """About the vertical (rad)."""

    half: Array
    """Half of its extents along its own axes, (3,), m."""

    @property
    def quaternion(self) -> tuple[float, float, float, float]:
        """(w, x, y, z)."""
        return (float(np.cos(self.yaw / 2)), 0.0, 0.0, float(np.sin(self.yaw / 2)))


@dataclass(frozen=True)
class ArmMechanics:
    """How an arm in the scene moves, where it is to move by forces."""

    joint_low: Array
    joint_high: Array
    """(7,), rad."""

    link_mass: Array
    """(7,), kg."""


class TableObject(Protocol):
    """Something that can be grasped."""

    task: str
    """What is to be done with it, in words."""

    def add(self, mujoco: Any, spec: Any, stiff: tuple[float, float]) -> None:
        """Add it to a scene, as a free body `OBJECT`.

        Args:
            mujoco: The module.
            spec: The scene.
            stiff: Time (s) and damping of its contacts, where it does not say them itself.
        """
        ...

    def start(self, number: int) -> ObjectStart:
        """Return where an initial state has it."""
        ...

    def fit(self, model: Any, half: Array) -> None:
        """Give it the size of an episode in a compiled scene."""
        ...

    def lifted_m(self, half: Array) -> float:
        """Return the height of its middle above the table from which on the goal holds."""
        ...


def load_mujoco() -> Any:
    """Return mujoco, with the backend chosen that it draws with.

    Raises:
        MissingDependencyError: mujoco or robosuite is not installed.
        SimulatorError: one of them has the wrong version.
    """
    check_versions()
    choose_backend()
    import mujoco

    return mujoco


def load_model(
    table_object: TableObject | None = None,
    *,
    drawn: bool,
    boxes: Mapping[str, tuple[Array, Array]] | None = None,
    mounts: Mapping[str, tuple[Point, Point, float]] | None = None,
    mechanics: ArmMechanics | None = None,
) -> Any:
    """Return the compiled scene.

    Args:
        table_object: What lies on the table.
        drawn: With what cameras see; else only with what moves and touches, which loads faster.
        boxes: Center and half of the size, (3,), m, of other boxes in it, by the name of their
            shapes.
        mounts: What the hand carries, by the name of its shape: corners of a box, or with a radius
            (m) the ends of a capsule's axis, from the flange in the hand's axes.
        mechanics: Of the arm. None: robosuite's, for scenes that are looked at and not moved.
    """
    mujoco = load_mujoco()
    spec = mujoco.MjSpec.from_file(str(robosuite_asset("base.xml")))
    # Meshes lie beside the parts, not beside the settings that all scenes of robosuite share.
    spec.meshdir = ""
    spec.option.timestep = 1e-3
    # robosuite's 5,000 contacts take 1.2 GiB of address space for each scene. What is reserved
    # counts when a process forks.
    spec.memory = _MEMORY
    for part, place in (
        (_arena(mujoco), np.negative(BASE)),
        (_arm(mujoco, mechanics), (0.0, 0.0, 0.0)),
    ):
        part.compiler.degree = False
        spec.attach(part, frame=spec.worldbody.add_frame(pos=place), prefix="")
    if table_object is not None:
        table_object.add(mujoco, spec, STIFF)
    for name, (center, half) in (boxes or {}).items():
        spec.worldbody.add_geom(name=name, type=mujoco.mjtGeom.mjGEOM_BOX, pos=center, size=half)
    for name, (low, high, radius_m) in (mounts or {}).items():
        _mount(mujoco, spec, name, (low, high), radius_m)
    if not drawn:
        spec.compiler.discardvisual = True
    return spec.compile()


def _mount(mujoco: Any, spec: Any, name: str, ends: tuple[Point, Point], radius_m: float) -> None:
    hand, (low, high) = spec.body("right_hand"), np.array(ends)
    if radius_m:
        hand.add_geom(
            name=name, type=mujoco.mjtGeom.mjGEOM_CAPSULE, fromto=[*low, *high],
            size=[radius_m, 0.0, 0.0],
        )  # fmt: skip
        return
    hand.add_geom(
        name=name, type=mujoco.mjtGeom.mjGEOM_BOX, pos=(low + high) / 2, size=(high - low) / 2
    )


def robosuite_asset(name: str) -> Path:
    """Return a file of robosuite's models, which must be installed."""
    place = importlib.util.find_spec("robosuite")
    assert place is not None, "checked by load_mujoco"
    return Path(str(place.origin)).parent / "models" / "assets" / name


def _arena(mujoco: Any) -> Any:
    """Return floor, walls, lights, cameras, and the table of robosuite's Lift."""
    arena = mujoco.MjSpec.from_file(str(robosuite_asset("arenas/table_arena.xml")))
    long, wide, thick = TABLE_HALF
    arena.body("table").pos = np.subtract(TABLE, (0.0, 0.0, thick))
    for name in ("table_collision", "table_visual"):
        arena.geom(name).size = TABLE_HALF
    leg = (TABLE[2] - thick) / 2.0
    corners = ((1, 1), (-1, 1), (-1, -1), (1, -1))
    for number, (right, front) in enumerate(corners, start=1):
        geom = arena.geom(f"table_leg{number}_visual")
        geom.pos = (right * (long - _LEG_INSET_M), front * (wide - _LEG_INSET_M), -leg)
        geom.size = (_LEG_RADIUS_M, leg, 0.0)
    return arena


def _arm(mujoco: Any, mechanics: ArmMechanics | None) -> Any:
    """Return arm, mount and hand; they are driven by applied forces and their gravity is held."""
    arm = mujoco.MjSpec.from_file(str(robosuite_asset("robots/panda/robot.xml")))
    hand = mujoco.MjSpec.from_file(str(robosuite_asset("grippers/panda_gripper.xml")))
    mount = mujoco.MjSpec.from_file(str(robosuite_asset("mounts/rethink_mount.xml")))
    mount.body("base").name = "mount"
    mount.body("mount").pos = (0.0, 0.0, _MOUNT_M)
    for part in (hand, mount):
        part.compiler.degree = False
    arm.attach(hand, frame=arm.body("right_hand").add_frame(), prefix="")
    arm.attach(mount, frame=arm.body("base").add_frame(), prefix="")
    for actuator in list(arm.actuators):
        actuator.delete()
    if mechanics is not None:
        _weigh(arm, mechanics)
    for body in arm.bodies:
        body.gravcomp = 1.0
    for name in ("finger1_pad_collision", "finger2_pad_collision"):
        arm.geom(name).solref = STIFF
    first, second = FINGERS
    arm.add_equality(
        type=mujoco.mjtEq.mjEQ_JOINT, objtype=mujoco.mjtObj.mjOBJ_JOINT, name1=first, name2=second,
        data=[0.0, -1.0, *[0.0] * 9],
    )  # fmt: skip
    return arm


def _weigh(arm: Any, mechanics: ArmMechanics) -> None:
    """Give arm and hand their masses, about where the joints are, as in the clients' URDF."""
    # A joint beyond its range is stopped by the arm's reflexes, which come first.
    for name, low, high in zip(ARM, mechanics.joint_low, mechanics.joint_high, strict=True):
        arm.joint(name).range = (low - _BEYOND_RAD, high + _BEYOND_RAD)
    inertia = LINK_INERTIA_M2 * mechanics.link_mass
    bodies = {
        f"link{number}": (mass, (turning,) * 3)
        for number, (mass, turning) in enumerate(
            zip(mechanics.link_mass, inertia, strict=True), start=1
        )
    }
    bodies["right_gripper"] = (HAND_KG, HAND_INERTIA)
    bodies["leftfinger"] = bodies["rightfinger"] = (FINGER_KG, FINGER_INERTIA)
    for name in ("right_hand", "finger_joint1_tip", "finger_joint2_tip"):
        bodies[name] = (_NOTHING, (_NOTHING,) * 3)
    for name, (mass, turning) in bodies.items():
        body = arm.body(name)
        body.mass, body.inertia = mass, turning
        if name.startswith("link"):
            body.ipos = (0.0, 0.0, 0.0)
        body.iquat = (1.0, 0.0, 0.0, 0.0)
