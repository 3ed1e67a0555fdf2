"""What clients and servers of openpi's family send each other, read into typed values and written.

Four dialects share one wire format: openpi's own (a map back), DreamZero's (a bare array back),
that of vLLM-Omni's robot path, and ours, which a client asks for by the WebSocket subprotocol
:data:`SUBPROTOCOL`. Arena, RoboLab, MolmoSpaces and RoboArena speak one of the first two.

How messages are written is :mod:`dzrobot.messages`. Between dzrobot's own client and server, which
announces it, images may take fewer bytes: ``jpeg`` changes pixels, hence actions, and is on the
card of a result; ``zstd`` changes nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from websockets.typing import Subprotocol

from dzrobot.documents import shorten, validated
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ModalityError, ProtocolError, preview, suggest
from dzrobot.messages import ArrayForm, pack
from dzrobot.modality.window import Observation, array, check_observation
from dzrobot.policies.base import Leftover, Method, Plan
from dzrobot.untrusted import LARGEST_MESSAGE, parsing

ImageCoding = Literal["raw", "jpeg", "zstd"]
"""``raw``: as they are; ``jpeg``: every frame as JPEG of quality 95; ``zstd``: compressed."""

Images = NDArray[np.uint8]

_QUALITY = 95
_CODING = b"__images__"
_MOST_AXES = 4
_FRAME_HEADERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of JPEG that are followed by the size of the image."""


def write_images(images: NDArray[Any], coding: ImageCoding) -> object:
    """Return images ``(..., H, W, 3)`` as they are sent."""
    if coding == "raw":
        return images
    if coding == "zstd":
        import pyarrow as pa

        data: list[bytes] = [pa.compress(images.tobytes(), codec="zstd", asbytes=True)]
    else:
        data = [_jpeg(frame) for frame in images.reshape(-1, *images.shape[-3:])]
    return {_CODING: coding, b"shape": list(images.shape), b"data": data}


def read_images(value: object, size: tuple[int, int], most: int) -> object:
    """Return the images that :func:`write_images` wrote; anything else as it is.

    Nothing larger than was agreed on is decoded.

    Args:
        value: Of one view, from a message.
        size: ``(height, width)`` of the view.
        most: Most frames.

    Raises:
        ProtocolError: images of another size or number, or damaged data.
    """
    if not isinstance(value, Mapping) or _CODING not in value:
        return value
    coding, data = value[_CODING], value.get(b"data")
    given = value.get(b"shape")
    shape: list[int] = given if isinstance(given, list) else []
    whole = all(type(side) is int for side in shape)
    if not whole or shape[-3:] != [*size, 3] or len(shape) > _MOST_AXES:
        raise ProtocolError(
            f"images of the shape {shorten(given)}: give (frames, {size[0]}, {size[1]}, 3), or one "
            "image without frames"
        )
    frames = math.prod(shape[:-3])
    if not 1 <= frames <= most or not isinstance(data, list):
        raise ProtocolError(f"{frames} frames of one view: give 1 to {most}")
    if not all(isinstance(part, bytes) for part in data):
        raise ProtocolError("coded images are bytes")
    if coding == "zstd" and len(data) == 1:
        return np.frombuffer(_expanded(data[0], math.prod(shape)), np.uint8).reshape(shape)
    if coding == "jpeg" and len(data) == frames:
        return np.stack([_decoded(part, size) for part in data]).reshape(shape)
    raise ProtocolError(
        f"{len(data)} parts of {shorten(coding)} for {frames} frames: allowed are one of zstd, or "
        "a JPEG for each frame"
    )


def _jpeg(frame: NDArray[Any]) -> bytes:
    import cv2

    bgr = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
    done, data = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    assert done, "any image of bytes can be written as JPEG"
    return data.tobytes()


def _decoded(data: bytes, size: tuple[int, int]) -> Images:
    import cv2

    if _jpeg_size(data) != size:
        raise ProtocolError(
            f"a JPEG of {len(data)} bytes that does not say it has {size[0]} x {size[1]} pixels"
        )
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None or image.shape != (*size, 3):
        raise ProtocolError(f"a JPEG of {len(data)} bytes is damaged")
    rgb: Images = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return rgb


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return ``(height, width)`` as the header says, before anything is decoded."""
    at = 2
    while data[:2] == b"\xff\xd8" and at + 9 <= len(data) and data[at] == 0xFF:
        if data[at + 1] in _FRAME_HEADERS:
            height, width = (int.from_bytes(data[at + i : at + i + 2]) for i in (5, 7))
            return height, width
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def _expanded(data: bytes, count: int) -> bytes:
    import pyarrow as pa

    with parsing(f"{len(data)} bytes of zstd", ProtocolError, "are damaged", "send them again"):
        # No more than `count` bytes are written, whatever the data announces.
        expanded: bytes = pa.decompress(data, decompressed_size=count, codec="zstd", asbytes=True)
    return expanded


def coded_card(coding: ImageCoding) -> dict[str, Any]:
    """Return what a result depends on of it."""
    return {"images": f"jpeg {_QUALITY}"} if coding == "jpeg" else {}


_LEAST_LIMIT = 16 * 1024**2
"""Bytes that a server reads of any message: images of a wrong size are then refused by name."""

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
    GROOT = "groot"
    """No WebSocket; see :mod:`.groot`."""

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
    """What the actions depend on, and under :data:`dzrobot.code_identity.CODE` by which code."""

    continues: dict[Method, int]
    """Most rows of a running plan that a new one can begin with, by method; a missing method is
    not supported."""

    images: list[ImageCoding] = []
    """How images may be written."""

    robot: dict[str, Any] | None = None
    """The robot as data. None, and not sent: it is built in, or data cannot express it."""


@dataclass(frozen=True)
class ClientRequest:
    """One message of a client, parsed."""

    envelope: Envelope
    observation: Observation
    """Under modality keys, checked; empty in a reset."""

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
    if dialect is Dialect.GROOT:
        return {key: key for key in (*robot.video_keys, *robot.state_keys, robot.language)}
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
        ModalityError: keys missing or unknown, or a value that is not the robot's: of another
            shape or type, not finite, or an instruction that is none.
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
    for view in robot.views:
        observation[view.key] = read_images(
            observation[view.key], view.resolution, robot.timing.action_horizon
        )
    for part in robot.state:
        observation[part.key] = _single(observation[part.key])
    # Checked here for every policy: what does not fit never reaches one.
    _, stacked = check_observation(observation, robot)
    leftover = _leftover(envelope.leftover, robot)
    return ClientRequest(envelope, observation, stacked or 1, leftover, form)


def write_leftover(left: Leftover) -> dict[str, Any]:
    """Return what a robot keeps executing, as a field of a request."""
    return {
        "targets": left.targets,
        "delay": left.delay,
        "method": left.method,
        "strength": left.strength,
        "weights": left.weights,
    }


def write_observation(
    given: Observation, robot: Embodiment, dialect: Dialect, coding: ImageCoding = "raw"
) -> dict[str, Any]:
    """Return a checked observation under its names in messages to a server of ``dialect``.

    Args:
        given: The observation.
        robot: Whose it is.
        dialect: Of the server.
        coding: How images are written; other ones than ``raw`` only where the greeting allows.
    """
    written: dict[str, Any] = {name: given[key] for key, name in wire_names(robot, dialect).items()}
    for key, name in wire_names(robot, dialect).items():
        if key in robot.video_keys:
            written[name] = write_images(array(given, key), coding)
    return written


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
