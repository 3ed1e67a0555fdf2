"""Predicted frames beside what was seen: a video for the page, and scores of every plan.

PSNR and SSIM (Wang et al. 2004: Gaussian window of 11 pixels, sigma 1.5) are means over the frames
of a plan. They stand beside those of a copy of the frame that the plan was made from: a scene that
hardly moves scores high without any prediction. The PSNR of moving pixels alone leaves the still
ones out. The evaluation has added the error in latents.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.files import is_inside, make_folders, write_text
from dzrobot.importing import required
from dzrobot.recording.media import VideoCodec, VideoFile
from dzrobot.rollout.evaluation.comparison import Results
from dzrobot.rollout.evaluation.planning import EvaluationRequest
from dzrobot.rollout.evaluation.significance import RankCorrelation, rank_correlation
from dzrobot.rollout.pages.content import Predicted, Run, Scores
from dzrobot.rollout.policy_spec import open_coder
from dzrobot.rollout.predictions import (
    Chunk,
    EpisodePredictions,
    decode,
    prediction_files,
    read_predictions,
    undecoded_files,
)
from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.untrusted import parsing

Image = NDArray[np.uint8]

SHOWN_HEIGHT = 256
"""Pixels that small images are enlarged to, at least."""

MOST_PSNR = 100.0
"""PSNR of equal images, which is infinite."""

MOVING = 16
"""In steps of 255: a pixel moves if a color of it differs by more from the frame a plan was made
from."""

_WHERE_IT_MOVES = ("moving_psnr", "copy_moving_psnr")
"""Scores that a plan lacks in which no pixel moves."""


def decode_predictions(
    results: Results, show: Callable[[int, int], None] = lambda _done, _total: None
) -> None:
    """Decode what the evaluation has kept of predictions, where that was left for later.

    What is decoded is kept beside the results, so that it is done once.

    Args:
        results: The evaluation.
        show: Called with how many episodes are decoded, of how many.

    Raises:
        CheckpointError: the checkpoint is not there, or has changed.
        ConfigError: the evaluation names a device that is not there.
        ProtocolError: what was kept is damaged, or the results cannot be written.
    """
    folder = results.folder
    there = {case.name: undecoded_files(folder, case.name) for case in results.cases}
    waiting = [case for case, files in there.items() if all(is_inside(folder, f) for f in files)]
    if not waiting:
        return
    policy = EvaluationRequest.of(results.card).policy
    coder = open_coder(policy, results.card["policy"])
    for done, case in enumerate(waiting):
        show(done, len(waiting))
        decode(folder, case, coder, coder.decode)
    show(len(waiting), len(waiting))


def write_prediction(run: Run, case: EpisodeSpec, output: Path, media: Path) -> Predicted | None:
    """Write what the page shows of an episode's predictions; None where none are kept.

    Args:
        run: The evaluation.
        case: Which episode.
        output: Folder of the page.
        media: Folder to write to, relative to it.

    Raises:
        MissingDependencyError: there are predictions, and scikit-image is not installed.
        ProtocolError: a file of predictions is damaged.
    """
    kept = read_predictions(run.folder, case.name)
    if kept is None:
        return None
    required("a report with predictions", "report", "skimage")
    make_folders(output, media)
    name = media / f"{case.name}-predicted"
    parts = list(read_parts(kept, prediction_files(run.folder, case.name)[1]))
    scores = _of_plans(kept, parts, list(_MEASURES))
    _write_video(output / f"{name}.mp4", kept.fps, parts)
    _write_script(output / f"{name}.js", (run.letter, case.name), kept, scores)
    return Predicted(
        video=f"{name.as_posix()}.mp4",
        script=f"{name.as_posix()}.js",
        scores=_of_episode([one for one in scores if one]),
    )


def mean_scores(found: Sequence[Predicted]) -> Scores:
    """Return the means over episodes; empty without any."""
    return _means([one.scores for one in found if one.scores])


def read_parts(kept: EpisodePredictions, path: Path) -> Iterator[tuple[Image, Image, Image]]:
    """Yield, for every plan: the frame it was made from (H, W, 3), seen and predicted (F, H, W, 3).

    Raises:
        ProtocolError: the video is damaged, or has other frames than its description says.
    """
    remedy = (
        "remove it and the .json beside it, and the report leaves this episode's predictions out"
    )
    guard = parsing(str(path), ProtocolError, "is not a readable video", remedy)
    with guard, av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    sizes = {frame.shape for frame in frames}
    unlike = len(sizes) > 1 or any(height % 2 for height, _, _ in sizes)
    if unlike or len(frames) != sum(1 + len(chunk.frames) for chunk in kept.chunks):
        raise ProtocolError(
            f"{path} has {len(frames)} frames, which are not those that the .json beside it tells "
            "of; remove both, and the report leaves this episode's predictions out"
        )
    first = 0
    for chunk in kept.chunks:
        whole = np.stack(frames[first : first + 1 + len(chunk.frames)])
        seen, predicted = np.split(whole, 2, axis=1)
        yield seen[0], seen[1:], predicted[1:]
        first += len(whole)


def quick_scores(results: Results) -> dict[str, Scores]:
    """Return what is computed quickly of every episode's predicted video: all but SSIM.

    Means over its plans, by case: ``psnr``, ``copy_psnr``, the same of moving pixels where any
    move, and the errors in latents where they were kept; empty where no predicted frame was seen.
    Episodes without predictions are left out.

    Raises:
        ProtocolError: a file of predictions is damaged.
    """
    found = {}
    for case in results.cases:
        kept = read_predictions(results.folder, case.name)
        if kept is not None:
            parts = read_parts(kept, prediction_files(results.folder, case.name)[1])
            scores = _of_plans(kept, parts, ["psnr"])
            found[case.name] = _of_episode([one for one in scores if one])
    return found


def _of_plans(
    kept: EpisodePredictions, parts: Iterable[tuple[Image, Image, Image]], names: Sequence[str]
) -> list[Scores]:
    """Return the scores ``names`` of every plan, and the errors in latents where they were kept."""
    return [
        _scores(part, names) | chunk.latents for part, chunk in zip(parts, kept.chunks, strict=True)
    ]


def _scores(parts: tuple[Image, Image, Image], names: Sequence[str]) -> Scores:
    """Return the scores ``names`` of a plan; empty where none of its predicted frames was seen."""
    start, seen, predicted = parts
    if not len(seen):
        return {}
    found = {}
    for name in names:
        measure = _MEASURES[name]
        own = [measure(*pair) for pair in zip(seen, predicted, strict=True)]
        found[name] = float(np.mean(own))
        found[f"copy_{name}"] = float(np.mean([measure(real, start) for real in seen]))
    return found | _where_it_moves(start, seen, predicted)


def _where_it_moves(start: Image, seen: Image, predicted: Image) -> Scores:
    """Return the PSNR of moving pixels, the mean over the frames that have any; else nothing."""
    moves = (np.abs(seen.astype(np.int16) - start) > MOVING).any(axis=-1)
    pairs = [
        (_psnr(real[moving], own[moving]), _psnr(real[moving], start[moving]))
        for real, own, moving in zip(seen, predicted, moves, strict=True)
        if moving.any()
    ]
    means = np.mean(pairs, axis=0).tolist() if pairs else []
    return dict(zip(_WHERE_IT_MOVES, means, strict=False))


def _psnr(real: Image, other: Image) -> float:
    one, two = (image.astype(np.float64) / 255 for image in (real, other))
    error = float(np.mean((one - two) ** 2))
    return MOST_PSNR if error == 0 else min(MOST_PSNR, -10 * float(np.log10(error)))


def _ssim(real: Image, other: Image) -> float:
    from skimage.metrics import structural_similarity

    one, two = (image.astype(np.float64) / 255 for image in (real, other))
    likeness = structural_similarity(
        one, two, channel_axis=-1, gaussian_weights=True, sigma=1.5,
        use_sample_covariance=False, data_range=1,
    )  # fmt: skip
    return float(likeness)


_MEASURES: Mapping[str, Callable[[Image, Image], float]] = {"psnr": _psnr, "ssim": _ssim}
"""Measures of a seen frame and another one."""


def _means(scores: Sequence[Scores]) -> Scores:
    # Results of an earlier version that were continued have fewer at first.
    names = [name for name in scores[0] if all(name in one for one in scores)] if scores else []
    means = {name: float(np.mean([one[name] for one in scores])) for name in names}
    for name in _WHERE_IT_MOVES:
        if there := [one[name] for one in scores if name in one]:
            means[name] = float(np.mean(there))
    return means


def _of_episode(scores: Sequence[Scores]) -> Scores:
    """Return the means over the plans of an episode, and ``first_`` those of its first plan."""
    first = {f"first_{name}": score for name, score in (scores[0] if scores else {}).items()}
    return _means(scores) | first


def _write_video(path: Path, fps: float, parts: Sequence[tuple[Image, Image, Image]]) -> None:
    video = VideoFile(path, fps, VideoCodec(gop=20, crf=20))
    for start, seen, predicted in parts:
        # The frame that a plan was made from is not a prediction: black is shown beside it.
        if not len(seen):
            video.add(_beside(start, np.zeros_like(start)))
        for pair in zip(seen, predicted, strict=True):
            video.add(_beside(*pair))
    video.close()


def _beside(seen: Image, predicted: Image) -> Image:
    difference = np.abs(seen.astype(np.int16) - predicted).astype(np.uint8)
    joined = np.concatenate([seen, predicted, difference], axis=1)
    times = max(1, -(-SHOWN_HEIGHT // joined.shape[0]))
    size = (joined.shape[1] * times, joined.shape[0] * times)
    larger: Image = np.asarray(cv2.resize(joined, size, interpolation=cv2.INTER_NEAREST), np.uint8)
    return larger[: size[1] // 2 * 2, : size[0] // 2 * 2]


def _write_script(
    path: Path, about: tuple[str, str], kept: EpisodePredictions, scores: Sequence[Scores]
) -> None:
    chunks = [_described(chunk, one) for chunk, one in zip(kept.chunks, scores, strict=True)]
    content = {
        "chunks": chunks,
        "executed": [[round(number, 5) for number in row] for row in kept.executed],
    }
    # A script, since a page from disk may fetch nothing else. ASCII: no text of it can end early.
    letter, case = map(json.dumps, about)
    write_text(path, f"takePredictions({letter}, {case}, {json.dumps(content)});\n")


def _described(chunk: Chunk, scores: Scores) -> dict[str, Any]:
    return {
        "step": chunk.step,
        "frames": len(chunk.frames),
        "planned": [[round(number, 5) for number in row] for row in chunk.planned],
        "timing": {name: round(spent, 3) for name, spent in chunk.timing.items()},
        "scores": {name: round(score, 4) for name, score in scores.items()},
    }


QUALITIES = {
    "psnr": "PSNR, dB",
    "gain": "PSNR above a copy of the last frame, dB",
    "moving_psnr": "PSNR of moving pixels, dB",
    "moving_gain": "PSNR of moving pixels above a copy's, dB",
    "latent_gain": "latent error below a copy's",
    "first_latent_gain": "latent error below a copy's, first plan alone",
}
"""What is looked at of an episode's predicted video, higher is better; means over its plans.

Failures have more plans than successes have. The first plan is known before either, so that only it
could foretell one. ``latent_gain`` is ``copy_latent_error - latent_error``, see
:func:`~dzrobot.rollout.predictions.latent_errors`: only of policies that encode images.
"""


@dataclass(frozen=True, kw_only=True)
class ScoredRun:
    """A run whose predicted videos were scored."""

    name: str
    """For the table."""

    results: Results

    scores: Mapping[str, Scores]
    """Means over the plans of an episode, by case; empty where no predicted frame was seen."""

    def values(self) -> dict[str, dict[str, float]]:
        """Return what is known of each finished episode of what `QUALITIES` names."""
        found = {case: self.scores.get(case) for case in self.results.finished}
        return {case: _qualities(scores) for case, scores in found.items() if scores}


@dataclass(frozen=True, kw_only=True)
class Along:
    """One quality of the episodes that succeeded, and of those that did not."""

    of_successes: float | None
    """Mean; None without any."""

    of_failures: float | None
    """Mean; None without any."""

    correlation: RankCorrelation | None
    """With success; None where there is too little to tell."""


@dataclass(frozen=True, kw_only=True)
class QualityRow:
    """One run, or all of them together."""

    name: str
    episodes: int
    successes: int
    along: Mapping[str, Along]
    """By the names of `QUALITIES`."""


def _qualities(scores: Scores) -> dict[str, float]:
    found = {"psnr": scores["psnr"], "gain": scores["psnr"] - scores["copy_psnr"]}
    if "moving_psnr" in scores:
        found["moving_psnr"] = scores["moving_psnr"]
        found["moving_gain"] = scores["moving_psnr"] - scores["copy_moving_psnr"]
    for name in ("", "first_"):
        if f"{name}latent_error" in scores:
            copied = scores[f"{name}copy_latent_error"]
            found[f"{name}latent_gain"] = copied - scores[f"{name}latent_error"]
    return found


def quality_rows(runs: Sequence[ScoredRun]) -> list[QualityRow]:
    """Return how far predicted video goes along with success, in each run and in all together.

    All together are the starts that every run has finished with scores.

    Raises:
        MissingDependencyError: scipy is not installed.
    """
    known = [run.values() for run in runs]
    rows = [
        _row(run.name, [run], [values], list(values))
        for run, values in zip(runs, known, strict=True)
    ]
    if len(runs) > 1:
        shared = [case for case in known[0] if all(case in values for values in known)]
        rows.append(_row("all, same starts", runs, known, shared))
    return rows


def _row(
    name: str,
    runs: Sequence[ScoredRun],
    known: Sequence[Mapping[str, Mapping[str, float]]],
    cases: Sequence[str],
) -> QualityRow:
    won = _won(runs, cases)
    along = {quality: _along(runs, known, cases, quality) for quality in QUALITIES}
    return QualityRow(
        name=name, episodes=len(runs) * len(cases), successes=sum(map(sum, won)), along=along
    )


def _along(
    runs: Sequence[ScoredRun],
    known: Sequence[Mapping[str, Mapping[str, float]]],
    cases: Sequence[str],
    quality: str,
) -> Along:
    """Look at one quality, on the cases of which every run knows it."""
    cases = [case for case in cases if all(quality in values[case] for values in known)]
    values = [[of[case][quality] for case in cases] for of in known]
    won = _won(runs, cases)
    numbers, outcomes = np.array(values, np.float64), np.array(won, bool)
    return Along(
        of_successes=_mean(numbers[outcomes].tolist()),
        of_failures=_mean(numbers[~outcomes].tolist()),
        correlation=rank_correlation(values, won),
    )


def _won(runs: Sequence[ScoredRun], cases: Sequence[str]) -> list[list[bool]]:
    return [[bool(run.results.finished[case].success) for case in cases] for run in runs]


def _mean(numbers: Sequence[float]) -> float | None:
    return float(np.mean(numbers)) if numbers else None


def predictions_table(
    runs: Sequence[Results], show: Callable[[int, int], None] = lambda _done, _total: None
) -> Table:
    """Return how far predicted video goes along with success.

    Args:
        runs: Evaluations.
        show: As of :func:`decode_predictions`.

    Raises:
        CheckpointError: as :func:`decode_predictions`.
        ConfigError: a run has kept no predictions.
    """
    for results in runs:
        decode_predictions(results, show)
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
    for name in ("in successes", "in failures", "rho", "95 %", "AUC", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in quality_rows(scored):
        for quality, along in row.along.items():
            table.add_row(
                row.name, f"{row.successes}/{row.episodes}", QUALITIES[quality], *_cells(along)
            )
        table.add_section()
    table.caption = (
        "rho: Spearman's with success; AUC: how often a failure has a lower number than a success "
        "(0.5: it says nothing); the intervals draw starts, each with all their episodes. "
        "Failed episodes are longer, and a copied frame scores high where little moves."
    )
    return table


def _cells(along: Along) -> Iterator[str]:
    for mean in (along.of_successes, along.of_failures):
        yield "-" if mean is None else f"{mean:.3g}"
    found = along.correlation
    yield "-" if found is None else f"{found.rho:+.2f}"
    yield "too few" if found is None else f"{found.low:+.2f} to {found.high:+.2f}"
    yield "-" if found is None else f"{found.auc:.2f}"
    yield "too few" if found is None else f"{found.auc_low:.2f} to {found.auc_high:.2f}"
