"""``dzrobot init-robot``: the description of one's own robot, drafted from a dataset of it."""

import argparse
import re
import runpy
from pathlib import Path

from dzrobot.commands.options import flags
from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, DatasetError, counted, preview
from dzrobot.files import explained, write_text
from dzrobot.progress import progress_bar
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data.draft import RobotDraft, draft_robot
from dzrobot.training.data.draft_file import NAME, draw_sheet, robot_file

SUMMARY = "write the file of your own robot from a dataset of it, with a sheet of its pictures"

NEXT = "dzrobot inspect-data {dataset} --embodiment {reference}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot init-robot``."""
    parser.description = (
        "Write a commented Python file that describes the robot of a LeRobot dataset: what is\n"
        "measured, what names say, and what is open. Beside it, a page with pictures,\n"
        "instructions and plots of some episodes, to look at before training."
    )
    parser.add_argument(
        "dataset", type=flags.text, help="folder of a LeRobot dataset, or its hub name"
    )
    parser.add_argument(
        "--output", type=flags.path, default=Path("robot.py"), metavar="FILE.py",
        help="such as my_robot.py; must not exist yet (default: robot.py)",
    )  # fmt: skip
    parser.add_argument("--tag", type=flags.text, help="name of the robot (default: the file's)")
    for kind in ("state", "action"):
        parser.add_argument(
            f"--{kind}", type=flags.text, nargs="+", default=[], metavar="COLUMN",
            help=f"columns of the {kind} (default: those that are called so)",
        )  # fmt: skip
    parser.add_argument(
        "--without", type=flags.text, nargs="+", default=[], metavar="PART",
        help="parts to leave out of state and action, such as left_hand",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Draft, write, and say what is open."""
    file: Path = arguments.output
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise ConfigError(f"{file}: a robot's file is a Python module, such as my_robot.py")
    if file.exists():
        raise ConfigError(f"{file} exists: edit it, or give another --output")
    tag = arguments.tag or file.stem
    if tag in EMBODIMENTS:
        raise ConfigError(f"{tag!r} is the name of a built-in robot: give another --tag")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\-]*", tag):
        raise ConfigError(f"--tag {tag!r}: allowed are letters, digits, '_', '-' and '.'")
    catalog = DatasetCatalog.open(arguments.dataset)
    draft = draft_robot(catalog, arguments.state, arguments.action, arguments.without)
    with explained(f"write {file}", ConfigError):
        write_text(file, robot_file(draft, tag))
    _report(draft)
    print(f"wrote {file}")
    _absent(catalog)
    arguments.reference = f"{file.stem}:{NAME}"
    sheet = file.with_name(f"{file.stem}_sheet.html")
    try:
        robot: Embodiment = runpy.run_path(str(file))[NAME]
    except ConfigError as error:
        print(f"{file} is not finished: {error}")
        return 0
    try:
        with progress_bar("contact sheet") as advance:
            shown = draw_sheet(catalog, robot, sheet, advance)
        print(f"wrote {sheet}: {counted(shown, 'episode')}; do cameras and instructions fit?")
    except DatasetError as error:
        print(f"no contact sheet: {error}")
    return 0


def _report(draft: RobotDraft) -> None:
    for one in draft.action:
        way = "" if one.gripper is None else ", with a two-way gripper"
        print(
            f"action.{one.part.name}  {counted(len(one.part.numbers), 'number')}, {one.kind}{way}"
        )
    for one in draft.left_out:
        print(
            f"action.{one.part.name}  left out: {len(one.part.numbers)} numbers that never change"
        )
    print(f"views {preview(view.name for view in draft.views) or 'none'}; {draft.rate_evidence}")
    for question in draft.questions:
        print(f"OPEN {question}")


def _absent(catalog: DatasetCatalog) -> None:
    """Say which pictures are not there, and how to get them."""
    lacking = catalog.missing(catalog.cameras)
    names = sorted(
        {name for found in lacking.values() for name in found if not name.startswith("data/")}
    )
    if names:
        folder = names[0].partition("/")[0]
        print(
            f"pictures: {len(lacking)} of {counted(len(catalog.episodes), 'episode')} lack a file "
            f"({counted(len(names), 'file')}, such as {names[0]}): copy them there, or fetch the "
            f"dataset again: hf download OWNER/NAME --repo-type dataset --include '{folder}/*'"
        )
