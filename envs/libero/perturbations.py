"""Perturbations that make a simulated scene harder in one respect, applied after a reset.

Every change is drawn from a seed alone and grows with the level, 1 to 5, along the same direction.
A scene is built anew at every reset, so nothing has to be undone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.libero.sim import Simulation
from dzrobot.errors import SimulatorError

Array = NDArray[np.float64]

CAMERA_RAD = 0.06
"""Turn of the exterior camera around what it looks at, a level."""

CAMERA_SHARE = 0.03
"""Change of its distance, a level."""

LIGHT_SHARE = 0.1
"""Change of brightness and color of every light, a level."""

LIGHT_RAD = 0.2
"""Turn of its direction, a level."""

TEXTURE_SHARE = 0.18
"""Share of another color in the materials of all fixed things, a level."""

ROBOT_RAD = 0.1
"""Length of the change of the seven joint angles, a level."""

LAYOUT_M = 0.01
"""Shift of everything that can move, together, a level."""

_DRAWS = 50
_ROBOT = ("robot", "gripper", "mount")


def perturb(sim: Simulation, axis: str, level: int, seed: int) -> None:
    """Change the scene.

    Args:
        sim: With the scene at its initial state.
        axis: One of `AXES`.
        level: 1 to 5.
        seed: Of all that is drawn.

    Raises:
        SimulatorError: every drawn change brings things into contact.
    """
    AXES[axis](sim.env, level, np.random.default_rng(seed))


def _camera(env: Any, level: int, draws: np.random.Generator) -> None:
    """Move the exterior camera over a sphere around what it looks at, nearer or farther."""
    model = env.sim.model._model
    number = env.sim.model.camera_name2id(env.camera_names[0])
    place, axes = model.cam_pos[number].copy(), _matrix(model.cam_quat[number])
    toward = -axes[:, 2]
    hand = np.array(env.sim.data.site_xpos[env.robots[0].eef_site_id])
    center = place + toward * float(toward @ (hand - place))
    turn = _turn(_direction(draws), CAMERA_RAD * level)
    stretch = 1.0 + CAMERA_SHARE * level * float(draws.choice([-1.0, 1.0]))
    model.cam_pos[number] = center + stretch * turn @ (place - center)
    model.cam_quat[number] = _quaternion(turn @ axes)


def _light(env: Any, level: int, draws: np.random.Generator) -> None:
    """Change brightness, color and direction of every light, and of the camera's own."""
    model = env.sim.model._model
    brighter = float(draws.choice([-1.0, 1.0]))
    tint = draws.uniform(-0.5, 0.5, 3)
    factor = np.clip(1.0 + LIGHT_SHARE * level * (brighter + tint), 0.05, None)
    turn = _turn(_direction(draws), LIGHT_RAD * level)
    for number in range(model.nlight):
        model.light_diffuse[number] *= factor
        model.light_specular[number] *= factor
        model.light_dir[number] = turn @ model.light_dir[number]
    model.vis.headlight.diffuse[:] *= factor
    model.vis.headlight.ambient[:] *= factor


def _texture(env: Any, level: int, draws: np.random.Generator) -> None:
    """Mix another color into the materials of table, floor, walls and furniture."""
    model = env.sim.model._model
    share = min(1.0, TEXTURE_SHARE * level)
    still = [number for number in range(model.ngeom) if _is_fixed(env, number)]
    materials = sorted({int(model.geom_matid[number]) for number in still} - {-1})
    for table, numbers in (
        (model.mat_rgba, materials),
        (model.geom_rgba, [number for number in still if model.geom_matid[number] < 0]),
    ):
        for number in numbers:
            other = draws.uniform(0.1, 1.0, 3)
            table[number, :3] = (1 - share) * table[number, :3] + share * other


def _robot_init(env: Any, level: int, draws: np.random.Generator) -> None:
    """Bend the arm's joints to another pose, from which nothing is touched."""
    robot, data = env.robots[0], env.sim.data
    joints = list(robot._ref_joint_pos_indexes)
    before = np.array(data.qpos[joints])
    touching = _contacts(env)

    def bend() -> None:
        data.qpos[joints] = before + ROBOT_RAD * level * _direction(draws, len(joints))

    _until_free(env, bend, touching)
    robot.controller.update(force=True)
    robot.controller.reset_goal()


def _layout(env: Any, level: int, draws: np.random.Generator) -> None:
    """Shift all that can move on its own, together, so that what lies on what stays so."""
    model, data = env.sim.model._model, env.sim.data
    free = [
        int(model.jnt_qposadr[number])
        for number in range(model.njnt)
        if model.jnt_type[number] == 0  # mjJNT_FREE
    ]
    before = {place: np.array(data.qpos[place : place + 2]) for place in free}
    touching = _contacts(env)

    def shift() -> None:
        offset = LAYOUT_M * level * _direction(draws, 2)
        for place, start in before.items():
            data.qpos[place : place + 2] = start + offset

    _until_free(env, shift, touching)


AXES: Mapping[str, Callable[[Any, int, np.random.Generator], None]] = {
    "camera": _camera,
    "light": _light,
    "texture": _texture,
    "robot_init": _robot_init,
    "layout": _layout,
}
"""What can be changed, and how."""


def _until_free(env: Any, change: Callable[[], None], allowed: frozenset[Any]) -> None:
    """Draw a change until nothing touches that did not before."""
    for _ in range(_DRAWS):
        change()
        env.sim.forward()
        if _contacts(env) <= allowed:
            return
    raise SimulatorError(
        f"no change of {_DRAWS} leaves everything apart; take a lower level or another seed"
    )


def _contacts(env: Any) -> frozenset[tuple[int, int]]:
    """Return which bodies touch, without contacts with fixed things."""
    model, data = env.sim.model._model, env.sim.data
    found = set()
    for contact in data.contact[: data.ncon]:
        one, other = (int(model.geom_bodyid[geom]) for geom in (contact.geom1, contact.geom2))
        arm = any(_of_robot(env, body) for body in (one, other))
        if arm or (model.body_weldid[one] and model.body_weldid[other]):
            found.add((min(one, other), max(one, other)))
    return frozenset(found)


def _of_robot(env: Any, body: int) -> bool:
    return (env.sim.model.body_id2name(body) or "").startswith(_ROBOT)


def _is_fixed(env: Any, geom: int) -> bool:
    model = env.sim.model._model
    body = int(model.geom_bodyid[geom])
    return model.body_weldid[body] == 0 and not _of_robot(env, body)


def _direction(draws: np.random.Generator, size: int = 3) -> Array:
    drawn = draws.normal(size=size)
    unit: Array = drawn / np.linalg.norm(drawn)
    return unit


def _turn(axis: Array, angle: float) -> Array:
    """Return the rotation (3, 3) about a unit vector."""
    import mujoco

    quaternion = np.zeros(4)
    mujoco.mju_axisAngle2Quat(quaternion, axis, angle)
    return _matrix(quaternion)


def _matrix(quaternion: Array) -> Array:
    """Return the rotation (3, 3) of MuJoCo's quaternion (w, x, y, z)."""
    import mujoco

    flat = np.zeros(9)
    mujoco.mju_quat2Mat(flat, np.asarray(quaternion, np.float64))
    return flat.reshape(3, 3)


def _quaternion(matrix: Array) -> Array:
    import mujoco

    quaternion = np.zeros(4)
    mujoco.mju_mat2Quat(quaternion, np.ascontiguousarray(matrix).reshape(9))
    return quaternion
