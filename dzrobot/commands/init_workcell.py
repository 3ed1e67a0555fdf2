"""``dzrobot init-workcell``: write the file of a workcell, taught on the arm."""

import argparse
import sys
from pathlib import Path

from dzrobot.commands import flags
from dzrobot.envs.franka.camera import list_cameras
from dzrobot.envs.franka.cells import Cell, EmulatedCell, RealCell
from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.envs.franka.make import connectable, load_workcell
from dzrobot.envs.franka.teaching import assign, teach, workcell_text
from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_text

SUMMARY = "write a workcell file, taught on the arm"


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
        help="of the arm; `emulated` to practise without one",
    )
    parser.add_argument("--task", type=flags.text, help="the instruction (default: asked for)")


def run(arguments: argparse.Namespace) -> int:
    """Teach and write; 0 when the file can be read back."""
    file: Path = arguments.file
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file}: a workcell file ends in .yaml")
    if file.exists():
        raise ConfigError(f"{file} exists: edit it, or name another")
    emulated = arguments.address == "emulated"
    cell: Cell = EmulatedCell() if emulated else RealCell(arguments.address)
    env = connectable(cell, FrankaConfig(address=None if emulated else arguments.address))
    try:
        cell.open()
        found = [device.serial for device in list_cameras(cell.camera_settings())]
        print(f"cameras: {', '.join(found) or 'none'}")
        env.arm.connect()
        taught = teach(env.arm, _ask)
        cameras = assign(found, _ask)
        task = arguments.task or _ask("The task, as the policy is told it: ").strip()
        firmware = _ask("System image of the arm, as Desk shows it (Enter: unknown): ").strip()
    finally:
        env.close()
        cell.close()
    text = workcell_text(
        arguments.address, cameras, taught, task=task or FrankaConfig().task, firmware=firmware
    )
    with explained(f"write {file}", ConfigError):
        write_text(file, text)
    load_workcell(str(file))
    print(f"wrote {file}; look it over, then: dzrobot doctor franka --config {file}")
    return 0


def _ask(question: str) -> str:
    sys.stdout.write(question)
    sys.stdout.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise ConfigError("nobody answers: standard input has ended; run this in a terminal")
    return answer.rstrip("\n")
