"""A policy server of GR00T's: requests over ZeroMQ, in the names that it has for a robot's parts.

The server answers one request after another and keeps no memory of an episode. Source: Isaac-GR00T
ade260e, ``gr00t/policy/server_client.py``, ``gr00t_policy.py``; for LIBERO
``gr00t/configs/data/embodiment_configs.py`` and ``gr00t/eval/sim/LIBERO/libero_env.py``.
"""

import io
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dzrobot.documents import shorten, validated
from dzrobot.embodiments.spec import Embodiment, Groot
from dzrobot.errors import ConfigError, ProtocolError, ServerError, printable
from dzrobot.importing import required
from dzrobot.messages import pack, unpack
from dzrobot.modality.window import array
from dzrobot.policies.serving.connection import ConnectOptions, ServerAnswer
from dzrobot.policies.serving.dialects import Dialect
from dzrobot.untrusted import LARGEST_MESSAGE, parsing, read_npy

SCHEME = "zmq://"
_ARRAY, _BYTES = "__ndarray_class__", "as_npy"


class _Modality(BaseModel):
    """What the server reads or answers of one kind."""

    model_config = ConfigDict(extra="ignore", strict=True)

    delta_indices: list[int] = Field(min_length=1)
    modality_keys: list[str] = Field(min_length=1)


class _Wrapped(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    as_json: _Modality


class _Modalities(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    video: _Wrapped
    state: _Wrapped
    action: _Wrapped
    language: _Wrapped


class GrootConnection:
    """A socket to one server; used as a :class:`~.connection.Connection`.

    Args:
        server: ``zmq://HOST:PORT``.
        options: Timeouts; the key is sent as ``api_token``.
        robot: Whose observations are sent.

    Raises:
        ConfigError: no such address, or the server's policy is for another robot.
        MissingDependencyError: pyzmq is not installed.
        ServerError: the server does not answer, or refuses.
    """

    dialect = Dialect.GROOT
    greeting = None
    sessions = False

    def __init__(self, server: str, options: ConnectOptions, robot: Embodiment) -> None:
        required(f"--server {SCHEME}...", "groot", "zmq")
        if robot.wire.groot is None:
            raise ConfigError(
                f"it is not known what GR00T's servers call the parts of {robot.tag}: they can be "
                "used for libero_sim"
            )
        self._server, self._options, self._robot = server, options, robot
        self._names: Groot = robot.wire.groot
        self._socket: Any = None
        self.generation = 0
        asked = self._ask("get_modality_config", None, options.connect_s)
        found = validated(asked, _Modalities, f"the modalities of {server}", ProtocolError)
        self._reads: dict[str, list[str]] = {}
        for kind in ("video", "state", "action", "language"):
            self._reads[kind] = self._checked(kind, getattr(found, kind).as_json)
        self._rows = len(found.action.as_json.delta_indices)
        self.metadata: Mapping[str, Any] = {**self._reads, "action_horizon": self._rows}

    def ensure(self) -> None:
        """Do nothing: ZeroMQ connects again by itself, and the server remembers nothing."""

    def request_plan(self, request: Mapping[str, Any], *, first: bool) -> ServerAnswer:
        """Return the plan for an observation under modality keys.

        Args:
            request: The observation.
            first: Whether it is the first of its episode, for which the server's policy is reset
                and more time is given.

        Raises:
            ServerError: the server refuses, or its answer is not a plan.
        """
        if first:
            self._ask("reset", {"options": None}, self._options.later_s)
        began = time.perf_counter()
        data = {"observation": self._written(request), "options": None}
        wait_s = self._options.first_s if first else self._options.later_s
        sent, received = self._exchange("get_action", data, wait_s)
        answer = self._fields(received)
        if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[0], dict):
            raise ServerError(f"{self._server} answered {shorten(answer)}, which is not a plan")
        return ServerAnswer(
            actions=self._plan(answer[0]), targets=None, normalized=None,
            round_trip_ms=1000 * (time.perf_counter() - began), timing={},
            sent_bytes=len(sent), received_bytes=len(received),
        )  # fmt: skip

    def reset(self, session: str, episode: int | None = None) -> None:
        """Do nothing: the server knows no sessions, and the next episode begins with a reset."""

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
            self.generation += 1

    def _checked(self, kind: str, asked: _Modality) -> list[str]:
        """Return the names of one kind, all of which this robot has."""
        robot, names = self._robot, asked.modality_keys
        own = {
            "video": [key.removeprefix("video.") for key in robot.video_keys],
            "state": [name for name, _ in self._names.state],
            "action": [name for name, _ in self._names.action],
            "language": names[:1],
        }[kind]
        complete = kind != "action" or len(names) == len(own)
        if not complete or not set(names) <= set(own):
            raise ConfigError(
                f"{self._server} serves a policy with the {kind} {shorten(names)}; {robot.tag} has "
                f"{shorten(own)}"
            )
        steps = asked.delta_indices
        if steps != ([*range(len(steps))] if kind == "action" else [0]):
            raise ConfigError(
                f"{self._server} serves a policy with the {kind} of steps {shorten(steps)}; only "
                "observations of the present and plans from the present on are supported"
            )
        return names

    def _written(self, observation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return an observation as the server reads it: one of a batch, of one step."""
        robot = self._robot
        rows = np.concatenate([array(observation, key) for key in robot.state_keys])
        ends = np.cumsum([width for _, width in self._names.state])
        states = {
            name: _npy(rows[end - width : end].astype(np.float32)[None, None])
            for (name, width), end in zip(self._names.state, ends, strict=True)
        }
        return {
            "video": {
                name: _npy(array(observation, f"video.{name}")[None, None])
                for name in self._reads["video"]
            },
            "state": {name: states[name] for name in self._reads["state"]},
            "language": {name: [[observation[robot.language]]] for name in self._reads["language"]},
        }

    def _plan(self, answer: Mapping[str, Any]) -> NDArray[np.float32]:
        """Return the rows (H, A) of a plan in the robot's order and units."""
        parts = []
        for name, width in self._names.action:
            part, expected = _array_of(answer.get(name)), (1, self._rows, width)
            if part is None or part.shape != expected or part.dtype.kind != "f":
                given = "no array" if part is None else f"{part.dtype} {part.shape}"
                raise ServerError(
                    f"{self._server} answered the action {name!r} as {given}, not float {expected}"
                )
            # Theirs is 0 to close and 1 to open, and only the side of a half counts.
            parts.append(np.sign(1 - 2 * part[0]) if name == self._names.opening else part[0])
        with np.errstate(over="ignore"):
            plan = np.concatenate(parts, axis=1).astype(np.float32)
        if not np.isfinite(plan).all():
            row = int(np.argmax(~np.isfinite(plan).all(axis=1)))
            raise ServerError(
                f"{self._server} answered a plan whose row {row} is {shorten(plan[row].tolist())}: "
                "a number in it is not finite"
            )
        return plan

    def _ask(self, endpoint: str, data: Mapping[str, Any] | None, wait_s: float) -> Any:
        return self._fields(self._exchange(endpoint, data, wait_s)[1])

    def _exchange(
        self, endpoint: str, data: Mapping[str, Any] | None, wait_s: float
    ) -> tuple[bytes, bytes]:
        """Return a request and its answer, as they were sent."""
        import zmq

        request: dict[str, Any] = {"endpoint": endpoint}
        if data is not None:
            request["data"] = data
        if self._options.api_key is not None:
            request["api_token"] = self._options.api_key
        message = pack(request)
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.REQ)
            self._socket.maxmsgsize = LARGEST_MESSAGE
            try:
                self._socket.connect("tcp://" + self._server.removeprefix(SCHEME))
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"{self._server} is not an address zmq://HOST:PORT: {error}"
                ) from error
        self._socket.rcvtimeo = round(1000 * wait_s)
        try:
            self._socket.send(message)
            answer: bytes = self._socket.recv()
        except zmq.Again as error:
            # A socket of this kind must be answered before it sends again.
            self.close()
            raise ServerError(
                f"{self._server} has not answered within {wait_s:g} s, or with more than "
                f"{LARGEST_MESSAGE // 2**20} MiB, which are not read"
            ) from error
        return message, answer

    def _fields(self, answer: bytes) -> Any:
        fields = unpack(answer)
        if isinstance(fields, dict) and "error" in fields:
            raise ServerError(f"{self._server} refuses: {printable(str(fields['error']), 2000)}")
        return fields


def _npy(values: NDArray[Any]) -> dict[str, Any]:
    """Return an array as their messages hold it: the bytes of a file of NumPy's."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return {_ARRAY: True, _BYTES: file.getvalue()}


def _array_of(found: object) -> NDArray[Any] | None:
    """Return the array that a map holds; None if it is not such a map.

    Raises:
        ServerError: it holds something else than numbers.
    """
    if not isinstance(found, dict) or not isinstance(found.get(_BYTES), bytes):
        return None
    with parsing("the server's array", ServerError, "cannot be read", "see what it sends"):
        return read_npy(found[_BYTES])
