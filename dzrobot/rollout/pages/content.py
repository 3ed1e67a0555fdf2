"""What the page of one or two evaluations shows, as plain values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dzrobot.errors import ConfigError, printable
from dzrobot.files import is_inside
from dzrobot.rollout.evaluation.card import OWN, REQUEST, card_digest, listed, tasks_by_axis
from dzrobot.rollout.evaluation.comparison import Comparison, Results, compare, read_results
from dzrobot.rollout.evaluation.foreign import ForeignResult, read_foreign
from dzrobot.rollout.evaluation.report import Row, Score, Summary, summarize
from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.rollout.records import RECORDS_FILE, Record

Scores = dict[str, float]

LETTERS = ("A", "B")
"""Names of the runs on a page."""


@dataclass(frozen=True, kw_only=True)
class Run(Results):
    """One results folder, as a page shows it."""

    letter: str
    summary: Summary

    @property
    def digest(self) -> str:
        """Letters that tell its card from others."""
        return card_digest(self.card)

    @property
    def who(self) -> str:
        """Name of the policy, as the heading has it; of a checkpoint, of its folder."""
        request = self.card.get(REQUEST) or {}
        named = (request.get("policy") or {}).get("name") or self.card["policy"].get("policy")
        return printable(Path(str(named or "a policy")).name, 80)

    @property
    def where(self) -> str:
        """Suites that it was evaluated on."""
        return printable(", ".join(self.card["suites"]), 120)

    @property
    def when(self) -> str:
        """Day of the last record, in words; empty where there is none."""
        path = self.folder / RECORDS_FILE
        if not path.exists():
            return "not run yet"
        return f"{datetime.fromtimestamp(path.stat().st_mtime):%-d %B %Y, %H:%M}"

    @property
    def code(self) -> str:
        """What ran it, in words."""
        return "; ".join(
            listed(codes) if who == OWN else f"{who}: {listed(codes)}"
            for who, codes in self.codes.items()
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a page has of one episode's predictions."""

    video: str
    """Film of what was seen, what was predicted, and their difference; relative to the page."""

    script: str
    """Scores, plans and times; loaded when the episode is chosen."""

    scores: Scores
    """Means over the plans; with ``copy_`` before the name, of the copied frame."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """All that a page shows."""

    runs: tuple[Run, ...]
    """One or two."""

    comparison: Comparison | None
    """Comparison of two runs."""

    foreign: tuple[ForeignResult, ...] = ()
    """What other programs found, beside the table of tasks."""


def read_content(folders: Sequence[Path], foreign: Sequence[Path] = ()) -> Content:
    """Return what the page of one or two results folders, and of other programs' results, shows.

    Raises:
        ConfigError: none, or more than two.
        ProtocolError: one holds no evaluation, or the two are not of the same episodes.
        MissingDependencyError: two are to be compared, and the statistics are not installed.
    """
    if not 1 <= len(folders) <= len(LETTERS):
        raise ConfigError(f"{len(folders)} results folders: a report shows one, or two beside")
    runs = tuple(_read(*named) for named in zip(LETTERS, folders, strict=False))
    found = compare(runs, any_perturbation=True) if len(runs) > 1 else ()
    others = tuple(read_foreign(path) for path in foreign)
    return Content(runs=runs, comparison=found[0] if found else None, foreign=others)


def _read(letter: str, folder: Path) -> Run:
    found = read_results(folder)
    return Run(
        folder=folder,
        card=found.card,
        cases=found.cases,
        records=found.records,
        letter=letter,
        summary=summarize(found.records.values(), found.cases, axes=tasks_by_axis(found.card)),
    )


def film_of(folder: Path, record: Record) -> Path | None:
    """Return the video of an episode in the results folder ``folder``; None if there is none."""
    if record.video is None:
        return None
    film = folder / record.video
    # A record is a text from outside: it may point anywhere.
    return film if film.suffix == ".mp4" and is_inside(folder, film) else None


def task_rows(content: Content) -> list[dict[str, Any]]:
    """Return the table of tasks: a row for every task or total, with a rate for every run."""
    tables = [_rows(run.summary) for run in content.runs]
    return [
        {
            "suite": row.suite,
            "task": _task(row, name),
            "total": row.task_id is None,
            "rates": [*_rates(content, tables, name), *_foreign_rates(content, row)],
        }
        for name, row in tables[0].items()
    ]


def _rates(
    content: Content, tables: Sequence[Mapping[Any, Row]], name: tuple[str, int | None]
) -> Iterator[dict[str, Any]]:
    for run, table in zip(content.runs, tables, strict=True):
        if name in table:
            row = table[name]
            yield {**asdict(row), "rate": row.rate, "letter": run.letter}


def _foreign_rates(content: Content, row: Row) -> Iterator[dict[str, Any]]:
    for result in content.foreign:
        count = result.of(row.suite, row.task_id, row.task)
        if count is not None:
            score = Score(successes=count[0], episodes=count[1])
            low, high = score.interval
            yield {
                **{"successes": count[0], "episodes": count[1], "rate": count[0] / count[1]},
                **{"low": low, "high": high, "mean_steps": None, "failure_classes": {}},
                "letter": result.program,
            }


def _rows(summary: Summary) -> dict[tuple[str, int | None], Row]:
    whole = [*summary.axes, summary.total, *([summary.distinct] if summary.distinct else [])]
    return {(row.suite, row.task_id): row for row in (*summary.rows, *whole)}


def _task(row: Row, name: tuple[str, int | None]) -> str:
    return "" if name[1] is None else f"{name[1]} {row.task}"


def episode_rows(
    content: Content,
    videos: Mapping[tuple[str, str], str],
    photos: Mapping[tuple[str, str], str],
    predicted: Mapping[str, Mapping[str, Predicted]],
) -> list[dict[str, Any]]:
    """Return a row for every episode, with what came of it in every run.

    Args:
        content: What is shown.
        videos: Where the video of (letter, case) lies, relative to the page.
        photos: The same of the photo of its initial state.
        predicted: What is kept of predictions, by letter and case.
    """
    return [
        {
            "case": case.name,
            "suite": case.suite,
            "task": _instruction(content, case),
            "task_id": case.task_id,
            "episode": case.episode,
            "seed": case.seed,
            "runs": [
                _outcome(
                    run.records.get(case.name),
                    videos.get((run.letter, case.name)),
                    predicted[run.letter].get(case.name),
                )
                | {"photo": photos.get((run.letter, case.name))}
                for run in content.runs
            ],
        }
        for case in content.runs[0].cases
    ]


def _instruction(content: Content, case: EpisodeSpec) -> str:
    records = (run.records.get(case.name) for run in content.runs)
    return next((record.task for record in records if record is not None and record.task), "")


def _outcome(
    record: Record | None, video: str | None, predicted: Predicted | None
) -> dict[str, Any]:
    if record is None:
        return {"outcome": "not run", "failure": "", "video": None, "predicted": None}
    kept = (
        "steps", "ended", "init_state_id", "wall_s", "policy_ms", "plan_ms", "env_ms", "error",
        "robot",
    )  # fmt: skip
    return {
        "outcome": "error" if record.error is not None else _won(record),
        "failure": record.failed_by or record.failure_class or "",
        "video": video,
        "predicted": None if predicted is None else asdict(predicted),
        "measures": None if record.measures is None else asdict(record.measures),
        **{name: value for name, value in vars(record).items() if name in kept},
    }


def _won(record: Record) -> str:
    return "success" if record.success else "failure"
