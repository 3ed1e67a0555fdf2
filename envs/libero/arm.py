"""What LIBERO and Lift have in common: one arm, two cameras, seven numbers."""

from typing import Literal

import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import HandMotion
from dzrobot.envs.libero.sim import ArmSetup, Raw, Simulation
from dzrobot.envs.libero.simulated import Observation, SimulatedArmEnv, SimulatedRobot
from dzrobot.envs.spaces import action_space

STATE_LIMITS = (
    (-3.0, -3.0, -3.0, -6.2832, -6.2832, -6.2832, -0.1, -0.1),
    (3.0, 3.0, 3.0, 6.2832, 6.2832, 6.2832, 0.1, 0.1),
)
"""Lowest and highest state: meters, radians (a rotation vector of up to one turn), meters."""

SETTLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""What is done while the objects come to rest: stand still, gripper open."""


class ArmEnv(SimulatedArmEnv):
    """A simulated Panda with an exterior and a wrist camera, in the keys of ``libero_sim``.

    Observation:
        ``video.image``, ``video.wrist_image``: ``(H, W, 3)`` uint8. Turned by 180 degrees from
            robosuite's bottom-up buffer, as the published datasets and policies have them: that is
            a mirror image. :meth:`render` is upright and not mirrored.
        ``state.state``: ``(8,)`` float32. Position of the hand (m), its rotation vector (rad),
            the two finger positions (m), as :func:`arm_state` writes them.
        ``annotation.task``: the instruction.

    Action, ``(7,)`` in [-1, 1]: translation along the world's axes (1 = 0.05 m), rotation vector
    about them (1 = 0.5 rad), both measured from the current pose, then the gripper, of which only
    the sign counts: above 0 closes, below 0 opens, 0 holds. One step is 50 ms.

    What episodes are is said in :class:`SimulatedArmEnv`.
    """

    hand = HandMotion(
        position=slice(0, 3),
        rotation=slice(3, 6),
        rotation_form="rotation vector",
        fingers=slice(6, 8),
        translation=slice(0, 3),
        turn=slice(3, 6),
        gripper=6,
        closes=1,
        translation_m=0.05,
        rotation_rad=0.5,
    )
    """Which numbers of state and action move the hand."""

    def __init__(  # noqa: PLR0913 (Gymnasium passes plain keyword arguments)
        self,
        *,
        starts: int,
        resolution: int,
        render_mode: str | None,
        settle_steps: int,
        cameras: bool,
        quality: Literal["full", "draft"],
        stop_on_success: bool,
    ) -> None:
        embodiment = load_embodiment("libero_sim").at_resolution(resolution, resolution)
        super().__init__(
            robot=SimulatedRobot(
                embodiment=embodiment,
                state_limits={"state.state": STATE_LIMITS},
                action_space=action_space(embodiment),
                setup=ArmSetup(),
            ),
            starts=starts,
            render_mode=render_mode,
            settle_steps=settle_steps,
            cameras=cameras,
            quality=quality,
            stop_on_success=stop_on_success,
        )

    def _rest(self, sim: Simulation) -> np.ndarray:
        return SETTLE

    def _command(self, sim: Simulation, action: np.ndarray) -> np.ndarray:
        return action

    def _images(self, raw: Raw) -> Observation:
        return {
            "video.image": turned(raw["agentview_image"]),
            "video.wrist_image": turned(raw["robot0_eye_in_hand_image"]),
        }

    def _state(self, raw: Raw) -> Observation:
        return {"state.state": arm_state(raw)}


def turned(raw: np.ndarray) -> np.ndarray:
    """Return a fresh copy of ``raw`` (H, W, 3), turned by 180 degrees."""
    return np.ascontiguousarray(raw[::-1, ::-1])


def arm_state(raw: Raw) -> np.ndarray:
    """Return ``(8,)`` float32: hand position, rotation vector, finger positions."""
    return np.concatenate(
        [
            raw["robot0_eef_pos"],
            rotation_vector(raw["robot0_eef_quat"]),
            raw["robot0_gripper_qpos"],
        ]
    ).astype(np.float32)


def rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """Return axis times angle (rad) of ``quaternion`` (x, y, z, w), which is left as it is.

    The angle lies in [0, 2 pi]: a quaternion with negative w keeps its sign and gives more than pi.
    The datasets are written so, and a downward hand sits right at that seam; folding it back would
    flip the sign of the whole vector there.
    """
    x, y, z, w = (float(number) for number in quaternion)
    w = min(max(w, -1.0), 1.0)
    sine = float(np.sqrt(1.0 - w * w))
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return np.array([x, y, z]) * (2.0 * float(np.arccos(w)) / sine)
