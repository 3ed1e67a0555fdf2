"""Faults that the emulated robot shows on demand."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Faults:
    """Switches that tests and ``dzrobot emulate`` may turn while the server runs."""

    user_stop: bool = False
    """The user stop is pressed: motions are refused and recovery fails."""

    manual_recovery: bool = False
    """Error recovery answers that a person must recover by hand."""

    frozen_until_s: float = 0.0
    """No state is sent before this time of the monotonic clock (s)."""

    packet_loss: float = 0.0
    """Share of commands that are lost, in [0, 1]."""

    loss_seed: int = 0
    """Seed of the loss sequence."""

    reject_moves: int = 0
    """How many of the next Move requests are refused."""

    version: int | None = None
    """Robot server version to claim instead of the real one."""

    comm_violation_after: int | None = None
    """Missed commands in a row that trip a communication error; None never does."""

    strict_velocity: bool = False
    """Trip ``joint_velocity_violation`` when a commanded joint speed exceeds its limit."""

    gripper_fails: int = 0
    """How many of the next gripper requests fail (the client raises)."""

    gripper_latency_s: float = 0.0
    """Extra time before each gripper request is answered (s)."""

    gripper_stuck: bool = False
    """The fingers do not move and requests are never answered."""

    object_width_m: float | None = None
    """Width of an object between the fingers (m); None means nothing to grasp."""

    def lost(self, sequence: int) -> bool:
        """Return whether the command to state ``sequence`` is lost; the same answer every time."""
        if self.packet_loss <= 0:
            return False
        draw = np.random.default_rng((self.loss_seed, sequence)).random()
        return bool(draw < self.packet_loss)
