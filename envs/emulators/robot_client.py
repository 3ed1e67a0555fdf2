"""One client of the emulated robot server: its connection, the states it is sent, its motion."""

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dzrobot.envs.driver_process import Latest
from dzrobot.envs.emulators import fci_protocol as wire
from dzrobot.envs.emulators.arm import EmulatedArm, Target
from dzrobot.envs.emulators.fci_protocol import (
    ERRORS,
    ROBOT_STATE,
    Command,
    Generator,
    MoveStatus,
    RequestBuffer,
)
from dzrobot.envs.emulators.kinematics import ArmDescription, Array
from dzrobot.envs.mujoco.lift_scene import LINK_INERTIA_M2


@dataclass(frozen=True)
class Order:
    """One command datagram."""

    answers_ms: int
    numbers: tuple[float, ...]
    finished: bool

    @classmethod
    def read(cls, message: bytes) -> Self:
        """Return the order in a datagram."""
        fields = wire.COMMAND.unpack(message)
        return cls(fields[0], fields, bool(fields[40] or fields[48]))

    def target(self, generator: Generator) -> Target:
        """Return what it asks of ``generator``."""
        values = np.array(self.numbers)
        return Target(
            generator,
            values[1:8],
            values[8:15],
            values[15:31].reshape(4, 4, order="F"),
            values[31:37],
            values[41:48],
        )


class EmulatorClient:
    """Requests, answers, states and commands of one client; nothing here blocks for long."""

    def __init__(self, connection: socket.socket, address: str, udp: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tcp = connection
        self._udp = udp
        # What the client before this one sent last is not this one's.
        with contextlib.suppress(OSError):
            while True:
                self._udp.recv(4096)
        self._address = address
        self._requests = RequestBuffer(wire.ROBOT_HEADER)
        self._order: Order | None = None
        self._poll = select.poll()
        self._poll.register(self._tcp, select.POLLIN)
        self._poll.register(self._udp, select.POLLIN)
        self._udp_number = self._udp.fileno()
        self.udp_port: int | None = None
        self.move_id: int | None = None
        self.commanding = False
        self.finishing = False
        self.missed = 0
        self._began_s = 0.0
        self.silent = False
        """It has not answered in time; until it does, nothing waits for it."""

    @property
    def receiver(self) -> tuple[str, int]:
        """Where states are sent."""
        return self._address, self.udp_port or 0

    def wake_on(self, descriptor: int) -> None:
        """Let :meth:`await_order` end when something can be read from ``descriptor``."""
        self._poll.register(descriptor, select.POLLIN)

    def has_left(self) -> bool:
        """Return whether the client closed its connection and everything it sent was read."""
        try:
            return not self._tcp.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def requests(self) -> list[tuple[int, int, bytes]]:
        """Return complete requests.

        Raises:
            ConnectionError: the client left.
            MalformedError: it speaks another protocol.
        """
        try:
            chunk = self._tcp.recv(65536)
        except BlockingIOError:
            return []
        if not chunk:
            raise ConnectionResetError
        return list(self._requests.add(chunk))

    def reply(self, command: int, identity: int, body: bytes) -> None:
        """Answer a request; raise ConnectionError when the client left or reads no answers."""
        size = wire.ROBOT_HEADER.size + len(body)
        try:
            self._tcp.sendall(wire.ROBOT_HEADER.pack(command, identity, size) + body)
        except BlockingIOError as error:
            raise ConnectionResetError from error

    def begin_move(self, identity: int) -> None:
        """Remember the motion whose end must be answered."""
        self.move_id = identity
        self.commanding = False
        self.finishing = False
        self.missed = 0
        self._order = None
        self._began_s = time.monotonic()

    def is_beginning(self, patience_s: float) -> bool:
        """Return whether the first command of a motion may still be pending."""
        return not self.commanding and time.monotonic() - self._began_s < patience_s

    def end_move(self, status: MoveStatus) -> None:
        """Answer the running motion a second time."""
        assert self.move_id is not None
        self.reply(Command.MOVE, self.move_id, bytes([status]))
        self.move_id = None
        self.commanding = False
        self.finishing = False

    def send_state(self, message: bytes) -> None:
        """Send one state datagram; one that cannot be sent is lost, as on a network."""
        with contextlib.suppress(OSError):
            self._udp.sendto(message, self.receiver)

    def await_order(self, sequence: int, wait_s: float) -> bool:
        """Keep the newest order; wait for the one that answers state ``sequence``.

        Returns:
            Whether it came; False also when a request or a call came first.
        """
        deadline = time.monotonic() + wait_s
        while True:
            remaining_ms = max(0.0, 1000.0 * (deadline - time.monotonic()))
            ready = self._poll.poll(remaining_ms)
            for descriptor, _ in ready:
                if descriptor != self._udp_number:
                    continue
                self._receive()
                if self._order is not None and self._order.answers_ms >= sequence:
                    return True
            if any(descriptor != self._udp_number for descriptor, _ in ready):
                return False
            if not ready:
                return False

    def take_order(self) -> Order | None:
        """Return the order received since the last call."""
        order, self._order = self._order, None
        return order

    def close(self) -> None:
        """Close the connection."""
        self._tcp.close()

    def _receive(self) -> None:
        try:
            message = self._udp.recv(4096)
        except (BlockingIOError, ConnectionRefusedError):
            return
        if len(message) == wire.COMMAND.size:
            self.silent = False
            self._order = Order.read(message)


HAND_KG = 0.73


class StateMessage:
    """Writes state after state into one buffer; what seldom changes is written when it does."""

    def __init__(self) -> None:
        self._state = np.zeros((), ROBOT_STATE)
        self._fields: dict[str, Any] = {name: self._state[name] for name in ROBOT_STATE.names or ()}
        self._kept: tuple[object, ...] = ()
        self._fields["O_ddP_O"][:] = (0.0, 0.0, -9.81)

    def of(self, arm: EmulatedArm) -> bytes:
        """Return the datagram that shows ``arm`` now."""
        fields, clock = self._fields, arm.clock_ms
        self._write_settings(arm)
        fields["message_id"][...] = clock
        fields["O_T_EE"][:] = arm.pose.ravel(order="F")
        desired = arm.reference.pose.ravel(order="F")
        for name in ("O_T_EE_d", "O_T_EE_c"):
            fields[name][:] = desired
        share = arm.faults.noise
        fields["q"][:] = arm.q + share * arm.noise.at("q", clock)
        fields["theta"][:] = arm.q
        fields["q_d"][:] = arm.reference_q
        moving = arm.dq.any()
        fields["dq"][:] = arm.dq + share * arm.noise.at("dq", clock) if moving else 0.0
        fields["dtheta"][:] = arm.dq
        fields["dq_d"][:] = arm.reference_dq
        fields["ddq_d"][:] = arm.ddq
        fields["tau_J"][:] = fields["tau_J_d"][:] = arm.torque
        twist = arm.reference.jacobian @ arm.reference_dq
        fields["O_dP_EE_d"][:] = fields["O_dP_EE_c"][:] = twist
        torque, wrench = arm.measured_torque, arm.measured_wrench
        fields["tau_ext"][:] = torque
        fields["K_F_ext"][:] = wrench
        rotation = (arm.pose @ arm.settings.ee_to_stiffness)[:3, :3]
        fields["O_F_ext"][:] = (wrench.reshape(2, 3) @ rotation.T).ravel()
        settings = arm.settings
        fields["joint_contact"][:] = np.abs(torque) > settings.contact_torque
        fields["cartesian_contact"][:] = np.abs(wrench) > settings.contact_force
        elbow = (arm.q[2], -1.0 if arm.q[3] < 0 else 1.0)
        fields["elbow"][:] = fields["elbow_d"][:] = fields["elbow_c"][:] = elbow
        fields["generator_mode"][...] = 0 if arm.generator is None else int(arm.generator) + 1
        fields["controller_mode"][...] = arm.controller
        fields["robot_mode"][...] = int(arm.mode)
        fields["success_rate"][...] = arm.success_rate
        return self._state.tobytes()

    def _write_settings(self, arm: EmulatedArm) -> None:
        errors, reasons = frozenset(arm.errors), frozenset(arm.reflex_reason)
        settings = arm.settings
        now = (
            errors, reasons, settings.load_kg, id(settings.load_center),
            id(settings.hand_to_ee), id(settings.ee_to_stiffness),
        )  # fmt: skip
        if now == self._kept:
            return
        self._kept = now
        fields = self._fields
        fields["errors"][:] = [name in errors for name in ERRORS]
        fields["reflex_reason"][:] = [name in reasons for name in ERRORS]
        collided = bool(errors & {"joint_reflex", "cartesian_reflex"})
        fields["joint_collision"][:] = fields["cartesian_collision"][0] = collided
        fields["F_T_EE"][:] = _flat(settings.flange_to_ee)
        fields["F_T_NE"][:] = _flat(settings.flange_to_hand)
        fields["NE_T_EE"][:] = _flat(settings.hand_to_ee)
        fields["EE_T_K"][:] = _flat(settings.ee_to_stiffness)
        fields["m_ee"][:] = HAND_KG
        fields["m_load"][:] = settings.load_kg
        fields["F_x_Cload"][:] = settings.load_center
        fields["I_load"][:] = settings.load_inertia


def _flat(pose: Array) -> Array:
    flat: Array = pose.flatten(order="F")
    return flat


def arm_urdf(arm: ArmDescription) -> str:
    """Return the URDF of the seven joints with limits, masses and the ``link8`` flange."""
    parts = ['<?xml version="1.0"?>', f'<robot name="{arm.name}">', '<link name="link0"/>']
    for index in range(7):
        parts += [_joint(arm, index), _link(arm, index)]
    parts += [
        '<joint name="joint8" type="fixed">'
        f'<origin xyz="0 0 {arm.file.flange_z}" rpy="0 0 0"/>'
        '<parent link="link7"/><child link="link8"/></joint>',
        '<link name="link8"/>',
        "</robot>",
    ]
    return "\n".join(parts)


def _joint(arm: ArmDescription, index: int) -> str:
    (x, y, z), roll = arm.file.origins[index], arm.file.quarter_turns[index] * np.pi / 2
    low, high = arm.file.joint_low[index], arm.file.joint_high[index]
    return (
        f'<joint name="joint{index + 1}" type="revolute">'
        f'<origin xyz="{x} {y} {z}" rpy="{roll} 0 0"/>'
        f'<parent link="link{index}"/><child link="link{index + 1}"/><axis xyz="0 0 1"/>'
        f'<limit lower="{low}" upper="{high}" velocity="{arm.file.joint_velocity[index]}" '
        f'effort="{arm.file.joint_torque[index]}"/>'
        f'<position_based_velocity_limits velocity_offset="{arm.file.velocity_offset[index]}" '
        f'deceleration_limit="{arm.file.deceleration[index]}"/></joint>'
    )


def _link(arm: ArmDescription, index: int) -> str:
    mass = arm.file.link_mass[index]
    inertia = float(np.round(LINK_INERTIA_M2 * mass, 6))
    return (
        f'<link name="link{index + 1}"><inertial><origin xyz="0 0 0" rpy="0 0 0"/>'
        f'<mass value="{mass}"/><inertia ixx="{inertia}" ixy="0" ixz="0" iyy="{inertia}" '
        f'iyz="0" izz="{inertia}"/></inertial></link>'
    )


_LARGEST_STATE = 2048
_PERIOD_S = 0.2
_RECEIVER = struct.Struct("!4sH")


class RepeatedStates:
    """The newest state of one server, and who receives it.

    Args:
        sender: The socket that it is sent from; clients answer there.
    """

    def __init__(self, sender: socket.socket) -> None:
        self.sender = sender
        self.latest = Latest.create(_LARGEST_STATE)

    def keep(self, message: bytes, receiver: tuple[str, int]) -> None:
        """Send ``message`` again when nothing newer follows."""
        host, port = receiver
        self.latest.put(_RECEIVER.pack(socket.inet_aton(host), port), message)

    def forget(self) -> None:
        """Send nothing again: the silence is meant, or the other side is gone."""
        if self.latest.get():
            self.latest.put(b"")

    def send(self) -> None:
        """Send the newest state again, if there is one."""
        value = self.latest.get()
        if value:
            host, port = _RECEIVER.unpack_from(value)
            with contextlib.suppress(OSError):
                self.sender.sendto(value[_RECEIVER.size :], (socket.inet_ntoa(host), port))


def start_repeating(servers: Sequence[RepeatedStates]) -> None:
    """Start the process that repeats; it ends with this one. To be called before any thread is."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        _repeat(servers, parent)
    finally:
        os._exit(0)


def _repeat(servers: Sequence[RepeatedStates], parent: int) -> None:
    # The scheduler shares the machine out by session.
    os.setsid()
    kept = {number for one in servers for number in (one.sender.fileno(), one.latest.descriptor)}
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
    seen = [0] * len(servers)
    while os.getppid() == parent:
        time.sleep(_PERIOD_S)
        for index, server in enumerate(servers):
            before, seen[index] = seen[index], server.latest.count()
            if before == seen[index]:
                server.send()
