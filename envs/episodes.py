"""What all environments here share: spaces, arguments, initial states, kinds of failure."""

import inspect
import multiprocessing
import string
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import wraps
from typing import Any, ParamSpec, overload

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import ConfigError, ModalityError, find, refuse_unknown

P = ParamSpec("P")

DRAWN = 2**31
"""How many there are where a start's number is all that it is drawn from."""


def named_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor that ``gym.make`` calls name the nearest argument to an unknown one.

    Raises:
        UnknownNameError: The constructor takes no such argument.
    """
    known = [*inspect.signature(init).parameters][1:]

    @wraps(init)
    def checked(*args: P.args, **given: P.kwargs) -> None:
        refuse_unknown(type(args[0]).__name__, given, known)
        init(*args, **given)

    return checked


class InitialStates:
    """A cursor over ``count`` initial states.

    A seed names a state (``seed % count``), so that ``reset(seed=s)`` repeats itself and fixes
    every unseeded reset after it. ``options={"init_state_id": k}`` names one. Otherwise the next
    one follows, from 0 onwards.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._last = -1

    def choose(self, seed: int | None, options: Mapping[str, Any] | None) -> int:
        """Return the initial state of the next episode, in ``[0, count)``.

        Raises:
            ModalityError: ``options`` holds another name, or a state that does not exist.
        """
        options = options or {}
        if unknown := sorted(set(options) - {"init_state_id"}):
            raise ModalityError(
                f"reset got the options {', '.join(unknown)}; the only one is init_state_id."
            )
        if "init_state_id" in options:
            self._last = self._checked(options["init_state_id"])
        elif seed is not None:
            self._last = seed % self._count
        else:
            self._last = (self._last + 1) % self._count
        return self._last

    def _checked(self, wanted: Any) -> int:
        try:
            index = range(self._count).index(wanted)
        except ValueError as error:
            raise ModalityError(
                f"init_state_id={wanted!r} does not exist; this task has 0 to {self._count - 1}."
            ) from error
        return index


NEAR_SHARE = 1 / 3
"""Less than this share of the initial distance left counts as near the goal."""


class FailureClass(StrEnum):
    """Why the goal does not hold; from the least that was achieved to the most."""

    NEVER_REACHED = "never reached"
    """The gripper touched nothing that the goal asks to be moved."""

    NOT_GRASPED = "touched, not grasped"
    """It was touched and not taken hold of; of a drawer, door or knob: not moved far."""

    WRONG_OBJECT = "wrong object"
    """Something else was grasped, or another drawer, door or knob moved, and nothing else done."""

    DROPPED = "grasped, then dropped"
    """It was held, and is held no longer."""

    HELD = "held far from the goal"
    """It is held where the episode ended, short of the goal."""

    NEAR_GOAL = "time ran out near the goal"
    """Less than `NEAR_SHARE` of the distance was left, and it was not dropped."""

    GOAL_LOST = "goal held, then lost"
    """The goal, or a part of it that did not hold at the start, came to hold and does no more."""


def episode_info(
    task: str, start: int, failure: FailureClass | None, *, success: bool, ends: bool
) -> dict[str, Any]:
    """Return what ``info`` holds at every step; ``reset_reason`` is empty while it goes on.

    Args:
        task: The instruction.
        start: Number of the initial state.
        failure: How the episode failed if it ended now; None while the goal holds.
        success: Whether the goal holds.
        ends: Whether success ends the episode.
    """
    return {
        "is_success": success,
        "task": task,
        "init_state_id": start,
        "reset_reason": "success" if success and ends else "",
        "failure_class": None if failure is None else failure.value,
    }


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
