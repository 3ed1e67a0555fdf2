"""Several policies on the same episodes: what `eval --steps`, `--blind` and `sweep` share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dzrobot.commands.variants import Variant
from dzrobot.errors import ConfigError
from dzrobot.rollout.evaluation.report import Score, Summary
from dzrobot.rollout.policy_spec import REMOTE, PolicySpec

SELECTED = "selected on these episodes"
"""What the score of a policy that was picked by its score has to be called."""

One = Callable[[Variant], tuple[Summary, Path, str]]
"""Runs one evaluation; returns what it found, its folder and the title of its table."""


_SERVERS = ("ws://", "wss://")


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


def evaluate_candidates(
    console: Console, candidates: Mapping[str, Variant], one: One
) -> Iterator[tuple[str, Summary]]:
    """Evaluate one after the other; yield the name and what was found of each.

    Args:
        console: Where to it is said which one is evaluated.
        candidates: What each has of its own, by its name.
        one: Runs one evaluation.
    """
    for name, variant in candidates.items():
        console.print(name, highlight=False, markup=False, soft_wrap=True)
        yield name, one(variant)[0]


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
