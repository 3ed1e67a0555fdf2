"""The state datagram of the emulated arm."""

from typing import Any

import numpy as np

from dzrobot.envs.emulators.arm import EmulatedArm
from dzrobot.envs.emulators.wire import ERRORS, ROBOT_STATE
from dzrobot.envs.panda import kinematics
from dzrobot.envs.panda.kinematics import Array

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
        fields["F_T_NE"][:] = _flat(kinematics.flange_to_hand())
        fields["NE_T_EE"][:] = _flat(settings.hand_to_ee)
        fields["EE_T_K"][:] = _flat(settings.ee_to_stiffness)
        fields["m_ee"][:] = HAND_KG
        fields["m_load"][:] = settings.load_kg
        fields["F_x_Cload"][:] = settings.load_center
        fields["I_load"][:] = settings.load_inertia


def _flat(pose: Array) -> Array:
    flat: Array = pose.flatten(order="F")
    return flat
