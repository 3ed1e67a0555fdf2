"""What goes into the pipeline: one observation, or a window of several, under modality keys."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment, Part, View
from dzrobot.errors import ModalityError, preview, suggest
from dzrobot.untrusted import attempted

Observation = Mapping[str, NDArray[np.uint8] | NDArray[np.float32] | str]
"""One step: ``video.*`` (H, W, 3) uint8, ``state.*`` (D,) float32, the instruction as str."""

Window = Mapping[str, NDArray[np.uint8] | NDArray[np.float32] | str]
"""Several steps: ``video.*`` (T, H, W, 3) uint8, ``state.*`` (S, D) float32, the instruction as
str, and for training ``action.*`` (A, D) float32 with A = S * horizon."""


def stacked(observations: Sequence[Observation], embodiment: Embodiment) -> Window:
    """Return the frames of all ``observations``, with the state and instruction of the last one.

    Args:
        observations: What :func:`read_observation` returned; at least one.
        embodiment: The robot that they are of.

    Raises:
        ModalityError: images of one were left out; see :func:`read_observation`.
    """
    check_seen(observations, embodiment)
    last = observations[-1]
    window: dict[str, NDArray[np.uint8] | NDArray[np.float32] | str] = {
        embodiment.language: last[embodiment.language]
    }
    for view in embodiment.views:
        window[view.key] = np.stack([array(observation, view.key) for observation in observations])
    for part in embodiment.state:
        window[part.key] = array(last, part.key)[None]
    return window


def check_seen(observations: Sequence[Observation], embodiment: Embodiment) -> None:
    """Raise :class:`ModalityError` unless all ``observations`` have their images."""
    for ago, observation in enumerate(reversed(observations)):
        if missing := [key for key in embodiment.video_keys if key not in observation]:
            raise ModalityError(
                f"a plan is to be made from an observation without {preview(missing)}, number "
                f"{len(observations) - ago} of {len(observations)}: its images were left out. "
                "Leave them out only where reads_frames() of the policy returned False"
            )


def read_observation(
    given: Any, embodiment: Embodiment, *, frames: bool = True
) -> list[Observation]:
    """Return what a policy may keep of ``given``: copies, one for each frame of its views.

    This is the door: whatever comes out of it can be made a window and encoded.

    Args:
        given: An observation; its views may be stacks of equally many frames ``(T, H, W, 3)``.
        embodiment: What it must hold.
        frames: Whether images are needed. Without, all views may be missing, and no single one.

    Raises:
        ModalityError: see :func:`check_observation`.
    """
    views, count = check_observation(given, embodiment, frames=frames)
    rest: dict[str, Any] = {embodiment.language: str(given[embodiment.language])}
    return [
        {
            **{key: np.array(image[i] if count else image) for key, image in views.items()},
            **{part.key: np.array(given[part.key]) for part in embodiment.state},
            **rest,
        }
        for i in range(count or 1)
    ]


def check_observation(
    given: object, embodiment: Embodiment, *, frames: bool = True
) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the images of an observation that fits, and how many each view stacks; 0: no stack.

    Args:
        given: As of :func:`read_observation`.
        embodiment: What it must hold.
        frames: Whether images are needed.

    Raises:
        ModalityError: not a mapping, a key missing or unknown, a wrong shape or type, a number not
            finite, views of unlike lengths, or an instruction that is none.
    """
    if not isinstance(given, Mapping):
        raise ModalityError(
            f"the observation is a {type(given).__name__}: give a mapping with the keys "
            f"{preview(embodiment.observation_keys, 12)}"
        )
    views = _views(given, embodiment, needed=frames)
    counts = {image.shape[0] if image.ndim == 4 else 0 for image in views.values()}
    if len(counts) > 1 or any(image.ndim > 4 or not image.size for image in views.values()):
        shapes = ", ".join(f"{key} {image.shape}" for key, image in views.items())
        raise ModalityError(
            f"views hold unlike numbers of frames ({shapes}): give one (H, W, 3), or equally many "
            "(frames, H, W, 3)"
        )
    for part in embodiment.state:
        _check_numbers(array(given, part.key), part, (part.dim,))
    _check_instruction(given[embodiment.language])
    return views, counts.pop() if counts else 0


def _views(
    given: Mapping[str, object], embodiment: Embodiment, *, needed: bool
) -> dict[str, NDArray[Any]]:
    """Return the images of ``given``, whose keys are checked; none where all were left out."""
    allowed: Sequence[str] = embodiment.observation_keys
    if not needed and not any(key in given for key in embodiment.video_keys):
        allowed = (*embodiment.state_keys, embodiment.language)
    check_keys(given, allowed, embodiment.tag)
    views = {view.key: array(given, view.key) for view in embodiment.views if view.key in given}
    for view in embodiment.views:
        if view.key in views:
            check_frames(views[view.key], view, embodiment.tag, least=3)
    return views


def check_keys(given: Mapping[str, object], allowed: Sequence[str], tag: str) -> None:
    """Raise :class:`ModalityError` unless ``given`` holds exactly the ``allowed`` keys."""
    if missing := set(allowed) - given.keys():
        raise ModalityError(
            f"{tag}: {preview(missing)} missing; given: {preview(given, 12)}. Every view and state "
            "part is needed: no missing one is filled in."
        )
    if unknown := given.keys() - set(allowed):
        first = min(map(str, unknown))
        raise ModalityError(
            f"{tag}: unexpected {preview(unknown)}.{suggest(first, allowed)} "
            f"Allowed: {preview(allowed, 12)}."
        )


def array(given: Mapping[str, object], key: str) -> NDArray[np.float32]:
    """Return the array under ``key``; raise :class:`ModalityError` if it is none."""
    value = given[key]
    if not isinstance(value, np.ndarray):
        raise ModalityError(f"{key} is a {type(value).__name__}: give a numpy array")
    return value


class _Frames(Protocol):
    """An array of NumPy or a tensor of torch."""

    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_frames(frames: _Frames, view: View, tag: str, *, least: int = 4) -> None:
    """Raise :class:`ModalityError` unless ``frames`` are uint8 images of ``view``.

    Args:
        frames: ``(..., H, W, 3)``.
        view: Says height and width.
        tag: Of the embodiment, for the message.
        least: Fewest axes; 4 asks for one of frames.
    """
    if str(frames.dtype).removeprefix("torch.") != "uint8":
        raise ModalityError(f"{view.key} is {frames.dtype}: give uint8 from 0 to 255")
    if len(frames.shape) < least or tuple(frames.shape[-3:]) != (*view.resolution, 3):
        leading = "..., frames, " if least > 3 else ""
        raise ModalityError(
            f"{view.key} has shape {tuple(frames.shape)}: {tag} delivers "
            f"({leading}{view.resolution[0]}, {view.resolution[1]}, 3).{_sized(frames, view, tag)}"
        )


def _sized(frames: _Frames, view: View, tag: str) -> str:
    """Return what to do about images of another size; empty for what has not their three axes."""
    if len(frames.shape) < 3 or frames.shape[-1] != 3:
        return ""
    height, width = frames.shape[-3:-1]
    robot = tag.partition("@")[0]
    square = len(set(view.resolution)) == 1
    made = f" make the environment with resolution={view.resolution[0]}, or" if square else ""
    return (
        f" For these images{made} name the robot with their size, {robot}@{height}x{width} "
        "(height x width); a checkpoint keeps the size that it was trained with."
    )


def rows(given: Mapping[str, object], part: Part) -> NDArray[np.float32]:
    """Return the finite float32 rows ``(N, dim)`` of ``part``, or raise :class:`ModalityError`."""
    value = array(given, part.key)
    if value.dtype == np.float32 and (
        value.ndim != 2 or value.shape[1] != part.dim or not len(value)
    ):
        raise ModalityError(f"{part.key} has shape {value.shape}: give (rows, {part.dim})")
    _check_numbers(value, part, value.shape)
    return value


def _check_numbers(value: NDArray[Any], part: Part, shape: tuple[int, ...]) -> None:
    if value.dtype != np.float32:
        raise ModalityError(f"{part.key} is {value.dtype}: give float32")
    if value.shape != shape:
        raise ModalityError(f"{part.key} has shape {value.shape}: give {shape}")
    if not np.isfinite(value).all():
        *row, column = np.argwhere(~np.isfinite(value))[0]
        place = f"row {row[0]}, number {column}" if row else f"number {column}"
        raise ModalityError(
            f"{part.key} holds {value[(*row, column)]} at {place}: check the "
            "sensor or the recording; only finite values can be used"
        )


def _check_instruction(text: object) -> None:
    instruction = clean_instruction(text)
    # What Gymnasium's shared memory makes of a text: the first character, as often as there is room
    if set(instruction) <= {"0", "\0"} or (len(instruction) > 2 and len(set(instruction)) == 1):
        raise ModalityError(
            f"the instruction is {instruction[:8]!r} ({len(instruction)} characters), which says "
            "nothing. Gymnasium's AsyncVectorEnv does not bring texts through shared memory: make "
            "it with shared_memory=False (in gym.make_vec: vector_kwargs={'shared_memory': "
            "False}), or use dzrobot.envs.episodes.Instruction as the text's space"
        )


LONGEST = 10_000
"""Characters of an instruction; the networks read 512 tokens, which are a few thousand."""


def clean_instruction(text: object) -> str:
    """Return the instruction in lower case; of a written Python list, its first element.

    Some datasets store ``"['Pick up the cup', 'Take the cup']"`` (docs/model.md, section 5).

    Raises:
        ModalityError: not a text, nothing in it, too long, or not to be written in UTF-8.
    """
    if not isinstance(text, str):
        raise ModalityError(f"the instruction is a {type(text).__name__}: give a str")
    if len(text) > LONGEST:
        raise ModalityError(
            f"the instruction {text[:40]!r}... has {len(text)} characters: give up to {LONGEST}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModalityError(
            f"the instruction holds {text[error.start]!r} at character {error.start}, which is not "
            "a character of its own: decode the text from its bytes once more"
        ) from error
    listed = _listed(text)
    instruction = text if listed is None else listed
    if not instruction.strip():
        raise ModalityError(f"the instruction {text!r} is empty: say what the robot shall do")
    return instruction.lower()


def prompt_of(text: object, embodiment: Embodiment) -> str:
    """Return the embodiment's prompt for the instruction ``text``."""
    return embodiment.prompt.format(task=clean_instruction(text))


def _listed(text: str) -> str | None:
    """Return the first element of a written list, or None if ``text`` is not a list."""
    if not text.lstrip().startswith("["):
        return None
    value = attempted(lambda: ast.literal_eval(text.strip()))
    if not isinstance(value, list):
        return None
    if not value or not isinstance(value[0], str):
        raise ModalityError(f"the instruction list {text!r} must begin with a text")
    return value[0]
