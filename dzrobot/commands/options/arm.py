"""Flags of the commands that move an arm."""

import argparse
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.rollout.environment import OperatorOptions
from dzrobot.rollout.facts import EnvironmentFacts


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
    parser.add_argument(
        "--env-arg", action="append", default=[], metavar="KEY=VALUE",
        help="keyword argument of the environment, such as slow_first_steps=20",
    )  # fmt: skip


def workcell_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the environment's keyword arguments."""
    given = {} if arguments.workcell is None else {"workcell": arguments.workcell}
    return given | flags.keywords(arguments.env_arg)


def add_teleop_settings(group: Any) -> None:
    """Declare ``--teleop-arg``, of the commands that open a teleoperation device."""
    group.add_argument(
        "--teleop-arg", action="append", default=[], metavar="KEY=VALUE",
        help="setting of the device, such as dead_zone=0.15",
    )  # fmt: skip


def add_attention(group: Any) -> None:
    """Declare the flags that say how the operator of an arm is involved."""
    group.add_argument(
        "--unattended", action="store_true",
        help="arm: move without asking a person, and continue after a lost frame or a slow policy; "
        "every other stop ends the run all the same",
    )  # fmt: skip
    group.add_argument(
        "--full-speed", action="store_true",
        help="arm: let a policy or a replay drive a real arm at full speed; an evaluation without "
        "it is at the workcell's slow_pace",
    )  # fmt: skip
    group.add_argument(
        "--preview", type=flags.whole(0, 65535), metavar="PORT",
        help="arm: show the cameras on a page of this machine; 0 picks a free port",
    )  # fmt: skip
    group.add_argument(
        "--log", type=flags.path, metavar="FILE",
        help="arm: where the operator's log goes (default: beside the output)",
    )  # fmt: skip


def read_operator(arguments: argparse.Namespace) -> OperatorOptions:
    """Return how the operator is involved, as the flags of :func:`add_attention` say."""
    return OperatorOptions(
        unattended=arguments.unattended, preview=arguments.preview, log=arguments.log
    )


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
