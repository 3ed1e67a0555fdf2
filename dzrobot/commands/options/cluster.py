"""Flags of the commands that run on a Ray cluster."""

import argparse
import os
from typing import Any

from dzrobot.cluster import LOCAL, ClusterOptions
from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError


def add_cluster(group: Any) -> None:
    """Declare where Ray runs, and how many actors."""
    group.add_argument(
        "--ray", type=flags.text, nargs="?", const=LOCAL, metavar="ADDRESS",
        help="run on all GPUs and machines of a Ray cluster: HOST:6379, auto for the one of this "
        "machine; without an address RAY_ADDRESS, else a Ray of this command's own",
    )  # fmt: skip
    group.add_argument(
        "--actors", type=flags.whole(1, 4096), metavar="N",
        help="with --ray: processes with --workers simulators each, and the policy (default: one "
        "for every GPU, or without GPUs as many as there are cores for)",
    )  # fmt: skip


def read_cluster(arguments: argparse.Namespace) -> ClusterOptions | None:
    """Return what the flags say; None: this process runs everything.

    Raises:
        ConfigError: actors without a cluster.
    """
    if arguments.ray is None:
        if arguments.actors is not None:
            raise ConfigError("--actors says how many run on a Ray cluster: give --ray besides")
        return None
    address = arguments.ray
    if address == LOCAL:
        address = os.environ.get("RAY_ADDRESS") or LOCAL
    return ClusterOptions(address=address, actors=arguments.actors)
