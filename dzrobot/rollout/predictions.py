"""What a policy predicted of an episode, beside what was seen: kept for reports.

Nothing here changes what a policy does. Decoding a prediction takes several times as long as
making the plan. Where it can be done later, the latents and what was seen are kept as they are, and
whoever reads the predictions decodes them first (:func:`decode`).
"""

import io
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from dzrobot.documents import read_bytes, read_json
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import EpisodeError, ErrorCapture, ProtocolError
from dzrobot.files import is_inside, replacing, write_bytes, write_json
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action, Image, ImaginedLatents, Plan, Policy, robot_of
from dzrobot.recording.media import VideoCodec, VideoFile
from dzrobot.rollout.episode import Actor, PolicyActor
from dzrobot.rollout.records import PREDICTION_FOLDER, UNFINISHED, storing
from dzrobot.untrusted import parsing, read_npy

_T = TypeVar("_T")

MAX_PENDING = 4
"""Chunks that may wait for the thread that decodes and keeps them."""

LOSSLESS = VideoCodec(gop=20, crf=0, pixel_format="yuv444p")
"""Scores are computed from these frames; only the rounding to YUV is lost."""

EXACT = VideoCodec(name="h264rgb", gop=20, crf=0, pixel_format="rgb24")
"""What was seen is kept so until it is compared: to the bit."""

_LARGEST_LATENTS = 2**30
"""Bytes of the latents of an episode; 200 plans of a 14B have some 140 MB."""

UNDECODED = "undecoded"
"""Folder within that of predictions for what is still to be decoded."""

_Count = Annotated[int, Field(ge=1, le=65_536)]
_Rows = Annotated[tuple[tuple[float, ...], ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True)
class CarriedOut:
    """One plan, as far as it was carried out."""

    step: int
    """Step of the episode from which it was planned."""

    frames: tuple[int, ...]
    """Steps after it of the kept frames: predicted ones that were also seen."""

    planned: _Rows
    """(H, A): all planned actions."""

    timing: dict[str, float]
    """Where the time went, in milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Chunk(CarriedOut):
    """One plan, whose prediction is kept as images."""

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


@dataclass(frozen=True, kw_only=True)
class UndecodedChunk(CarriedOut):
    """One plan, whose prediction is still latents."""

    starts: bool
    """See :class:`~dzrobot.policies.base.ImaginedLatents`."""

    shape: tuple[_Count, _Count, _Count, _Count]
    """(C, F, Y, X) of its latents."""


@dataclass(frozen=True, kw_only=True)
class UndecodedPredictions:
    """Predictions of one episode that are still to be decoded; checked when they are read back.

    Beside it lie the latents of all plans one after the other, and a video without loss of what was
    seen: for each plan, the frame that it was made from, then those that it predicted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    fps: Annotated[float, Field(gt=0)]
    steps: tuple[int, ...]
    """:func:`frame_steps` of the robot."""

    chunks: Annotated[tuple[UndecodedChunk, ...], Field(min_length=1)]
    executed: _Rows
    states: _Rows
    """As of :class:`EpisodePredictions`."""


def frame_steps(timing: Timing) -> tuple[int, ...]:
    """Return how many steps after its observation each predicted frame of a plan lies."""
    return (*timing.frame_offsets[1:], timing.action_horizon)


def prediction_files(folder: Path, case: str) -> tuple[Path, Path]:
    """Return the description and the video of ``case`` in the results folder ``folder``."""
    place = folder / PREDICTION_FOLDER
    return place / f"{case}.json", place / f"{case}.mp4"


def undecoded_files(folder: Path, case: str) -> tuple[Path, Path, Path]:
    """Return description, latents and video of ``case``, where they are still to be decoded."""
    place = folder / PREDICTION_FOLDER / UNDECODED
    return place / f"{case}.json", place / f"{case}.npy", place / f"{case}.mp4"


def read_predictions(folder: Path, case: str) -> EpisodePredictions | None:
    """Return what is kept of ``case``; None if nothing is, or it is still to be decoded.

    Raises:
        ProtocolError: the file holds something else.
    """
    path, video = prediction_files(folder, case)
    if not (is_inside(folder, path) and is_inside(folder, video)):
        return None
    return read_json(path, EpisodePredictions, ProtocolError)


_Predicted = TypeVar("_Predicted")

_Decode = Callable[[int], Image]
"""Takes how many frames to leave out at the end, and returns the predicted ones."""


@dataclass
class _Carried(Generic[_Predicted]):
    """A plan that is carried out, and what it predicts."""

    step: int
    plan: Plan
    start: Image
    """What was seen when it was made."""

    predicted: _Predicted
    """What decodes it, or its latents."""

    frames: list[int] = field(default_factory=list)
    seen: list[Image] = field(default_factory=list)

    def described(self) -> dict[str, Any]:
        """Return the fields of :class:`CarriedOut`."""
        timing = {name: float(spent) for name, spent in self.plan.timing.items()}
        planned = _rows(self.plan.actions.tolist())
        return {"step": self.step, "frames": tuple(self.frames), "planned": planned,
                "timing": timing}  # fmt: skip


class CarriedPlans(Generic[_Predicted]):
    """Follows which plan an actor carries out, and what is seen of what it predicted.

    Args:
        actor: Its policy predicts, and says as which robot.
        predicted: Returns what is wanted of what the last plan of a session predicts.
    """

    def __init__(self, actor: PolicyActor, predicted: Callable[[Policy, str], _Predicted]) -> None:
        self._actor, self._predicted = actor, predicted
        self._robot = robot_of(actor.policy)
        self.steps = frame_steps(self._robot.timing)
        self._open: _Carried[_Predicted] | None = None

    def is_predicted(self, step: int) -> bool:
        """Return whether the plan that is being carried out predicts the frame of ``step``."""
        return self._open is not None and step - self._open.step in self.steps

    def see(self, step: int, observation: Observation) -> _Carried[_Predicted] | None:
        """Take in what the actor has just acted on; return the plan that ended with it, if any."""
        policy, session = self._actor.policy, self._actor.session
        plan = policy.last_plan(session)
        fresh = plan is not None and (self._open is None or plan is not self._open.plan)
        wanted = self.is_predicted(step)
        if not (fresh or wanted):
            return None
        seen = tiled(observation, self._robot)
        if self._open is not None and wanted:
            self._open.frames.append(step - self._open.step)
            self._open.seen.append(seen)
        if not fresh or plan is None:
            return None
        ended = self.end()
        self._open = _Carried(step, plan, seen, self._predicted(policy, session))
        return ended

    def end(self) -> _Carried[_Predicted] | None:
        """Return the plan that was being carried out, which is no longer."""
        ended, self._open = self._open, None
        return ended


class _AtOnce(Executor):
    """Runs what it is given in the thread that gives it, which gets what it raises."""

    def submit(self, job: Callable[..., _T], /, *given: Any, **named: Any) -> Future[_T]:
        done: Future[_T] = Future()
        done.set_result(job(*given, **named))
        return done


class _Keeper(ABC, Generic[_Predicted]):
    """Writes the predictions of one episode.

    Args:
        path: Of the video while it is written.
        fps: Its frames per second.
        steps: :func:`frame_steps` of the robot.
        codec: Of the video.
    """

    def __init__(self, path: Path, fps: float, steps: tuple[int, ...], codec: VideoCodec) -> None:
        self._path, self._fps, self._steps, self._codec = path, fps, steps, codec
        self._video: VideoFile | None = None

    @abstractmethod
    def predicted(self, policy: Policy, session: str) -> _Predicted:
        """Return what is kept of what the last plan of ``session`` predicts."""

    @abstractmethod
    def add(self, one: _Carried[_Predicted]) -> None:
        """Add a plan that is no longer carried out."""

    @abstractmethod
    def _put(self, folder: Path, case: str, executed: _Rows, states: _Rows) -> None:
        """Put all of it, of a plan at least, where the results lie; the video is complete."""

    def store(self, folder: Path, case: str, executed: _Rows, states: _Rows) -> None:
        """Put all of it where the results lie; an episode without a plan leaves nothing."""
        if self._video is not None:
            self._video.close()
            self._put(folder, case, executed, states)

    def _film(self) -> VideoFile:
        if self._video is None:
            self._video = VideoFile(self._path, self._fps, self._codec)
        return self._video


class _Decoded(_Keeper[_Decode]):
    """Writes them decoded, with their scores in latents.

    The video has, for each plan, the frame that it was made from and then every predicted frame
    that was also seen: what was seen above, what was predicted below.

    Args:
        path: As of :class:`_Keeper`.
        fps: As of :class:`_Keeper`.
        steps: As of :class:`_Keeper`.
        encoder: Encodes images, or does not.
    """

    def __init__(self, path: Path, fps: float, steps: tuple[int, ...], encoder: Policy) -> None:
        super().__init__(path, fps, steps, LOSSLESS)
        self._encoder = encoder
        self._chunks: list[Chunk] = []

    def predicted(self, policy: Policy, session: str) -> _Decode:
        """Return what decodes it."""
        return policy.imagine_later(session)

    def add(self, one: _Carried[_Decode]) -> None:
        """Decode a plan, and add it."""
        start, seen, predicted = _compared(one, self._steps)
        film = self._film()
        film.add(np.concatenate([start, np.zeros_like(start)]))
        for pair in zip(seen, predicted, strict=True):
            film.add(np.concatenate(pair))
        errors = latent_errors(self._encoder, start, seen, predicted)
        self._chunks.append(Chunk(**one.described(), latents=errors))

    def _put(self, folder: Path, case: str, executed: _Rows, states: _Rows) -> None:
        path, video = prediction_files(folder, case)
        self._path.replace(video)
        write_json(path, asdict(self.about(executed, states)))

    def closed(self, executed: _Rows, states: _Rows) -> EpisodePredictions:
        """Finish the video, which has a plan at least, and return its description."""
        self._film().close()
        return self.about(executed, states)

    def about(self, executed: _Rows, states: _Rows) -> EpisodePredictions:
        """Return the description of what was added."""
        return EpisodePredictions(
            fps=self._fps, chunks=tuple(self._chunks), executed=executed, states=states
        )


class _Undecoded(_Keeper[ImaginedLatents]):
    """Keeps them to be decoded later; arguments as of :class:`_Keeper`."""

    def __init__(self, path: Path, fps: float, steps: tuple[int, ...]) -> None:
        super().__init__(path, fps, steps, EXACT)
        self._chunks: list[UndecodedChunk] = []
        self._latents: list[NDArray[np.float32]] = []

    def predicted(self, policy: Policy, session: str) -> ImaginedLatents:
        """Return its latents."""
        return policy.imagine_latents(session)

    def add(self, one: _Carried[ImaginedLatents]) -> None:
        """Add the latents of a plan, and what was seen."""
        film = self._film()
        for image in (one.start, *one.seen):
            film.add(image)
        latents, starts = one.predicted.latents, one.predicted.starts
        channels, frames, rows, columns = latents.shape
        self._latents.append(latents.ravel())
        shape = (channels, frames, rows, columns)
        self._chunks.append(UndecodedChunk(**one.described(), starts=starts, shape=shape))

    def _put(self, folder: Path, case: str, executed: _Rows, states: _Rows) -> None:
        path, latents, video = undecoded_files(folder, case)
        kept = UndecodedPredictions(
            fps=self._fps, steps=self._steps, chunks=tuple(self._chunks),
            executed=executed, states=states,
        )  # fmt: skip
        video.parent.mkdir(parents=True, exist_ok=True)
        self._path.replace(video)
        file = io.BytesIO()
        np.save(file, np.concatenate(self._latents), allow_pickle=False)
        write_bytes(latents, file.getvalue())
        # Last: where it lies, the others are complete.
        write_json(path, asdict(kept))


@dataclass(kw_only=True)
class PredictingActor(Actor):
    """A policy as an actor, whose predictions are kept.

    They are decoded later, or at once; then, where the policy defers its images
    (:class:`~dzrobot.policies.base.Abilities`), by a thread beside.
    """

    inner: PolicyActor
    """Its policy predicts, and says as which robot."""

    folder: Path
    """Results folder."""

    case: str
    """Name of the episode."""

    later: bool = False
    """Whether they are decoded later, which takes a policy that hands out latents."""

    _executed: list[list[float]] = field(default_factory=list)
    _states: list[list[float]] = field(default_factory=list)
    _robot: Embodiment = field(init=False)
    _plans: CarriedPlans[Any] = field(init=False)
    _kept: _Keeper[Any] = field(init=False)
    _executor: Executor = field(init=False)
    _jobs: deque[Future[Any]] = field(default_factory=deque)
    _failure: BaseException | None = None
    """The first of what they have raised; it is the episode's, not an action's."""

    def __post_init__(self) -> None:
        policy = self.inner.policy
        self._robot = robot_of(policy)
        timing = self._robot.timing
        steps = frame_steps(timing)
        fps = timing.control_hz * len(timing.frame_offsets) / timing.action_horizon
        path = self.folder / PREDICTION_FOLDER / UNFINISHED / f"{self.case}.mp4"
        if self.later:
            self._kept = _Undecoded(path, fps, steps)
        else:
            self._kept = _Decoded(path, fps, steps, policy)
        self._plans = CarriedPlans(self.inner, self._kept.predicted)
        beside = policy.can.defers and not self.later
        self._executor = ThreadPoolExecutor(1) if beside else _AtOnce()

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
        self._keep(self._plans.see(len(self._executed), observation))
        self._executed.append([float(number) for number in action])
        state = [np.ravel(observation[key]) for key in self._robot.state_keys]
        self._states.append([float(number) for number in np.concatenate(state)])
        return action, spent

    def reads_frames(self) -> bool:
        """Return whether the images of the next observation are looked at, or kept."""
        return self._plans.is_predicted(len(self._executed)) or self.inner.reads_frames()

    def finish(self) -> EpisodeError | None:
        """Put what was kept where the results lie; an episode without a plan leaves nothing.

        Returns:
            What computing it has raised; None: nothing.

        Raises:
            ProtocolError: it cannot be stored.
        """
        stores = ErrorCapture(passes=lambda error: isinstance(error, ProtocolError))
        with stores as caught, storing(self.folder):
            self._keep(self._plans.end())
            self._settle(0)
            if self._failure is not None:
                raise self._failure
            executed, states = _rows(self._executed), _rows(self._states)
            self._kept.store(self.folder, self.case, executed, states)
        return caught.failure

    def _settle(self, allowed: int) -> None:
        """Wait until at most ``allowed`` jobs are left."""
        while len(self._jobs) > allowed:
            error = self._jobs.popleft().exception()
            self._failure = self._failure or error

    def _keep(self, ended: _Carried[Any] | None) -> None:
        if ended is not None:
            self._settle(MAX_PENDING - 1)
            self._jobs.append(self._executor.submit(self._kept.add, ended))


def decode(
    folder: Path, case: str, coder: Policy, decoded: Callable[[ImaginedLatents, int], Image]
) -> None:
    """Decode what is kept of ``case``; the files are then those of a run that decodes at once.

    Args:
        folder: Results folder.
        case: One whose :func:`undecoded_files` are there.
        coder: Encodes images as the policy of the run did.
        decoded: Returns the video of a plan but for some last frames, called for every plan, in
            order.

    Raises:
        ProtocolError: the files are damaged, or the results cannot be written.
    """
    path, latents, video = undecoded_files(folder, case)
    kept = read_json(path, UndecodedPredictions, ProtocolError)
    described, shown = prediction_files(folder, case)
    with storing(folder):
        with replacing(shown, derived=True) as unfinished:
            into = _Decoded(unfinished, kept.fps, kept.steps, coder)
            for one in _read_undecoded(kept, latents, video):
                later = partial(decoded, one.predicted)
                into.add(_Carried(one.step, one.plan, one.start, later, one.frames, one.seen))
            about = into.closed(kept.executed, kept.states)
        write_json(described, asdict(about))
        for file in (path, latents, video):
            file.unlink()


def _read_undecoded(
    kept: UndecodedPredictions, latents: Path, video: Path
) -> Iterator[_Carried[ImaginedLatents]]:
    """Yield every plan of an episode.

    Raises:
        ProtocolError: the files are damaged, or not of one episode.
    """
    remedy = f"remove it and {latents.stem}.json beside it: the episode then has no predictions"
    content = read_bytes(latents, ProtocolError, largest=_LARGEST_LATENTS)
    with parsing(latents, ProtocolError, "holds no latents", remedy):
        numbers = read_npy(content)
        ends = np.cumsum([np.prod(chunk.shape) for chunk in kept.chunks])
        if numbers.dtype != np.float32 or numbers.shape != (ends[-1],):
            raise ValueError(f"{numbers.dtype} {numbers.shape}, not float32 of {ends[-1]} numbers")
    parts = np.split(numbers, ends[:-1])
    images = _read_images(video, sum(1 + len(chunk.frames) for chunk in kept.chunks), remedy)
    for chunk, part in zip(kept.chunks, parts, strict=True):
        if not set(chunk.frames) <= set(kept.steps):
            raise ProtocolError(
                f"{latents.with_suffix('.json')} names frames that no plan predicts"
            )
        start, *seen = (next(images) for _ in range(1 + len(chunk.frames)))
        yield _Carried(
            chunk.step,
            Plan.of(np.array(chunk.planned, np.float32), chunk.timing),
            start,
            ImaginedLatents(latents=part.reshape(chunk.shape), starts=chunk.starts),
            frames=list(chunk.frames),
            seen=seen,
        )


def _read_images(video: Path, count: int, remedy: str) -> Iterator[Image]:
    """Yield the images (H, W, 3) of a video, which has ``count``.

    Raises:
        ProtocolError: it cannot be read, or has fewer.
    """
    import av

    with parsing(str(video), ProtocolError, "is not a readable video", remedy):
        container = av.open(str(video))
    with container:
        frames = container.decode(video=0)
        for number in range(count):
            with parsing(str(video), ProtocolError, f"ends after {number} images", remedy):
                image = next(frames).to_ndarray(format="rgb24")
            yield image


def _compared(
    one: _Carried[_Decode], steps: tuple[int, ...]
) -> tuple[Image, Sequence[Image], Sequence[Image]]:
    """Return what a plan was made from, what was then seen, and what it predicted for that.

    All frames have the size (H, W, 3) of those that are decoded.
    """
    shown = [steps.index(after) for after in one.frames]
    # The first frame of a video that starts over was seen, not predicted.
    wanted = 1 + max(shown, default=0)
    video = one.predicted(len(steps) - wanted)[-wanted:]
    start, *seen = (_as_seen_by_network(image, video[0]) for image in (one.start, *one.seen))
    return start, seen, [video[index] for index in shown]


class PredictionError:
    """How far what a policy predicts is from what is then seen, while it acts.

    Args:
        actor: Its policy predicts, encodes images, and says as which robot.
    """

    def __init__(self, actor: PolicyActor) -> None:
        self._encoder = actor.policy
        self._plans = CarriedPlans(actor, lambda policy, session: policy.imagine_later(session))
        self._step = 0

    def see(self, observation: Observation) -> float | None:
        """Take in what the actor has just acted on.

        Returns:
            The ``latent_error`` (:func:`latent_errors`) of the plan that ended with it; None: none
            did, or no frame was seen that it predicted.
        """
        ended = self._plans.see(self._step, observation)
        self._step += 1
        if ended is None or not ended.frames:
            return None
        compared = _compared(ended, self._plans.steps)
        return latent_errors(self._encoder, *compared)["latent_error"]


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
