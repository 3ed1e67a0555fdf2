"""Faults and surroundings that the emulated robot shows on demand."""

from dataclasses import dataclass

import numpy as np

GRIPPER_WIDTH_M = 0.08
"""Widest opening of the emulated hand."""


@dataclass
class Faults:
    """Switches that tests and ``dzrobot emulate`` may turn while the server runs."""

    user_stop: bool = False
    """The user stop is pressed: motions are refused and recovery fails."""

    manual_recovery: bool = False
    """Error recovery answers that a person must recover by hand."""

    packet_loss: float = 0.0
    """Share of commands that are lost, in [0, 1]."""

    loss_seed: int = 0
    """Seed of the loss sequence."""

    reject_moves: int = 0
    """How many of the next Move requests are refused."""

    version: int | None = None
    """Robot server version to claim instead of the real one."""

    comm_violation_after: int | None = 20
    """Missed commands in a row that trip a communication error, as on the arm; None never does."""

    limits: bool = True
    """Trip the reflexes of velocity, acceleration, torque and Cartesian limits."""

    walls_m: tuple[float, ...] | None = None
    """Box of virtual walls set up in Desk: lowest x, y, z, then highest (m)."""

    refuse_settings: bool = False
    """A safety function is active: every setter is refused."""

    fci: bool = True
    """The control interface is enabled in Desk; without it connections are refused."""

    payload_kg: float = 0.0
    """Mass at the hand that Desk does not know."""

    table_m: float | None = None
    """Height of a table under the hand; None: there is none."""

    friction: float = 1.0
    """Dry friction, as a share of the usual."""

    noise: float = 1.0
    """Sensor noise, as a share of the usual."""

    wrench_bias: tuple[float, ...] = (0.4, -0.3, 0.6, 0.02, -0.03, 0.01)
    """What the estimated wrench at the hand shows without any contact (N, then Nm)."""

    gripper_fails: int = 0
    """How many of the next gripper requests fail (the client raises)."""

    gripper_latency_s: float = 0.0
    """Extra time before each gripper request is answered (s)."""

    gripper_stuck: bool = False
    """The fingers do not move and requests are never answered."""

    homed: bool = True
    """The hand has been homed; before, it knows no widest opening and does not grasp."""

    object_width_m: float | None = None
    """Width of an object between the fingers (m); None means nothing to grasp."""

    def lost(self, sequence: int) -> bool:
        """Return whether the command to state ``sequence`` is lost; the same answer every time."""
        if self.packet_loss <= 0:
            return False
        draw = np.random.default_rng((self.loss_seed, sequence)).random()
        return bool(draw < self.packet_loss)
