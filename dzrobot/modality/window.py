"""What goes into the pipeline: one observation, or a window of several, under modality keys."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import ModalityError, preview, suggest

Observation = Mapping[str, NDArray[np.uint8] | NDArray[np.float32] | str]
"""One step: ``video.*`` (H, W, 3) uint8, ``state.*`` (D,) float32, the instruction as str."""

Window = Mapping[str, NDArray[np.uint8] | NDArray[np.float32] | str]
"""Several steps: ``video.*`` (T, H, W, 3) uint8, ``state.*`` (S, D) float32, the instruction as
str, and for training ``action.*`` (A, D) float32 with A = S * horizon."""


def window_of(observations: Sequence[Observation], embodiment: Embodiment) -> Window:
    """Return the frames of all ``observations``, with the state and instruction of the last one.

    Raises:
        ModalityError: no observation, or one that lacks a key or holds an unknown one.
    """
    if not observations:
        raise ModalityError("no observation given: a window needs at least one")
    for observation in observations:
        check_keys(observation, embodiment.observation_keys, embodiment.tag)
    last = observations[-1]
    window: dict[str, NDArray[np.uint8] | NDArray[np.float32] | str] = {
        embodiment.language: last[embodiment.language]
    }
    for view in embodiment.views:
        frames = [array(observation, view.key) for observation in observations]
        _check_equal(view.key, [frame.shape for frame in frames])
        window[view.key] = np.stack(frames)
    for part in embodiment.state:
        window[part.key] = array(last, part.key)[None]
    return window


def check_keys(given: Mapping[str, object], allowed: Sequence[str], tag: str) -> None:
    """Raise :class:`ModalityError` unless ``given`` holds exactly the ``allowed`` keys."""
    if missing := set(allowed) - given.keys():
        raise ModalityError(
            f"{tag}: {preview(missing)} missing; given: {preview(given, 12)}. Every view and state "
            "part is needed: no missing one is filled in."
        )
    if unknown := given.keys() - set(allowed):
        first = min(unknown)
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


def rows(given: Mapping[str, object], part: Part) -> NDArray[np.float32]:
    """Return the finite float32 rows ``(N, dim)`` of ``part``, or raise :class:`ModalityError`."""
    value = array(given, part.key)
    if value.dtype != np.float32:
        raise ModalityError(f"{part.key} is {value.dtype}: give float32")
    if value.ndim != 2 or value.shape[1] != part.dim or not len(value):
        raise ModalityError(f"{part.key} has shape {value.shape}: give (rows, {part.dim})")
    if not np.isfinite(value).all():
        row, column = np.argwhere(~np.isfinite(value))[0]
        raise ModalityError(
            f"{part.key} holds {value[row, column]} at row {row}, number {column}: check the "
            "sensor or the recording; only finite values can be used"
        )
    return value


def _check_equal(key: str, shapes: Sequence[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        raise ModalityError(f"{key} changes its shape within the window: {sorted(set(shapes))}")
