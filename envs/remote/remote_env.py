"""An environment of an environment server, as if it were here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.utils import EzPickle
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from dzrobot import errors
from dzrobot.documents import shorten
from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.remote.exchange import (
    SUBPROTOCOL,
    Asked,
    Failure,
    Made,
    Make,
    Perturb,
    Render,
    Reset,
    Step,
    Turn,
    read,
    read_hand,
    read_space,
    read_value,
    write,
    write_value,
)
from dzrobot.messages import pack, unpack
from dzrobot.websocket import open_socket, read_key, reason

_RAISED_HERE = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError, errors.InvalidActionError, errors.ModalityError,
        errors.ProtocolError, errors.SimulatorError, errors.UnknownNameError,
    )
}  # fmt: skip
"""Errors of the environment that are raised as what they are; others are a `SimulatorError`."""


class RemoteEnv(gym.Env[Any, Any], EzPickle):
    """An environment that ``dzrobot serve-env`` serves; ``dzrobot/remote-v0`` makes it.

    Spaces, observations, rewards, ``info`` and what the environment says of itself are those of the
    served one, bit for bit. What of ``info`` is no number, text, array of numbers, or map or list
    of them stays behind, and tuples arrive as lists.

    Every environment here is one of its own there, in a process of its own.

    Args:
        server: ``ws://HOST:PORT``, or ``wss://`` for TLS.
        api_key_file: File whose first line is the server's key. None: ``DZROBOT_API_KEY``.
        connect_s: Seconds to connect, while the server starts or is full.
        reset_s: Seconds that making the environment or a reset may take.
        step_s: Seconds that a step may take.
        render_mode: ``"rgb_array"`` or None.
        arguments: Of the served environment.

    Raises:
        ServerError: the server cannot be reached, refuses, or does not answer in time.
        ConfigError: the environment cannot be made.
        UnknownNameError: it takes no such argument.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (Gymnasium's own)

    def __init__(  # noqa: PLR0913 (Gymnasium passes plain keyword arguments)
        self,
        *,
        server: str | None = None,
        api_key_file: str | None = None,
        connect_s: float = 60.0,
        reset_s: float = 300.0,
        step_s: float = 60.0,
        render_mode: str | None = None,
        **arguments: Any,
    ) -> None:
        if server is None:
            raise errors.ConfigError(
                "dzrobot/remote-v0 needs the address that `dzrobot serve-env` prints: "
                "server='ws://HOST:PORT' (--env-arg server=ws://HOST:PORT)"
            )
        given = {"render_mode": render_mode, "api_key_file": api_key_file, **arguments}
        # A copy is an environment of its own there.
        EzPickle.__init__(
            self, server=server, connect_s=connect_s, reset_s=reset_s, step_s=step_s, **given
        )
        self._server, self._connect_s = server, connect_s
        self._reset_s, self._step_s = reset_s, step_s
        self._key = read_key(None if api_key_file is None else Path(api_key_file))
        self._make = Make(
            arguments=write_value(arguments, "arguments"), draws=render_mode is not None
        )
        self._socket: ClientConnection | None = None
        self._omitting = False
        made = self._open()
        facts = made.facts
        self._about = made.about
        self.observation_space = read_space(made.observation_space)
        self.action_space = read_space(made.action_space)
        self.render_mode = made.render_mode
        self.metadata = {
            # Not asked, it may draw: the answer comes with the next one.
            "render_modes": [] if render_mode and made.render_mode is None else ["rgb_array"],
            "render_fps": made.render_fps,
        }
        self.embodiment: Embodiment | None = facts.embodiment
        """Robot whose keys it has, if it says so; the following are as a local environment's."""

        self.control_hz = facts.control_hz
        self.init_states = facts.init_states
        self.task = facts.task
        self.hand: HandMotion | None = read_hand(facts.hand)
        self.prompt, self.opengl = facts.prompt, facts.opengl
        self.perturbations = facts.perturbations

    @property
    def remote(self) -> Mapping[str, Any]:
        """Return what a result depends on: the served environment, its arguments and versions."""
        return self._about

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode as the environment does; connect again where the connection broke.

        Raises:
            ServerError: the server cannot be reached, or now serves something else.
        """
        if self._socket is None and self._open().about != self._about:
            raise errors.ServerError(
                f"{self._server} now serves another environment than when this one was made: make "
                "it again"
            )
        super().reset(seed=seed)
        self._omitting = False
        asked = Reset(seed=seed, options=write_value(options, "options"))
        turn = self._turn(asked, self._reset_s)
        return turn.observation, turn.info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do what the environment does with ``action``.

        Raises:
            ServerError: the connection broke, or no answer came in time; a reset begins anew.
        """
        asked = Step(action=write_value(action, "the action"), omit_frames=self._omitting)
        self._omitting = False
        turn = self._turn(asked, self._step_s)
        return turn.observation, turn.reward, turn.terminated, turn.truncated, turn.info

    def omit_frames(self) -> None:
        """Leave all ``video.*`` out of the observation of the next step, and of no other."""
        self._omitting = True

    def perturb(self, axis: str | None, level: int, seed: int) -> None:
        """Make the scene of the next resets harder, along one of ``perturbations``."""
        self._ask(Perturb(axis=axis, level=level, seed=seed), self._step_s)

    def render(self) -> Any:
        """Draw as the environment does."""
        return read_value(self._ask(Render(), self._step_s))

    def close(self) -> None:
        """End the environment; :meth:`reset` begins another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _open(self) -> Made:
        self._socket = open_socket(
            self._server, self._greet,
            subprotocol=SUBPROTOCOL, key=self._key, within_s=self._connect_s,
        )  # fmt: skip
        made: Made = read(self._ask(self._make, self._reset_s), Made, self._server)
        return made

    def _greet(self, socket: ClientConnection, _within_s: float) -> None:
        if socket.subprotocol != SUBPROTOCOL:
            raise errors.ServerError(
                f"{self._server} serves no environment, as `dzrobot serve-env` does; a policy's "
                "server is for `dzrobot eval --server`"
            )

    def _turn(self, asked: Reset | Step, within_s: float) -> Turn:
        turn: Turn = read(self._ask(asked, within_s), Turn, self._server)
        observation = read_value(turn.observation, self.observation_space)
        return turn.model_copy(update={"observation": observation, "info": read_value(turn.info)})

    def _ask(self, asked: Asked, within_s: float) -> Any:
        """Return the answer to ``asked``; whatever leaves one open closes the connection."""
        if self._socket is None:
            raise errors.ServerError(f"there is no connection to {self._server}: reset")
        try:
            self._socket.send(pack(write(asked)))
            content = self._socket.recv(timeout=within_s)
        except TimeoutError as error:
            self.close()
            raise errors.ServerError(
                f"{self._server} has not answered {asked.do!r} within {within_s:g} s; allow more "
                "with reset_s= or step_s="
            ) from error
        except ConnectionClosed as error:
            self.close()
            raise errors.ServerError(
                f"the connection to {self._server} broke ({reason(error)}), and its environment is "
                "gone"
            ) from error
        except BaseException:
            # Of Ctrl-C: the answer would be taken for that of the next request.
            self.close()
            raise
        if isinstance(content, str):
            # The server's last words.
            self.close()
            raise errors.ServerError(f"{self._server} says: {shorten(content, 300)}")
        return self._checked(unpack(content))

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, dict) and answer.keys() == Failure.model_fields.keys():
            failure: Failure = read(answer, Failure, self._server)
            kind = _RAISED_HERE.get(failure.error, errors.SimulatorError)
            raise kind(f"{self._server}: {failure.message}")
        return answer
