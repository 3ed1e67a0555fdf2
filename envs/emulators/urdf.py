"""The arm's URDF text, as a robot server sends it to its client."""

import numpy as np

from dzrobot.envs.panda import kinematics


def arm_urdf() -> str:
    """Return the URDF of the seven joints with limits, masses and the ``link8`` flange."""
    parts = ['<?xml version="1.0"?>', '<robot name="fr3">', '<link name="link0"/>']
    for index in range(7):
        parts += [_joint(index), _link(index)]
    parts += [
        '<joint name="joint8" type="fixed">'
        f'<origin xyz="0 0 {kinematics.FLANGE_Z}" rpy="0 0 0"/>'
        '<parent link="link7"/><child link="link8"/></joint>',
        '<link name="link8"/>',
        "</robot>",
    ]
    return "\n".join(parts)


def _joint(index: int) -> str:
    (x, y, z), roll = kinematics.ORIGINS[index]
    low, high = kinematics.JOINT_LOW[index], kinematics.JOINT_HIGH[index]
    return (
        f'<joint name="joint{index + 1}" type="revolute">'
        f'<origin xyz="{x} {y} {z}" rpy="{roll} 0 0"/>'
        f'<parent link="link{index}"/><child link="link{index + 1}"/><axis xyz="0 0 1"/>'
        f'<limit lower="{low}" upper="{high}" velocity="{kinematics.JOINT_VELOCITY[index]}" '
        f'effort="{kinematics.JOINT_TORQUE[index]}"/>'
        f'<position_based_velocity_limits velocity_offset="{kinematics.VELOCITY_OFFSET[index]}" '
        f'deceleration_limit="{kinematics.DECELERATION[index]}"/></joint>'
    )


def _link(index: int) -> str:
    mass = kinematics.LINK_MASS[index]
    # A solid sphere of 8 cm radius is close enough for the client's dynamics terms.
    inertia = float(np.round(0.4 * mass * 0.08**2, 6))
    return (
        f'<link name="link{index + 1}"><inertial><origin xyz="0 0 0" rpy="0 0 0"/>'
        f'<mass value="{mass}"/><inertia ixx="{inertia}" ixy="0" ixz="0" iyy="{inertia}" '
        f'iyz="0" izz="{inertia}"/></inertial></link>'
    )
