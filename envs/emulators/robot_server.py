"""A robot server that the real client libraries connect to: TCP requests, 1 kHz UDP states.

The clock is in lockstep: once a motion has started, the next state waits for the command that
answers the last one (at most 250 ms), so a busy machine slows the robot's time down instead of
dropping commands.
"""

import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np

from dzrobot.envs.emulators import kinematics, wire
from dzrobot.envs.emulators.arm import EmulatedArm, Target
from dzrobot.envs.emulators.client import Client
from dzrobot.envs.emulators.faults import Faults
from dzrobot.envs.emulators.urdf import arm_urdf
from dzrobot.envs.emulators.wire import Command, Generator, MoveStatus, RecoverStatus, RobotMode

PERIOD_S = 1e-3
ECHO_TIMEOUT_S = 0.25


class RobotServer:
    """One emulated arm behind the robot control interface on ``host``.

    Args:
        host: Loopback address to listen on, port 1337.
        faults: Switches shared with whoever injects faults.
        rate: Robot seconds per wall second; 1 is real time.
    """

    def __init__(self, host: str, faults: Faults, rate: float = 1.0) -> None:
        self.arm = EmulatedArm()
        self.faults = faults
        self._period_s = PERIOD_S / rate
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = threading.Event()
        self._listener = socket.create_server((host, wire.ROBOT_PORT), reuse_port=False)
        self._listener.setblocking(False)
        self._host = host
        self._client: Client | None = None
        self._thread = threading.Thread(target=self._run, name="emulated-robot", daemon=True)

    def start(self) -> None:
        """Serve until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close every socket."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._listener.close()

    def call(self, action: Callable[[], None]) -> None:
        """Run ``action`` between two states, on the server's thread."""
        self._calls.put(action)

    def trip(self, *errors: str) -> None:
        """Stop the arm with a reflex that shows these error names."""
        self.call(lambda: self._trip(errors))

    def press_user_stop(self) -> None:
        """Press the user stop: any motion ends and recovery is refused until released."""
        self.faults.user_stop = True
        self.call(self._enter_user_stop)

    def release_user_stop(self) -> None:
        """Release the user stop."""
        self.faults.user_stop = False
        self.call(lambda: self.arm.halt(RobotMode.IDLE))

    def drop_client(self) -> None:
        """Close the client's TCP connection."""
        self.call(self._drop)

    def _run(self) -> None:
        deadline = time.monotonic()
        while not self._stopping.is_set():
            self._run_calls()
            self._accept()
            client = self._client
            if client is None:
                self.arm.step(None)
            else:
                self._tick(client)
            deadline = max(deadline + self._period_s, time.monotonic() - 0.02)
            time.sleep(max(0.0, deadline - time.monotonic()))
        self._drop()

    def _run_calls(self) -> None:
        while True:
            try:
                self._calls.get_nowait()()
            except Empty:
                return

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        if self._client is not None and self._client.has_left():
            # Someone who left and came back at once is no second client.
            self._drop()
        if self._client is not None:
            # One client at a time: a second one is refused at once instead of left waiting.
            connection.close()
            return
        self._client = Client(connection, address[0], self._host)

    def _tick(self, client: Client) -> None:
        try:
            for command, identity, body in client.requests():
                self._answer(client, command, identity, body)
        except ConnectionError:
            self._drop()
            return
        if client.udp_port is None:
            return
        in_motion = self.arm.generator is not None
        self.arm.step(self._target(client) if in_motion else None)
        self._end_motion_if_due(client)
        if time.monotonic() >= self.faults.frozen_until_s:
            client.send_state(self.arm.message())
            self._await_echo(client)

    def _await_echo(self, client: Client) -> None:
        in_motion = self.arm.generator is not None
        wait = (
            ECHO_TIMEOUT_S if in_motion and client.commanding and not self.faults.packet_loss else 0
        )
        client.receive_command(self.arm.clock_ms, wait)

    def _target(self, client: Client) -> Target | None:
        command = client.take_command()
        if command is not None and self.faults.lost(self.arm.clock_ms):
            command = None
        self.arm.success_rate += 0.01 * (float(command is not None) - self.arm.success_rate)
        if command is None:
            client.missed += 1
            limit = self.faults.comm_violation_after
            if limit is not None and client.commanding and client.missed > limit:
                self.arm.trip("communication_constraints_violation")
            return None if client.commanding else self._hold()
        client.missed = 0
        client.commanding = True
        if command["motion_finished"] or command["torque_finished"]:
            client.finishing = True
            return self._hold()
        target = _target_from(command, self.arm.generator)
        if self.faults.strict_velocity and target.generator is Generator.JOINT_POSITION:
            speed = np.abs(target.joints - self.arm.q) / PERIOD_S
            if np.any(speed > kinematics.JOINT_VELOCITY):
                self.arm.trip("joint_velocity_violation")
        return target

    def _hold(self) -> Target:
        generator = self.arm.generator
        kind = Generator.NONE if generator is Generator.NONE else Generator.JOINT_POSITION
        zeros = np.zeros(7)
        return Target(kind, self.arm.q.copy(), zeros, self.arm.pose, np.zeros(6), zeros)

    def _end_motion_if_due(self, client: Client) -> None:
        if client.move_id is None:
            return
        if client.finishing:
            self.arm.halt(RobotMode.IDLE)
            client.end_move(MoveStatus.SUCCESS)
        elif self.arm.mode is RobotMode.REFLEX:
            client.end_move(MoveStatus.REFLEX_ABORTED)
        elif self.arm.mode is RobotMode.USER_STOPPED:
            client.end_move(MoveStatus.EMERGENCY_ABORTED)

    def _trip(self, errors: tuple[str, ...]) -> None:
        self.arm.trip(*errors)

    def _enter_user_stop(self) -> None:
        self.arm.halt(RobotMode.USER_STOPPED)

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.arm.generator is not None:
            self.arm.halt(RobotMode.IDLE)

    def _answer(self, client: Client, command: int, identity: int, body: bytes) -> None:
        match command:
            case Command.CONNECT:
                self._connect(client, identity, body)
            case Command.GET_ROBOT_MODEL:
                client.reply(command, identity, b"\0" + arm_urdf().encode())
            case Command.MOVE:
                self._move(client, identity, body)
            case Command.STOP_MOVE:
                client.reply(command, identity, b"\0")
                if client.move_id is not None:
                    self.arm.halt(RobotMode.IDLE)
                    client.end_move(MoveStatus.PREEMPTED)
            case Command.RECOVER:
                client.reply(command, identity, bytes([self._recover()]))
            case Command.SET_NE_TO_EE:
                hand = kinematics.flange_to_hand()
                self.arm.flange_to_ee = hand @ np.frombuffer(body, "<f8").reshape(4, 4, order="F")
                client.reply(command, identity, b"\0")
            case _:
                client.reply(command, identity, b"\0")

    def _connect(self, client: Client, identity: int, body: bytes) -> None:
        version, port = wire.CONNECT_REQUEST.unpack(body)
        ours = self.faults.version or wire.ROBOT_VERSION
        fits = version == ours
        client.reply(Command.CONNECT, identity, bytes([not fits]) + ours.to_bytes(2, "little"))
        if fits:
            client.udp_port = port

    def _move(self, client: Client, identity: int, body: bytes) -> None:
        controller, generator = wire.MOVE_REQUEST.unpack(body)[:2]
        ready = self.arm.mode is RobotMode.IDLE or client.move_id is not None
        if self.faults.reject_moves or not ready:
            self.faults.reject_moves = max(0, self.faults.reject_moves - 1)
            client.reply(Command.MOVE, identity, bytes([MoveStatus.REJECTED]))
            return
        if client.move_id is not None:
            client.end_move(MoveStatus.PREEMPTED)
        client.begin_move(identity)
        self.arm.mode = RobotMode.MOVE
        self.arm.generator = Generator(generator)
        self.arm.controller = controller
        self.arm.reflex_reason = set()
        self.arm.success_rate = 1.0
        client.reply(Command.MOVE, identity, bytes([MoveStatus.STARTED]))

    def _recover(self) -> RecoverStatus:
        if self.faults.user_stop:
            return RecoverStatus.EMERGENCY
        if self.faults.manual_recovery:
            return RecoverStatus.MANUAL_RECOVERY_REQUIRED
        self.arm.errors.clear()
        self.arm.halt(RobotMode.IDLE)
        return RecoverStatus.SUCCESS


def _target_from(command: np.void, generator: Generator | None) -> Target:
    assert generator is not None
    pose = np.array(command["O_T_EE_c"], np.float64).reshape(4, 4, order="F")
    return Target(
        generator,
        np.array(command["q_c"], np.float64),
        np.array(command["dq_c"], np.float64),
        pose,
        np.array(command["O_dP_EE_c"], np.float64),
        np.array(command["tau_J_d"], np.float64),
    )
