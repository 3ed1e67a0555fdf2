"""Flags and surroundings of the commands that move an arm."""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.process import Terminated
from dzrobot.rollout.arm.attended import Attended, OperatorOptions, attended


def add_teleop_settings(group: Any) -> None:
    """Declare ``--teleop-arg``, of the commands that open a device which people steer with."""
    group.add_argument(
        "--teleop-arg", action="append", default=[], metavar="KEY=VALUE",
        help="setting of the device, such as dead_zone=0.15",
    )  # fmt: skip


def add_attention(group: Any) -> None:
    """Declare the flags that say how an arm is looked after."""
    group.add_argument(
        "--unattended", action="store_true",
        help="arm: ask nobody before it moves, and continue after a lost frame or a slow policy; "
        "every other stop ends the run all the same",
    )  # fmt: skip
    group.add_argument(
        "--full-speed", action="store_true",
        help="arm: let a policy drive a real arm at full speed; without it, at the workcell's "
        "slow_pace",
    )  # fmt: skip
    group.add_argument(
        "--preview", type=flags.whole(0, 65535), metavar="PORT",
        help="arm: show the cameras on a page of this machine; 0 picks a free port",
    )  # fmt: skip
    group.add_argument(
        "--log", type=flags.path, metavar="FILE",
        help="arm: where the operator's log goes (default: beside the output)",
    )  # fmt: skip


@contextmanager
def looked_after(
    arguments: argparse.Namespace, title: str, log: Path | None, *, asks_reason: bool = False
) -> Iterator[Attended]:
    """Yield what looks after the arms of a command while it runs.

    Args:
        arguments: Of :func:`add_attention`.
        title: Heads the operator's screen.
        log: Where their log goes if nothing else is said. None: nowhere.
        asks_reason: Whether they are asked why an episode failed.
    """
    file = arguments.log or log
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    attention = OperatorOptions(
        title=title, unattended=arguments.unattended, preview=arguments.preview, log=file,
        asks_reason=asks_reason,
    )  # fmt: skip
    try:
        with attended(attention) as people:
            yield people
    except KeyboardInterrupt as ended:
        if ended.args == (signal.SIGTERM.name,):
            raise Terminated from ended
        raise
