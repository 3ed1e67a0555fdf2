"""When an episode on the robot has succeeded or failed: by pose, by a person, by a function."""

import importlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from dzrobot.envs.franka.arm import ArmState
from dzrobot.envs.franka.config import RewardConfig
from dzrobot.envs.franka.keyboard import Keyboard, terminal
from dzrobot.errors import ConfigError

Observation = Mapping[str, Any]


class Outcome(StrEnum):
    """What is known about the task."""

    OPEN = ""
    SUCCESS = "success"
    FAILURE = "failure"


class Operator(Protocol):
    """A person beside the robot."""

    def start(self) -> None:
        """Begin to listen; twice is harmless."""
        ...

    def verdict(self) -> Outcome:
        """Return what was said since the last call."""
        ...

    def wants_stop(self) -> bool:
        """Return whether a stop was asked for since the last call."""
        ...

    def close(self) -> None:
        """Stop listening; twice is harmless."""
        ...


class Rule(Protocol):
    """Decides after each step."""

    def begin(self) -> None:
        """Begin an episode."""
        ...

    def judge(self, observation: Observation, state: ArmState) -> Outcome:
        """Return whether the task is done."""
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

    def judge(self, observation: Observation, state: ArmState) -> Outcome:
        """Count the steps in a row."""
        self._held = self._held + 1 if self._holds(observation, state) else 0
        return Outcome.SUCCESS if self._held >= self._steps else Outcome.OPEN


class OperatorRule:
    """A person decides.

    Args:
        operator: Who.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def begin(self) -> None:
        """Forget what was said before."""
        self._operator.verdict()

    def judge(self, observation: Observation, state: ArmState) -> Outcome:
        """Return what the operator said."""
        return self._operator.verdict()


def rule_for(config: RewardConfig, operator: Operator | None) -> Rule:
    """Return the rule that ``config`` asks for.

    Raises:
        ConfigError: the operator is missing, or the callback cannot be found.
    """
    match config.rule:
        case "pose":
            goal = np.array(config.position)

            def near(_: Observation, state: ArmState) -> bool:
                return bool(np.linalg.norm(state.pose[:3, 3] - goal) <= config.tolerance_m)

            return PredicateRule(near, config.hold_steps)
        case "callback":
            assert config.callback is not None, "checked by the configuration"
            return PredicateRule(_imported(config.callback), config.hold_steps)
        case "operator":
            if operator is None:
                raise ConfigError("reward.rule='operator' needs an operator: FrankaEnv(operator=)")
            return OperatorRule(operator)
        case "none":
            return PredicateRule(lambda *_: False, 1)


def _imported(name: str) -> Callable[[Observation, ArmState], bool]:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"reward.callback={name!r} must be 'module:function'")
    try:
        function: Callable[[Observation, ArmState], bool] = getattr(
            importlib.import_module(module), attribute
        )
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"reward.callback={name!r} cannot be imported: {error}") from error
    return function


class TerminalOperator:
    """A person at the keyboard: ``c`` success, ``b`` failure, space stops the arm.

    Args:
        keyboard: What they type on. None: the terminal.
    """

    def __init__(self, keyboard: Keyboard | None = None) -> None:
        self._keyboard = keyboard or terminal()

    def start(self) -> None:
        """Listen to the terminal."""
        self._keyboard.open()

    def verdict(self) -> Outcome:
        """Return the newest verdict."""
        keys = self._keyboard.take("cb")
        if not keys:
            return Outcome.OPEN
        return Outcome.SUCCESS if keys[-1] == "c" else Outcome.FAILURE

    def wants_stop(self) -> bool:
        """Return whether space was pressed."""
        return bool(self._keyboard.take(" "))

    def close(self) -> None:
        """Give the terminal back."""
        self._keyboard.close()
