"""LeRobot's own `lerobot-rollout` with DAgger, on an arm and a leader that exist in memory alone.

    python dagger.py POLICY OUTPUT

Keys are pressed by number of observation.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from lerobot.robots import Robot, RobotConfig
from lerobot.rollout.strategies import dagger as strategy
from lerobot.scripts import lerobot_rollout
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig

from dzrobot.embodiments.registry import load_embodiment

ROBOT = load_embodiment("libero_mini")
STATES = [f"state_{number}.pos" for number in range(ROBOT.state_dim)]
ACTIONS = [f"action_{number}.pos" for number in range(ROBOT.action_dim)]
KEYS = {20: "space", 22: "tab", 34: "tab", 36: "space", 50: "space", 52: "tab", 60: "tab",
        62: "esc"}  # fmt: skip
"""Number of an observation and the key pressed then: pause, correct, pause, go on, ..., end."""

PERSON = 0.625
"""Each of the leader's actions but the hand's."""


class Keyboard:
    """Hands keys to what LeRobot would call; nobody sits at a keyboard."""

    press = staticmethod(lambda key: None)

    def __init__(self, dispatch, **_):
        Keyboard.press = staticmethod(dispatch)

    def stop(self):
        """Stop."""


@RobotConfig.register_subclass("remembered")
@dataclass
class RememberedConfig(RobotConfig):
    """The arm."""


@TeleoperatorConfig.register_subclass("remembered")
@dataclass
class RememberedLeaderConfig(TeleoperatorConfig):
    """The leader."""


class _Device:
    is_connected = is_calibrated = True

    def connect(self, calibrate=True):
        """Connect nothing."""

    def calibrate(self):
        """Calibrate nothing."""

    def configure(self):
        """Configure nothing."""

    def disconnect(self):
        """Disconnect nothing."""


class Remembered(_Device, Robot):
    """An arm whose states count its observations."""

    config_class, name = RememberedConfig, "remembered"
    cameras: ClassVar = {}
    observation_features: ClassVar = {
        **dict.fromkeys(STATES, float),
        **{view.feature.rpartition(".")[2]: (*view.resolution, 3) for view in ROBOT.views},
    }
    action_features: ClassVar = dict.fromkeys(ACTIONS, float)
    seen = 0

    def get_observation(self):
        """Return the next observation."""
        Remembered.seen += 1
        Keyboard.press(KEYS.get(self.seen, "nothing"))
        shown = {
            name: np.arange(np.prod(kind), dtype=np.uint8).reshape(kind) // 2 + self.seen
            for name, kind in self.observation_features.items()
            if isinstance(kind, tuple)
        }
        return {**{name: self.seen / 100 + n / 1000 for n, name in enumerate(STATES)}, **shown}

    def send_action(self, action):
        """Do nothing."""
        return action


class RememberedLeader(_Device, Teleoperator):
    """A leader held by somebody who moves alike in all directions and opens and closes it."""

    config_class, name = RememberedLeaderConfig, "remembered"
    action_features: ClassVar = dict.fromkeys(ACTIONS, float)
    feedback_features: ClassVar = {}

    def get_action(self):
        """Return what they do."""
        return {**dict.fromkeys(ACTIONS, PERSON), ACTIONS[-1]: (-1.0) ** Remembered.seen}

    def send_feedback(self, feedback):
        """Feel nothing."""


def main():
    """Record."""
    policy, output = sys.argv[1:]
    strategy.create_key_listener = Keyboard
    sys.argv[1:] = [
        f"--policy.path={policy}", "--robot.type=remembered", "--teleop.type=remembered",
        "--strategy.type=dagger", "--strategy.record_autonomous=true", "--task=Lift the red cube",
        "--dataset.repo_id=us/rollout_corrected", f"--dataset.root={output}",
        "--dataset.push_to_hub=false", "--fps=20", "--dataset.fps=20", "--play_sounds=false",
        "--return_to_initial_position=false",
    ]  # fmt: skip
    lerobot_rollout.main()


if __name__ == "__main__":
    main()
