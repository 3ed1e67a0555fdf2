"""Episodes as Rerun recordings: what was seen, predicted, planned and done, step by step."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dzrobot.errors import ProtocolError
from dzrobot.files import explained, replacing
from dzrobot.importing import required
from dzrobot.rollout.evaluation.comparison import Results, read_results
from dzrobot.rollout.pages.content import film_of
from dzrobot.rollout.pages.predicted import decode_predictions, read_parts
from dzrobot.rollout.predictions import EpisodePredictions, prediction_files, read_predictions
from dzrobot.rollout.records import Record

if TYPE_CHECKING:
    from rerun import RecordingStream

STEP = "step"
"""Name of the time line: actions executed so far."""

_JPEG_QUALITY = 90


def write_recordings(
    folder: Path, output: Path, show: Callable[[int, int], None] = lambda _done, _total: None
) -> list[Path]:
    """Write a recording of every episode that was run, and return where they lie.

    Args:
        folder: Results folder.
        output: Folder of the recordings; made if need be. One that is there is replaced.
        show: Called with how many are done, of how many; first of predictions that are decoded.

    Raises:
        CheckpointError: predictions were to be decoded now, and the checkpoint is not there.
        ProtocolError: the folder holds no evaluation or a damaged one, or ``output`` cannot be
            written.
        MissingDependencyError: Rerun is not installed.
    """
    required("a Rerun recording", "rerun", "rerun")
    results = read_results(folder)
    decode_predictions(results, show)
    ran = [case.name for case in results.cases if case.name in results.records]
    written = []
    for name in ran:
        with (
            explained(f"write {output}", ProtocolError),
            replacing(output / f"{name}.rrd") as path,
        ):
            _write(path, results, results.records[name])
        written.append(output / f"{name}.rrd")
        show(len(written), len(ran))
    return written


def _write(path: Path, results: Results, record: Record) -> None:
    import rerun

    stream = rerun.RecordingStream("dzrobot", recording_id=f"{results.name} {record.case}")
    # When it was written means nothing here; the viewer would begin with that time line.
    stream.set_log_time_enabled(False)
    stream.set_log_tick_enabled(False)
    stream.save(path)
    outcome = "error" if record.error is not None else "success" if record.success else "failure"
    facts = f"{record.task}\n\n{record.case}: {outcome}, {record.ended or record.error}"
    stream.log("episode", rerun.TextDocument(facts), static=True)
    card = json.dumps(results.card, indent=2)
    stream.log("card", rerun.TextDocument(card, media_type="application/json"), static=True)
    _log_film(stream, results.folder, record)
    kept = read_predictions(results.folder, record.case)
    if kept is not None:
        _log_rows(stream, "state", 0, kept.states)
        _log_rows(stream, "action/executed", 0, kept.executed)
        _log_plans(stream, kept, prediction_files(results.folder, record.case)[1])
    if record.success is not None and record.steps is not None:
        _log_rows(stream, "success", record.steps, [[float(record.success)]])
    stream.flush()
    stream.disconnect()


def _log_film(stream: "RecordingStream", folder: Path, record: Record) -> None:
    import rerun

    film = film_of(folder, record)
    if film is None:
        return
    asset = rerun.AssetVideo(path=film)
    times = asset.read_frame_timestamps_nanos()
    stream.log("cameras", asset, static=True)
    # One frame an observation: the first before the first step.
    stream.send_columns(
        "cameras",
        indexes=[rerun.TimeColumn(STEP, sequence=range(len(times)))],
        columns=rerun.VideoFrameReference.columns_nanos(times),
    )


def _log_plans(stream: "RecordingStream", kept: EpisodePredictions, video: Path) -> None:
    import rerun

    parts = read_parts(kept, video)
    for number, (chunk, part) in enumerate(zip(kept.chunks, parts, strict=True)):
        start, seen, predicted = part
        _log_rows(stream, f"action/planned/{number:03d}", chunk.step, chunk.planned)
        for name, error in chunk.latents.items():
            _log_rows(stream, name, chunk.step, [[error]])
        for name, spent_ms in chunk.timing.items():
            _log_rows(stream, f"time_ms/{name}", chunk.step, [[spent_ms]])
        shown = [("seen", chunk.step, start)]
        for after, real, dreamt in zip(chunk.frames, seen, predicted, strict=True):
            shown += [("seen", chunk.step + after, real), ("predicted", chunk.step + after, dreamt)]
        for name, step, image in shown:
            stream.set_time(STEP, sequence=step)
            stream.log(f"network/{name}", rerun.Image(image).compress(jpeg_quality=_JPEG_QUALITY))


def _log_rows(
    stream: "RecordingStream", entity: str, first: int, rows: Sequence[Sequence[float]]
) -> None:
    """Log one row of numbers a step, from step ``first`` on."""
    import rerun

    for number, row in enumerate(rows):
        stream.set_time(STEP, sequence=first + number)
        stream.log(entity, rerun.Scalars(row))
