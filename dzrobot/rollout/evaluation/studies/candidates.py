"""Several policies on the same episodes: checkpoints of a training run, or a sweep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dzrobot.errors import ConfigError
from dzrobot.files import write_json
from dzrobot.rollout.evaluation.report import (
    STEPS_FILE,
    SWEEP_FILE,
    Score,
    StepScore,
    Summary,
    Sweep,
    SweepScore,
    folder_name,
    logged_step,
    print_conclusion,
)
from dzrobot.rollout.evaluation.request import EvaluationRequest, EvaluationSession, Variant
from dzrobot.rollout.policy_spec import REMOTE, PolicySpec
from dzrobot.rollout.protocol import plan_episodes

SELECTED = "selected on these episodes"
"""What the score of a policy that was picked by its score has to be called."""

CONFIRMATION = "confirmation"
"""Folder of the run that measures the selected policy on other episodes."""

_SERVERS = ("ws://", "wss://", "zmq://")


def read_candidates(
    names: Sequence[str], place: Callable[[str], Path], *, taken: Sequence[str] = ()
) -> dict[str, Variant]:
    """Return what is evaluated, by the name that was given.

    Args:
        names: Checkpoints, policies, or addresses of servers.
        place: Returns the results folder of one, given a name for it.
        taken: Names that no folder may have.

    Raises:
        ConfigError: one is given twice, or cannot be one of several.
    """
    found: dict[str, Variant] = {}
    for name, folder in zip(names, candidate_folders(names, taken), strict=True):
        if name in found:
            raise ConfigError(f"{name} is given twice; keep one")
        if name == REMOTE:
            raise ConfigError(f"{REMOTE} is one of several by its server's address: ws://HOST:PORT")
        found[name] = Variant.model_validate({**_policy(name), "output": place(folder)})
    return found


def _policy(name: str) -> dict[str, str]:
    if name.startswith(_SERVERS):
        return {"policy": REMOTE, "server": name}
    return {"checkpoint" if PolicySpec(name=name).is_checkpoint else "policy": name}


def candidate_folders(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Return a folder for each policy: its last name, or all of it where two have the same.

    Args:
        names: As they were given.
        taken: Names that no folder may have.
    """
    labels = [PolicySpec(name=name).label for name in names]
    every = [*taken, *labels]
    return [
        label if every.count(label) == 1 and label else _whole(name)
        for name, label in zip(names, labels, strict=True)
    ]


def _whole(name: str) -> str:
    parts = Path(name).resolve().parts[1:] if PolicySpec(name=name).is_checkpoint else (name,)
    return PolicySpec(name="-".join(parts)).label


def scores_table(title: str, column: str, scores: Mapping[str, Score]) -> Table:
    """Return scores as a table, one line each.

    Args:
        title: Of the table.
        column: Heading of the names.
        scores: By name.
    """
    table = Table(title=title, title_justify="left")
    table.add_column(column, overflow="fold")
    for name in ("success", "rate", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in scores.items():
        rate = 100 * score.successes / score.episodes if score.episodes else float("nan")
        low, high = score.interval
        table.add_row(
            name,
            f"{score.successes}/{score.episodes}",
            f"{rate:.1f}",
            f"{100 * low:.1f} to {100 * high:.1f}",
        )
    return table


def evaluate_steps(session: EvaluationSession, steps: Mapping[int, Path], run: Path) -> int:
    """Evaluate training checkpoints on the same episodes; return the exit code.

    The table is printed, and kept in the results folder.

    Args:
        session: Runs the evaluations.
        steps: Checkpoint of each training step.
        run: Folder of the training run.
    """
    request = session.request
    whole = request.output or run / "evaluations" / folder_name(
        request.suites, request.env or "lift"
    )
    candidates = {
        f"step {step}": Variant(
            checkpoint=str(path), output=whole / f"step_{step:08d}", is_tracked=False
        )
        for step, path in steps.items()
    }
    scores: list[StepScore] = []
    complete = True
    with session.logger(request.project, whole, {"checkpoint": request.checkpoint}) as log:
        for step, summary in zip(steps, _evaluated(session, candidates), strict=True):
            score = StepScore.of(summary, step=step)
            scores.append(score)
            complete = complete and summary.complete
            write_json(whole / STEPS_FILE, [score.model_dump() for score in scores])
            log(score.step, logged_step(score))
    title = f"success by training step, {SELECTED}"
    console = session.console
    console.print(scores_table(title, "step", {str(score.step): score for score in scores}))
    console.print(
        f"A checkpoint picked by this table has a score {SELECTED}: too high for it. Measure it "
        f"once more on others, as `dzrobot sweep` does. `dzrobot plot {run}` draws the table; "
        f"results in {whole}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0 if complete else 1


def evaluate_sweep(
    session: EvaluationSession, candidates: Mapping[str, Variant], confirmed: Variant | None
) -> int:
    """Evaluate policies on the same episodes, and the best of them on others; return the exit code.

    Args:
        session: Runs the evaluations; its request names the output folder.
        candidates: What each policy has of its own, by name.
        confirmed: What the confirmation of the best has of its own; None: there is none.
    """
    console, output = session.console, session.request.output
    assert output is not None, "checked beforehand"
    scores: list[SweepScore] = []
    complete = True
    for name, summary in zip(candidates, _evaluated(session, candidates), strict=True):
        scores.append(SweepScore.of(summary, policy=name))
        complete = complete and summary.complete
        _write(output, scores, None)
    if not complete:
        console.print(scores_table("success", "policy", {s.policy: s for s in scores}))
        console.print("nothing is selected yet: the same command runs what has no result")
        return 1
    best = max(scores, key=lambda score: score.successes)
    scores = [score.model_copy(update={"selected": score is best}) for score in scores]
    _print_selection(console, scores, best)
    _write(output, scores, None)
    if confirmed is None:
        return 0
    console.print(f"{CONFIRMATION}: {best.policy}, on other episodes", markup=False)
    own = candidates[best.policy].model_copy(
        update=confirmed.model_dump(include={"output", "episodes", "first_episode"})
    )
    done = session.run(own)
    _write(output, scores, SweepScore.of(done.summary, policy=best.policy))
    return print_conclusion(console, done.summary, done.folder, done.title)


def confirmation(request: EvaluationRequest, first: Variant, wanted: int | None) -> Variant | None:
    """Return what the confirmation of a sweep has of its own; None: there is none.

    Args:
        request: Of the sweep.
        first: One of its candidates.
        wanted: Episodes per task; None: as many as in the sweep, 0: no confirmation.

    Raises:
        ProtocolError: the protocol has no other episodes; raised before hours of work.
    """
    if wanted == 0:
        return None
    assert request.output is not None, "checked beforehand"
    spec = request.varied(first).resolved().evaluation.spec
    swept = spec.protocol.episodes if spec.episodes is None else spec.episodes
    confirmed = Variant(
        output=request.output / CONFIRMATION,
        episodes=swept if wanted is None else wanted,
        first_episode=swept,
    )
    own = first.model_copy(update=confirmed.model_dump(exclude_none=True))
    plan_episodes(request.varied(own).resolved().evaluation.spec)
    return confirmed


def _evaluated(session: EvaluationSession, candidates: Mapping[str, Variant]) -> Iterator[Summary]:
    """Evaluate one after the other; yield what was found of each."""
    for name, variant in candidates.items():
        session.console.print(name, highlight=False, markup=False, soft_wrap=True)
        yield session.run(variant).summary


def _print_selection(console: Console, scores: Sequence[SweepScore], best: SweepScore) -> None:
    title = f"success; {best.policy} is {SELECTED}"
    marked = {f"{s.policy} *" if s.selected else s.policy: s for s in scores}
    console.print(scores_table(title, "policy", marked))
    if tied := [s.policy for s in scores if s.successes == best.successes and not s.selected]:
        console.print(f"as good, but named later: {', '.join(tied)}", markup=False, soft_wrap=True)


def _write(output: Path, scores: Sequence[SweepScore], confirmed: SweepScore | None) -> None:
    sweep = Sweep(scores=tuple(scores), confirmation=confirmed)
    write_json(output / SWEEP_FILE, sweep.model_dump())
