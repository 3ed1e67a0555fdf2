"""``dzrobot compare``: is one policy better than another, on the same episodes?"""

import argparse
import re

from rich.console import Console

from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_json
from dzrobot.progress import progress_bar
from dzrobot.rollout.evaluation.comparison import Comparison, compare, read_results
from dzrobot.rollout.evaluation.foreign import read_foreign
from dzrobot.rollout.evaluation.tables import (
    WIDTH,
    print_comparison,
    task_counts,
    unpaired_table,
)
from dzrobot.rollout.pages.predicted import predictions_table


def _next(arguments: argparse.Namespace) -> str:
    # A page shows one or two runs.
    return "dzrobot report {runs}" if len(arguments.runs) < 3 else "dzrobot compare {runs} --flips"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot compare``."""
    parser.description = (
        "Compares every later results folder with the first one, episode by episode: the same "
        "task, initial state and seed. Folders of unlike protocols are refused."
    )
    parser.add_argument(
        "runs", type=flags.path, nargs="+", help="results folders; the first is the base"
    )
    parser.add_argument(
        "--published",
        metavar="K/N",
        help="also compare each with a published count, such as 495/512",
    )
    parser.add_argument(
        "--foreign", type=flags.path, action="append", default=[], metavar="FILE",
        help="also compare each with a result of LeRobot (eval_info.json), vla-eval (.sqlite) or "
        "MolmoSpaces (.csv); may be repeated",
    )  # fmt: skip
    parser.add_argument("--seed", type=flags.seed, default=0, help="of the bootstrap (default: 0)")
    parser.add_argument(
        "--force", action="store_true",
        help="compare runs of unlike execution or latency too: the difference is then theirs",
    )  # fmt: skip
    parser.add_argument(
        "--perturbed", action="store_true",
        help="compare runs of unlike perturbation too: the difference is then the perturbation's",
    )  # fmt: skip
    parser.add_argument(
        "--predictions", action="store_true",
        help="also say how far the kept predicted video goes along with success, in each run and "
        "in all",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=flags.output, metavar="FILE", help="write the numbers to FILE"
    )
    parser.add_argument("--flips", action="store_true", help="list the episodes that differ")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison and return 0."""
    others = [] if arguments.published is None else [_count(arguments.published)]
    foreign = [read_foreign(path) for path in arguments.foreign]
    runs = [read_results(folder) for folder in arguments.runs]
    if len(runs) == 1 and not (others or foreign or arguments.predictions):
        raise ConfigError(
            "give two or more results folders, or one and --published K/N, --foreign FILE or "
            "--predictions"
        )
    allowed = {"any_execution": arguments.force, "any_perturbation": arguments.perturbed}
    found = compare(runs, arguments.seed, **allowed) if len(runs) > 1 else ()
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    if found:
        print_comparison(console, found)
    for comparison in found if arguments.flips else ():
        _print_flips(console, comparison)
    for count in others:
        console.print(unpaired_table(runs, f"a published {count[0]}/{count[1]}", count))
    for result in foreign:
        won, episodes = result.count
        console.print(unpaired_table(runs, f"{result.program}'s {won}/{episodes}", result.count))
        console.print(task_counts(runs, result))
    if arguments.predictions:
        with progress_bar("decoding predictions") as show:
            table = predictions_table(runs, show)
        console.print(table)
    if arguments.json is not None:
        with explained(f"write {arguments.json}", ConfigError):
            write_json(arguments.json, [comparison.numbers() for comparison in found])
    return 0


def _count(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        raise ConfigError(f"--published {text!r}: write successes/episodes, such as 495/512")
    successes, episodes = map(int, text.split("/"))
    return successes, episodes


def _print_flips(console: Console, comparison: Comparison) -> None:
    second = comparison.second.name
    for what, names in (("lost", comparison.first_only), ("won", comparison.second_only)):
        console.print(f"{second} {what} {len(names)}: {', '.join(names) or 'none'}")
