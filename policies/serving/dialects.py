"""What clients and servers of openpi's family send each other, read into typed values and written.

Four dialects share one wire format: openpi's own (a map back), DreamZero's (a bare array back),
that of vLLM-Omni's robot path, and ours, which a client asks for by the WebSocket subprotocol
:data:`SUBPROTOCOL`. Arena, RoboLab, MolmoSpaces and RoboArena speak one of the first two.

The format is msgpack with arrays, as openpi's clients and servers write it: no pickle, every size
bounded. An array is the map ``{b"__ndarray__": True, b"data": bytes, b"dtype": str, b"shape":
[..]}``, one number ``{b"__npgeneric__": True, b"data": number, b"dtype": str}``. Source:
openpi-client 0.1.2, ``msgpack_numpy``. MolmoSpaces' client packs with the library of that name from
PyPI (0.4.8): ``{b"nd": True, b"type": str, b"kind": b"", b"shape": [..], b"data": bytes}``, one
number ``{b"nd": False, b"type": str, b"data": bytes}``. It is answered in that form.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from websockets.typing import Subprotocol

from dzrobot.documents import shorten, validated
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ModalityError, ProtocolError, preview, suggest
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Leftover, Method, Plan

LARGEST_MESSAGE = 64 * 1024**2
"""Bytes of one message; vLLM-Omni has the same limit."""

_LEAST_LIMIT = 16 * 1024**2
"""Bytes that a server reads of any message: images of a wrong size are then refused by name."""

_MOST_ITEMS = 20_000
"""Of one message, at all levels together. An item may take two hundred times its bytes in memory;
an array is four items whatever its size."""

_DEEPEST = 16
_MOST_TEXT = 1024**2
"""Bytes of all texts of a message together: one rare letter makes four bytes of each other one."""

_MOST_AXES = 8
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])\Z")
_ARRAY, _NUMBER = b"__ndarray__", b"__npgeneric__"
_ND = b"nd"

ArrayForm = Literal["openpi", "nd"]
"""How arrays are written: as openpi's clients do, or as the library msgpack_numpy does."""


def pack(value: object, form: ArrayForm = "openpi") -> bytes:
    """Return ``value`` as one message.

    Raises:
        ProtocolError: it holds something else than texts, bytes, numbers, lists, maps and arrays of
            numbers.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_written if form == "openpi" else _written_nd)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent: {error}") from error
    return packed


def unpack(message: bytes, forms: set[ArrayForm] | None = None) -> Any:
    """Return what ``message`` holds; arrays are views of it and cannot be written to.

    Args:
        message: As it arrived.
        forms: In which arrays were written; added to.

    Raises:
        ProtocolError: no msgpack, cut short, more behind its end, too many items or levels, too
            much text, or an array that is none.
    """
    try:
        _check_size(message)
        hook = functools.partial(_read, set() if forms is None else forms)
        return msgpack.unpackb(message, object_hook=hook, ext_hook=_no_extension)
    except (ValueError, RecursionError) as error:
        # msgpack's own faults of nesting and of what is behind the end have no text of their own.
        reason = str(error) or type(error).__name__
        raise ProtocolError(
            f"a message of {len(message)} bytes is no msgpack of openpi's kind: {reason[:200]}"
        ) from error


_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
          0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip
"""First byte of an item of msgpack -> bytes that follow."""

_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4,
            0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # fmt: skip
"""First byte of an item of msgpack -> bytes of the count that follows."""


def _check_size(message: bytes) -> None:
    """Raise ValueError if ``message`` holds more than a request does; nothing of it is built.

    What is no msgpack passes: the reader refuses it.
    """
    at, announced, text, left = 0, 1, 0, [1]
    while left and at < len(message):
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        at, inside, letters = _item(message, at)
        announced, text = announced + inside, text + letters
        if inside:
            left.append(inside)
        if announced > _MOST_ITEMS or text > _MOST_TEXT or len(left) > _DEEPEST:
            raise ValueError(
                f"more than {_MOST_ITEMS} items, {_DEEPEST} levels or {_MOST_TEXT} bytes of text"
            )


def _item(message: bytes, at: int) -> tuple[int, int, int]:
    """Return where the item at ``at`` ends, the items inside it (which follow), bytes of text."""
    first, at = message[at], at + 1
    match first:
        case _ if first < 0x80 or first >= 0xE0 or first in _FIXED:
            return at + _FIXED.get(first, 0), 0, 0
        case _ if first < 0x90:
            return at, 2 * (first & 15), 0
        case _ if first < 0xA0:
            return at, first & 15, 0
        case _ if first < 0xC0:
            return at + (first & 31), 0, first & 31
    width = _COUNTED.get(first, 0)
    count, at = int.from_bytes(message[at : at + width]), at + width
    match first:
        case 0xDC | 0xDD:
            return at, count, 0
        case 0xDE | 0xDF:
            return at, 2 * count, 0
        case 0xD9 | 0xDA | 0xDB:
            return at + count, 0, count
        case 0xC7 | 0xC8 | 0xC9:
            return at + 1 + count, 0, 0
    return at + count, 0, 0


def _written(value: object) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray | np.generic):
        if not _DTYPE.match(value.dtype.str):
            raise ValueError(f"arrays of {value.dtype} are not sent, only numbers")
        kind = value.dtype.str
        if isinstance(value, np.ndarray):
            return {
                _ARRAY: True,
                b"data": value.tobytes(),
                b"dtype": kind,
                b"shape": value.shape,
            }
        return {_NUMBER: True, b"data": value.item(), b"dtype": kind}
    raise TypeError(f"a {type(value).__name__} is not sent")


def _written_nd(value: object) -> object:
    """Return ``value`` as the library msgpack_numpy writes it."""
    plain = _written(value)
    kind = plain[b"dtype"]
    if _NUMBER in plain:
        return {_ND: False, b"type": kind, b"data": np.array(plain[b"data"], kind).tobytes()}
    kept = {name: plain[name] for name in (b"shape", b"data")}
    return {_ND: True, b"type": kind, b"kind": b"", **kept}


def _read(forms: set[ArrayForm], found: dict[Any, Any]) -> Any:
    if _ARRAY in found:
        return _array(found)
    if _NUMBER in found:
        return _number(found)
    if _ND in found:
        forms.add("nd")
        kept = {b"dtype": found.get(b"type"), b"data": found.get(b"data")}
        whole = found[_ND] is True
        array = _array({**kept, b"shape": found.get(b"shape") if whole else []})
        return array if whole else array[()]
    return found


def _array(found: dict[Any, Any]) -> NDArray[Any]:
    data, shape = found.get(b"data"), found.get(b"shape")
    dtype = _dtype(found)
    if not isinstance(shape, list) or len(shape) > _MOST_AXES:
        raise ValueError(f"the shape {shorten(shape)} of an array is no list of few numbers")
    if any(type(count) is not int or count < 0 for count in shape):
        raise ValueError(f"the shape {shorten(shape)} of an array is no list of whole numbers")
    expected = math.prod(shape) * dtype.itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        given = len(data) if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise ValueError(f"an array {dtype} {shorten(shape)} needs {expected} bytes, got {given}")
    return np.frombuffer(data, dtype).reshape(shape)


def _number(found: dict[Any, Any]) -> np.generic:
    value, dtype = found.get(b"data"), _dtype(found)
    if not isinstance(value, int | float):
        raise ValueError(f"a number of {dtype} is written as a {type(value).__name__}")
    try:
        number: np.generic = dtype.type(value)
    except OverflowError as error:
        raise ValueError(f"{shorten(value)} does not fit into {dtype}") from error
    return number


def _dtype(found: dict[Any, Any]) -> np.dtype[Any]:
    kind = found.get(b"dtype")
    if not isinstance(kind, str) or not _DTYPE.match(kind):
        raise ValueError(f"the dtype {shorten(kind)} is none of a number")
    return np.dtype(kind)


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"an extension of type {code} with {len(data)} bytes")


SUBPROTOCOL = Subprotocol("dzrobot.v1")
VLLM_PATH = "/v1/realtime/robot/openpi"
PREFIX = "observation/"
PROMPT = "prompt"
RESET_DONE = "reset successful"

_LONGEST_ID = 128
_MOST_IDS = 1024
LONGEST_PLAN = 4096
"""Rows."""


class Dialect(Enum):
    """How one connection is answered."""

    OPENPI = "openpi"
    DREAMZERO = "dreamzero"
    VLLM = "vllm"
    DZROBOT = "dzrobot"

    @property
    def survives_errors(self) -> bool:
        """Whether an error is a map and the connection stays open; else a text, and it closes."""
        return self in (Dialect.VLLM, Dialect.DZROBOT)

    @property
    def answers_map(self) -> bool:
        """Whether actions are sent in a map with times; else as a bare array."""
        return self in (Dialect.OPENPI, Dialect.DZROBOT)


SessionId = Annotated[str, Field(min_length=1, max_length=_LONGEST_ID)]


class WireLeftover(BaseModel):
    """What a robot keeps executing; fields as in :class:`Leftover`."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    targets: np.ndarray[Any, Any]
    delay: int = Field(ge=1, le=LONGEST_PLAN)
    method: Method
    strength: float | None = Field(default=None, ge=0, le=1000, allow_inf_nan=False)
    weights: Literal["linear", "exp"] = "linear"


class Envelope(BaseModel):
    """The fields of a request beside the observation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    endpoint: Literal["infer", "reset"] = "infer"
    session_id: SessionId | None = None
    session_ids: list[SessionId] | None = Field(default=None, max_length=_MOST_IDS)
    """Which sessions a reset ends; None: those of this connection."""

    deadline_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """Time after which the answer is of no use."""

    episode: int | None = Field(default=None, ge=0, lt=2**53)
    """Number that keyed noise depends on."""

    leftover: WireLeftover | None = None
    """What the plan is to continue; in our own dialect, where the greeting announces it."""


_ENVELOPE = frozenset(Envelope.model_fields)


class Greeting(BaseModel):
    """What our server sends to our client first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dzrobot: str
    """Version of the server."""

    embodiment: str
    action_horizon: int = Field(ge=1)
    execute: int = Field(ge=1)
    """Actions of each plan that are executed unless the client chooses another number."""

    history: Literal["off", "recent"]
    card: dict[str, Any]
    """What the actions depend on."""

    continues: dict[Method, int]
    """Most rows of a running plan that a new one can begin with, by method; a missing method is
    not supported."""


@dataclass(frozen=True)
class ClientRequest:
    """One message of a client, parsed."""

    envelope: Envelope
    observation: Observation
    """Under modality keys; empty in a reset. The policy checks what it holds."""

    frames: int
    """Images of each view."""

    leftover: Leftover | None = None
    """What the plan is to continue."""

    form: ArrayForm = "openpi"
    """How its arrays were written; the answer's are written so too."""


def wire_names(robot: Embodiment, dialect: Dialect = Dialect.DZROBOT) -> dict[str, str]:
    """Return modality key -> name in messages, of every view and state part and the prompt.

    A server of openpi's own may read fewer.
    """
    if dialect is Dialect.OPENPI and robot.wire.openpi:
        read = {key: PREFIX + name for key, name in robot.wire.openpi}
        return {**read, robot.language: PROMPT}
    named = dict(robot.wire.names)
    keys = (*robot.video_keys, *robot.state_keys)
    table = {key: PREFIX + named.get(key, key.partition(".")[2]) for key in keys}
    return {**table, robot.language: PROMPT}


def read_request(message: object, robot: Embodiment, form: ArrayForm = "openpi") -> ClientRequest:
    """Return a client's message, parsed.

    Args:
        message: As :func:`unpack` returns it.
        robot: Whose observation it is.
        form: How its arrays were written.

    Raises:
        ProtocolError: no map, or an envelope that is none.
        ModalityError: keys missing or unknown.
    """
    if not isinstance(message, Mapping):
        raise ProtocolError(f"a request is a map, got {shorten(message)}")
    if odd := [key for key in message if not isinstance(key, str)]:
        raise ProtocolError(f"the keys of a request are texts, got {shorten(odd[0])}")
    envelope = validated(
        {key: message[key] for key in _ENVELOPE & message.keys()},
        Envelope,
        "the request",
        ProtocolError,
    )
    if envelope.endpoint == "reset":
        return ClientRequest(envelope, {}, 0, form=form)
    names = wire_names(robot)
    _check_names(message, names, robot)
    observation: dict[str, Any] = {key: message[name] for key, name in names.items()}
    for part in robot.state:
        observation[part.key] = _single(observation[part.key])
    frames, leftover = _frames(observation, robot), _leftover(envelope.leftover, robot)
    return ClientRequest(envelope, observation, frames, leftover, form)


def write_leftover(left: Leftover) -> dict[str, Any]:
    """Return what a robot keeps executing, as a field of a request."""
    return {
        "targets": left.targets,
        "delay": left.delay,
        "method": left.method,
        "strength": left.strength,
        "weights": left.weights,
    }


def write_observation(given: Observation, robot: Embodiment, dialect: Dialect) -> dict[str, Any]:
    """Return a checked observation under its names in messages to a server of ``dialect``."""
    return {name: given[key] for key, name in wire_names(robot, dialect).items()}


def largest_request(robot: Embodiment) -> int:
    """Return the bytes that a request of ``robot`` may have: a horizon of frames of every view."""
    frame = sum(3 * math.prod(view.resolution) for view in robot.views)
    return min(LARGEST_MESSAGE, max(_LEAST_LIMIT, frame * robot.timing.action_horizon))


def arena_greeting(robot: Embodiment) -> dict[str, Any]:
    """Return what RoboArena's and DreamZero's clients are sent; exactly their six keys.

    They build a class from it and fail at any further key. For a robot that none of them drives,
    the map lists the keys that the server expects.
    """
    arena = robot.wire.arena
    if arena is None:
        return {
            "embodiment": robot.tag,
            "action_horizon": robot.timing.action_horizon,
            "control_hz": robot.timing.control_hz,
            "keys": list(wire_names(robot).values()),
        }
    return {
        "image_resolution": list(robot.views[0].resolution),
        "needs_wrist_camera": arena.needs_wrist_camera,
        "n_external_cameras": arena.n_external_cameras,
        "needs_stereo_camera": arena.needs_stereo_camera,
        "needs_session_id": arena.needs_session_id,
        "action_space": arena.action_space,
    }


def write_actions(
    dialect: Dialect,
    actions: NDArray[np.float32],
    timing: Mapping[str, float],
    plan: Plan | None = None,
    form: ArrayForm = "openpi",
) -> bytes:
    """Return the answer to a request for actions (H, A).

    Args:
        dialect: Of the connection.
        actions: What the robot executes.
        timing: Milliseconds.
        plan: What they were made from, for our own client to continue; None: not known.
        form: How arrays are written.
    """
    if dialect is Dialect.DZROBOT and plan is not None:
        whole = {"targets": plan.targets, "normalized": plan.normalized}
        return pack({"actions": actions, "server_timing": dict(timing), **whole})
    if dialect.answers_map:
        # No other array: openpi's broker slices every array along the plan.
        return pack({"actions": actions, "server_timing": dict(timing)}, form)
    return pack(actions, form)


def write_reset(dialect: Dialect) -> bytes | str:
    """Return the answer to a reset."""
    return pack({"status": RESET_DONE}) if dialect.survives_errors else RESET_DONE


def write_error(dialect: Dialect, error: Exception) -> bytes | str:
    """Return the message that reports an error; a text ends the connection."""
    if dialect.survives_errors:
        kind = type(error).__name__
        return pack({"type": "error", "message": str(error), "kind": kind})
    return str(error)


def _check_names(
    message: Mapping[str, object], names: Mapping[str, str], robot: Embodiment
) -> None:
    expected: Sequence[str] = list(names.values())
    if missing := set(expected) - message.keys():
        raise ModalityError(
            f"{robot.tag}: {preview(missing)} missing; given: {preview(message, 12)}; expected: "
            f"{preview(expected, 12)}. Every view and state part is required."
        )
    unused = {PREFIX + name for name in robot.wire.unused}
    if unknown := message.keys() - set(expected) - unused - _ENVELOPE:
        first = min(unknown)
        raise ModalityError(
            f"{robot.tag}: unexpected {preview(unknown)}.{suggest(first, expected)} Expected: "
            f"{preview(expected, 12)}."
        )


def _leftover(given: WireLeftover | None, robot: Embodiment) -> Leftover | None:
    """Return what a plan is to continue, checked.

    Raises:
        ProtocolError: no rows of this robot's plans.
        ConfigError: more rows are to be kept than are left.
    """
    if given is None:
        return None
    rows, horizon = given.targets, robot.timing.action_horizon
    fits = rows.ndim == 2 and 1 <= len(rows) <= horizon and rows.shape[1] == robot.action_dim
    if not fits or rows.dtype != np.float32 or not np.isfinite(rows).all():
        raise ProtocolError(
            f"a leftover of {rows.dtype} {rows.shape}: a plan of {robot.tag} leaves 1 to {horizon} "
            f"rows of {robot.action_dim} finite float32 numbers"
        )
    return Leftover(
        targets=rows,
        delay=given.delay,
        method=given.method,
        strength=given.strength,
        weights=given.weights,
    )


def _single(value: object) -> object:
    """Return an array of double precision, which most clients send, in single precision."""
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        with np.errstate(over="ignore"):
            # What does not fit becomes infinite, and is refused later.
            return value.astype(np.float32)
    return value


def _frames(observation: Mapping[str, object], robot: Embodiment) -> int:
    shown = observation[robot.views[0].key]
    stack = isinstance(shown, np.ndarray) and shown.ndim == 4
    return len(shown) if stack else 1  # type: ignore[arg-type]
