"""The state of one episode on the arm: control rate, recorded facts, and the success rule."""

import copy
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np

from dzrobot.envs.driver_process import DisconnectedError
from dzrobot.envs.franka.franka_config import FrankaConfig, RewardConfig
from dzrobot.envs.franka.operator.operator import OperatorVerdict
from dzrobot.envs.franka.safeguards.limits import Abort, RefusalError
from dzrobot.envs.franka.sensing import Reading
from dzrobot.envs.franka.workcells import ControllerEndedError, RateLimiter, Scene
from dzrobot.envs.panda.state import ArmState
from dzrobot.errors import ConfigError, DzrobotError, RobotError, StoppedError
from dzrobot.importing import load_reference

Observation = Mapping[str, Any]

_log = logging.getLogger(__name__)

SETTLES_S = 0.5
"""The arm reports the share of its last hundred commands; by then all of them are ours."""

POOR_CONNECTION = (
    "use a real-time kernel, a network port of its own without a switch, and end other programs "
    "(`dzrobot doctor franka` checks all of it)"
)
"""What to do where commands do not reach the arm."""

POOR_S = 1.0
"""For how long too few commands must have reached the arm: it reports the share of a tenth of a
second, which varies by some percent."""

_KEPT = ("abort", "abort_message", "recoveries", "late_steps", "paused_s", "is_grasped")
"""What of the last info of an episode is kept."""


class PredicateRule:
    """Success once a predicate has held for some steps in a row.

    Args:
        holds: Takes observation and arm state.
        steps: How many steps in a row.
    """

    def __init__(self, holds: Callable[[Observation, ArmState], bool], steps: int) -> None:
        self._holds = holds
        self._steps = steps
        self._held = 0

    def begin(self) -> None:
        """Forget what held before."""
        self._held = 0

    def judge(self, observation: Observation, state: ArmState) -> OperatorVerdict:
        """Count the steps in a row."""
        self._held = self._held + 1 if self._holds(observation, state) else 0
        return OperatorVerdict.SUCCESS if self._held >= self._steps else OperatorVerdict.OPEN


def rule_for(config: RewardConfig, scene: Scene | None = None) -> PredicateRule:
    """Return the rule that ``config`` asks for; an operator's word counts besides, always.

    Raises:
        UnknownNameError: the callback cannot be found.
        ConfigError: the scene is to say it, and there is none.
    """
    match config.rule:
        case "pose":
            goal = np.array(config.position)

            def near(_: Observation, state: ArmState) -> bool:
                return bool(np.linalg.norm(state.pose[:3, 3] - goal) <= config.tolerance_m)

            return PredicateRule(near, config.hold_steps)
        case "callback":
            # The configuration has checked that there is one.
            named = load_reference(config.callback or "", "reward.callback", Callable)
            return PredicateRule(named, config.hold_steps)
        case "scene":
            if scene is None:
                raise ConfigError(
                    "reward.rule='scene' needs a workcell that knows its objects: "
                    "workcell='emulated'. On this one let a person say it (rule: operator), or a "
                    "pose or a function of yours"
                )
            return PredicateRule(lambda *_: scene.goal_holds(), config.hold_steps)
        case "operator" | "none":
            return PredicateRule(lambda *_: False, 1)


class ArmEpisodeFacts:
    """Counts what happens in one episode, and warns of a poor connection once.

    Args:
        config: The workcell.
        lasting: What is true of all its episodes; see :func:`lasting_facts`.
        start_off_m: How far from its start the hand was when the episode began.
    """

    def __init__(
        self, config: FrankaConfig, lasting: Mapping[str, Any], *, start_off_m: float = 0.0
    ) -> None:
        self._least = config.controller.least_success_rate
        self._fault = config.controller.fault_success_rate
        self._lasting = dict(lasting)
        self._limited: Counter[str] = Counter()
        self._lowest: float | None = None
        self._controlled_since_s: float | None = None
        self._recoveries = 0
        self._warned = False
        self._poor_since_s: float | None = None
        self._poor_s = 0.0
        self._start_off_m = start_off_m

    def note(self, state: ArmState, limited_by: tuple[str, ...], recoveries: int) -> None:
        """Take a step's state, and what its action was limited by."""
        self._limited.update(limited_by)
        if recoveries != self._recoveries or not state.controlled:
            self._recoveries = recoveries
            self.restart()
        if not state.controlled:
            return
        if self._controlled_since_s is None:
            self._controlled_since_s = state.robot_time_s
        if state.robot_time_s - self._controlled_since_s < SETTLES_S:
            return
        rate, now_s = state.success_rate, state.robot_time_s
        if rate >= self._fault:
            self._poor_since_s = None
        elif self._poor_since_s is None:
            self._poor_since_s = now_s
        self._poor_s = 0.0 if self._poor_since_s is None else now_s - self._poor_since_s
        self._lowest = rate if self._lowest is None else min(self._lowest, rate)
        if rate < self._least and not self._warned:
            self._warned = True
            _log.warning(
                "only %.0f %% of the control commands reach the arm; below %.0f %% it moves badly "
                "and may stop by itself: %s",
                100 * rate, 100 * self._least, POOR_CONNECTION,
            )  # fmt: skip

    def check_commands(self) -> None:
        """Raise :class:`RefusalError` where too few commands have reached the arm for a result."""
        if self._lowest is not None and self._poor_s >= POOR_S:
            raise RefusalError(
                Abort.PACKET_LOSS,
                f"only {100 * self._lowest:.0f} % of the control commands reached the arm, allowed "
                f"are {100 * self._fault:.0f} % (controller.fault_success_rate), so the episode "
                f"does not count: {POOR_CONNECTION}",
            )

    def restart(self) -> None:
        """Control starts over: the arm's count of commands does too."""
        self._controlled_since_s = self._poor_since_s = None
        self._poor_s = 0.0

    def plain(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts as plain values, some of them from the newest ``info``."""
        return {
            **{name: info[name] for name in _KEPT},
            "success_rate": self._lowest,
            "start_off_m": self._start_off_m,
            "limited": dict(sorted(self._limited.items())),
            # Whoever gets an info may keep and change it.
            **copy.deepcopy(self._lasting),
        }


def lasting_facts(
    config: FrankaConfig, workcell: Mapping[str, Any], libraries: tuple[str, ...]
) -> dict[str, Any]:
    """Return what is true of every episode in a workcell, as plain values.

    Args:
        config: The workcell.
        workcell: The same, without what says where its devices are.
        libraries: Distributions of the drivers.
    """
    return {
        **{f"action.{name}": value for name, value in config.action},
        "workcell": workcell_digest(workcell),
        "firmware": config.firmware,
        "drivers": dict(_versions_of(libraries)),
    }


def workcell_digest(workcell: Mapping[str, Any]) -> str:
    """Return eight characters that identify a workcell, apart from addresses and serial numbers."""
    return hashlib.sha256(json.dumps(workcell, sort_keys=True).encode()).hexdigest()[:8]


@cache
def _versions_of(libraries: tuple[str, ...]) -> Mapping[str, str]:
    """Return the version of every library that is installed."""
    found = {}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class ArmEpisode:
    """What lasts an episode.

    Args:
        start: Number of its initial state.
        reading: What the sensors said at the start.
        pace: Its control rate.
        facts: Counts what happens.
    """

    def __init__(
        self, start: int, reading: Reading, pace: RateLimiter, facts: ArmEpisodeFacts
    ) -> None:
        self.start = start
        self.facts = facts
        self.reading = reading
        self.origin = reading.state.pose
        self.pace = pace
        self.paused_s = 0.0
        self.abort = Abort.NONE
        self.message = ""

    def info(self) -> dict[str, Any]:
        """Return what ``info`` says of the episode and of its newest reading."""
        return {
            "init_state_id": self.start,
            "abort": self.abort.value,
            "abort_message": self.message,
            "late_steps": self.pace.late_steps,
            "paused_s": self.paused_s,
            "overrun_s": self.pace.overrun_s,
            **self.reading.info(),
        }


def refusal_of(error: DzrobotError) -> RefusalError:
    """Return how an error ends an episode."""
    match error:
        case RefusalError():
            return error
        case StoppedError():
            return RefusalError(Abort.OPERATOR_STOP, str(error))
        case ControllerEndedError():
            return RefusalError(Abort.CONTROLLER, str(error))
    return RefusalError(Abort.CONNECTION, str(error))


def reset_abort(error: BaseException, *, moved: bool) -> Abort | None:
    """Return why ``error`` cut a reset short; None if no person has to look at the arm.

    Args:
        error: What was raised.
        moved: Whether the arm had begun to move.
    """
    match error:
        case RefusalError():
            return error.abort
        case StoppedError():
            return Abort.OPERATOR_STOP
        case DisconnectedError() if moved:
            return Abort.CONNECTION
        case RobotError() if moved:
            return Abort.NOT_ARRIVED
    return None
