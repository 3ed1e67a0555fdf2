"""Hand guiding: the arm is compliant within its limits, and its motion is recorded as actions.

While the person holds their deadman, the arm has no stiffness; it is stiff again as soon as they
let go, and where the limits end. What they show becomes the action that would have led there.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.motion.action_spaces import SHORTFALLS, Held, JointSpace
from dzrobot.envs.franka.motion.reach import solve_joints
from dzrobot.envs.franka.safeguards.limits import LimitedTarget, Workspace
from dzrobot.envs.franka.safeguards.self_collision import collision_of
from dzrobot.envs.franka.workcells import Space
from dzrobot.envs.panda.poses import Array, euler_of, quaternion_of
from dzrobot.envs.panda.quantities import ArmLayout
from dzrobot.envs.panda.state import ActionConfig, ArmState, in_action_axes
from dzrobot.errors import ConfigError

_INWARDS_M, _INWARDS_RAD = 0.005, 0.02
"""How far a hand is brought back from the edge of the workspace, so that it is surely within."""


class GuidedSpace(JointSpace):
    """Joint angles, (7,), rad, of an arm that a person guides; actions do not move it.

    Args:
        config: Limits. Faster than ``speed_m_s``, ``turn_rad_s`` or ``joint_speed_rad_s``, outside
            the workspace or the room of the joints, or too near an obstacle, the arm is stiff.
        engaged: Whether the person guides it now.
        links: Whether distances between links are checked, as for actions of joint angles.
    """

    space = Space.GUIDED

    def __init__(self, config: FrankaConfig, engaged: Callable[[], bool], *, links: bool) -> None:
        super().__init__(config)
        self._engaged = engaged
        self._links = links
        self._compliant = False
        self._inner = Workspace(_smaller(config))

    def prepare(self) -> None:
        """Load the shapes of the links, if they are checked."""
        if self.collision is None:
            self.collision = collision_of(self._limits, links=self._links)

    def begin(self, state: ArmState) -> None:
        """Begin stiff."""
        super().begin(state)
        self._compliant = False

    def held(self, last: Array | None, state: ArmState) -> Held:
        """Return where the joints are, if they were guided there; else where they are kept."""
        guided, self._compliant = self._compliant, False
        return super().held(None if guided else last, state)

    def rested(self, last: Array) -> Held | None:
        """Return where the joints are kept, stiff, while something else is waited for."""
        self._compliant = False
        return Held(last)

    def check(self, action: Array) -> None:
        """Do nothing: the motion of an action counts for nothing."""

    def limit(self, action: Array, state: ArmState, last: Array, pace: float) -> LimitedTarget:
        """Return where the joints are, to yield from there; or where they are held instead."""
        if not self._engaged():
            return LimitedTarget(self.held(last, state).target, ())
        self._compliant = False
        short = self._shortfalls(state.joints)
        if (short > 0).any():
            # The hand meets a wall there, and may go along it.
            target = self._nearest(state) if short[0] > 0 else None
            by = (SHORTFALLS[int(np.argmax(short))],)
            return LimitedTarget(last if target is None else target, by)
        within = np.clip(state.joints, self._low, self._high)
        if not np.array_equal(within, state.joints):
            return LimitedTarget(within, ("joints",))
        if self._is_fast(state):
            return LimitedTarget(state.joints.copy(), ("speed",))
        self._compliant = True
        return LimitedTarget(state.joints.copy(), (), compliant=True)

    def _nearest(self, state: ArmState) -> Array | None:
        """Return joints (7,) with the hand a little within the workspace, near where it is."""
        joints = solve_joints(state.joints, self._inner.clip(state.pose), self._flange_to_ee)
        return None if joints is None else np.clip(joints, self._low, self._high)

    def _is_fast(self, state: ArmState) -> bool:
        limits = self._limits
        return bool(
            np.linalg.norm(state.twist[:3]) > limits.speed_m_s
            or np.linalg.norm(state.twist[3:]) > limits.turn_rad_s
            or (np.abs(state.joint_speeds) > self._profile.speed).any()
        )


def _smaller(config: FrankaConfig) -> FrankaConfig:
    """Return the workcell with a workspace that ends a little before its own does."""
    limits = config.limits
    low, high, tilt = (
        np.array(values) for values in (limits.workspace_low, limits.workspace_high, limits.tilt)
    )
    room = np.minimum(_INWARDS_M, (high - low) / 4)
    inner = {
        "workspace_low": tuple(low + room),
        "workspace_high": tuple(high - room),
        "tilt": tuple(np.maximum(tilt - _INWARDS_RAD, tilt / 2)),
    }
    return config.model_copy(update={"limits": limits.model_copy(update=inner)})


class Guidance:
    """A person who guides an arm.

    Args:
        config: The workcell.
        layout: What actions are made of.
        engaged: Whether they guide it now.

    Raises:
        ConfigError: the controller cannot yield.
    """

    def __init__(
        self, config: FrankaConfig, layout: ArmLayout, engaged: Callable[[], bool]
    ) -> None:
        if config.controller.kind != "impedance":
            raise ConfigError(
                f"controller.kind={config.controller.kind!r} follows targets and cannot yield to a "
                "hand: set it to impedance"
            )
        self._layout = layout
        self._scales = config.action
        self.space = GuidedSpace(config, engaged, links=layout.motion == "joint_position")
        """What the arm is controlled in."""

    def shown(
        self, action: Array, before: ArmState, after: ArmState, limited: LimitedTarget
    ) -> LimitedTarget:
        """Return ``limited`` with the action that leads from one state to the next."""
        action, fits = shown_action(action, before, after, self._layout, self._scales)
        by = limited.by if fits else (*limited.by, "action")
        return replace(limited, by=by, executed_action=action.astype(np.float32))


def shown_action(
    action: Array, before: ArmState, after: ArmState, layout: ArmLayout, config: ActionConfig
) -> tuple[Array, bool]:
    """Return the action (A,) that leads from one state to the next, and whether one step can.

    Args:
        action: (A,); its gripper number stays.
        before: Where the arm was when the action was chosen.
        after: Where it is one period later.
        layout: What actions are made of.
        config: Scales and axes of steps of the hand; a longer step is cut to them.
    """
    place, turned = after.pose[:3, 3], after.pose[:3, :3]
    fits = True
    match layout.motion:
        case "joint_position":
            motion = after.joints
        case "pose_euler":
            motion = np.concatenate([place, euler_of(turned)])
        case "pose_quaternion":
            motion = np.concatenate([place, quaternion_of(turned)])
        case _:
            move = (place - before.pose[:3, 3]) / config.translation_m
            turn = euler_of(turned @ before.pose[:3, :3].T) / config.rotation_rad
            wanted = in_action_axes(before.pose, np.concatenate([move, turn]), config)
            motion = wanted.clip(-1.0, 1.0)
            fits = bool(np.array_equal(motion, wanted))
    action = action.copy()
    action[layout.motion_at] = motion
    return action, fits
