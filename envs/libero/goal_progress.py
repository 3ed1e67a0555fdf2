"""How far an episode got towards its goal, read from the simulator's predicates.

Every part of the goal, such as ``On bowl plate``, is followed by itself: did the gripper touch what
has to move, press it between its pads, let it go, bring it near? Nothing here changes the physics.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.episodes import NEAR_SHARE, FailureClass
from dzrobot.envs.libero.task_scene import geoms_below

GRASP_STEPS = 3
"""Control steps of 50 ms between the pads that make a grasp."""

HELD_STEPS = 3
"""A hold is over when the pads pressed in none of so many steps: contacts flicker."""

LIFTED_M = 0.04
"""Height of the cube's center above the table from which on Lift's goal holds."""

_GRIPPER = "gripper0_"

JOINT_RANGES = {
    "open": "default_open_ranges",
    "close": "default_close_ranges",
    "turnon": "default_turnon_ranges",
    "turnoff": "default_turnoff_ranges",
}
"""Predicates about a drawer, door or knob, and where its fixture keeps the positions at which they
hold."""

PLACED = ("in", "on")
"""Predicates about an object and its place."""


@dataclass(kw_only=True)
class _Thing:
    """What can be moved, and what was done to it."""

    geoms: NDArray[np.bool_]
    """(G,): which shapes of the scene are its own."""

    travel: Callable[[], float] | None = None
    """Share of its range that a drawer, door or knob has moved through; None: a free object."""

    touched: bool = False
    pressed: int = 0
    """Steps between the pads."""

    last_pressed: int = field(default=-HELD_STEPS)
    """Number of the last of them."""

    @property
    def grasped(self) -> bool:
        return self.travel is None and self.pressed >= GRASP_STEPS

    @property
    def handled(self) -> bool:
        """Whether it was grasped, or touched and brought through most of its range."""
        if self.travel is None:
            return self.grasped
        return self.touched and self.travel() > 1 - NEAR_SHARE


@dataclass(kw_only=True)
class _Part:
    """One predicate of the goal."""

    holds: Callable[[], bool]
    distance: Callable[[], float]
    """How far from holding it is, in meters or radians."""

    thing: _Thing
    """What has to move."""

    def __post_init__(self) -> None:
        self.start = self.distance()
        self.held_at_start = self.holds_now = self.holds()
        self.came_to_hold = False

    @property
    def is_near(self) -> bool:
        return self.distance() < NEAR_SHARE * self.start


class GoalProgress:
    """One episode; made when it begins, and stepped with it."""

    def __init__(self, env: Any) -> None:
        """Begin.

        Args:
            env: The robosuite environment behind a task, at the start.
        """
        self._data = env.sim.data
        names = [env.sim.model.geom_id2name(i) or "" for i in range(env.sim.model.ngeom)]
        pads = env.robots[0].gripper.important_geoms
        self._gripper = np.array([name.startswith(_GRIPPER) for name in names])
        self._pads = [np.isin(names, pads[f"{side}_fingerpad"]) for side in ("left", "right")]
        self._parts = [_lift(env)] if type(env).__name__ == "Lift" else list(_goal_parts(env))
        targets = [part.thing for part in self._parts]
        asked = np.any([target.geoms for target in targets], axis=0)
        self._others = [thing for thing in _movable(env) if not (thing.geoms & asked).any()]
        self._things = [*targets, *self._others]
        self._steps = 0

    def step(self) -> None:
        """Take in what the last control step did."""
        self._steps += 1
        contact = self._data._data.contact
        # Each contact once from either side; the normal points from the first shape to the second.
        first, second = np.concatenate([contact.geom, contact.geom[:, ::-1]]).T
        normals = np.concatenate([contact.frame[:, :3], -contact.frame[:, :3]])
        by_hand = self._gripper[first]
        first, second, normals = first[by_hand], second[by_hand], normals[by_hand]
        for thing in self._things if by_hand.any() else ():
            on_it = thing.geoms[second]
            thing.touched |= bool(on_it.any())
            left, right = (normals[on_it & pad[first]].sum(axis=0) for pad in self._pads)
            # From opposite sides: closed fingers that push an object touch it with both pads too.
            if left @ right < 0:
                thing.pressed += 1
                thing.last_pressed = self._steps
        for part in self._parts:
            part.holds_now = part.holds()
            part.came_to_hold |= part.holds_now and not part.held_at_start

    @property
    def failure_class(self) -> FailureClass | None:
        """How the episode failed if it ended now; None while the goal holds."""
        pending = [part for part in self._parts if not part.holds_now]
        if not pending:
            return None
        if any(part.came_to_hold for part in pending):
            return FailureClass.GOAL_LOST
        # Of several parts, the one that came farthest.
        best = max((self._reached(part) for part in pending), key=list(FailureClass).index)
        early = (FailureClass.NEVER_REACHED, FailureClass.NOT_GRASPED)
        return FailureClass.WRONG_OBJECT if best in early and self._wrong(pending) else best

    def _reached(self, part: _Part) -> FailureClass:
        thing = part.thing
        held = self._steps - thing.last_pressed < HELD_STEPS
        if part.is_near and thing.touched and (held or not thing.grasped):
            return FailureClass.NEAR_GOAL
        if thing.grasped:
            return FailureClass.HELD if held else FailureClass.DROPPED
        return FailureClass.NOT_GRASPED if thing.touched else FailureClass.NEVER_REACHED

    def _wrong(self, pending: Sequence[_Part]) -> bool:
        """Return whether another thing of a kind that is asked for was handled."""
        jointed = {part.thing.travel is not None for part in pending}
        return any(o.handled and (o.travel is not None) in jointed for o in self._others)


def _lift(env: Any) -> _Part:
    body = env.cube_body_id
    height = float(env.model.mujoco_arena.table_offset[2]) + LIFTED_M
    return _Part(
        holds=lambda: bool(env._check_success()),
        distance=lambda: max(0.0, height - float(env.sim.data.body_xpos[body][2])),
        thing=_Thing(geoms=_shapes(env, body)),
    )


def _goal_parts(env: Any) -> Iterator[_Part]:
    """Yield the predicates of a LIBERO task."""
    for predicate in env.parsed_problem["goal_state"]:
        kind, name = predicate[0].lower(), predicate[1]
        holds = partial(_holds, env, predicate)
        if kind in PLACED:
            body = env.obj_body_id[name]
            distance = partial(_apart, env, name, predicate[2])
            yield _Part(holds=holds, distance=distance, thing=_Thing(geoms=_shapes(env, body)))
        else:
            joints, fixture = _joints(env, name)
            span = fixture.object_properties["articulation"][JOINT_RANGES[kind]]
            distance = partial(_joint_way, env, joints, (min(span), max(span)))
            yield _Part(holds=holds, distance=distance, thing=_jointed(env, joints))


def _movable(env: Any) -> Iterator[_Thing]:
    """Yield every free object and every drawer, door and knob of a LIBERO scene."""
    if type(env).__name__ == "Lift":
        return
    for name in env.objects_dict:
        yield _Thing(geoms=_shapes(env, env.obj_body_id[name]))
    for fixture in env.fixtures_dict.values():
        for joint in fixture.joints:
            yield _jointed(env, [joint])


def _jointed(env: Any, joints: Sequence[str]) -> _Thing:
    model = env.sim.model
    bodies = [int(model.jnt_bodyid[model.joint_name2id(joint)]) for joint in joints]
    geoms = np.any([_shapes(env, body) for body in bodies], axis=0)
    began = [_position(env, joint) for joint in joints]

    def travel() -> float:
        spans = (np.ptp(model.jnt_range[model.joint_name2id(joint)]) for joint in joints)
        moved = (
            abs(_position(env, joint) - start) for joint, start in zip(joints, began, strict=True)
        )
        return max(way / float(span) for way, span in zip(moved, spans, strict=True))

    return _Thing(geoms=geoms, travel=travel)


def _joints(env: Any, name: str) -> tuple[list[str], Any]:
    """Return the joints that a predicate about ``name`` reads, and the fixture they belong to."""
    if name in env.object_sites_dict:
        site = env.object_sites_dict[name]
        return list(site.joints), env.get_object(site.parent_name)
    fixture = env.get_object(name)
    return list(fixture.joints), fixture


def _joint_way(env: Any, joints: Sequence[str], span: tuple[float, float]) -> float:
    """Return how far the farthest of ``joints`` is from ``span``."""
    places = [_position(env, joint) for joint in joints]
    return max(max(span[0] - place, place - span[1], 0.0) for place in places)


def _apart(env: Any, name: str, place: str) -> float:
    """Return the horizontal distance of an object from the center of its place."""
    states = env.object_states_dict
    one, two = (states[each].get_geom_state()["pos"] for each in (name, place))
    return float(np.linalg.norm((np.asarray(one) - np.asarray(two))[:2]))


def _holds(env: Any, predicate: Sequence[str]) -> bool:
    return bool(env._eval_predicate(predicate))


def _position(env: Any, joint: str) -> float:
    return float(env.sim.data.qpos[env.sim.model.get_joint_qpos_addr(joint)])


def _shapes(env: Any, body: int) -> NDArray[np.bool_]:
    return np.isin(np.arange(env.sim.model.ngeom), list(geoms_below(env.sim.model, body)))
