"""Writes the page: one HTML file, and the videos it plays in ``media/`` beside it."""

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import CheckpointError, ConfigError, DatasetError, ProtocolError
from dzrobot.files import explained, is_inside, make_folders, replacing, write_text
from dzrobot.importing import required
from dzrobot.rollout.evaluation.tables import failures_line, measures_line
from dzrobot.rollout.footage import photo_file
from dzrobot.rollout.pages.content import (
    Content,
    Predicted,
    Run,
    episode_rows,
    film_of,
    read_content,
    task_rows,
)
from dzrobot.rollout.pages.predicted import (
    QUALITIES,
    QualityRow,
    ScoredRun,
    decode_predictions,
    mean_scores,
    quality_rows,
    write_prediction,
)

_log = logging.getLogger(__name__)

PAGE_FILE = "report.html"
MEDIA_FOLDER = "media"


def write_page(
    folders: list[Path],
    output: Path,
    show: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    foreign: Sequence[Path] = (),
    decoding: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Write the page of one or two results folders, and return its path.

    Args:
        folders: Results folders.
        output: Folder that the page and its media go to; made if need be. A page that is there is
            replaced.
        show: Called with how many episodes are done, of how many.
        foreign: Results of other programs, to stand beside by task.
        decoding: Called with how many episodes have their predictions decoded, of how many, where
            that was left for now. If the checkpoint is not there, the page is without them, and
            says so.

    Raises:
        ConfigError: none, or more than two folders.
        ProtocolError: a folder holds no evaluation, the two are not of the same episodes, or
            ``output`` cannot be written.
        MissingDependencyError: what a report needs is not installed.
    """
    required("a report", "report", "plotly")
    content = read_content(folders, foreign)
    for run in content.runs:
        try:
            decode_predictions(run, decoding)
        except (CheckpointError, ConfigError) as error:
            _log.warning("%s: predictions are left out: %s", run.folder, error)
    with explained(f"write {output}", ProtocolError):
        output.mkdir(parents=True, exist_ok=True)
        videos = _copied(content, output, _film_of, ".mp4")
        photos = _copied(content, output, _photo_of, "-start.png")
        predicted = _written_predictions(content, output, show)
        page = output / PAGE_FILE
        episodes = episode_rows(content, videos, photos, predicted)
        tasks = task_rows(content)
        plots = _written_plotly(output) if _needs_plots(tasks, predicted) else ""
        write_text(page, _rendered(content, tasks, episodes, predicted, plots))
    return page


def _needs_plots(
    tasks: list[dict[str, Any]], predicted: Mapping[str, Mapping[str, Predicted]]
) -> bool:
    """Return whether the page draws anything: classes of failures, or what was predicted."""
    failed = any(rate["failure_classes"] for task in tasks for rate in task["rates"])
    return failed or any(predicted.values())


def _written_plotly(output: Path) -> str:
    """Write the library that draws plots, 4.5 MB, beside the page; return where it lies."""
    from plotly.offline import get_plotlyjs

    place = Path(MEDIA_FOLDER) / "plotly.min.js"
    write_text(make_folders(output, place.parent) / place.name, get_plotlyjs())
    return place.as_posix()


def _written_predictions(
    content: Content, output: Path, show: Callable[[int, int], None]
) -> dict[str, dict[str, Predicted]]:
    """Write what the page shows of predictions; return it by letter and case."""
    predicted: dict[str, dict[str, Predicted]] = {run.letter: {} for run in content.runs}
    work = [(run, case) for run in content.runs for case in run.cases]
    for done, (run, case) in enumerate(work, start=1):
        found = write_prediction(run, case, output, Path(MEDIA_FOLDER) / run.letter.lower())
        if found is not None:
            predicted[run.letter][case.name] = found
        show(done, len(work))
    return predicted


def _copied(
    content: Content, output: Path, find: Callable[[Run, str], Path | None], ending: str
) -> dict[tuple[str, str], str]:
    """Copy a file of each episode below ``output``; return where they lie, by letter and case."""
    places: dict[tuple[str, str], str] = {}
    for run in content.runs:
        for case in run.cases:
            source = find(run, case.name)
            if source is None:
                continue
            place = Path(MEDIA_FOLDER) / run.letter.lower() / f"{case.name}{ending}"
            target = make_folders(output, place.parent) / place.name
            if not _same(source, target):
                with replacing(target) as temporary:
                    _linked(source, temporary)
            places[run.letter, case.name] = place.as_posix()
    return places


def _linked(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that cannot be: films are written once."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _film_of(run: Run, case: str) -> Path | None:
    record = run.records.get(case)
    return None if record is None else film_of(run.folder, record)


def _photo_of(run: Run, case: str) -> Path | None:
    photo = photo_file(run.folder, case)
    return photo if is_inside(run.folder, photo) else None


def _same(one: Path, other: Path) -> bool:
    if other.is_symlink() or not other.exists():
        return False
    first, second = one.stat(), other.stat()
    return (first.st_size, first.st_mtime_ns) == (second.st_size, second.st_mtime_ns)


def _rendered(
    content: Content,
    tasks: list[dict[str, Any]],
    episodes: list[dict[str, Any]],
    predicted: Mapping[str, Mapping[str, Predicted]],
    plotly: str,
) -> str:
    return _filled(
        "report.html",
        content=content,
        tasks=tasks,
        data={"tasks": tasks, "episodes": episodes, "letters": [r.letter for r in content.runs]},
        scores={letter: mean_scores(list(found.values())) for letter, found in predicted.items()},
        qualities=QUALITIES,
        quality_rows=_quality_rows(content, predicted),
        lines={run.letter: _lines(run) for run in content.runs},
        plotly=plotly,
    )


def _filled(template: str, **values: Any) -> str:
    files = resources.files(__package__)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text("utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values)


@dataclass(frozen=True, kw_only=True)
class SheetPlot:
    """The numbers of a part over an episode."""

    low: float
    high: float
    lines: tuple[tuple[str, str], ...]
    """``state`` or ``action``, and the points of a line in a square of 100, ``x,y x,y ...``."""


@dataclass(frozen=True, kw_only=True)
class SheetEpisode:
    """An episode on a contact sheet."""

    number: int
    instruction: str
    pictures: Mapping[str, Sequence[tuple[int, str]]]
    """By camera: row and picture, a PNG file in base64."""

    plots: Mapping[str, SheetPlot]
    """By part."""


def write_sheet(page: Path, title: str, episodes: Sequence[SheetEpisode]) -> None:
    """Write a contact sheet, one HTML file that opens from disk.

    Raises:
        DatasetError: ``page`` cannot be written.
    """
    with explained(f"write {page}", DatasetError):
        write_text(page, _filled("sheet.html", title=title, episodes=episodes))


@dataclass(frozen=True, kw_only=True)
class CheckupPage:
    """What the page of a policy's examination shows."""

    title: str
    sentence: str
    """What came of it."""

    pictures: Mapping[str, Sequence[tuple[str, str]]]
    """By view: caption and picture, a PNG file in base64."""

    groups: Sequence[tuple[str, str, Mapping[str, SheetPlot]]]
    """Heading, legend, and plots by what they show."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The table of all measurements."""

    film: str
    """Recorded above live, an MP4 file in base64; empty: there is none."""


def write_checkup(file: Path, page: CheckupPage) -> None:
    """Write the page of an examination, one HTML file that opens from disk.

    Raises:
        ConfigError: ``file`` cannot be written.
    """
    with explained(f"write {file}", ConfigError):
        write_text(file, _filled("checkup.html", **vars(page)))


@dataclass(frozen=True, kw_only=True)
class RoundsPage:
    """What the page of an improvement shows."""

    title: str
    sentence: str
    """Where it stands."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The table of rounds."""

    legend: str
    sections: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, str]]]]
    """Heading, lines, and films: caption and place, relative to the page."""


def write_rounds_page(file: Path, page: RoundsPage) -> None:
    """Write the page of an improvement, one HTML file; its films stay where they are.

    Raises:
        ConfigError: ``file`` cannot be written.
    """
    with explained(f"write {file}", ConfigError):
        write_text(file, _filled("rounds.html", **vars(page)))


def plotted(lines: Sequence[tuple[str, NDArray[np.floating[Any]]]]) -> SheetPlot:
    """Return a plot of lines, each of the values (N,) of a kind, from left to right."""
    low = min(float(values.min()) for _, values in lines)
    high = max(float(values.max()) for _, values in lines)
    drawn = []
    for kind, values in lines:
        x = np.linspace(0, 100, len(values))
        y = 98 - 96 * (values - low) / ((high - low) or 1.0)
        drawn.append((kind, " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))))
    return SheetPlot(low=low, high=high, lines=tuple(drawn))


def _quality_rows(
    content: Content, predicted: Mapping[str, Mapping[str, Predicted]]
) -> list[QualityRow]:
    """Return how far predicted video goes along with success; empty where a run has none."""
    runs = [
        ScoredRun(
            name=run.letter,
            results=run,
            scores={case: one.scores for case, one in predicted[run.letter].items()},
        )
        for run in content.runs
        if predicted[run.letter]
    ]
    return quality_rows(runs) if runs else []


def _lines(run: Run) -> dict[str, str]:
    return {"failed": failures_line(run.summary), "measured": measures_line(run.summary)}
