"""A policy of LeRobot beside this process: served from the Python environment that has LeRobot."""

import atexit
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import dzrobot
from dzrobot.errors import ConfigError

PARENT_VARIABLE = "DZROBOT_PARENT"
"""Process id that a server ends with."""

NEEDED = (
    "websockets", "msgpack", "pydantic", "PyYAML", "rich", "prometheus_client", "pyarrow", "av",
)  # fmt: skip
"""Packages that a server imports and LeRobot may lack."""

SAID = 2
"""Exit code of a server that has said what is wrong, and what to do."""

_ADDRESS = re.compile(r"(ws://127\.0\.0\.1:\d+)")
_READY = "Ctrl-C stops it."
_END_S = 10.0


def start_server(python: Path, words: Sequence[str]) -> str:
    """Start ``dzrobot serve`` in another Python environment, and return its address.

    It ends with this process, however that ends.

    Args:
        python: Of the environment.
        words: What follows the command: ``lerobot:ID_OR_FOLDER``, robot, device, seed.

    Raises:
        ConfigError: it does not start; its own words are on the terminal.
    """
    command = [str(python), "-m", "dzrobot", "serve", *words, "--port", "0", "--no-array-port"]
    paths = [str(Path(dzrobot.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        PARENT_VARIABLE: str(os.getpid()),
    }
    try:
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise ConfigError(f"{python} cannot be started: {error.strerror or error}") from error
    atexit.register(_end, process)
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        if found := _ADDRESS.search(line):
            address = found[1]
        if line.startswith(_READY):
            return address
    code = process.wait()
    needed = f"It needs LeRobot, and: {python} -m pip install {' '.join(NEEDED)}"
    raise ConfigError(
        f"{' '.join(command)} ended with {code}, for the reason above"
        + ("" if code == SAID else f". {needed}")
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
