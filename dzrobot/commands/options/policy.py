"""Flags of policies, servers, and the Ray cluster or the devices that a command runs on."""

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dzrobot.cluster import LOCAL, ClusterOptions
from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.options import LooseWeights, chosen_device
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.websocket import read_key

OFFLOAD_LOG = "dzrobot.policies.dreamzero.checkpoints.load"
"""Logger that says where weights lie."""

COMPILE_LOG = "dzrobot.policies.dreamzero.compiling"
"""Logger that says what is compiled."""


def declare_policy(
    group: Any, *, without: Sequence[str] = (), **changes: Mapping[str, Any]
) -> None:
    """Declare how a policy acts and where its weights come from; arguments as of `flags.declare`.

    Read by :func:`read_policy`.
    """
    flags.declare(group, PolicySpec, without=without, **changes)
    flags.declare(group, LooseWeights)


def read_policy(
    arguments: argparse.Namespace, name: str, *, without: Sequence[str] = ()
) -> PolicySpec:
    """Return the policy that is called ``name``, as the flags say; its logs then speak of them.

    Args:
        arguments: What the parser returned.
        name: As `PolicySpec` has it.
        without: Fields whose flags were left out.

    Raises:
        ConfigError: flags that exclude each other were given.
        CheckpointError: there are no such statistics.
    """
    said = flags.said(arguments, PolicySpec, without=without)
    if (two := said.get("cfg_device")) is not None:
        if "device" in said:
            raise ConfigError(
                f"--cfg-devices {','.join(two)} says where the network runs: leave --device "
                f"{said['device']} out"
            )
        said["device"], said["cfg_device"] = two
    if loose := flags.said(arguments, LooseWeights):
        said["config_from"] = LooseWeights(**loose, embodiment=said.get("embodiment"))
    spec = PolicySpec(**said, name=name)
    if spec.memory is not None:
        if chosen_device(spec.device) == "cpu":
            raise ConfigError(
                "--memory says how much of a GPU may be used, and this network runs on the "
                "processor; give --device cuda, or leave it out"
            )
        logging.getLogger(OFFLOAD_LOG).setLevel(logging.INFO)
    if spec.compile:
        logging.getLogger(COMPILE_LOG).setLevel(logging.INFO)
    return spec


def read_access(arguments: argparse.Namespace, access: type) -> dict[str, Any]:
    """Return what was given of a server's `ServerAccess`, by field.

    Raises:
        ConfigError: there is no key in the file, or in the variable.
    """
    said = flags.said(arguments, access)
    return said if "api_key" in said else {**said, "api_key": read_key(None)}


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
