"""``dzrobot report``: evaluations as a page that a browser opens from disk."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from dzrobot.commands.options import flags
from dzrobot.errors import ProtocolError, counted, in_units
from dzrobot.files import explained, make_folders
from dzrobot.progress import progress_bar
from dzrobot.rollout.pages.content import LETTERS
from dzrobot.rollout.pages.recordings import write_recordings
from dzrobot.rollout.pages.write import write_page

RERUN_FOLDER = "rerun"
"""Folder of recordings, beside the page; of two evaluations, each has a folder in it."""


def _next(arguments: argparse.Namespace) -> str:
    if arguments.other is None:
        return "dzrobot compare {results} RESULTS_B"
    return "dzrobot compare {results} {other} --flips"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot report``."""
    parser.description = (
        "Write report.html, which opens from disk without a network, and media/ with the videos: "
        "the card, success by task, every episode. With a second folder the two runs stand beside "
        "each other, and the episodes that flipped are marked."
    )
    parser.add_argument("results", type=flags.path, metavar="RESULTS", help="results folder")
    parser.add_argument(
        "other", type=flags.path, nargs="?", metavar="RESULTS_B",
        help="results of the same episodes, to stand beside it",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=flags.output, metavar="DIR", help="default: RESULTS/report"
    )
    parser.add_argument(
        "--foreign", type=flags.path, action="append", default=[], metavar="FILE",
        help="result of LeRobot (eval_info.json), vla-eval (.sqlite) or MolmoSpaces (.csv), to "
        "stand beside by task; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--rerun", action="store_true",
        help="write a Rerun recording of every episode instead, to DIR/rerun",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and say where."""
    folders = [arguments.results, *([arguments.other] if arguments.other else [])]
    if arguments.rerun:
        output: Path = arguments.output or _own_folder(arguments.results)
        return _write_recordings(folders, output / RERUN_FOLDER)
    report(folders, arguments.output, arguments.foreign)
    return 0


def report(folders: list[Path], output: Path | None = None, foreign: Sequence[Path] = ()) -> None:
    """Write the page of results and print its path.

    Args:
        folders: One or two results folders.
        output: Folder to write into; None: ``report`` in the first.
        foreign: Results of other programs, to stand beside.

    Raises:
        ProtocolError: a folder holds no results, or the page cannot be written.
    """
    with _gone_if_refused(output or folders[0] / "report"):
        output = output or _own_folder(folders[0])
        with progress_bar("episodes") as show:

            def decoding(done: int, total: int) -> None:
                show(done, total, "decoding predictions")

            page = write_page(folders, output, show, foreign=foreign, decoding=decoding)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{page}: {in_units(page.stat().st_size)}, {in_units(size)} with its media")


@contextlib.contextmanager
def _gone_if_refused(folder: Path) -> Iterator[None]:
    """Leave no empty folder behind where none was, when the block raises."""
    known = folder.exists()
    try:
        yield
    except BaseException:
        if not known and not folder.is_symlink():
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _own_folder(results: Path) -> Path:
    # Results may come from a stranger: a link in the place of the folder leads elsewhere.
    with explained(f"write a report into {results}", ProtocolError):
        return make_folders(results, "report")


def _write_recordings(folders: list[Path], output: Path) -> int:
    for letter, folder in zip(LETTERS, folders, strict=False):
        own = output if len(folders) == 1 else output / letter.lower()
        with progress_bar("recordings") as show:
            written = write_recordings(folder, own, show)
        size = sum(path.stat().st_size for path in written)
        what = f"{counted(len(written), 'recording')}, {in_units(size)}"
        print(f"{own}: {what}; `rerun FILE.rrd` shows one")
    return 0
