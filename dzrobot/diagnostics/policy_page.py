"""The page of a policy's examination: what was compared, side by side."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from dzrobot.diagnostics.examination import CheckupLine, Examination
from dzrobot.diagnostics.policy_files import state_bounds
from dzrobot.importing import required
from dzrobot.modality.input_variants import Image
from dzrobot.recording.media import VideoCodec, VideoFile, encode_png
from dzrobot.rollout.footage import side_by_side

if TYPE_CHECKING:
    # Jinja is imported where a page is written.
    from dzrobot.rollout.pages.write import SheetPlot

FILMED_STEPS = 300
"""Most steps of an episode that are on the film."""

COLUMNS = ("measured", "", "found", "differs", "matters", "s", "plans")
"""Headings of a table of measurements."""

_WORDS = {None: "", True: "yes", False: "no"}


def cells(line: CheckupLine) -> tuple[str, ...]:
    """Return one measurement as a row of a table, under :data:`COLUMNS`."""
    differs, matters = _WORDS[line.differs], _WORDS[line.matters]
    return (
        line.step,
        line.what,
        line.found,
        differs,
        matters,
        f"{line.seconds:.1f}",
        str(line.plans),
    )


def check_can_write() -> None:
    """Check that a page can be written, before work whose results are to be on it.

    Raises:
        MissingDependencyError: what a page needs is not installed.
    """
    required("a page", "report", "jinja2")


def write_policy_page(file: Path, checkup: Examination, lines: Sequence[CheckupLine]) -> None:
    """Write the page of an examination that is over.

    Args:
        file: One HTML file, which opens from disk.
        checkup: What was examined.
        lines: Its measurements.

    Raises:
        ConfigError: the file cannot be written.
    """
    from dzrobot.rollout.pages.write import CheckupPage, write_checkup

    assert checkup.verdict is not None, "it is over"
    pictures = {
        one.key: [(caption, _encoded(image)) for caption, image in one.pictures.items()]
        for one in checkup.compared
        if one.pictures
    }
    write_checkup(
        file,
        CheckupPage(
            title=f"Why does {checkup.found.spec.label or 'the bundled policy'} fail?",
            sentence=checkup.verdict.sentence, pictures=pictures, groups=list(_groups(checkup)),
            columns=COLUMNS, rows=[cells(line) for line in lines], film=_film(checkup),
        ),
    )  # fmt: skip


def _groups(checkup: Examination) -> Iterator[tuple[str, str, Mapping[str, "SheetPlot"]]]:
    from dzrobot.rollout.pages.write import plotted

    names = [f"{part.key}[{i}]" for part in checkup.found.robot.state for i in range(part.dim)]
    if checkup.live is not None and names:
        recorded, live = checkup.live.states
        bounds = state_bounds(checkup.found)
        shown = {}
        for number, name in enumerate(names):
            edges = [] if bounds is None else [
                ("bounds", np.full(2, bound[number])) for bound in bounds
            ]  # fmt: skip
            both = [("recorded", recorded[:, number]), ("live", live[:, number])]
            shown[name] = plotted([*both, *edges])
        legend = "Recorded blue, live orange, bounds of the policy's statistics dashed."
        yield "States, where recorded actions were repeated", legend, shown
    if checkup.own is not None:
        own = checkup.own
        actions = [f"{p.key}[{i}]" for p in checkup.found.robot.action for i in range(p.dim)]
        shown = {
            name: plotted([("recorded", own.recorded[:, 0, n]), ("planned", own.planned[:, 0, n])])
            for n, name in enumerate(actions)
        }
        legend = "Recorded blue, planned orange: the first action at each row that was asked about."
        yield "Actions, on recorded rows", legend, shown


def _film(checkup: Examination) -> str:
    """Return an episode as it was recorded, above what is seen when its actions are repeated.

    An MP4 file in base64; empty where nothing can be repeated.
    """
    if checkup.bench is None or checkup.recording is None or not checkup.episodes:
        return ""
    start, robot = checkup.episodes[0], checkup.found.robot
    ordinal = checkup.recording.ordinal(start.number)
    steps = list(range(min(checkup.recording.length(ordinal), FILMED_STEPS)))
    recorded = checkup.recording.images(ordinal, steps)
    live = checkup.bench.observations(start.recording, steps)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "replay.mp4"
        film = VideoFile(path, robot.timing.control_hz, VideoCodec(crf=28))
        for one, other in zip(recorded, live, strict=True):
            rows = [
                side_by_side([np.asarray(seen[key], np.uint8) for key in robot.video_keys])
                for seen in (one, other)
            ]
            film.add(np.concatenate(rows))
        film.close()
        return base64.b64encode(path.read_bytes()).decode("ascii")


def _encoded(image: Image) -> str:
    return base64.b64encode(encode_png(image)).decode("ascii")
