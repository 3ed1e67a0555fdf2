"""How images and actions of another package's environment become a robot's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import cv2
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from dzrobot.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImageConversion:
    """What is done to the images (H, W, 3) uint8 of another environment."""

    resize: bool = False
    """Whether they take the robot's size, by the mean of the pixels that one covers; else they must
    have it."""

    flip: Literal["none", "upside_down", "mirrored", "turned"] = "none"
    """``turned``: both, as half a turn."""

    def apply(self, image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return ``image`` with ``size`` (height, width)."""
        rows = -1 if self.flip in ("upside_down", "turned") else 1
        columns = -1 if self.flip in ("mirrored", "turned") else 1
        turned = np.ascontiguousarray(image[::rows, ::columns])
        if not self.resize or turned.shape[:2] == size:
            return turned
        height, width = size
        resized = cv2.resize(turned, (width, height), interpolation=cv2.INTER_AREA)
        return np.asarray(resized, np.uint8)


@dataclass(frozen=True, kw_only=True)
class ActionConversion:
    """How an environment's action is made of a robot's: ``scale * robot[source] + offset``."""

    source: Sequence[int | None]
    """For each number of the environment's action, the place of the robot's; None: the offset
    alone."""

    scale: float | Sequence[float] = 1.0
    """Factor of all numbers, or one of each."""

    offset: float | Sequence[float] = 0.0
    """Added to all numbers, or one of each."""

    unused: Sequence[int] = ()
    """Places of the robot's action that go nowhere."""

    def apply(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return the environment's action for the robot's ``action`` (A,)."""
        taken = [0.0 if place is None else action[place] for place in self.source]
        numbers: NDArray[Any] = np.asarray(taken) * self._scale + self._offset
        return numbers

    def space(self, there: spaces.Box, dim: int) -> spaces.Box:
        """Return the robot's space (``dim``,) of what becomes an action in ``there``.

        Raises:
            ConfigError: it does not fit; all faults at once.
        """
        if faults := [*self._faults(there, dim)]:
            raise ConfigError(f"these actions do not fit: {'; '.join(faults)}")
        low, high = np.full(dim, -np.inf, np.float32), np.full(dim, np.inf, np.float32)
        for index, place in enumerate(self.source):
            if place is not None:
                ends = np.ravel([there.low[index], there.high[index]])
                at = np.sort((ends - self._offset[index]) / self._scale[index])
                low[place], high[place] = max(low[place], at[0]), min(high[place], at[1])
        return spaces.Box(low, high, dtype=np.float32)

    @property
    def _scale(self) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(self.scale, np.float64), len(self.source))

    @property
    def _offset(self) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(self.offset, np.float64), len(self.source))

    def _faults(self, there: spaces.Box, dim: int) -> Iterator[str]:
        count = len(self.source)
        if there.shape != (count,):
            yield f"source names {count} numbers, the environment takes {there.shape}"
        for name, given in (("scale", self.scale), ("offset", self.offset)):
            if np.ndim(given) and np.shape(given) != (count,):
                yield f"{name} has the shape {np.shape(given)}, source names {count} numbers"
            elif name == "scale" and not np.all(given):
                yield "scale is 0; write None in source for a number that is always the same"
        taken = {place for place in self.source if place is not None}
        if wrong := sorted(place for place in {*taken, *self.unused} if place not in range(dim)):
            yield f"the robot's actions are 0 to {dim - 1}, not {wrong}"
        if lost := sorted(set(range(dim)) - taken - set(self.unused)):
            yield f"the robot's {lost} go nowhere; name them in unused if they are to"


@runtime_checkable
class _OnDevice(Protocol):
    """A tensor of torch, which this package does not import."""

    def cpu(self) -> Any: ...


def as_array(value: Any) -> Any:
    """Return a tensor as an array, and anything else as it is."""
    return np.asarray(value.cpu()) if isinstance(value, _OnDevice) else value


def unbatched(value: Any) -> Any:
    """Return what a vector of one environment gave, without its leading axis.

    Args:
        value: Arrays and tensors (1, ...), lists of one, maps of them; anything else stays.
    """
    if isinstance(value, Mapping):
        return {key: unbatched(inner) for key, inner in value.items()}
    value = as_array(value)
    single = isinstance(value, np.ndarray | list | tuple) and len(np.shape(value)) > 0
    return value[0] if single and len(value) == 1 else value


def unbatched_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return ``space`` without the leading axis of a vector of one environment.

    Raises:
        ConfigError: it holds a box that has none.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: unbatched_space(inner) for key, inner in space.items()})
    if not isinstance(space, spaces.Box):
        return space
    if space.shape[:1] != (1,):
        raise ConfigError(f"batched=True: {space} has no leading axis of one")
    return spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)  # type: ignore[arg-type]
