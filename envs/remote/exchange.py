"""What an environment server and its client send each other, read into typed values and written."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from gymnasium import spaces
from pydantic import BaseModel, ConfigDict, Field
from websockets.typing import Subprotocol

from dzrobot.documents import shorten, validated
from dzrobot.embodiments.action_conventions import HandMotion, RotationForm
from dzrobot.embodiments.spec import ActionFrame, Embodiment
from dzrobot.envs.episodes import Instruction
from dzrobot.errors import ProtocolError
from dzrobot.untrusted import parsing

SUBPROTOCOL = Subprotocol("dzrobot-env.v1")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Make(_Message):
    """Make the environment of this connection, and say what it is."""

    do: Literal["make"] = "make"
    arguments: dict[str, Any]
    draws: bool
    """Whether it is asked for images for people."""


class Reset(_Message):
    """Begin an episode."""

    do: Literal["reset"] = "reset"
    seed: int | None
    options: dict[str, Any] | None


class Step(_Message):
    """Do one action."""

    do: Literal["step"] = "step"
    action: Any
    omit_frames: bool
    """Whether all ``video.*`` are left out of the observation."""


class Perturb(_Message):
    """Make the scene of the next resets harder, along one of the environment's own axes."""

    do: Literal["perturb"] = "perturb"
    axis: str | None
    level: int
    seed: int


class Render(_Message):
    """Return an image for people."""

    do: Literal["render"] = "render"


Asked = Make | Reset | Step | Perturb | Render
Request = Annotated[Asked, Field(discriminator="do")]


class Facts(_Message):
    """What the environment says of itself, as in the attributes of a local one."""

    embodiment: Embodiment | None = None
    control_hz: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    init_states: int | None = None
    task: str | None = None
    hand: dict[str, Any] | None = None
    prompt: str | None = None
    opengl: str | None = None
    perturbations: tuple[str, ...] = ()


class Made(_Message):
    """Answer to `Make`."""

    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    render_mode: str | None
    render_fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    facts: Facts
    about: dict[str, Any]
    """What a result depends on: the environment, its arguments, versions there."""


class Turn(_Message):
    """Answer to `Reset` and `Step`."""

    observation: Any
    info: dict[str, Any]
    reward: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    terminated: bool = False
    truncated: bool = False


class Failure(_Message):
    """Answer to what could not be done."""

    error: str
    """Class of the error."""

    message: str


def write(message: BaseModel) -> dict[str, Any]:
    """Return ``message`` as it is packed."""
    return message.model_dump()


def read(content: object, kind: Any, sender: str) -> Any:
    """Return the message of ``kind`` that ``content`` is.

    Raises:
        ProtocolError: it is none.
    """
    return validated(content, kind, f"the message of {sender}", ProtocolError)


Numbers = tuple[Annotated[int, Field(ge=0, le=4096)], Annotated[int, Field(ge=0, le=4096)]]
"""First and behind the last, of a state or an action."""


Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Hand(_Message):
    """Holds what `HandMotion` has, with pairs for its slices."""

    position: Numbers
    rotation: Numbers
    rotation_form: RotationForm
    fingers: Numbers
    translation: Numbers
    turn: Numbers
    gripper: Annotated[int, Field(ge=0, le=4096)]
    closes: Literal[-1, 1]
    translation_m: Size
    rotation_rad: Size
    frame: ActionFrame = "base"


def write_hand(hand: HandMotion | None) -> dict[str, Any] | None:
    """Return how a hand moves, without slices."""
    if hand is None:
        return None
    return {
        name: [value.start, value.stop] if isinstance(value, slice) else value
        for name, value in asdict(hand).items()
    }


def read_hand(given: Mapping[str, Any] | None) -> HandMotion | None:
    """Return how a hand moves.

    Raises:
        ProtocolError: the fields are others.
    """
    if given is None:
        return None
    hand = validated(given, _Hand, "the server's description of the hand", ProtocolError)
    fields: dict[str, Any] = {
        name: slice(*value) if isinstance(value, tuple) else value
        for name, value in vars(hand).items()
    }
    return HandMotion(**fields)


def write_value(value: object, place: str) -> Any:
    """Return an observation, an action or a part of ``info`` as it is packed.

    Args:
        value: Numbers, texts, arrays of numbers, and maps and sequences of them.
        place: Where it is, for the message.

    Raises:
        ProtocolError: it holds something else.
    """
    match value:
        case None | bool() | float() | np.generic():
            return value
        case int() if -(2**63) <= value < 2**64:
            return int(value)
        case str():
            # Of a text that is a member of an enumeration: its value.
            return str.__str__(value)
        case np.ndarray() if value.dtype.kind in "biuf":
            return value
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: write_value(inner, f"{place}[{key!r}]") for key, inner in value.items()}
        case list() | tuple():
            return [write_value(inner, f"{place}[{n}]") for n, inner in enumerate(value)]
    raise ProtocolError(
        f"{place} is {shorten(value)} ({type(value).__name__}), which cannot be sent: numbers, "
        "texts, arrays of numbers, and maps and lists of them can"
    )


def write_info(info: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what of ``info`` can be sent, and what cannot: its keys, with the reason."""
    sent: dict[str, Any] = {}
    left: dict[str, str] = {}
    for key, value in info.items():
        try:
            sent[key] = write_value(value, f"info[{key!r}]")
        except ProtocolError as error:
            left[str(key)] = str(error)
    return sent, left


def read_value(value: Any, space: spaces.Space[Any] | None = None) -> Any:
    """Return ``value`` with arrays that may be written to, and tuples where ``space`` has them.

    Raises:
        ProtocolError: it has parts that ``space`` has not.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        if not isinstance(space, spaces.Dict):
            return {key: read_value(part) for key, part in value.items()}
        if unknown := value.keys() - space.spaces.keys():
            raise ProtocolError(f"an observation holds {sorted(unknown)}, unlike its space")
        return {key: read_value(part, space[key]) for key, part in value.items()}
    if isinstance(value, list):
        if isinstance(space, spaces.Tuple):
            return tuple(read_value(*pair) for pair in zip(value, space.spaces, strict=True))
        return [read_value(part) for part in value]
    return value


def write_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return ``space`` as it is packed.

    Raises:
        ProtocolError: it is of a kind that is not sent.
    """
    match space:
        case Instruction():
            return {"kind": "instruction"}
        case spaces.Dict():
            parts = {key: write_space(inner) for key, inner in space.spaces.items()}
            return {"kind": "dict", "parts": parts}
        case spaces.Tuple():
            return {"kind": "tuple", "parts": [write_space(inner) for inner in space.spaces]}
        case spaces.Box():
            low, high = (_narrow(limit) for limit in (space.low, space.high))
            shape, dtype = list(space.shape), space.dtype.str
            return {"kind": "box", "low": low, "high": high, "shape": shape, "dtype": dtype}
        case spaces.Discrete():
            return {"kind": "discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"kind": "multidiscrete", "nvec": space.nvec, "start": space.start}
        case spaces.MultiBinary():
            return {"kind": "multibinary", "n": space.n}
        case spaces.Text():
            letters = "".join(sorted(space.character_set))
            limits = {"min": space.min_length, "max": space.max_length}
            return {"kind": "text", "letters": letters, **limits}
    raise ProtocolError(
        f"a space {type(space).__name__} cannot be sent: serve the environment in a wrapper that "
        "gives it spaces of boxes, numbers, texts, dicts and tuples"
    )


def read_space(given: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space that ``given`` describes.

    Raises:
        ProtocolError: it does not describe one.
    """
    with parsing(
        "the environment server's description of a space", ProtocolError,
        f"is not one: {shorten(dict(given))}", "serve it with the same version of dzrobot",
    ):  # fmt: skip
        space: spaces.Space[Any] = _SPACES[given["kind"]](given)
        return space


def _read_box(given: Mapping[str, Any]) -> spaces.Box:
    shape = tuple(given["shape"])
    low, high = (np.broadcast_to(given[limit], shape) for limit in ("low", "high"))
    return spaces.Box(low, high, shape, np.dtype(given["dtype"]).type)


def _read_bits(given: Mapping[str, Any]) -> spaces.MultiBinary:
    count = given["n"]
    return spaces.MultiBinary(count if isinstance(count, int) else tuple(count))


_SPACES: Mapping[str, Any] = {
    "instruction": lambda _: Instruction(),
    "dict": lambda s: spaces.Dict({key: read_space(part) for key, part in s["parts"].items()}),
    "tuple": lambda s: spaces.Tuple([read_space(part) for part in s["parts"]]),
    "box": _read_box,
    "discrete": lambda s: spaces.Discrete(s["n"], start=s["start"]),
    "multidiscrete": lambda s: spaces.MultiDiscrete(s["nvec"], start=s["start"]),
    "multibinary": _read_bits,
    "text": lambda s: spaces.Text(s["max"], min_length=s["min"], charset=s["letters"]),
}


def _narrow(limit: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return one number where all limits are equal, as those of images are."""
    first = limit.reshape(-1)[:1]
    return first.reshape(()) if limit.size and (limit == first).all() else limit
