"""Flags of the commands that move an arm."""

import argparse
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.rollout.environment import EnvironmentFacts


def add_workcell(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say which environment is driven."""
    parser.add_argument(
        "--env", type=flags.text, default="dzrobot/Franka-PnP-v0", help="Gymnasium id"
    )
    parser.add_argument(
        "--workcell",
        type=flags.text,
        help="emulated, emulated:empty, emulated:OBJECT, fake, or a YAML file of a workcell",
    )
    flags.add_keywords(
        parser, "--env-arg", "keyword argument of the environment, such as slow_first_steps=20"
    )


def workcell_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the environment's keyword arguments."""
    given = {} if arguments.workcell is None else {"workcell": arguments.workcell}
    return given | flags.keywords(arguments.env_arg)


def add_teleop_settings(group: Any) -> None:
    """Declare ``--teleop-arg``, of the commands that open a teleoperation device."""
    flags.add_keywords(group, "--teleop-arg", "setting of the device, such as dead_zone=0.15")


def check_full_speed(
    arguments: argparse.Namespace, facts: EnvironmentFacts, *, by_person: bool = False
) -> None:
    """Check that a real arm that no person drives may move at full speed.

    Raises:
        ConfigError: it was not said.
    """
    if facts.is_real and not (by_person or arguments.full_speed):
        raise ConfigError(
            "a real arm is driven by no person here, and what is recorded or replayed at another "
            "pace is another motion: try a policy with `dzrobot eval` first, which is slow; then "
            "say --full-speed"
        )
