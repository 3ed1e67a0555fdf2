"""When an episode on the robot has succeeded or failed: by pose, by a person, by a function."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from dzrobot.envs.franka.arm import ArmState
from dzrobot.envs.franka.config import RewardConfig
from dzrobot.importing import load_reference

Observation = Mapping[str, Any]


class OperatorVerdict(StrEnum):
    """What is known about the task."""

    OPEN = ""
    SUCCESS = "success"
    FAILURE = "failure"
    DISCARDED = "discarded"


class ArmPhase(StrEnum):
    """What the arm is doing, as an operator sees it."""

    STOPPED = "stopped"
    STAND_CLEAR = "stand clear"
    MOVING = "moving to the start"
    SCENE = "scene ready?"
    RUNNING = "running"
    PAUSED = "paused"
    JUDGING = "judging"
    DONE = "done"


class Operator(Protocol):
    """A person beside the robot."""

    def start(self) -> None:
        """Begin to listen; twice is harmless."""
        ...

    def show(self, phase: ArmPhase, text: str) -> None:
        """Take note of what the arm is doing."""
        ...

    def confirm(self, phase: ArmPhase, question: str) -> None:
        """Return when they agree.

        Raises:
            StoppedError: they stopped the arm instead, or have left.
        """
        ...

    def verdict(self) -> OperatorVerdict:
        """Return what was said since the last call."""
        ...

    def judge(self) -> OperatorVerdict:
        """Return the verdict on the episode that is over, asking for it.

        Raises:
            StoppedError: they stopped the arm instead, or have left.
        """
        ...

    def wants_stop(self) -> bool:
        """Return whether a stop was asked for since the last call."""
        ...

    def wants_pause(self) -> bool:
        """Return whether the arm is to rest until they say otherwise."""
        ...

    def close(self) -> None:
        """Stop listening; twice is harmless."""
        ...


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


def rule_for(config: RewardConfig) -> PredicateRule:
    """Return the rule that ``config`` asks for; an operator's word counts besides, always.

    Raises:
        UnknownNameError: the callback cannot be found.
    """
    match config.rule:
        case "pose":
            goal = np.array(config.position)

            def near(_: Observation, state: ArmState) -> bool:
                return bool(np.linalg.norm(state.pose[:3, 3] - goal) <= config.tolerance_m)

            return PredicateRule(near, config.hold_steps)
        case "callback":
            assert config.callback is not None, "checked by the configuration"
            return PredicateRule(
                load_reference(config.callback, "reward.callback", Callable), config.hold_steps
            )
        case "operator" | "none":
            return PredicateRule(lambda *_: False, 1)
