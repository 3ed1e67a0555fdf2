"""Recorded motion beside the same actions repeated, and what makes the two equal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import gymnasium as gym
import numpy as np

from dzrobot.diagnostics import conventions
from dzrobot.diagnostics.conventions import (
    AGREES,
    UNCHANGED,
    Array,
    Misfit,
    Repair,
    RotationReading,
)
from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.input_variants import Image
from dzrobot.rollout.demonstrations.record import RecordedActions, replay
from dzrobot.rollout.environment import accepted, made_environment
from dzrobot.rollout.episode import Actor, EpisodeResult, run_episode
from dzrobot.rollout.protocol import EpisodeRules

FIRST_STEPS = 24
"""Rows of an episode that are repeated, and those until the gripper has moved."""

LAST_STEPS = 80
"""At most."""

_GRIPPER_STEPS = 8
_BETTER = 0.7
_LESS = 0.8
_WORSE = 1.1
_HALF = 0.5
_SURE = 0.02
_MOST_FAULTS = 3
_TRIED = 12
_REFINED = 6


@dataclass(frozen=True, kw_only=True)
class RecordedStart:
    """An episode of a dataset with what its cameras saw first."""

    number: int
    recording: RecordedActions
    images: Mapping[str, Image] = field(repr=False)
    """By view key, (H, W, 3); only of those that are looked at."""

    answers: Array | None = field(default=None, repr=False)
    """(T, A): the recorded actions, where ``recording`` has what was executed in their place. None:
    they were executed."""

    @property
    def start_known(self) -> bool:
        """Return whether the recording says where the episode began."""
        return self.recording.start is not None or self.recording.seed is not None


class Bench:
    """An environment that recordings are repeated in; a context manager.

    Args:
        env: Its name.
        arguments: Keyword arguments of ``gym.make``.
        robot: Whose states and actions they are.
        report: Called with the replays that are done, and how many are planned.
    """

    def __init__(
        self,
        env: str,
        arguments: Mapping[str, Any],
        robot: Embodiment,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._env = env
        self._arguments = arguments
        self._robot = robot
        self._report = report
        self._done = self._planned = 0
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def first_images(self, recording: RecordedActions) -> dict[str, Image]:
        """Return what the cameras show where ``recording`` began."""
        options = None if recording.start is None else {"init_state_id": recording.start}
        observation, _ = self._seeing.reset(seed=recording.seed or 0, options=options)
        self._counted()
        return {key: np.asarray(observation[key]) for key in self._robot.video_keys}

    def observations(
        self, recording: RecordedActions, steps: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Return what is seen at some ``steps`` while the actions of ``recording`` are repeated."""
        found: dict[int, dict[str, Any]] = {}
        at = -1

        def watch(observation: Mapping[str, Any]) -> None:
            nonlocal at
            at += 1
            if at in steps:
                found[at] = dict(observation)

        last = max(steps)
        replay(self._seeing, replace(recording, actions=recording.actions[: max(1, last)]),
               self._robot, watch)  # fmt: skip
        self._counted()
        return [found[step] for step in steps]

    def acted(self, actor: Actor, rules: EpisodeRules) -> EpisodeResult:
        """Return what comes of an episode that ``actor`` acts in."""
        outcome = run_episode(self._seeing, actor, rules)
        self._counted()
        return outcome

    def states(self, recording: RecordedActions, actions: Array) -> Array:
        """Return the states (T + 1, S) that ``actions`` (T, A) lead to from its start."""
        _, states = replay(self._blind, _with_actions(recording, actions), self._robot)
        self._counted()
        return states.astype(np.float64)

    def succeeds(self, recording: RecordedActions, actions: Array) -> bool:
        """Return whether ``actions`` (T, A) reach the goal from its start."""
        outcome, _ = replay(self._blind, _with_actions(recording, actions), self._robot)
        self._counted()
        return outcome.success

    def plan(self, count: int) -> None:
        """Count on ``count`` further replays."""
        self._planned += count

    def _counted(self) -> None:
        self._done += 1
        self._report(self._done, max(self._done, self._planned))

    @cached_property
    def _seeing(self) -> gym.Env[Any, Any]:
        return self._opened({})

    @cached_property
    def _blind(self) -> gym.Env[Any, Any]:
        """Without images, where the environment can: a step then takes a fraction of the time."""
        known, _ = accepted(self._env)
        return self._opened({"cameras": False}) if "cameras" in known else self._seeing

    def _opened(self, own: Mapping[str, Any]) -> gym.Env[Any, Any]:
        known, _ = accepted(self._env)
        goes_on = {"stop_on_success": False} if "stop_on_success" in known else {}
        limit = {"max_episode_steps": conventions.MOST_STEPS}
        env = made_environment(self._env, {**limit, **goes_on, **self._arguments, **own})
        made: gym.Env[Any, Any] = self._held.enter_context(closing(env))
        return made


def _with_actions(recording: RecordedActions, actions: Array) -> RecordedActions:
    return replace(recording, actions=np.ascontiguousarray(actions, np.float32))


@dataclass(frozen=True, kw_only=True)
class Motion:
    """What came of comparing the hand's motion."""

    repair: Repair
    """All that had to be changed; `UNCHANGED` where nothing."""

    faults: tuple[Repair, ...]
    """The same, one by one."""

    before: Misfit
    after: Misfit


class Motions:
    """Compares recorded with repeated motion, and looks for what makes them equal.

    Args:
        bench: Where recordings are repeated.
        episodes: What was recorded.
        hand: Which numbers move the hand.
        reading: How the recorded states write rotations.
    """

    def __init__(
        self,
        bench: Bench,
        episodes: Sequence[RecordedStart],
        hand: HandMotion,
        reading: RotationReading,
    ) -> None:
        self._bench, self._episodes = bench, episodes
        self._hand = hand
        self._reading = reading
        self._known: dict[Any, list[Array]] = {}

    @cached_property
    def _recordings(self) -> list[RecordedActions]:
        """What is repeated."""
        return [one.recording for one in self._episodes]

    def compare(self) -> Motion:
        """Return what has to be changed for the motion to be the recorded one."""
        chosen, now = UNCHANGED, self._misfit(UNCHANGED)
        before = now
        faults: list[Repair] = []
        while now.total > AGREES and len(faults) < _MOST_FAULTS:
            self._announce()
            best = min(self._tried(chosen, now), key=lambda tried: tried[1].total, default=None)
            if best is None or not self._mends(best[1], now):
                break
            fault, now = best
            chosen = fault if chosen is UNCHANGED else chosen.then(fault)
            faults.append(fault)
        if now.total > max(AGREES, _HALF * before.total) and not self._mends_a_part(now, before):
            # A change that mends half or less only follows what is there at random.
            return Motion(repair=UNCHANGED, faults=(), before=before, after=before)
        return Motion(repair=chosen, faults=tuple(faults), before=before, after=now)

    def _announce(self) -> None:
        """Tell the progress how much will be repeated for one more repair."""
        self._bench.plan(_TRIED * len(self._recordings))

    def repeated(self, repair: Repair) -> list[Array]:
        """Return the states of each episode when its repaired actions are repeated."""
        changed = [self._actions(recording, repair) for recording in self._recordings]
        key = tuple(actions.tobytes() for actions in changed)
        if key not in self._known:
            self._known[key] = [
                self._bench.states(recording, actions)
                for recording, actions in zip(self._recordings, changed, strict=True)
            ]
        return self._known[key]

    def _tried(self, chosen: Repair, now: Misfit) -> Iterator[tuple[Repair, Misfit]]:
        """Yield every further repair that may explain ``now``, and what is left with it."""
        for repair in self._candidates(chosen, now):
            whole = repair if chosen is UNCHANGED else chosen.then(repair)
            left = self._misfit(whole)
            yield repair, left
            if left.total < _SURE:
                return

    def _candidates(self, chosen: Repair, now: Misfit) -> Iterator[Repair]:
        hand, reading = self._hand, self._reading
        if now.fingers > AGREES:
            yield from conventions.gripper_repairs(hand)
        if now.translation > AGREES:
            if all(
                conventions.looks_absolute(np.asarray(r.actions), np.asarray(r.states), hand)
                for r in self._recordings
            ):
                yield from conventions.absolute_repairs(hand, reading)
            yield from conventions.row_repairs()
            yield from conventions.axis_repairs(hand)
        if now.rotation > AGREES:
            yield from conventions.turn_repairs(hand)
        scales = list[Repair]()
        for part, share, columns in (
            (0, now.translation, hand.translation), (1, now.rotation, hand.turn),
        ):  # fmt: skip
            if share > AGREES:
                scales += self._scale(chosen, part, columns)
        yield from scales
        if len(scales) > 1:
            # Each alone leaves the other, and half or double a rate mends some of both.
            yield scales[0].then(scales[1])
        if now.translation > AGREES:
            yield from conventions.motion_repairs(hand, reading)

    def _scale(self, chosen: Repair, part: int, columns: slice) -> Iterator[Repair]:
        """Yield the factor by which translation (0) or turn (1) is off, found in a few rounds."""
        factor = 1.0
        for _ in range(_REFINED):
            change = conventions.scaled(columns, factor)
            tried = chosen.then(Repair(what="", note="", change=change))
            recorded, replayed = self._steps(tried, part)
            more = conventions.scale_of(recorded, replayed)
            if not 1e-3 < more < 1e3:
                return
            factor *= more
            if abs(more - 1) < _SURE:
                break
        if abs(factor - 1) > AGREES:
            yield Repair(
                what=f"delta scale of the {'translation' if part == 0 else 'rotation'}",
                note=f"the hand moved {factor:.3g} times as far as these actions move it: multiply "
                f"action[{columns.start}:{columns.stop}] by {factor:.3g}",
                change=conventions.scaled(columns, factor),
            )

    def _steps(self, repair: Repair, part: int) -> tuple[list[Array], list[Array]]:
        recorded, replayed = [], []
        for recording, states in zip(self._recordings, self.repeated(repair), strict=True):
            own = self._compared(recording)[:: repair.recorded_every]
            one = conventions.steps_of(own, self._hand, self._reading)[part]
            stated = conventions.as_stated(self._hand)
            other = conventions.steps_of(states[:: repair.replayed_every], self._hand, stated)[part]
            one, other = conventions.aligned(one, other, repair.lag)
            recorded.append(one)
            replayed.append(other)
        return recorded, replayed

    def _misfit(self, repair: Repair) -> Misfit:
        found = [
            conventions.misfit(self._compared(recording), states, self._hand, self._reading, repair)
            for recording, states in zip(self._recordings, self.repeated(repair), strict=True)
        ]
        return Misfit(
            translation=float(np.mean([one.translation for one in found])),
            rotation=float(np.mean([one.rotation for one in found])),
            fingers=float(np.mean([one.fingers for one in found])),
        )

    def _compared(self, recording: RecordedActions) -> Array:
        """Return the states (T, S) of the rows that are compared."""
        return _prefix(recording, self._hand)

    def _actions(self, recording: RecordedActions, repair: Repair) -> Array:
        """Return the actions of the rows that are compared as ``repair`` has them."""
        states = self._compared(recording)
        return repair.change(recording.actions[: len(states)].astype(np.float64), states)

    def _mends(self, after: Misfit, before: Misfit) -> bool:
        """Return whether a repair explains most of a difference, or one part as a whole."""
        return after.total <= _BETTER * before.total or self._mends_a_part(after, before)

    def _mends_a_part(self, after: Misfit, before: Misfit) -> bool:
        """Return whether one part of the motion agrees now, and no other has become worse.

        Where translation and rotation are both off, the right repair of one leaves the other, and
        fingers that close beside the object.
        """
        pairs = list(zip(after.parts, before.parts, strict=True))
        one = any(self._is_mended(a, b) for a, b in pairs)
        return one and all(a <= max(AGREES, _WORSE * b) for a, b in pairs)

    def _is_mended(self, after: float, before: float) -> bool:
        """Return whether a part that differed agrees now."""
        return after <= AGREES < before


class Answers(Motions):
    """Compares recorded actions with what was executed in the same rows: they, and noise.

    Noise is left by every repair, so a part is mended where clearly less of its square is left.

    Args:
        bench: Where recordings would be repeated; nothing is.
        episodes: What was recorded, with ``answers``.
        hand: Which numbers move the hand.
        reading: How the recorded states write rotations.
    """

    @cached_property
    def _recordings(self) -> list[RecordedActions]:
        answers = [one.answers for one in self._episodes if one.answers is not None]
        pairs = zip(self._episodes, answers, strict=True)
        return [_with_actions(one.recording, rows) for one, rows in pairs]

    def _announce(self) -> None:
        # Nothing is repeated.
        pass

    def _compared(self, recording: RecordedActions) -> Array:
        # So all rows cost as little as the first ones.
        return recording.states.astype(np.float64)

    def _is_mended(self, after: float, before: float) -> bool:
        return before > AGREES and after**2 <= _LESS * before**2

    def _candidates(self, chosen: Repair, now: Misfit) -> Iterator[Repair]:
        # Both were written at one rate.
        found = super()._candidates(chosen, now)
        return (one for one in found if one.recorded_every == one.replayed_every == 1)

    def _steps(self, repair: Repair, part: int) -> tuple[list[Array], list[Array]]:
        columns = self._parts[part]
        done, said = [], []
        for recording, episode in zip(self._recordings, self._episodes, strict=True):
            repaired = self._actions(recording, repair)[:, columns]
            executed = np.asarray(episode.recording.actions, np.float64)[:, columns]
            one, other = conventions.aligned(executed, repaired, repair.lag)
            done.append(one)
            said.append(other)
        return done, said

    def _misfit(self, repair: Repair) -> Misfit:
        shares = []
        for part in range(len(self._parts)):
            done, said = map(np.concatenate, self._steps(repair, part))
            size = max(float(np.linalg.norm(done)), float(np.linalg.norm(said)), _SURE)
            shares.append(float(np.linalg.norm(done - said)) / size)
        return Misfit(*shares)

    @property
    def _parts(self) -> tuple[slice, slice, slice]:
        gripper = slice(self._hand.gripper, self._hand.gripper + 1)
        return self._hand.translation, self._hand.turn, gripper


def _prefix(recording: RecordedActions, hand: HandMotion) -> Array:
    """Return the first recorded states (T, S), until the gripper has moved."""
    gripper = np.sign(recording.actions[:, hand.gripper])
    changes = np.flatnonzero(np.diff(gripper))
    steps = max(FIRST_STEPS, int(changes[0]) + _GRIPPER_STEPS if len(changes) else 0)
    return recording.states[: min(steps, LAST_STEPS)].astype(np.float64)
