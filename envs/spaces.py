"""Gymnasium spaces that follow from an embodiment."""

import multiprocessing
import string
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import ConfigError, ModalityError, find

Limits = tuple[float | Sequence[float], float | Sequence[float]]
"""Lowest and highest value of a state part: one number for all, or one for each."""

MOST_PIXELS = 4096
"""Along one side of an image. A space holds the limits of every value, in memory."""

LETTERS = string.printable + "".join(map(chr, (*range(0xA1, 0x250), *range(0x2010, 0x2027))))
"""Letters of instructions: ASCII, Latin letters with accents, and typographic quotes and dashes,
which some tasks of LIBERO-PRO have.
"""

TEXT_LIMIT = 256
"""Longest instruction, in characters."""


def observation_space(
    embodiment: Embodiment,
    limits: Mapping[str, Limits],
    *,
    resolution: tuple[int, int] | None = None,
    cameras: bool = True,
) -> spaces.Dict:
    """Return the space of one observation: the embodiment's modality keys, each with its own space.

    Args:
        embodiment: Which cameras, state parts and instruction key there are.
        limits: ``(low, high)`` of every state part by key, in the part's own units; finite.
        resolution: ``(height, width)`` in pixels of every camera. None: what each view states.
        cameras: False leaves the cameras out.

    Raises:
        ConfigError: images of no size, or larger than any camera's.
        UnknownNameError: a state part has no limits.
    """
    height, width = resolution or (1, 1)
    if not (1 <= height <= MOST_PIXELS and 1 <= width <= MOST_PIXELS):
        raise ConfigError(
            f"images of {height} x {width} pixels were asked for; allowed: 1 to {MOST_PIXELS} "
            "each way"
        )
    parts: dict[str, spaces.Space[object]] = {}
    for view in embodiment.views if cameras else ():
        shape = (*(resolution or view.resolution), 3)
        parts[view.key] = spaces.Box(0, 255, shape, np.uint8)
    for part in embodiment.state:
        parts[part.key] = _box(part, find(limits, "state limits", part.key))
    parts[embodiment.language] = Instruction()
    return spaces.Dict(parts)


def action_space(embodiment: Embodiment) -> spaces.Box:
    """Return the box [-1, 1] (A,) over all action numbers of ``embodiment``, in their order."""
    return spaces.Box(-1.0, 1.0, (embodiment.action_dim,), np.float32)


def plain_action(action: object, space: spaces.Box) -> NDArray[Any]:
    """Return ``action`` as an array of the shape of ``space``, its numbers and their type kept.

    Args:
        action: An array, list or tuple of numbers, or a torch tensor on the host.
        space: Of the environment's actions, ``(A,)``; numbers beyond its limits are let pass.

    Raises:
        ModalityError: another shape, no numbers, or numbers that are not finite.
    """
    plain = bool((space.low == -1).all() and (space.high == 1).all())
    wanted = f"an action is {space.shape[0]} finite numbers"
    wanted += " in [-1, 1]" if plain else ", as env.action_space says"
    try:
        values = np.asarray(action)
        fits = values.shape == space.shape and bool(np.isfinite(values).all())
    # What torch raises for a tensor on a device, or one that carries a gradient.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModalityError(
            f"{wanted}, got a {type(action).__name__} that NumPy cannot read ({error}); give "
            "np.ndarray, or tensor.detach().cpu().numpy()"
        ) from error
    if not fits:
        raise ModalityError(f"{wanted}, got {action!r}.")
    return values


class Instruction(spaces.Text):
    """Sentences; in ``AsyncVectorEnv`` they come through shared memory as they are.

    Gymnasium reads its own text space from shared memory once, when the environments are made, so
    that every instruction stays what it was then: zeros.
    """

    def __init__(self) -> None:
        # Gymnasium's own character set has no blank and no full stop, so no sentence fits it.
        super().__init__(max_length=TEXT_LIMIT, min_length=0, charset=LETTERS)


class _Instructions(Sequence[str]):
    """The instructions of all environments, read from their memory whenever they are read."""

    def __init__(self, codes: NDArray[np.int32]) -> None:
        self._codes = codes
        """Code points (environments, length), 0 after the last."""

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return "".join(chr(code) for code in self._codes[index] if code)

    def __deepcopy__(self, memo: dict[int, object]) -> tuple[str, ...]:
        return tuple(self)


@create_shared_memory.register(Instruction)
def _create_text(space: Instruction, n: int = 1, ctx: Any = multiprocessing) -> Any:
    return ctx.Array("i", n * space.max_length)


@read_from_shared_memory.register(Instruction)
def _read_text(space: Instruction, shared_memory: Any, n: int = 1) -> Sequence[str]:
    return _Instructions(_codes(shared_memory).reshape(n, space.max_length))


@write_to_shared_memory.register(Instruction)
def _write_text(space: Instruction, index: int, values: str, shared_memory: Any) -> None:
    if len(values) > space.max_length:
        raise ModalityError(
            f"the instruction {values[:40]!r}... has {len(values)} characters; "
            f"{space.max_length} go through shared memory: shorten it, or make the vector "
            "environment with shared_memory=False"
        )
    row = _codes(shared_memory).reshape(-1, space.max_length)[index]
    row[:] = 0
    row[: len(values)] = [ord(letter) for letter in values]


def _codes(shared_memory: Any) -> NDArray[np.int32]:
    return np.frombuffer(shared_memory.get_obj(), np.int32)


def _box(part: Part, limits: Limits) -> spaces.Box:
    low, high = (np.broadcast_to(np.asarray(limit, np.float32), (part.dim,)) for limit in limits)
    return spaces.Box(low, high, (part.dim,), np.float32)
