"""Where a command finds the key of a policy server: never on the command line, which others see."""

import argparse
import os
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.documents import read_bytes
from dzrobot.errors import ConfigError

VARIABLE = "DZROBOT_API_KEY"
_LONGEST = 4096


def add_key(group: Any) -> None:
    """Declare the flag."""
    group.add_argument(
        "--api-key-file", type=flags.path, metavar="FILE",
        help=f"whose first line is the server's key (default: the variable {VARIABLE})",
    )  # fmt: skip


def read_key(arguments: argparse.Namespace) -> str | None:
    """Return the key, or None where there is none.

    Raises:
        ConfigError: it is empty, or no printable ASCII text, which is all that HTTP carries.
    """
    if arguments.api_key_file is not None:
        content = read_bytes(arguments.api_key_file, ConfigError, largest=_LONGEST)
        key, where = content.decode("utf-8", "replace").partition("\n")[0].strip(), "the file"
    elif VARIABLE in os.environ:
        key, where = os.environ[VARIABLE].strip(), f"the variable {VARIABLE}"
    else:
        return None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where} holds no key: it is a line of printable ASCII characters")
    return key
