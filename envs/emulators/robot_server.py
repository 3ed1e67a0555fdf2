"""A robot server for the real client libraries: TCP requests, 1 kHz UDP states.

The clock is in lockstep. Once a motion has started, the next state waits for the command that
answers the last one, so a busy machine slows the robot's time down instead of dropping commands. An
environment that shares a time page is a second client: while it thinks, a moving arm's time is
paused, and only the last state is repeated so that the client library does not take the arm for
gone. A client that answers nothing for seconds is silent, and the arm continues without it.
"""

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from dzrobot.envs.emulators import fci_protocol as wire
from dzrobot.envs.emulators.arm import ONLY_AT_REST, SIZES, EmulatedArm, Target
from dzrobot.envs.emulators.dynamics import Dynamics, Faults
from dzrobot.envs.emulators.fci_protocol import (
    Command,
    Generator,
    MalformedError,
    MoveStatus,
    RecoverStatus,
    RobotMode,
    SetterStatus,
)
from dzrobot.envs.emulators.gripper_server import GripperServer
from dzrobot.envs.emulators.robot_client import (
    EmulatorClient,
    RepeatedStates,
    StateMessage,
    arm_urdf,
)
from dzrobot.envs.emulators.timebase import FREE, SCENE_PERIOD_MS, Timebase
from dzrobot.errors import RobotError

PERIOD_S = 1e-3
ANSWER_PATIENCE_S = 0.25
LOCKSTEP_PATIENCE_S = 10.0
"""How long an answer is waited for: alone, and where an environment shares the clock."""

TRICKLE_S = 0.02
"""A millisecond of an arm at rest lasts this long while the environment thinks."""

FIRST_PATIENCE_S = 0.005
_DOUBLINGS = 6

_SLICE_S = 0.05
_REPEAT_S = 0.1
_SERVE_EVERY_MS = 5
CATCH_UP_S = 0.02
_STANDING_S = 0.0003


class RobotServer:
    """One emulated arm and hand behind the robot control interface on ``host``.

    Args:
        host: Loopback address to listen on, ports 1337 and 1338.
        faults: Switches shared with whoever injects faults.
        page: The clock that cameras and an environment share. None: there is none.
        rate: Robot seconds per wall second, at most; infinity is as fast as the client answers.
        dynamics: What the arm's joints are moved by. None: no scene.
    """

    def __init__(
        self,
        host: str,
        faults: Faults,
        page: Timebase | None = None,
        rate: float = 1.0,
        dynamics: Dynamics | None = None,
    ) -> None:
        self.page = page or Timebase.create()
        self.faults = faults
        self.arm = EmulatedArm(faults, dynamics, self.page.clock_ms)
        self.gripper = GripperServer(host, faults, self.arm.dynamics.fingers)
        self._period_s = PERIOD_S / rate if math.isfinite(rate) else 0.0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._stopping = threading.Event()
        self._host = host
        self._listener: socket.socket | None = None
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((host, 0))
        self._udp.setblocking(False)
        self.states = RepeatedStates(self._udp)
        self._client: EmulatorClient | None = None
        self._message = StateMessage()
        self._last_state = b""
        self._repeated_s = 0.0
        self._silent_until_ms = 0
        self._shared = False
        self._listen()
        self._thread = threading.Thread(target=self._run, name="emulated-robot", daemon=True)

    def start(self) -> None:
        """Serve until :meth:`stop`."""
        self.page.arm_is_alive = True
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close every socket."""
        self._stopping.set()
        os.eventfd_write(self._bell, 1)
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self.gripper.stop()
        self._close_listener()
        self._udp.close()
        self.states.latest.close()

    def call(self, action: Callable[[], None]) -> None:
        """Run ``action`` between two states, on the server's thread."""
        self._calls.put(action)
        os.eventfd_write(self._bell, 1)

    def trip(self, *errors: str) -> None:
        """Stop the arm with a reflex that shows these error names."""
        self.call(lambda: self.arm.trip(*errors))

    def press_user_stop(self) -> None:
        """Press the user stop: any motion ends and recovery is refused until released."""
        self.faults.user_stop = True
        self.call(lambda: self.arm.halt(RobotMode.USER_STOPPED))

    def release_user_stop(self) -> None:
        """Release the user stop."""
        self.faults.user_stop = False
        self.call(lambda: self.arm.halt(RobotMode.IDLE))

    def show_mode(self, mode: RobotMode) -> None:
        """Put the arm into a mode: brakes locked (other), hand guiding, or idle again."""
        self.call(lambda: self.arm.halt(mode))

    def freeze(self, seconds: float) -> None:
        """Send no state for some of the arm's seconds."""
        self.call(lambda: self._fall_silent(seconds))

    def push(self, wrench: np.ndarray[tuple[int], np.dtype[np.float64]], seconds: float) -> None:
        """Push the hand with a wrench (6,) for some of the arm's seconds."""
        self.call(lambda: self.arm.push_until(wrench, seconds))

    def guide(self, joints: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Let somebody guide the arm to joint angles (7,) by hand."""
        self.call(lambda: self.arm.guide(joints))

    def prepare(self, start: int) -> None:
        """Put the scene's objects where an initial state has them; return when they are there."""
        done = threading.Event()

        def put() -> None:
            self.arm.dynamics.prepare(start)
            done.set()

        self.call(put)
        if not done.wait(LOCKSTEP_PATIENCE_S):
            raise RobotError("the emulated arm does not advance: its scene was not prepared")

    def drop_client(self) -> None:
        """Close the client's TCP connection."""
        self.call(self._drop)

    def _run(self) -> None:
        deadline = time.monotonic()
        while not self._stopping.is_set():
            self._run_calls()
            self._accept()
            if self._is_fixed():
                self._wait_standing()
                deadline = time.monotonic()
                continue
            try:
                self._tick()
            except (ConnectionError, MalformedError):
                self._drop()
            deadline = max(deadline + self._pace_s(), time.monotonic() - CATCH_UP_S)
            if (pause := deadline - time.monotonic()) > 0:
                time.sleep(pause)
        self._drop()

    def _is_fixed(self) -> bool:
        client = self._client
        moving = self.arm.generator is not None and client is not None and client.commanding
        return moving and not self._is_silent() and self._is_at_limit()

    def _is_at_limit(self) -> bool:
        return self.arm.clock_ms >= self.page.limit_ms

    def _wait_standing(self) -> None:
        """Wait for the environment; hear requests meanwhile, and keep the client's hope up."""
        client = self._client
        assert client is not None
        try:
            self._handle_requests(client)
            self._repeat(client)
        except (ConnectionError, MalformedError):
            self._drop()
        self.gripper.serve(self.arm.clock_ms)
        time.sleep(_STANDING_S)

    def _repeat(self, client: EmulatorClient) -> None:
        """Send the last state once more, now and then: the client takes a silent arm for gone."""
        if time.monotonic() - self._repeated_s > _REPEAT_S:
            self._repeated_s = time.monotonic()
            client.send_state(self._last_state)

    def _pace_s(self) -> float:
        """Return the shortest wall time of this millisecond."""
        if self._is_at_limit() and self.arm.generator is None:
            # The library waits for a new state whenever it is asked about an arm at rest.
            return TRICKLE_S
        allowed = self.page.limit_ms < FREE
        moving = self.arm.generator is not None and not self._is_silent()
        answered = moving and self._client is not None and not self._client.silent
        # Where no client is waited for, only the wall clock keeps the arm from rushing ahead.
        return self._period_s if allowed or answered else max(PERIOD_S, self._period_s)

    def _tick(self) -> None:
        client, arm = self._client, self.arm
        # An environment that counts alone may have gone ahead while no arm was there.
        arm.clock_ms = max(arm.clock_ms, self.page.clock_ms)
        in_motion = arm.generator is not None
        arm.step(self._target(client) if client is not None and in_motion else None)
        if arm.clock_ms % SCENE_PERIOD_MS == 0:
            self.page.keep_scene(arm.clock_ms, arm.dynamics.visible(arm.posture))
        self.page.goal_holds = arm.dynamics.goal_holds
        if client is not None and client.udp_port is not None:
            self._end_motion_if_due(client)
            self._exchange(client)
        self.page.clock_ms = arm.clock_ms
        if arm.clock_ms % _SERVE_EVERY_MS == 0:
            self.gripper.serve(arm.clock_ms)
            if client is not None and client is self._client:
                self._handle_requests(client)

    def _exchange(self, client: EmulatorClient) -> None:
        self._share()
        if self._is_silent():
            self.states.forget()
            return
        self._last_state = self._message.of(self.arm)
        self._repeated_s = time.monotonic()
        client.send_state(self._last_state)
        if self._shared:
            self.states.keep(self._last_state, client.receiver)
        self._await_answer(client)
        if not client.silent:
            self.page.sent_ms = self.arm.clock_ms

    def _share(self) -> None:
        """Note whether an environment keeps time with this arm: it does not end."""
        if not self._shared and (self.page.is_shared or self.page.limit_ms != FREE):
            self._shared = self.gripper.patient = True

    def _await_answer(self, client: EmulatorClient) -> None:
        """Wait for the command to the last state, where one is due."""
        patience = LOCKSTEP_PATIENCE_S if self._shared else ANSWER_PATIENCE_S
        if not client.commanding:
            # It leaves the first states of a motion unanswered; how many is not documented.
            patience = FIRST_PATIENCE_S * 2.0 ** min(client.missed, _DOUBLINGS)
        deadline = time.monotonic() + patience
        while not self._stopping.is_set():
            due = self.arm.generator is not None and not client.silent
            wait = max(0.0, deadline - time.monotonic()) if due else 0.0
            if client.await_order(self.arm.clock_ms, min(wait, _SLICE_S)) or not due:
                return
            if wait == 0.0:
                client.silent = client.commanding
                return
            # The hand's client waits for states of its own.
            self.gripper.serve(self.arm.clock_ms)
            # A request or a call came first: a stop must not wait for an answer that never comes.
            self._run_calls()
            self._handle_requests(client)
            if self._client is not client:
                return
            self._repeat(client)

    def _handle_requests(self, client: EmulatorClient) -> None:
        for command, identity, body in client.requests():
            self._answer(client, command, identity, body)

    def _run_calls(self) -> None:
        while not self._calls.empty():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._calls.get_nowait()()
        if not self.faults.fci and self._listener is not None:
            self._close_listener()
            self._drop()
        elif self.faults.fci and self._listener is None:
            self._listen()

    def _listen(self) -> None:
        self._listener = socket.create_server((self._host, wire.ROBOT_PORT), reuse_port=False)
        self._listener.setblocking(False)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def _accept(self) -> None:
        if self._listener is None or self.arm.clock_ms % _SERVE_EVERY_MS:
            return
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        if self._client is not None and self._client.has_left():
            # Someone who left and came back at once is not a second client.
            self._drop()
        if self._client is not None:
            # One client at a time: a second one is refused at once instead of left waiting.
            connection.close()
            return
        self._client = EmulatorClient(connection, address[0], self._udp)
        self._client.wake_on(self._bell)

    def _is_silent(self) -> bool:
        return self.arm.clock_ms < self._silent_until_ms

    def _fall_silent(self, seconds: float) -> None:
        self._silent_until_ms = self.arm.clock_ms + round(1000 * seconds)

    def _target(self, client: EmulatorClient) -> Target | None:
        order = client.take_order()
        begins = order is None and client.is_beginning(LOCKSTEP_PATIENCE_S)
        if order is not None and self.faults.lost(self.arm.clock_ms):
            order = None
        self.arm.success_rate += 0.01 * (float(order is not None) - self.arm.success_rate)
        if order is None:
            client.missed += 1
            limit = self.faults.comm_violation_after
            if limit is not None and client.missed > limit and not begins:
                self.arm.trip("communication_constraints_violation")
            return None
        client.missed = 0
        client.commanding = True
        if order.finished:
            client.finishing = True
            # The last torque is one like the others; after it the arm's own controller holds.
            if self.arm.generator is not Generator.NONE:
                return self._hold()
        assert self.arm.generator is not None
        return order.target(self.arm.generator)

    def _hold(self) -> Target:
        zeros = np.zeros(7)
        at = self.arm.reference_q.copy()
        pose = self.arm.reference.pose
        return Target(Generator.JOINT_POSITION, at, zeros, pose, np.zeros(6), zeros)

    def _end_motion_if_due(self, client: EmulatorClient) -> None:
        if client.move_id is None:
            return
        if client.finishing:
            self.arm.halt(RobotMode.IDLE)
            client.end_move(MoveStatus.SUCCESS)
        elif self.arm.mode is RobotMode.REFLEX:
            client.end_move(MoveStatus.REFLEX_ABORTED)
        elif self.arm.mode is RobotMode.USER_STOPPED:
            client.end_move(MoveStatus.EMERGENCY_ABORTED)
        elif self.arm.generator is None:
            client.end_move(MoveStatus.ABORTED)

    def _drop(self) -> None:
        self.states.forget()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.arm.generator is not None:
            # The arm does not know why its client went away; it brakes and says so.
            self.arm.trip("communication_constraints_violation")

    def _answer(self, client: EmulatorClient, command: int, identity: int, body: bytes) -> None:
        match command:
            case Command.CONNECT:
                self._connect(client, identity, body)
            case Command.GET_ROBOT_MODEL:
                client.reply(command, identity, b"\0" + arm_urdf(self.arm.description).encode())
            case Command.MOVE:
                self._move(client, identity, body)
            case Command.STOP_MOVE:
                client.reply(command, identity, b"\0")
                if client.move_id is not None:
                    self.arm.halt(RobotMode.IDLE)
                    client.end_move(MoveStatus.PREEMPTED)
            case Command.RECOVER:
                client.reply(command, identity, bytes([self._recover()]))
            case _ if command in SIZES:
                client.reply(command, identity, bytes([self._set(Command(command), body)]))
            case Command.SET_GUIDING_MODE:
                client.reply(command, identity, bytes([SetterStatus.SUCCESS]))
            case _:
                raise MalformedError(f"command {command}")

    def _connect(self, client: EmulatorClient, identity: int, body: bytes) -> None:
        version, port = wire.unpack(wire.CONNECT_REQUEST, body)
        ours = self.faults.version or wire.ROBOT_VERSION
        fits = version == ours
        client.reply(Command.CONNECT, identity, bytes([not fits]) + ours.to_bytes(2, "little"))
        if fits:
            client.udp_port = port

    def _set(self, command: Command, body: bytes) -> SetterStatus:
        if self.faults.refuse_settings:
            return SetterStatus.SAFETY_FUNCTION
        if command in ONLY_AT_REST and self.arm.generator is not None:
            return SetterStatus.NOT_POSSIBLE
        if len(body) % 8 or not self.arm.settings.take(command, np.frombuffer(body, "<f8").copy()):
            return SetterStatus.INVALID
        return SetterStatus.SUCCESS

    def _move(self, client: EmulatorClient, identity: int, body: bytes) -> None:
        controller, generator = wire.unpack(wire.MOVE_REQUEST, body)[:2]
        ready = self.arm.mode is RobotMode.IDLE or client.move_id is not None
        if self.faults.reject_moves or not ready:
            self.faults.reject_moves = max(0, self.faults.reject_moves - 1)
            client.reply(Command.MOVE, identity, bytes([MoveStatus.REJECTED]))
            return
        if controller > 2 or generator > max(Generator):
            client.reply(Command.MOVE, identity, bytes([MoveStatus.INVALID]))
            return
        if client.move_id is not None:
            client.end_move(MoveStatus.PREEMPTED)
        client.begin_move(identity)
        self.arm.begin(Generator(generator), controller)
        client.reply(Command.MOVE, identity, bytes([MoveStatus.STARTED]))

    def _recover(self) -> RecoverStatus:
        if self.faults.user_stop:
            return RecoverStatus.EMERGENCY
        if self.faults.manual_recovery:
            return RecoverStatus.MANUAL_RECOVERY_REQUIRED
        if self.arm.mode is RobotMode.OTHER:
            return RecoverStatus.NOT_POSSIBLE
        self.arm.errors.clear()
        self.arm.halt(RobotMode.IDLE)
        return RecoverStatus.SUCCESS
