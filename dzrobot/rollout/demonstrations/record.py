"""Recording episodes that someone or something drives, and driving recorded ones again.

An episode is run by :func:`dzrobot.rollout.run_episode`; what is recorded is what passed through
the environment.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import check_holds, hold_command
from dzrobot.embodiments.spec import Embodiment
from dzrobot.files import undone_on_error
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.checks import EpisodeWatch
from dzrobot.recording.formats import INTERVENTION
from dzrobot.rng import seed_sequence
from dzrobot.rollout.episode import Actor, EpisodeResult, Watch, run_episode
from dzrobot.rollout.protocol import EpisodeRules

SENSOR_TIMES = ("frame_time_s.", "state_time_s", "time_s")
SENSOR_COUNTS = ("frame_number.", "late_steps")
"""Beginnings of the info keys that are kept beside every frame."""

EXECUTED = "executed_action"
"""Column of what was done where noise was added to the action of the same row. Its name begins with
neither ``action`` nor ``observation``: LeRobot's policies take such columns for theirs."""

DONE = "done_action"
"""Key of the info in which :class:`NoisyActions` says what was done."""

NO_START = -1
"""Start of an episode whose environment has no numbered initial states."""

DISCARDED = "discarded"
"""How an episode ended that its operator wants no trace of."""


@dataclass(frozen=True)
class RecordedEpisode:
    """What came of one recorded episode."""

    outcome: EpisodeResult
    frames: int
    kept: bool
    measured_hz: float = 0.0
    """Frames per second that the loop reached; 0: no clock was read."""

    late_steps: int = 0
    abort: str = ""
    reason: str = ""
    """Why it failed; empty of a success."""

    interventions: int = 0
    """Rows whose action a person chose in the place of a policy."""

    warnings: Sequence[str] = ()
    """What training cannot use of it."""


class RecordedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Adds every step to a writer: what was seen, what was done, and when each sensor saw it.

    Args:
        env: The environment.
        writer: Where frames go.
        intervened: Asked after every step whether a person chose its action in the place of a
            policy; the column ``intervention`` says so. None: there is no such column.
        facts: Of every episode, such as how it was steered; kept with it.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        writer: EpisodeWriter,
        intervened: Callable[[], bool] | None = None,
        facts: Mapping[str, float | str] | None = None,
    ) -> None:
        super().__init__(env)
        self.facts = facts or {}
        """Facts about every episode."""

        self.writer = writer
        """Where frames go."""

        self.watch = EpisodeWatch(writer.embodiment, writer.fps)
        """Looks for what training cannot use."""

        self.takeovers: list[list[int]] = []
        """First and last row of every stretch of this episode in which a person acted in the place
        of a policy."""

        self._rows = 0
        self._intervened = intervened
        self._seen: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
        self._began_s = 0.0
        self.info: Mapping[str, Any] = {}
        """The newest info."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._seen, self.info = (observation, info), info
        self.watch = EpisodeWatch(self.writer.embodiment, self.writer.fps)
        self._rows, self.takeovers = 0, []
        # Sensor times count from here; on one clock, so they can be compared with each other.
        self._began_s = self._now_s(info)
        return observation, info

    @property
    def interventions(self) -> int:
        """Rows of this episode whose action a person chose in the place of a policy."""
        return sum(last - first + 1 for first, last in self.takeovers)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the reset, by the clock of the environment where it tells it."""
        return self._now_s(self.info) - self._began_s

    def _now_s(self, info: Mapping[str, Any]) -> float:
        return float(info["time_s"]) if "time_s" in info else time.monotonic()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out ``action`` and record it with what it was chosen from."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        seen, about = self._seen
        start = info.get("init_state_id")
        extras = {
            "next.reward": np.float32(reward),
            "next.done": np.bool_(terminated or truncated),
            "init_state_id": np.int64(NO_START if start is None else start),
            **self._sensors(about),
        }
        if self._intervened is not None:
            extras[INTERVENTION] = np.bool_(person := self._intervened())
            if person and self.takeovers and self.takeovers[-1][1] == self._rows - 1:
                self.takeovers[-1][1] = self._rows
            elif person:
                self.takeovers.append([self._rows, self._rows])
        self._rows += 1
        if DONE in info:
            # Learned from is what was chosen; what noise made of it is kept to be repeated.
            kept, extras[EXECUTED] = np.asarray(action, np.float32), info[DONE]
        else:
            # What an arm's limits left of the action, or where a person who guides it has led it.
            kept = np.asarray(info.get("executed_action", action), np.float32)
            if EXECUTED in self.writer.columns:
                # Earlier episodes were made with noise: every episode has the column.
                extras[EXECUTED] = kept
        self.writer.add_frame(seen, kept, extras)
        self.watch.see(seen, kept)
        self._seen, self.info = (observation, info), info
        return observation, reward, terminated, truncated, info

    def _sensors(self, info: Mapping[str, Any]) -> dict[str, Any]:
        times = {
            _column(f"timestamp.{name.removeprefix('frame_time_s.')}"): np.float64(
                value - self._began_s
            )
            for name, value in info.items()
            if name.startswith(SENSOR_TIMES)
        }
        counts = {
            _column(f"sensor.{name}"): np.int64(value)
            for name, value in info.items()
            if name.startswith(SENSOR_COUNTS)
        }
        return times | counts


def _column(name: str) -> str:
    # LeRobot takes every column with "image" in its name for images.
    return name.replace("image", "camera")


def record_episode(
    env: RecordedEnv, actor: Actor, writer: EpisodeWriter, rules: EpisodeRules, *, keep_all: bool
) -> RecordedEpisode:
    """Run one episode and commit it to ``writer``; an exception on the way discards it.

    Args:
        env: Records into ``writer``.
        actor: What acts.
        writer: The dataset.
        rules: Where the episode begins and ends.
        keep_all: Whether episodes without success are kept too.
    """
    with undone_on_error(writer.discard):
        outcome = run_episode(env, actor, rules)
    # A pause does not make the loop slow.
    seconds = env.elapsed_s - float(env.info.get("paused_s", 0.0))
    late = int(env.info.get("late_steps", 0))
    abort = str((outcome.robot or {}).get("abort", ""))
    kept = (keep_all or outcome.success) and outcome.ended != DISCARDED
    measured = outcome.steps / max(seconds, 1e-9)
    reason = why_it_failed(outcome, str(env.info.get("abort_message", "")))
    if kept:
        writer.save_episode(
            success=outcome.success,
            init_state_id=NO_START if outcome.init_state_id is None else outcome.init_state_id,
            ended=outcome.ended,
            late_steps=late,
            measured_hz=measured,
            **({} if rules.seed is None else {"seed": rules.seed}),
            **({} if outcome.success else {"reason": reason}),
            **_helped(env, seconds if "time_s" in env.info else outcome.steps / writer.fps),
            **_facts(outcome.robot or {}),
            **env.facts,
        )
    else:
        writer.discard()
    return RecordedEpisode(
        outcome, outcome.steps, kept, measured, late, abort, reason, env.interventions,
        env.watch.warnings(),
    )  # fmt: skip


def why_it_failed(outcome: EpisodeResult, abort_message: str = "") -> str:
    """Return why an episode failed: a person's words, else the policy's or the environment's.

    Empty where it succeeded.
    """
    if outcome.success:
        return ""
    reason = str((outcome.robot or {}).get("reason", ""))
    failed = "" if outcome.policy_failure is None else outcome.policy_failure.error
    return reason or failed or outcome.failure_class or abort_message or outcome.ended


def _helped(env: RecordedEnv, seconds: float) -> dict[str, Any]:
    """Return where a person acted, and what the episode cost robot and person."""
    rows = env.interventions
    person_s = rows / env.writer.fps if env.takeovers else 0.0
    facts = {"interventions": rows, "takeovers": env.takeovers} if rows else {}
    return {**facts, "robot_s": round(seconds, 3), "person_s": round(person_s, 3)}


def _facts(robot: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the arm's environment reported beyond the recording."""
    known = ("late_steps", "reason")
    return {
        name: value
        for name, value in robot.items()
        if isinstance(value, str | bool | int | float) and name not in known
    }


@dataclass(frozen=True)
class RecordedActions:
    """One episode of a dataset, without its images."""

    actions: NDArray[np.float32]
    """(steps, A)."""

    states: NDArray[np.float32]
    """(steps, S)."""

    start: int | None
    """Number of the start it began from, where the recording says so."""

    seed: int | None = None
    """What its environment was reset with, where the recording says so."""

    success: bool | None = None
    """Whether the task was done, where the recording says so."""

    executed: NDArray[np.float32] | None = None
    """(steps, A): what was done, where noise was added to ``actions``. None: these were done."""

    @property
    def to_repeat(self) -> "RecordedActions":
        """Return the same with what was done as its actions: what leads to the same states."""
        done = self.actions if self.executed is None else self.executed
        return replace(self, actions=done, executed=None)


class ReplayActor(Actor):
    """Repeats recorded actions.

    Args:
        actions: (steps, A); after the last one the robot is held.
        robot: Says how.
    """

    def __init__(self, actions: NDArray[np.float32], robot: Embodiment) -> None:
        self._robot = robot
        self._actions = actions
        self._step = 0

    def begin(self, env: Any) -> None:
        """Start at the first action."""
        self._step = 0

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the next action.

        Raises:
            ConfigError: there is none left, and nothing says how the robot is held.
        """
        step, self._step = self._step, self._step + 1
        if step >= len(self._actions):
            check_holds(self._robot, "after the last recorded action")
            last = self._actions[-1] if len(self._actions) else None
            return hold_command(self._robot, observation, last), 0.0
        return self._actions[step].copy(), 0.0


def replay(
    env: gym.Env[Any, Any],
    recording: RecordedActions,
    robot: Embodiment,
    look: Watch = lambda _: None,
) -> tuple[EpisodeResult, NDArray[np.float32]]:
    """Send what was done in ``recording`` to ``env``; return the outcome and states (steps, S).

    Args:
        env: The environment.
        recording: What is repeated, and from where.
        robot: Whose states they are.
        look: Called with the first observation and after every step.
    """
    seen: list[NDArray[np.float32]] = []

    def watch(observation: Any) -> None:
        look(observation)
        seen.append(np.concatenate([observation[key] for key in robot.state_keys]))

    rules = EpisodeRules(
        seed=recording.seed or 0,
        init_state_id=recording.start,
        max_steps=len(recording.actions),
    )
    actor = ReplayActor(recording.to_repeat.actions, robot)
    outcome = run_episode(env, actor, rules, stop_at_success=False, watch=watch)
    return outcome, np.stack(seen)


class CallableActor(Actor):
    """Asks a function for every action.

    Args:
        function: Takes an observation, returns (A,) numbers in [-1, 1].
    """

    def __init__(self, function: Callable[[Observation], Any]) -> None:
        self._function = function

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return what the function says, and how long it took (ms)."""
        began = time.perf_counter()
        action = np.asarray(self._function(observation), np.float32)
        return action, 1000 * (time.perf_counter() - began)


NOISY_NUMBERS = 6
"""Numbers of an action: those that move the hand; the gripper's are left alone."""


class NoisyActions(gym.ActionWrapper[Any, Any, Any]):
    """Adds noise to the first six numbers of every action, keyed by the seed of the reset.

    What is done stays within the action space, and the info says it (:data:`DONE`).

    Args:
        env: Where it is done.
        noise: Standard deviation, in the units of the actions.
    """

    def __init__(self, env: gym.Env[Any, Any], noise: float) -> None:
        super().__init__(env)
        self._noise = noise
        self._draws = _draws(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed, the draws continue."""
        if seed is not None:
            self._draws = _draws(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out ``action`` with noise."""
        noisy = self.action(action)
        observation, reward, terminated, truncated, info = self.env.step(noisy)
        if self._noise:
            # An arm's limits may leave less of it.
            done = np.asarray(info.get("executed_action", noisy), np.float32)
            info = {**info, DONE: done}
        return observation, reward, terminated, truncated, info

    def action(self, action: np.ndarray) -> np.ndarray:
        """Return what is done in the place of ``action``."""
        drawn = self._draws.normal(0.0, self._noise, NOISY_NUMBERS).astype(np.float32)
        executed: np.ndarray = action.copy()
        executed[:NOISY_NUMBERS] += drawn[: len(executed)]
        if isinstance(self.action_space, gym.spaces.Box):
            executed = executed.clip(self.action_space.low, self.action_space.high)
        return executed


def _draws(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed_sequence("nois", seed))
