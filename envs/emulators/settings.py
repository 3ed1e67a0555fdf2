"""What a client has set on the emulated arm, checked as the arm checks it."""

from dataclasses import dataclass, field

import numpy as np

from dzrobot.envs.emulators.wire import Command
from dzrobot.envs.panda import kinematics
from dzrobot.envs.panda.kinematics import Array

LARGEST_LOAD_KG = 3.0
_JOINT_STIFFNESS = (0.0, 14250.0)
_TRANSLATION_STIFFNESS = (10.0, 3000.0)
_ROTATION_STIFFNESS = (1.0, 300.0)

SIZES = {
    Command.SET_COLLISION_BEHAVIOR: 52,
    Command.SET_JOINT_IMPEDANCE: 7,
    Command.SET_CARTESIAN_IMPEDANCE: 6,
    Command.SET_EE_TO_K: 16,
    Command.SET_NE_TO_EE: 16,
    Command.SET_LOAD: 13,
}
"""Numbers in the body of each setter."""

ONLY_AT_REST = (
    Command.SET_JOINT_IMPEDANCE,
    Command.SET_CARTESIAN_IMPEDANCE,
    Command.SET_EE_TO_K,
    Command.SET_NE_TO_EE,
    Command.SET_LOAD,
)


@dataclass
class Settings:
    """Thresholds, frames and load; the values of an arm just switched on.

    Stiffness is checked and not kept: the emulated arm follows position commands exactly.
    """

    contact_torque: Array = field(default_factory=lambda: np.full(7, 20.0))
    collision_torque: Array = field(default_factory=lambda: np.full(7, 20.0))
    contact_force: Array = field(default_factory=lambda: np.full(6, 20.0))
    collision_force: Array = field(default_factory=lambda: np.full(6, 20.0))
    hand_to_ee: Array = field(default_factory=lambda: np.eye(4))
    flange_to_ee: Array = field(default_factory=kinematics.flange_to_hand)
    ee_to_stiffness: Array = field(default_factory=lambda: np.eye(4))
    load_kg: float = 0.0
    load_center: Array = field(default_factory=lambda: np.zeros(3))
    load_inertia: Array = field(default_factory=lambda: np.zeros(9))

    def take(self, command: Command, values: Array) -> bool:
        """Keep what a setter says; False where the arm would call it invalid."""
        if len(values) != SIZES[command] or not np.isfinite(values).all():
            return False
        match command:
            case Command.SET_COLLISION_BEHAVIOR:
                return self._take_thresholds(values)
            case Command.SET_JOINT_IMPEDANCE:
                return _within(values, _JOINT_STIFFNESS)
            case Command.SET_CARTESIAN_IMPEDANCE:
                return _within(values[:3], _TRANSLATION_STIFFNESS) and _within(
                    values[3:], _ROTATION_STIFFNESS
                )
            case Command.SET_LOAD:
                return self._take_load(values)
        return self._take_frame(command, values.reshape(4, 4, order="F"))

    def _take_thresholds(self, values: Array) -> bool:
        # Lower and upper, while accelerating and at constant speed: torques, then forces.
        torques, forces = values[:28].reshape(4, 7), values[28:].reshape(4, 6)
        if (torques <= 0).any() or (forces <= 0).any():
            return False
        self.contact_torque, self.collision_torque = torques[2], torques[3]
        self.contact_force, self.collision_force = forces[2], forces[3]
        return True

    def _take_load(self, values: Array) -> bool:
        if not 0.0 <= values[0] <= LARGEST_LOAD_KG:
            return False
        self.load_kg = float(values[0])
        self.load_center, self.load_inertia = values[1:4], values[4:]
        return True

    def _take_frame(self, command: Command, pose: Array) -> bool:
        rotation = pose[:3, :3]
        if not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-4):
            return False
        if command == Command.SET_NE_TO_EE:
            self.hand_to_ee, self.flange_to_ee = pose, kinematics.flange_to_hand() @ pose
        else:
            self.ee_to_stiffness = pose
        return True


def _within(values: Array, limits: tuple[float, float]) -> bool:
    return bool((values >= limits[0]).all() and (values <= limits[1]).all())
