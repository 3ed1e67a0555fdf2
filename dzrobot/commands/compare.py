"""``dzrobot compare``: is one policy better than another, on the same episodes?"""

import argparse
import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_json
from dzrobot.rollout.evaluation.comparison import Comparison, Results, compare, read_results
from dzrobot.rollout.evaluation.foreign import ForeignResult, read_foreign
from dzrobot.rollout.evaluation.report import summarize
from dzrobot.rollout.evaluation.significance import compare_counts, wilson
from dzrobot.rollout.evaluation.tables import WIDTH, percent_span, print_comparison
from dzrobot.rollout.pages.predicted import QUALITIES, Along, ScoredRun, quality_rows, quick_scores


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
    parser.add_argument("--json", type=flags.path, metavar="FILE", help="write the numbers to FILE")
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
        console.print(_unpaired(runs, f"a published {count[0]}/{count[1]}", count))
    for result in foreign:
        won, episodes = result.count
        console.print(_unpaired(runs, f"{result.program}'s {won}/{episodes}", result.count))
        console.print(_task_counts(runs, result))
    if arguments.predictions:
        console.print(_predictions_table(runs))
    if arguments.json is not None:
        with explained(f"write {arguments.json}", ConfigError):
            write_json(arguments.json, [_plain(comparison) for comparison in found])
    return 0


def _count(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        raise ConfigError(f"--published {text!r}: write successes/episodes, such as 495/512")
    successes, episodes = map(int, text.split("/"))
    return successes, episodes


def _unpaired(runs: Sequence[Results], what: str, count: tuple[int, int]) -> Table:
    table = Table(title=f"against {what}", title_justify="left")
    table.add_column("run", overflow="fold")
    for name in (
        "success",
        "rate",
        "95 % (Wilson)",
        "difference",
        "95 % (Newcombe)",
        "p (Boschloo)",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for results in runs:
        won = sum(bool(record.success) for record in results.finished.values())
        own = (won, len(results.finished))
        unpaired = compare_counts(count, own)
        table.add_row(
            results.name, f"{own[0]}/{own[1]}", f"{100 * own[0] / own[1]:.1f}",
            percent_span(*wilson(*own)),
            f"{100 * unpaired.difference:+.1f}", percent_span(unpaired.low, unpaired.high),
            f"{unpaired.p:.3g}",
        )  # fmt: skip
    table.caption = "That count is of other episodes, and perhaps of another protocol."
    return table


def _task_counts(runs: Sequence[Results], result: ForeignResult) -> Table:
    """Return the tasks that the first run and another program's result have in common."""
    table = Table(title=f"by task, {result.program}: {result.path}", title_justify="left")
    for name in ("suite", "task"):
        table.add_column(name, overflow="fold")
    for name in (*(run.name for run in runs), result.program):
        table.add_column(name, justify="right", overflow="fold")
    summaries = [summarize(run.records.values(), run.cases) for run in runs]
    rates = [
        {(row.suite, row.task_id): f"{row.successes}/{row.episodes}" for row in one.rows}
        for one in summaries
    ]
    shared = 0
    for row in summaries[0].rows:
        count = result.of(row.suite, row.task_id, row.task)
        if count is not None:
            key = (row.suite, row.task_id)
            own = [one.get(key, "-") for one in rates]
            table.add_row(row.suite, f"{row.task_id} {row.task}", *own, f"{count[0]}/{count[1]}")
            shared += 1
    table.caption = (
        f"{len(result.tasks) - shared} of its {len(result.tasks)} tasks are not in "
        f"{runs[0].name}; {result.errors} of its episodes ended with an error and count nowhere."
    )
    return table


def _predictions_table(runs: Sequence[Results]) -> Table:
    """Return how far predicted video goes along with success.

    Raises:
        ConfigError: a run has kept no predictions.
    """
    scored = [ScoredRun(name=run.name, results=run, scores=quick_scores(run)) for run in runs]
    for run in scored:
        if run.results.video != "full":
            raise ConfigError(
                f"{run.name} was planned with --video {run.results.video}, which predicts no video"
            )
        if not run.values():
            raise ConfigError(
                f"{run.name} has no finished episode with predictions: run it with --predictions on"
            )
    table = Table(title="predicted video and success", title_justify="left")
    table.add_column("run", overflow="fold")
    table.add_column("success", justify="right", no_wrap=True)
    table.add_column("mean over plans of", overflow="fold")
    for name in ("in successes", "in failures", "rho", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in quality_rows(scored):
        for quality, along in row.along.items():
            table.add_row(
                row.name, f"{row.successes}/{row.episodes}", QUALITIES[quality], *_cells(along)
            )
        table.add_section()
    table.caption = (
        "rho: Spearman's with success; the interval draws starts, each with all its episodes. "
        "Failed episodes are longer, and a copied frame scores high where little moves."
    )
    return table


def _cells(along: Along) -> Iterator[str]:
    for mean in (along.of_successes, along.of_failures):
        yield "-" if mean is None else f"{mean:.3g}"
    found = along.correlation
    yield "-" if found is None else f"{found.rho:+.2f}"
    yield "too few" if found is None else f"{found.low:+.2f} to {found.high:+.2f}"


def _print_flips(console: Console, comparison: Comparison) -> None:
    second = comparison.second.name
    for what, names in (("lost", comparison.first_only), ("won", comparison.second_only)):
        console.print(f"{second} {what} {len(names)}: {', '.join(names) or 'none'}")


def _plain(comparison: Comparison) -> dict[str, object]:
    total = comparison.total
    return {
        "first": comparison.first.name,
        "second": comparison.second.name,
        "code": comparison.code,
        "pairs": total.episodes,
        "both": total.both,
        "first_only": list(comparison.first_only),
        "second_only": list(comparison.second_only),
        "difference": total.difference,
        "bootstrap_95": [comparison.low, comparison.high],
        "adjusted_95": list(comparison.adjusted),
        "p_mcnemar": comparison.p,
        "p_holm": comparison.p_holm,
        "e": comparison.e,
        "decided_after": comparison.decided_after,
    }
