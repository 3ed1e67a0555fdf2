"""``dzrobot sweep``: which of several checkpoints is the best, and how good it is."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from dzrobot.commands.candidates import (
    SELECTED,
    evaluate_candidates,
    read_candidates,
    scores_table,
)
from dzrobot.commands.eval import evaluate_variant, together
from dzrobot.commands.options import flags
from dzrobot.commands.options.evaluation import add_acting, add_how, add_what, read_evaluation
from dzrobot.commands.options.execution import add_execution
from dzrobot.commands.options.tracking import check_tracking
from dzrobot.commands.results import conclude
from dzrobot.commands.variants import Variant
from dzrobot.errors import ConfigError
from dzrobot.files import write_json
from dzrobot.rollout.evaluation.ranks import Ranks
from dzrobot.rollout.evaluation.report import SWEEP_FILE, Summary, Sweep, SweepScore
from dzrobot.rollout.protocol import plan_episodes

SUMMARY = "find the best of several checkpoints, and measure it on other episodes"

CONFIRMATION = "confirmation"
"""Folder of the run that says how good the selected one is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot sweep``."""
    parser.description = (
        "Evaluate several checkpoints on the same episodes, and the best of them once more on "
        "others: the score it was selected by is too high for it. The same command again runs what "
        "is missing."
    )
    parser.add_argument(
        "policies", nargs="+", type=flags.text, metavar="CHECKPOINT",
        help="folder or Hugging Face id; random, hold, expert, module:factory and a server's ws:// "
        "address too",
    )  # fmt: skip
    what = parser.add_argument_group("what is run")
    add_what(what)
    what.add_argument(
        "--confirm", type=flags.whole(0), metavar="N",
        help="episodes per task of the confirmation, which follow those of the selection; 0: none "
        "(default: as many)",
    )  # fmt: skip
    add_acting(parser.add_argument_group("the policies"))
    add_execution(
        parser.add_argument_group("time that passes while the policy thinks (default: none)")
    )
    add_how(parser.add_argument_group("how it is run; none of this changes a result"))
    parser.set_defaults(checkpoint=None, policy=None, server=None, privileged=False)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the tables, and return 0 if every episode has a result, else 1."""
    check_tracking(arguments)
    if arguments.output is None:
        raise ConfigError("a sweep writes several folders: say below which with --output DIR")
    candidates = read_candidates(
        arguments.policies, lambda folder: arguments.output / folder, taken=[CONFIRMATION]
    )
    confirmed = _confirmed(arguments, next(iter(candidates.values())))
    return together(arguments, partial(_directed, candidates=candidates, confirmed=confirmed))


def _directed(
    console: Console,
    arguments: argparse.Namespace,
    ranks: Ranks | None,
    *,
    candidates: dict[str, Variant],
    confirmed: Variant | None,
) -> int:
    def one(variant: Variant) -> tuple[Summary, Path, str]:
        return evaluate_variant(console, arguments, variant, ranks)

    scores: list[SweepScore] = []
    complete = True
    for name, summary in evaluate_candidates(console, candidates, one):
        scores.append(SweepScore.of(summary, policy=name))
        complete = complete and summary.complete
        _write(arguments.output, scores, None)
    if not complete:
        console.print(scores_table("success", "policy", {s.policy: s for s in scores}))
        console.print("nothing is selected yet: the same command runs what has no result")
        return 1
    best = max(scores, key=lambda score: score.successes)
    scores = [score.model_copy(update={"selected": score is best}) for score in scores]
    title = f"success; {best.policy} is {SELECTED}"
    console.print(scores_table(title, "policy", {_marked(score): score for score in scores}))
    if tied := [s.policy for s in scores if s.successes == best.successes and not s.selected]:
        console.print(f"as good, but named later: {', '.join(tied)}", markup=False, soft_wrap=True)
    _write(arguments.output, scores, None)
    if confirmed is None:
        return 0
    console.print(f"{CONFIRMATION}: {best.policy}, on other episodes", markup=False)
    own = candidates[best.policy].model_copy(
        update=confirmed.model_dump(include={"output", "episodes", "first_episode"})
    )
    summary, folder, heading = one(own)
    _write(arguments.output, scores, SweepScore.of(summary, policy=best.policy))
    return conclude(console, summary, folder, heading)


def _confirmed(arguments: argparse.Namespace, first: Variant) -> Variant | None:
    """Return what the confirmation has of its own; None: there is none.

    Raises:
        ProtocolError: the protocol has no other episodes.
    """
    if arguments.confirm == 0:
        return None
    spec = read_evaluation(first.applied(arguments)).evaluation.spec
    swept = spec.protocol.episodes if spec.episodes is None else spec.episodes
    confirmed = Variant(
        output=arguments.output / CONFIRMATION,
        episodes=swept if arguments.confirm is None else arguments.confirm,
        first_episode=swept,
    )
    own = first.model_copy(update=confirmed.model_dump(exclude_none=True))
    # Said before hours of work.
    plan_episodes(read_evaluation(own.applied(arguments)).evaluation.spec)
    return confirmed


def _marked(score: SweepScore) -> str:
    return f"{score.policy} *" if score.selected else score.policy


def _write(output: Path, scores: Sequence[SweepScore], confirmation: SweepScore | None) -> None:
    sweep = Sweep(scores=tuple(scores), confirmation=confirmation)
    write_json(output / SWEEP_FILE, sweep.model_dump())
