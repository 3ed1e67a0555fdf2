"""What a policy predicted of an episode, beside what was seen: kept for reports.

Nothing here changes what a policy does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field

from dzrobot.documents import read_json
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import EpisodeError, ErrorCapture, ProtocolError
from dzrobot.files import is_inside, write_json
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action, Image, Plan, Policy, robot_of
from dzrobot.recording.media import VideoCodec, VideoFile
from dzrobot.rollout.episode import Actor, PolicyActor
from dzrobot.rollout.records import PREDICTION_FOLDER, UNFINISHED, storing

_T = TypeVar("_T")

MAX_PENDING = 4
"""Chunks that may wait for the thread that decodes and keeps them."""

LOSSLESS = VideoCodec(gop=20, crf=0, pixel_format="yuv444p")
"""Scores are computed from these frames; only the rounding to YUV is lost."""

_Rows = Annotated[tuple[tuple[float, ...], ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One plan, as far as it was carried out."""

    step: int
    """Step of the episode from which it was planned."""

    frames: tuple[int, ...]
    """Steps after it of the kept frames: predicted ones that were also seen."""

    planned: _Rows
    """(H, A): all planned actions."""

    timing: dict[str, float]
    """Where the time went, in milliseconds."""

    latents: dict[str, float] = field(default_factory=dict)
    """Errors of the last predicted frame that was seen: ``latent_error`` and ``copy_latent_error``,
    see :func:`latent_errors`. Empty where none was seen, of policies that do not encode images, and
    in files of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class EpisodePredictions:
    """Predictions of one episode; checked when they are read back."""

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
    if not (is_inside(folder, path) and is_inside(folder, video)):
        return None
    return read_json(path, EpisodePredictions, ProtocolError)


@dataclass
class _Open:
    """The plan that is being carried out."""

    step: int
    plan: Plan
    predicted: Callable[[int], Image]
    """Takes how many frames to leave out at the end, and returns the predicted ones."""

    start: Image
    """What was seen when it was made."""

    frames: list[int] = field(default_factory=list)
    seen: list[Image] = field(default_factory=list)


class _AtOnce(Executor):
    """Runs what it is given in the thread that gives it, which gets what it raises."""

    def submit(self, job: Callable[..., _T], /, *given: Any, **named: Any) -> Future[_T]:
        done: Future[_T] = Future()
        done.set_result(job(*given, **named))
        return done


@dataclass(kw_only=True)
class PredictingActor(Actor):
    """A policy as an actor, whose predictions are kept.

    The video has, for each plan, the frame that it was made from and then every predicted frame
    that was also seen: what was seen above, what was predicted below. Where the policy defers its
    images (:class:`~dzrobot.policies.base.Abilities`), a thread beside computes and keeps it.
    """

    inner: PolicyActor
    """Its policy predicts, and says as which robot."""

    folder: Path
    """Results folder."""

    case: str
    """Name of the episode."""

    _open: _Open | None = None
    _chunks: list[Chunk] = field(default_factory=list)
    _executed: list[list[float]] = field(default_factory=list)
    _states: list[list[float]] = field(default_factory=list)
    _video: VideoFile | None = None
    _robot: Embodiment = field(init=False)
    _executor: Executor = field(init=False)
    _jobs: deque[Future[Any]] = field(default_factory=deque)
    _failure: BaseException | None = None
    """The first of what they have raised; it is the episode's, not an action's."""

    def __post_init__(self) -> None:
        policy = self.inner.policy
        self._robot = robot_of(policy)
        self._executor = ThreadPoolExecutor(1) if policy.can.defers else _AtOnce()

    @property
    def plan_ms(self) -> Sequence[float]:
        """Return the times of those actions of this episode for which a plan was made."""
        return self.inner.plan_ms

    @property
    def clipped(self) -> float | None:
        """Return the share of state numbers beyond the policy's statistics; None: it is unknown."""
        return self.inner.clipped

    def begin(self, env: Any) -> None:
        """Start a new episode in the session."""
        self.inner.begin(env)

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the policy's action and its time; what it predicts is shown and kept apart."""
        action, spent = self.inner.act(observation)
        step, robot = len(self._executed), self._robot
        policy, session = self.inner.policy, self.inner.session
        plan = policy.last_plan(session)
        fresh = plan is not None and (self._open is None or plan is not self._open.plan)
        wanted = self._is_predicted(step)
        if fresh or wanted:
            seen = tiled(observation, robot)
            if self._open is not None and wanted:
                self._open.frames.append(step - self._open.step)
                self._open.seen.append(seen)
            if fresh and plan is not None:
                self._close_chunk()
                self._open = _Open(step, plan, policy.imagine_later(session), seen)
        self._executed.append([float(number) for number in action])
        state = [np.ravel(observation[key]) for key in robot.state_keys]
        self._states.append([float(number) for number in np.concatenate(state)])
        return action, spent

    def reads_frames(self) -> bool:
        """Return whether the images of the next observation are looked at, or kept."""
        return self._is_predicted(len(self._executed)) or self.inner.reads_frames()

    def finish(self) -> EpisodeError | None:
        """Put what was kept where the results lie; an episode without a plan leaves nothing.

        Returns:
            What computing it has raised; None: nothing.

        Raises:
            ProtocolError: it cannot be stored.
        """
        stores = ErrorCapture(passes=lambda error: isinstance(error, ProtocolError))
        with stores as caught, storing(self.folder):
            self._close_chunk()
            self._settle(0)
            if self._failure is not None:
                raise self._failure
            self._store()
        return caught.failure

    def _store(self) -> None:
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
        steps = frame_steps(self._robot.timing)
        return self._open is not None and step - self._open.step in steps

    @property
    def _fps(self) -> float:
        timing = self._robot.timing
        return timing.control_hz * len(timing.frame_offsets) / timing.action_horizon

    @property
    def _partial(self) -> Path:
        return self.folder / PREDICTION_FOLDER / UNFINISHED / f"{self.case}.mp4"

    def _settle(self, allowed: int) -> None:
        """Wait until at most ``allowed`` jobs are left."""
        while len(self._jobs) > allowed:
            error = self._jobs.popleft().exception()
            self._failure = self._failure or error

    def _close_chunk(self) -> None:
        if self._open is not None:
            one, self._open = self._open, None
            self._settle(MAX_PENDING - 1)
            self._jobs.append(self._executor.submit(self._keep, one))

    def _keep(self, one: _Open) -> None:
        """Add a plan that is no longer carried out to what is kept."""
        steps = frame_steps(self._robot.timing)
        shown = [steps.index(after) for after in one.frames]
        # The first frame of a video that starts over was seen, not predicted.
        wanted = 1 + max(shown, default=0)
        video = one.predicted(len(steps) - wanted)[-wanted:]
        if self._video is None:
            self._video = VideoFile(self._partial, self._fps, LOSSLESS)
        blank = np.zeros_like(video[0])
        self._video.add(np.concatenate([_as_seen_by_network(one.start, blank), blank]))
        predicted = [video[index] for index in shown]
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
                    self.inner.policy, _as_seen_by_network(one.start, blank), seen, predicted
                ),
            )
        )


def latent_errors(
    policy: Policy, start: Image, seen: Sequence[Image], predicted: Sequence[Image]
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
    if not seen or not policy.can.encodes:
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
    # A simulator's image may be flipped (negative strides) or read-only; torch takes neither.
    views = {key: torch.from_numpy(seen.copy("C"))[None] for key, seen in newest.items()}
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
