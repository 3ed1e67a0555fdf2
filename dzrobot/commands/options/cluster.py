"""Flags of the commands that run on a Ray cluster."""

import os
from typing import Any

from dzrobot.cluster import LOCAL, ClusterOptions
from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError


def add_cluster(group: Any) -> None:
    """Declare where Ray runs, and how many actors."""
    add_ray(group)
    group.add_argument(
        "--actors", type=flags.whole(1, 4096), metavar="N",
        help="with --ray: processes with --workers simulators each, and the policy (default: one "
        "for every GPU, or without GPUs as many as there are cores for)",
    )  # fmt: skip


def add_ray(group: Any) -> None:
    """Declare where Ray runs."""
    group.add_argument(
        "--ray", type=flags.text, nargs="?", const=LOCAL, metavar="ADDRESS",
        help="run on all GPUs and machines of a Ray cluster: HOST:6379, auto for the one of this "
        "machine; without an address RAY_ADDRESS, else a Ray of this command's own",
    )  # fmt: skip


def read_cluster(ray: str | None, actors: int | None = None) -> ClusterOptions | None:
    """Return what the flags say; None: this machine runs everything.

    Args:
        ray: Value of ``--ray``.
        actors: Value of ``--actors``.

    Raises:
        ConfigError: actors without a cluster.
    """
    if ray is None:
        if actors is not None:
            raise ConfigError("--actors says how many run on a Ray cluster: give --ray besides")
        return None
    address = os.environ.get("RAY_ADDRESS") or LOCAL if ray == LOCAL else ray
    return ClusterOptions(address=address, actors=actors)
