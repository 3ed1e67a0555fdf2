"""Flags that say how plans are executed which take time to make."""

import argparse
from typing import Any, get_args

from dzrobot.commands.options import flags
from dzrobot.rollout.asynchronous.execution import WAYS, Execution, ExecutionOptions, parse_latency


def add_execution(group: Any) -> None:
    """Declare the flags."""
    group.add_argument(
        "--execution", choices=get_args(Execution),
        help="sync: hold still until the next plan is there; naive: go over to it when it is; rtc: "
        "have it continue the running one; trained: likewise, by a network trained for it",
    )  # fmt: skip
    group.add_argument(
        "--latency", type=flags.text, metavar="TIME",
        help=f"of a plan, in simulators, on a clock that follows their steps: {WAYS}; presets in "
        "use: 0.2 and 0.6",
    )  # fmt: skip
    group.add_argument(
        "--first-plan", choices=["charged", "free"], default="charged",
        help="whether the first plan of an episode takes time as well",
    )  # fmt: skip
    group.add_argument(
        "--rtc-strength", type=flags.number(0, 1000), metavar="BETA",
        help="most that rtc multiplies its guidance by (default: the number of solver steps)",
    )  # fmt: skip
    group.add_argument(
        "--rtc-weights", choices=["linear", "exp"], default="linear",
        help="how the overlap with the running plan fades",
    )  # fmt: skip


def read_execution(arguments: argparse.Namespace) -> ExecutionOptions | None:
    """Return what the flags say; None where time stands still.

    Raises:
        ConfigError: a latency that is none, or guidance of what is not guided.
    """
    options = ExecutionOptions(
        execution=arguments.execution or "sync",
        latency=None if arguments.latency is None else parse_latency(arguments.latency),
        first_plan=arguments.first_plan,
        strength=arguments.rtc_strength,
        weights=arguments.rtc_weights,
    )
    asked = arguments.execution is not None or arguments.latency is not None
    return options if asked else None
