"""DreamZero as a policy of LeRobot; importing this registers ``policy.type=dreamzero``.

It also registers ``env.type=dzrobot``: dzrobot's environments for ``lerobot-eval``.
"""

from lerobot_policy_dreamzero.configuration_dreamzero import LeRobotDreamZeroConfig
from lerobot_policy_dreamzero.environment_dzrobot import DzrobotEnvConfig

__all__ = ["DzrobotEnvConfig", "LeRobotDreamZeroConfig"]
