"""Which process this is among those that torchrun, or a launcher like it, started together."""

import hashlib
import os
from pathlib import Path

from dzrobot.errors import ConfigError


def world_size() -> int:
    """Return how many processes were started together; 1 for one that was started alone."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Return the number of this process among all of them."""
    return _number("RANK", 0)


def local_rank() -> int:
    """Return the number of this process among those of its machine."""
    return _number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return how many of the processes are on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def is_first_to_say(message: str) -> bool:
    """Return whether no other process of this launch and machine has said ``message``.

    Whoever fails first speaks: torchrun ends the others at once, the main process among them.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place is None:
        return os.environ.get("RANK", "0") == "0"
    # One folder a process, in one folder a start of all of them.
    said = Path(place).parents[1] / f"said-{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        said.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _number(variable: str, alone: int) -> int:
    text = os.environ.get(variable, str(alone))
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{variable}={text!r} in the environment: a launcher such as torchrun sets it to a "
            "number; unset it where there is none"
        )
    return int(text)
