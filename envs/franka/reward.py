"""When an episode on the robot has succeeded or failed: by pose, by a person, by a function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dzrobot.envs.franka.config import RewardConfig
from dzrobot.envs.franka.operator.operator import OperatorVerdict
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.state import ArmState
from dzrobot.errors import ConfigError
from dzrobot.importing import load_reference

Observation = Mapping[str, Any]


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


@dataclass(frozen=True)
class SceneObject:
    """Something that can be grasped: a box."""

    pose: Array
    """Of its center, in the arm's base frame, (4, 4)."""

    half: Array
    """Half of its edges (3,), m."""


class Scene(Protocol):
    """What stands around an arm, where a program can set it up and look into it."""

    def object(self) -> SceneObject:
        """Return where what the task is about is now."""
        ...

    def prepare(self, start: int) -> None:
        """Put the objects where an initial state has them."""
        ...

    def goal_holds(self) -> bool:
        """Return whether the task is done now."""
        ...


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
            assert config.callback is not None, "checked by the configuration"
            return PredicateRule(
                load_reference(config.callback, "reward.callback", Callable), config.hold_steps
            )
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
