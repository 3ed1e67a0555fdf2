"""Which device computes and which one draws, where there are several."""

from collections.abc import Mapping, Sequence
from typing import Any

from dzrobot import process as ranks
from dzrobot.commands.options import flags
from dzrobot.envs.libero.rendering import DEVICE_VARIABLE


def add_render_device(group: Any) -> None:
    """Declare ``--render-device``."""
    group.add_argument(
        "--render-device", type=flags.numbers, metavar="N,N",
        help="EGL devices that simulators draw with, such as 1 or 0-3: processes of torchrun share "
        "them out, then the simulators of each (default: the first one)",
    )  # fmt: skip


def compute_device(named: str) -> str:
    """Return the device of this process: of several, each has a GPU of its own."""
    if named == "cuda" and ranks.local_world_size() > 1:
        return f"cuda:{ranks.local_rank()}"
    return named


def render_variables(devices: Sequence[int] | None) -> tuple[Mapping[str, str], ...]:
    """Return the environment variables of this process's simulators, in turn.

    Args:
        devices: Numbers of the machine's EGL devices. None: nothing is set.
    """
    if devices is None:
        return ()
    rank = ranks.local_rank()
    own = devices[rank :: ranks.local_world_size()] or (devices[rank % len(devices)],)
    return tuple({DEVICE_VARIABLE: str(device)} for device in own)
