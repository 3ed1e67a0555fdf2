"""``dzrobot init-workcell``: write the file of a workcell, taught on the arm."""

import argparse
import io
import select
import sys
from pathlib import Path
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.envs.franka.make import load_workcell
from dzrobot.envs.franka.teaching import write_taught
from dzrobot.errors import ConfigError

NEXT = "dzrobot doctor franka --config {file}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot init-workcell``."""
    parser.description = (
        "Write a commented workcell file. You guide the arm by hand to its start pose and to the "
        "corners of its workspace; serial numbers are read from the cameras. Nothing moves by "
        "itself."
    )
    parser.add_argument("file", type=flags.path, help="such as cell.yaml; must not exist yet")
    parser.add_argument(
        "--address",
        type=flags.text,
        required=True,
        help="of the arm; `emulated` to practice without one",
    )
    parser.add_argument(
        "--embodiment",
        type=flags.text,
        default="franka_pnp",
        help="what the arm is to a policy: a tag, or module:NAME (default: franka_pnp)",
    )
    parser.add_argument(
        "--gripper",
        choices=("franka", "robotiq", "none"),
        default="franka",
        help="the Franka Hand, a Robotiq 2F-85, or no hand (default: franka)",
    )
    parser.add_argument(
        "--gripper-device",
        type=flags.text,
        help="serial port of a Robotiq, such as /dev/serial/by-id/usb-FTDI_...",
    )
    parser.add_argument("--task", type=flags.text, help="the instruction (default: asked for)")


def run(arguments: argparse.Namespace) -> int:
    """Teach and write; 0 when the file can be read back."""
    file: Path = arguments.file
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file}: a workcell file ends in .yaml")
    if file.exists():
        raise ConfigError(f"{file} exists: edit it, or name another")
    given = {
        "address": arguments.address,
        "embodiment": arguments.embodiment,
        "gripper": {"kind": arguments.gripper, "device": arguments.gripper_device or ""},
    }
    described = load_workcell(None, given)
    _require_answers()
    write_taught(file, described, _ask, print, task=arguments.task or "")
    print(f"wrote {file}; look it over")
    return 0


_NO_ANSWER = "there is no answer: standard input has ended; run this in a terminal"


def _require_answers() -> None:
    """Refuse an input that has ended, as /dev/null has, before devices are started for it."""
    if sys.stdin is None:
        raise ConfigError(_NO_ANSWER)
    try:
        is_readable = bool(select.select([sys.stdin], [], [], 0)[0])
    except io.UnsupportedOperation:
        return
    if sys.stdin.isatty() or not is_readable:
        return
    typed: Any = sys.stdin.buffer
    if not typed.peek(1):
        raise ConfigError(_NO_ANSWER)


def _ask(question: str) -> str:
    sys.stdout.write(question)
    sys.stdout.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise ConfigError(_NO_ANSWER)
    return answer.rstrip("\n")
