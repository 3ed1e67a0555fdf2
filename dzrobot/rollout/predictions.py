"""What a policy predicted and planned, kept beside what happened; for reports.

Of every plan: the frames that were seen, the frames that were predicted for the same steps, the
planned actions and where the time went. Nothing here changes what the policy does.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from dzrobot.documents import read_json
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import ProtocolError
from dzrobot.files import write_json
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action, Plan
from dzrobot.recording.media import VideoCodec, VideoFile
from dzrobot.rollout.episode import PlansShown, PolicyActor

PREDICTION_FOLDER = "predictions"
_PARTIAL = "unfinished"

LOSSLESS = VideoCodec(gop=20, crf=0, pixel_format="yuv444p")
"""Scores are computed from these frames; only the rounding to YUV is lost."""

Image = NDArray[np.uint8]
_Rows = Annotated[tuple[tuple[float, ...], ...], Field(strict=False)]


@runtime_checkable
class PredictingPolicy(PlansShown, Protocol):
    """A policy that predicts a video with every plan, and can show both."""

    embodiment: Embodiment

    def imagine(self, session: str) -> Image:
        """Return the video (T, H, W, 3) uint8 that it predicts, views tiled."""
        ...


@runtime_checkable
class EncodingPolicy(Protocol):
    """A policy that can show what an image is to its network."""

    def encode_images(self, images: Image) -> NDArray[np.float32]:
        """Return the latents (N, ...) of images (N, H, W, 3), views tiled, each by itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One plan, as far as it was carried out."""

    step: int
    """Of the episode, from which on it was planned."""

    frames: tuple[int, ...]
    """Steps after it of the kept frames: predicted ones that were also seen."""

    planned: _Rows
    """(H, A): all planned actions."""

    timing: dict[str, float]
    """Where the time went, in milliseconds."""

    latents: dict[str, float] = field(default_factory=dict)
    """Of the last predicted frame that was seen: ``latent_error`` and ``copy_latent_error``, see
    :func:`latent_errors`. Empty where none was seen, of policies that do not encode images, and in
    files of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class EpisodePredictions:
    """Of one episode; checked when it is read back."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    fps: Annotated[float, Field(gt=0)]
    """Frames per second of the video."""

    chunks: tuple[Chunk, ...]
    executed: _Rows
    """(T, A): actions as they were executed."""

    states: _Rows = ()
    """(T, S): the robot's state when each of them was chosen; files of earlier versions have none.
    """


def frame_steps(timing: Timing) -> tuple[int, ...]:
    """Return how many steps after its observation each predicted frame of a plan lies."""
    return (*timing.frame_offsets[1:], timing.action_horizon)


def prediction_files(folder: Path, case: str) -> tuple[Path, Path]:
    """Return the description and the video of ``case`` in the results folder ``folder``."""
    place = folder / PREDICTION_FOLDER
    return place / f"{case}.json", place / f"{case}.mp4"


def read_predictions(folder: Path, case: str) -> EpisodePredictions | None:
    """Return what is kept of ``case``; None if nothing is.

    Raises:
        ProtocolError: the file holds something else.
    """
    path, video = prediction_files(folder, case)
    if not path.is_file() or not video.is_file():
        return None
    return read_json(path, EpisodePredictions, ProtocolError)


def predictions_size(folder: Path) -> int:
    """Return the bytes that the predictions in ``folder`` take."""
    files = (folder / PREDICTION_FOLDER).rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def remove_unfinished_predictions(folder: Path) -> None:
    """Remove what killed runs left half written below ``folder``."""
    shutil.rmtree(folder / PREDICTION_FOLDER / _PARTIAL, ignore_errors=True)


@dataclass
class _Open:
    """The plan that is being carried out."""

    step: int
    plan: Plan
    predicted: Image
    start: Image
    """What was seen when it was made."""

    frames: list[int] = field(default_factory=list)
    seen: list[Image] = field(default_factory=list)


@dataclass(kw_only=True)
class PredictingActor:
    """A policy as an actor, whose predictions are kept.

    The video has, for each plan, the frame that it was made from and then every predicted frame
    that was also seen: what was seen above, what was predicted below.
    """

    inner: PolicyActor
    folder: Path
    """Results folder."""

    case: str
    """Name of the episode."""

    _open: _Open | None = None
    _chunks: list[Chunk] = field(default_factory=list)
    _executed: list[list[float]] = field(default_factory=list)
    _states: list[list[float]] = field(default_factory=list)
    _video: VideoFile | None = None

    @property
    def policy(self) -> PredictingPolicy:
        """The policy that acts."""
        assert isinstance(self.inner.policy, PredictingPolicy), "checked beforehand"
        return self.inner.policy

    @property
    def plan_ms(self) -> list[float]:
        """Times of the actions of this episode for which a plan was made."""
        return self.inner.plan_ms

    def begin(self, env: gym.Env[Any, Any] | None) -> None:
        """Start a new episode in the session."""
        self.inner.begin(env)

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the policy's action and its time; what it predicts is shown and kept apart."""
        action, spent = self.inner.act(observation)
        step, robot = len(self._executed), self.policy.embodiment
        plan = self.policy.last_plan(self.inner.session)
        fresh = plan is not None and (self._open is None or plan is not self._open.plan)
        wanted = self._is_predicted(step)
        if fresh or wanted:
            seen = tiled(observation, robot)
            if self._open is not None and wanted:
                self._open.frames.append(step - self._open.step)
                self._open.seen.append(seen)
            if fresh and plan is not None:
                self._close_chunk()
                predicted = self.policy.imagine(self.inner.session)
                self._open = _Open(step, plan, predicted[-len(robot.timing.frame_offsets) :], seen)
        self._executed.append([float(number) for number in action])
        state = [np.ravel(observation[key]) for key in robot.state_keys]
        self._states.append([float(number) for number in np.concatenate(state)])
        return action, spent

    def reads_frames(self) -> bool:
        """Return whether the images of the next observation are looked at, or kept."""
        return self._is_predicted(len(self._executed)) or self.inner.reads_frames()

    def finish(self) -> None:
        """Put what was kept where the results lie; an episode without a plan leaves nothing."""
        self._close_chunk()
        if self._video is None:
            return
        self._video.close()
        path, video = prediction_files(self.folder, self.case)
        kept = EpisodePredictions(
            fps=self._fps,
            chunks=tuple(self._chunks),
            executed=_rows(self._executed),
            states=_rows(self._states),
        )
        self._partial.replace(video)
        write_json(path, asdict(kept))

    def _is_predicted(self, step: int) -> bool:
        """Return whether the plan that is being carried out predicts the frame of ``step``."""
        steps = frame_steps(self.policy.embodiment.timing)
        return self._open is not None and step - self._open.step in steps

    @property
    def _fps(self) -> float:
        timing = self.policy.embodiment.timing
        return timing.control_hz * len(timing.frame_offsets) / timing.action_horizon

    @property
    def _partial(self) -> Path:
        return self.folder / PREDICTION_FOLDER / _PARTIAL / f"{self.case}.mp4"

    def _close_chunk(self) -> None:
        if self._open is None:
            return
        one, self._open = self._open, None
        if self._video is None:
            self._video = VideoFile(self._partial, self._fps, LOSSLESS)
        blank = np.zeros_like(one.predicted[0])
        self._video.add(np.concatenate([_as_seen_by_network(one.start, blank), blank]))
        steps = frame_steps(self.policy.embodiment.timing)
        predicted = [one.predicted[steps.index(after)] for after in one.frames]
        seen = [_as_seen_by_network(image, blank) for image in one.seen]
        for pair in zip(seen, predicted, strict=True):
            self._video.add(np.concatenate(pair))
        self._chunks.append(
            Chunk(
                step=one.step,
                frames=tuple(one.frames),
                planned=_rows(one.plan.actions.tolist()),
                timing={name: float(spent) for name, spent in one.plan.timing.items()},
                latents=latent_errors(
                    self.policy, _as_seen_by_network(one.start, blank), seen, predicted
                ),
            )
        )


def latent_errors(
    policy: object, start: Image, seen: Sequence[Image], predicted: Sequence[Image]
) -> dict[str, float]:
    """Return how far the last predicted frame is from the one that was seen, in latents.

    Mean squared differences of normalized latents: ``latent_error``, and ``copy_latent_error`` of a
    copy of the frame that the plan was made from. Each frame is encoded by itself, since how frames
    are carried over from one to the next depends on how many were seen; only the last, which is the
    hardest to predict, since encoding all of them takes several times as long.

    Args:
        policy: Nothing is computed if it does not encode images.
        start: What a plan was made from, (H, W, 3) uint8.
        seen: Frames that were seen.
        predicted: Those that were predicted for the same steps.
    """
    if not seen or not isinstance(policy, EncodingPolicy):
        return {}
    copied, real, dreamt = policy.encode_images(np.stack([start, seen[-1], predicted[-1]]))
    return {
        "latent_error": float(np.mean((dreamt - real) ** 2)),
        "copy_latent_error": float(np.mean((copied - real) ** 2)),
    }


def tiled(observation: Observation, robot: Embodiment) -> Image:
    """Return the image (H, W, 3) uint8 that the network is shown of ``observation``."""
    # Here, because evaluations of policies without a network, and their workers, need no torch.
    import torch

    from dzrobot.modality.video import encode_views

    frames = {key: np.asarray(observation[key]) for key in robot.video_keys}
    newest = {key: seen[-1] if seen.ndim == 4 else seen for key, seen in frames.items()}
    views = {key: torch.from_numpy(seen)[None] for key, seen in newest.items()}
    image: Image = encode_views(views, robot)[0].numpy()
    return image


def _as_seen_by_network(image: Image, predicted: Image) -> Image:
    """Return ``image`` in the size of ``predicted``, resized as the network does it."""
    if image.shape == predicted.shape:
        return image
    import torch

    rows = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(
        rows, size=predicted.shape[:2], mode="bilinear", align_corners=False
    )
    found: Image = resized[0].permute(1, 2, 0).round().to(torch.uint8).numpy()
    return found


def _rows(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows)
