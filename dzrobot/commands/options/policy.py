"""Flags that say which weights are opened, where they compute, and with which server's key.

Where: on which device, or on which Ray cluster.
"""

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dzrobot.cluster import LOCAL, ClusterOptions
from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.loose import LooseWeights
from dzrobot.websocket import read_key


def add_render_device(group: Any) -> None:
    """Declare ``--render-device``."""
    group.add_argument(
        "--render-device", type=flags.numbers, metavar="N,N",
        help="EGL devices that simulators draw with in turn, such as 1 or 0-3; with --ray, the "
        "actors of a machine share them out (default: the first one)",
    )  # fmt: skip


def render_variables(devices: Sequence[int] | None) -> tuple[Mapping[str, str], ...]:
    """Return the environment variables of simulators, in turn.

    Args:
        devices: Numbers of the machine's EGL devices. None: nothing is set.
    """
    if devices is None:
        return ()
    from dzrobot.envs.mujoco.simulator import DEVICE_VARIABLE

    return tuple({DEVICE_VARIABLE: str(device)} for device in devices)


OFFLOAD_LOG = "dzrobot.policies.dreamzero.checkpoints.load"
"""Logger that says where weights lie."""

COMPILE_LOG = "dzrobot.policies.dreamzero.compiling"
"""Logger that says what is compiled."""


def add_weights(group: Any) -> None:
    """Declare device, precision and source of a checkpoint's weights."""
    group.add_argument(
        "--device", type=flags.device,
        help="cpu, cuda, cuda:1, or auto: a GPU where there is one (default: cpu)",
    )  # fmt: skip
    group.add_argument(
        "--cfg-devices", type=flags.two_devices, metavar="A,B",
        help="two devices instead of one, such as cuda:0,cuda:1: the prompt runs on the first, the "
        "negative prompt of guidance on the second, each with a copy of the transformer",
    )  # fmt: skip
    group.add_argument(
        "--dtype", choices=["float32", "bfloat16"],
        help="what the network computes in (default: float32 on a CPU, else bfloat16)",
    )  # fmt: skip
    group.add_argument(
        "--memory", type=flags.memory, metavar="GIB",
        help="of the GPU that may be used, such as 24 or 24GiB: as many weights as necessary wait "
        "in the host's memory and come when they are used; slower, the same numbers "
        "(default: all on the GPU)",
    )  # fmt: skip
    group.add_argument(
        "--quantize", choices=["int8", "fp8"],
        help="8-bit weights in the transformer: half the memory, other actions; fp8, on Ada, "
        "Hopper and newer, multiplies in 8 bits too (default: weights as they were trained)",
    )  # fmt: skip
    group.add_argument(
        "--revision", type=flags.text, help="branch, tag or commit of a Hugging Face checkpoint"
    )
    group.add_argument(
        "--base", type=flags.text, metavar="PATH",
        help="what the checkpoint was trained on, where it holds only what was trained",
    )  # fmt: skip
    add_loose_weights(group)


def add_loose_weights(group: Any) -> None:
    """Declare what weights are that lie alone, as a cold-started ``full_weights.pt`` does."""
    group.add_argument(
        "--config-from", type=flags.text, metavar="DIR",
        help="folder with config.json and experiment_cfg, where the checkpoint has none",
    )  # fmt: skip
    group.add_argument(
        "--preset", type=flags.text, metavar="5b|14b|FILE",
        help="instead: the network by its published size, or a config.json; horizon, frames and "
        "frame size are then those of --embodiment",
    )  # fmt: skip
    group.add_argument(
        "--metadata", type=flags.path, metavar="FILE",
        help="statistics (metadata.json) where the checkpoint has none",
    )  # fmt: skip


def read_loose_weights(arguments: argparse.Namespace) -> LooseWeights | None:
    """Return what the flags of :func:`add_loose_weights` and ``--embodiment`` say; None: nothing.

    Raises:
        ConfigError: A folder and a preset were given.
        CheckpointError: There are no such statistics.
    """
    given = (arguments.config_from, arguments.preset, arguments.metadata)
    if all(value is None for value in given):
        return None
    return LooseWeights(
        folder=arguments.config_from,
        network=arguments.preset,
        metadata=arguments.metadata,
        embodiment=arguments.embodiment,
    )


def _devices(arguments: argparse.Namespace) -> tuple[str, str | None]:
    """Return the device of the network, and that of the negative prompt's copy, if it has one."""
    if arguments.cfg_devices is None:
        return arguments.device or "cpu", None
    if arguments.device is not None:
        raise ConfigError(
            f"--cfg-devices {','.join(arguments.cfg_devices)} says where the network runs: leave "
            f"--device {arguments.device} out"
        )
    first, second = arguments.cfg_devices
    return first, second


def read_weights(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags of :func:`add_weights` say, by the fields of ``PolicySpec``.

    Raises:
        ConfigError: flags that exclude each other were given.
    """
    device, cfg_device = _devices(arguments)
    return {
        "device": device,
        "cfg_device": cfg_device,
        "dtype": arguments.dtype,
        "memory": _memory(arguments.memory, device),
        "quantize": arguments.quantize,
        "revision": arguments.revision,
        "base": arguments.base,
        "config_from": read_loose_weights(arguments),
    }


def asks_to_compile(arguments: argparse.Namespace) -> bool:
    """Return whether ``--compile`` was given; what is compiled is then logged."""
    if not arguments.compile:
        return False
    logging.getLogger(COMPILE_LOG).setLevel(logging.INFO)
    return True


def _memory(bytes_: int | None, device: str) -> int | None:
    """Return the bytes of ``--memory``; the outcome is logged as weights are loaded."""
    if bytes_ is None:
        return None
    if device == "cpu":
        raise ConfigError(
            "--memory says how much of a GPU may be used, and this network runs on the processor; "
            "give --device cuda, or leave it out"
        )
    logging.getLogger(OFFLOAD_LOG).setLevel(logging.INFO)
    return bytes_


def add_key(group: Any) -> None:
    """Declare ``--api-key-file``: a key on the command line could be read by other users."""
    group.add_argument(
        "--api-key-file", type=flags.path, metavar="FILE",
        help="whose first line is the server's key (default: the variable DZROBOT_API_KEY)",
    )  # fmt: skip


def add_access(group: Any) -> None:
    """Declare who may connect to a server, and its TLS."""
    add_key(group)
    group.add_argument(
        "--insecure", action="store_true", help="let other machines in without a key"
    )
    group.add_argument("--cert", type=flags.path, help="certificate of TLS, PEM")
    group.add_argument("--key", type=flags.path, help="its private key, PEM")


def read_access(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what :func:`add_access` declares, and the address, as fields of `ServerAccess`.

    Raises:
        ConfigError: there is no key in the file.
    """
    return {
        "host": arguments.host,
        "port": arguments.port,
        "api_key": read_key(arguments.api_key_file),
        "insecure": arguments.insecure,
        "certificate": arguments.cert,
        "private_key": arguments.key,
    }


def add_speed(group: Any) -> None:
    """Declare what makes the network faster on a GPU."""
    group.add_argument(
        "--compile", action="store_true", default=None,
        help="compile the network's blocks: faster on a GPU, last bits vary, the first plan takes "
        "minutes",
    )  # fmt: skip
    group.add_argument(
        "--graphs", action="store_true", default=None,
        help="on a GPU: record its work for every place of the memory's window, and launch it as "
        "one; goes together with --compile",
    )  # fmt: skip


def add_steps(group: Any) -> None:
    """Declare how often a plan runs the network, and what of the video it is shown."""
    group.add_argument(
        "--dit-steps", type=flags.dit_steps, help="network evaluations: 5 to 8, 16, or dynamic"
    )
    group.add_argument(
        "--video", choices=["full", "once", "skip"],
        help="video that the network denoises beside the actions: all of it; none after its first "
        "evaluation of a plan; none at all (faster, other actions, no prediction)",
    )  # fmt: skip
    group.add_argument(
        "--solver-steps", type=flags.whole(1, 1000), metavar="N",
        help="steps of the solver, of which all run the network unless there are 16 (default: a "
        "distilled checkpoint's own, else 16)",
    )  # fmt: skip


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
