"""Configuration of one workcell: address, cameras, limits, rates, rules. Meters and radians.

A value is never edited after construction; everything has a default except the address and the
camera serial numbers.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from dzrobot.configuration import FrozenConfig
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.panda.joint_targets import (
    DROID_GAINS,
    JOINT_LIMITS,
    TARGETS,
    ArmKind,
    Vector6,
    Vector7,
)
from dzrobot.envs.panda.poses import Array, pose_of
from dzrobot.envs.panda.state import FINGER_SPEED_M_S, ActionConfig
from dzrobot.errors import ConfigError, UnknownNameError
from dzrobot.rng import seed_sequence

Vector3 = tuple[float, float, float]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]

MOST_FRICTION_NM = 1.0
"""The library makes up for no more, at any joint."""

_SHOULDER = (0.0, 0.0, 0.333)
"""Where the second joint's axis crosses the first's (m)."""


EMULATED = "emulated"
"""A workcell, and the address of an arm, that is started when it is opened: robosuite's Lift."""

GRIPPER_PRESETS: Mapping[str, Mapping[str, float]] = {
    "published": {},
    "droid": {"settle_s": 0.0},
    "gentle": {
        "speed_m_s": 0.1, "force_n": 40.0, "open_width_m": 0.08, "grasp_width_m": 0.0,
        "settle_s": 1.0,
    },
}  # fmt: skip
"""What each preset of the gripper changes of the defaults; single fields replace it again."""


class GripperConfig(FrozenConfig):
    """The gripper: its kind, speed, force and widths."""

    preset: Literal["published", "droid", "gentle"] = "published"
    """``published``: as the published recordings of ``franka_pnp`` were made; ``droid``: the arm
    never waits for the fingers; ``gentle``: slower and softer, for fragile objects and first
    trials. A real arm must be given one; cards name it."""

    kind: Literal["franka", "robotiq", "none"] = "franka"
    """``franka``: the Franka Hand; ``robotiq``: a Robotiq 2F-85 on a serial port; ``none``: the arm
    has no hand, and what is asked of it does nothing."""

    device: str = ""
    """Serial port of a ``robotiq``, such as ``/dev/serial/by-id/usb-FTDI_...-port0``."""

    homing: bool = False
    """Whether a hand that was never homed may be where no person can be asked: its fingers then
    move all the way, once. An operator is asked. A Robotiq's homing is its activation."""

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """At or below minus this an open hand closes, at or above it a closed one opens."""

    speed_m_s: Positive = FINGER_SPEED_M_S
    """Speed of the fingers."""

    force_n: Positive = 130.0
    """Grasping force."""

    open_width_m: Positive = 0.09
    """Width of the open hand; one that opens less opens as far as it can."""

    grasp_width_m: Annotated[float, Field(ge=0)] = 0.01
    """Width that a grasp closes to; whatever is between the fingers is held. A Robotiq closes until
    it meets something."""

    empty_width_m: Annotated[float, Field(ge=0)] = 0.002
    """Fingers closed to this hold nothing, whatever the hand says."""

    settle_s: Annotated[float, Field(ge=0)] = 0.6
    """How long the arm waits, at most, for fingers that were just commanded. 0: not at all, and a
    step lasts one period whatever the fingers do."""

    timeout_s: Positive = 5.0
    """A command that is not answered for this long ends the episode."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if (self.kind == "robotiq") != bool(self.device):
            raise ValueError(
                "kind: robotiq takes `device`, its serial port (ls /dev/serial/by-id), and other "
                "grippers take none"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, Mapping) else None
        # An unknown name is refused by the field itself.
        return {**GRIPPER_PRESETS[name], **values} if name in tuple(GRIPPER_PRESETS) else values


class ResetConfig(FrozenConfig):
    """Where an episode begins, and how the arm gets there."""

    position: Vector3 = (0.3069, 0.0, 0.4869)
    """Position of the hand's grasp point in the base frame; the default is the arm's usual ready
    posture."""

    euler: Vector3 = (float(np.pi), 0.0, 0.0)
    """Roll, pitch, yaw about the base axes; the default points straight down."""

    joints: Vector7 | None = (
        0.0, -np.pi / 4, 0.0, -3 * np.pi / 4, 0.0, np.pi / 2, np.pi / 4,
    )  # fmt: skip
    """Joint angles that every reset passes through before ``position``, and that its
    elbow is drawn to while it moves; the default is the arm's usual ready posture. None: the joints
    stay as ``position`` finds them."""

    joint_dynamics: Annotated[float, Field(gt=0, le=0.13)] = 0.1
    """Share of the arm's largest velocity, acceleration and jerk towards ``joints``. An arm whose
    joints all turn at 0.13 of what they can turns its hand by less than the 2.5 rad/s at which it
    stops by itself, whatever its posture."""

    joint_tolerance_rad: Positive = 0.01
    """A joint this close to ``joints`` is there."""

    noise_xy_m: Annotated[float, Field(ge=0)] = 0.0
    """Each start is moved by up to this along x and y; the start's number decides."""

    noise_yaw_rad: Annotated[float, Field(ge=0)] = 0.0
    """Each start is turned by up to this about the vertical."""

    lift_m: Annotated[float, Field(ge=0)] = 0.05
    """How far the hand rises before it travels."""

    open_above_m: Annotated[float, Field(ge=0)] = 0.03
    """An empty hand that is less than this above the floor of ``limits.workspace_low`` rises before
    its fingers open, as they may sweep what lies there. One that holds something opens where it is,
    and drops nothing. 0: every hand opens where it is."""

    speed_m_s: Annotated[float, Field(gt=0, le=0.85)] = 0.15
    turn_rad_s: Annotated[float, Field(gt=0, le=1.25)] = 0.6
    """How fast the hand goes and turns. The largest are half of what a Panda stops by itself at:
    one that follows like a spring overshoots."""

    tolerance_m: Positive = 0.01
    tolerance_rad: Positive = 0.05

    timeout_s: Positive = 30.0
    """An arm that has not arrived by then is an error."""

    reach_m: Positive = 0.8
    """A start farther away than this is refused: bring the arm closer by hand."""

    @property
    def pose(self) -> Array:
        """The pose (4, 4) in the base frame."""
        return pose_of(self.position, self.euler)

    def start_pose(self, start: int) -> Array:
        """Return the pose (4, 4) of an initial state, whose number decides what is varied."""
        generator = np.random.default_rng(seed_sequence("franka", start))
        reach = (self.noise_xy_m, self.noise_xy_m, self.noise_yaw_rad)
        x, y, yaw = generator.uniform(-1.0, 1.0, 3) * reach
        pose = self.pose
        pose[:3, :3] = pose_of((0, 0, 0), (0, 0, yaw))[:3, :3] @ pose[:3, :3]
        pose[:2, 3] += (x, y)
        return pose


class ObstacleConfig(FrozenConfig):
    """A box that no link may enter, such as the table, a shelf or a camera's stand."""

    name: str
    """What messages call it."""

    low: Vector3
    high: Vector3
    """Its corners, in the base frame, along its axes."""

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        if not all(low < high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"{self.name}: low={self.low} must lie below high={self.high}")
        return self


class MountConfig(FrozenConfig):
    """What is mounted on the hand, such as a camera: a box, or a capsule.

    Points are from the flange, in the hand's axes: z out of the hand, y along the fingers' way.
    """

    name: str
    """What messages call it."""

    low: Vector3
    high: Vector3
    """Corners of the box, or the ends of the capsule's axis."""

    radius_m: Annotated[float, Field(ge=0)] = 0.0
    """Radius of the capsule. 0: it is a box."""

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        pairs = list(zip(self.low, self.high, strict=True))
        if not self.radius_m and not all(low < high for low, high in pairs):
            raise ValueError(f"{self.name}: low={self.low} must lie below high={self.high}")
        if self.low == self.high:
            raise ValueError(f"{self.name}: the ends of a capsule must differ")
        return self


class LimitsConfig(FrozenConfig):
    """What no command may exceed, whatever the policy says."""

    workspace_low: Vector3 = (0.25, -0.35, 0.01)
    workspace_high: Vector3 = (0.70, 0.35, 0.70)
    """Box that holds every target, in the base frame."""

    tilt: Vector3 = (0.1, 0.1, float(np.pi / 6))
    """Largest roll, pitch and yaw about the base axes, from the reset orientation."""

    margin_m: Positive = 0.03
    """A hand this far outside the box ends the episode."""

    step_m: Positive = 0.055
    step_rad: Positive = 0.18
    """How far a target may lie from the measured pose."""

    call_m: Positive = 0.10
    call_rad: Positive = 0.30
    """How far a target may lie from the one before. An arm that lags behind by more than this does
    not follow, and the episode ends."""

    speed_m_s: Positive = TARGETS.hand_speed_m_s
    turn_rad_s: Positive = TARGETS.hand_turn_rad_s
    """Speed that a target may ask for over one control period."""

    first_m: Positive = 0.02
    first_rad: Positive = 0.1
    """How far the first target of a controller may lie from the measured pose."""

    force_n: Positive = 40.0
    torque_nm: Positive = 8.0
    """External force and torque at the hand that end the episode."""

    resting_force_n: Positive = 2.0
    resting_torque_nm: Positive = 0.5
    """What an arm at rest that touches nothing may show: doctor and reset warn of more, which a
    small load or a worn arm makes."""

    load_force_n: Positive = 5.0
    load_torque_nm: Positive = 1.5
    """More than this at rest is a load that the arm does not know: the doctor fails it, and a reset
    moves nothing."""

    sag_m: Positive = 0.005
    """A hand that hangs farther below its target than this carries a load that the arm does not
    know: a person is not invited to reach in, as it may sink when control is given up."""

    joints_low: Vector7 = JOINT_LIMITS["fr3"][0]
    joints_high: Vector7 = JOINT_LIMITS["fr3"][1]
    """Joint limits of the arm; the controller pushes back before them. Left out: those of ``arm``.
    An arm that reports narrower ones is refused."""

    joint_margin_rad: Positive = 0.02
    """A joint this close to its limit ends the episode, before the arm stops by itself."""

    joint_room_rad: Positive = TARGETS.room_rad
    """Targets of joints stay this far from their limits."""

    joint_speed_rad_s: Vector7 = TARGETS.speed_rad_s
    """Fastest that targets of joints move."""

    joint_acceleration_rad_s2: Positive = TARGETS.acceleration_rad_s2
    """How fast the speed of such targets changes."""

    joint_step_rad: Positive = TARGETS.step_rad
    """How far such a target may run ahead of the measured joint."""

    joint_lag_rad: Positive = 0.4
    """Joints that lag behind their targets by more than this do not follow, and the episode ends.
    """

    self_collision_m: Annotated[float, Field(ge=0)] = 0.02
    """How near links that are not neighbors may come to each other by joint targets and on the way
    of a reset; checked in MuJoCo, with the shapes of robosuite's arm. 0: not checked."""

    obstacles: tuple[ObstacleConfig, ...] = ()
    """Boxes that links keep away from, from the second link on; checked as ``self_collision_m``
    is, whether actions move joints or the hand, and before a reset."""

    mounts: tuple[MountConfig, ...] = ()
    """What the hand carries besides its fingers; kept from the links and from obstacles as they are
    from each other."""

    obstacle_m: Positive = 0.02
    """How near links may come to them."""

    state_age_s: Positive = 0.25
    frame_age_s: Positive = 0.5
    """A state or a camera frame older than this ends the episode."""

    frame_periods: Positive = 1.5
    """A frame that came longer ago than so many periods of its stream is not acted upon: the next
    is waited for, as long as ``frame_age_s`` allows."""

    frozen_image_s: Annotated[float, Field(ge=0)] = 1.0
    """A camera whose image stays the same to the bit for this long while the hand moves is frozen,
    which ends the episode. 0: not checked."""

    hold_after_s: Positive = 0.5
    """Without an action for this long the arm holds the pose it is at."""

    deadman_s: Positive = 1.0
    """Without a word from the program for this long, because it is suspended or a policy holds its
    interpreter, the arm's driver ends its motion and holds it."""

    stop_after_s: Positive = 60.0
    """Without an action for this long control is given up and the episode ends."""

    recoveries: Annotated[int, Field(ge=0)] = 3
    """How often an episode may continue after a harmless reflex."""

    recovery_pace: Share = 0.5
    """Share of the speed after each recovery, until the next reset."""


class ControllerConfig(FrozenConfig):
    """How targets become motion."""

    kind: Literal["impedance", "motion"] = "impedance"
    """``impedance`` follows like a spring and is soft on contact; ``motion`` plans each step."""

    translational_stiffness: Positive = 500.0
    """N/m."""

    rotational_stiffness: Positive = 40.0
    """Nm/rad."""

    joint_stiffness: Vector7 = DROID_GAINS.joint_stiffness
    """Nm/rad, where targets are joint angles; this and the next three are those of DROID's arms."""

    joint_damping: Vector7 | None = DROID_GAINS.joint_damping
    """Nm s/rad. None: critical for the stiffness."""

    cartesian_stiffness: Vector6 | None = DROID_GAINS.hand_stiffness
    """N/m and Nm/rad at the hand, along the base axes: the Jacobian maps it to the joints, where it
    is added to ``joint_stiffness``. None: nothing is added."""

    cartesian_damping: Vector6 | None = DROID_GAINS.hand_damping
    """N s/m and Nm s/rad, added like ``cartesian_stiffness``. None: critical for it."""

    speed_feedforward: bool = False
    """Whether joints are damped against the speed of their targets, which they then follow without
    delay. DROID's are damped against standstill."""

    guided_stiffness: Vector7 = (400.0, 400.0, 400.0, 400.0, 150.0, 100.0, 50.0)
    """Nm/rad, of an arm that a person may guide and does not; critically damped."""

    guided_damping: Vector7 = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.3)
    """Nm s/rad, while the arm yields to a person's hand, without stiffness."""

    guided_friction_nm: Vector7 = (0.2, 0.2, 0.17, 0.17, 0.08, 0.07, 0.05)
    """Dry friction that is made up for while a person guides the arm, in the direction it moves;
    two thirds of what the emulated arm has. If the arm keeps moving when let go, it is too high."""

    error_clip_m: Positive = 0.05
    error_clip_rad: Positive = 0.3
    """Largest deviation that the spring answers."""

    posture_stiffness: Annotated[float, Field(ge=0)] = 5.0
    """How strongly the elbow is drawn to ``reset.joints`` (Nm/rad), as far as the hand allows."""

    posture_reach_rad: Positive = 0.3
    """How far from where they are, as the controller begins, joints are drawn at most. The pull
    grows with the distance, and the limits of the joints push back with no more than 5 Nm: an elbow
    that is far from home was driven into one of them. The way to a start brings it home by itself.
    """

    max_delta_tau: Positive = TARGETS.max_delta_tau
    """Largest change of a joint torque per millisecond (Nm)."""

    dynamics: Share = 0.2
    """Share of the arm's largest velocity, acceleration and jerk that ``motion`` uses."""

    collision_torque_nm: Vector7 = (45.0, 45.0, 45.0, 45.0, 11.0, 11.0, 11.0)
    """External torque of each joint at which the arm's own reflex stops it."""

    collision_force_n: Vector6 = (60.0, 60.0, 60.0, 20.0, 20.0, 20.0)
    """External force (N) and torque (Nm) at the hand at which the arm's own reflex stops it."""

    least_success_rate: Share = 0.95
    """Share of control commands that should reach the arm; fewer are warned of."""

    fault_success_rate: Annotated[float, Field(ge=0, le=1)] = 0.8
    """An episode in which fewer reach the arm for a second is cut short: the arm did not carry out
    what the policy asked for, so it does not count. 0: never."""

    realtime: Literal["ignore", "enforce"] = "ignore"
    """``enforce`` refuses to run without a real-time kernel."""


class LoadConfig(FrozenConfig):
    """What hangs on the flange that Desk does not know, such as a camera and its bracket."""

    mass_kg: Annotated[float, Field(ge=0, le=5)]

    center_m: Vector3
    """Center of mass, from the flange, in its axes."""

    inertia_kg_m2: tuple[float, float, float, float, float, float, float, float, float] = (0.0,) * 9
    """Inertia about the center of mass, one column after another."""


class FrameConfig(FrozenConfig):
    """Where the grasp point lies."""

    position: Vector3
    """From the end effector that Desk knows, in its axes."""

    euler: Vector3 = (0.0, 0.0, 0.0)
    """Roll, pitch, yaw from those axes."""

    @property
    def pose(self) -> Array:
        """The pose (4, 4) in the frame of the end effector."""
        return pose_of(self.position, self.euler)


class RewardConfig(FrozenConfig):
    """When an episode has succeeded."""

    rule: Literal["pose", "operator", "callback", "scene", "none"] = "pose"
    """``pose``: the hand is at ``position``; ``operator``: a person says so; ``callback``: a
    function ``(observation, state) -> bool`` says so; ``scene``: an emulated workcell's scene knows
    it; ``none``: never."""

    position: Vector3 = (0.5, 0.0, 0.2)
    """Position of the hand, in the base frame."""

    tolerance_m: Positive = 0.01

    hold_steps: Annotated[int, Field(ge=1)] = 1
    """Steps in a row that the rule must hold."""

    callback: str | None = None
    """``module:function``."""

    @model_validator(mode="after")
    def _callback_is_named(self) -> Self:
        if (self.rule == "callback") != (self.callback is not None):
            raise ValueError("rule='callback' and callback='module:function' go together")
        return self


class FrankaConfig(FrozenConfig):
    """One workcell."""

    address: str | None = None
    """Host name or IP address of the arm's controller; ``emulated``: an emulated workcell is
    started. None: the first reset fails."""

    arm: ArmKind = "fr3"
    """``fr3``: Franka Research 3; ``fer``: Franka Emika Robot, sold as Panda."""

    embodiment: str = "franka_pnp"
    """What the arm is to a policy: a tag, or ``module:NAME``, whose parts name quantities of
    ``envs/panda/quantities.py``. It decides cameras, state, action and rate."""

    cameras: tuple[CameraConfig, ...] = ()
    """One for each view. Empty: the first reset fails."""

    task: str = ""
    """The instruction, which policies read and recordings carry. Empty: no environment is made."""

    control_hz: Positive = 10.0
    """Steps per second. Left out: the embodiment's."""

    action: ActionConfig = ActionConfig()
    """How an action moves the arm."""

    gripper: GripperConfig = GripperConfig()
    """Which hand it has, and its speed and force."""

    reset: ResetConfig = ResetConfig()
    """Where an episode begins."""

    limits: LimitsConfig = LimitsConfig()
    """What every command must keep."""

    controller: ControllerConfig = ControllerConfig()
    """Stiffness and thresholds of the arm's own controller."""

    load: LoadConfig | None = None
    """None: as set in Desk."""

    end_effector: FrameConfig | None = None
    """None: as set in Desk."""

    reward: RewardConfig = RewardConfig()
    """Who judges an episode."""

    stop_on_success: bool = True
    """False never terminates on success; ``info["is_success"]`` still reports it."""

    full_speed: bool = False
    """Whether a real arm moves at full speed. False: every step runs at ``slow_pace``, as in the
    first trial of a policy. Emulated arms are always at full speed."""

    slow_first_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of each episode at ``slow_pace``, at full speed too."""

    slow_pace: Share = 0.3
    """Share of each action that is carried out while slow."""

    dry_run: bool = False
    """Everything is read and every target computed, nothing is sent to arm or gripper."""

    firmware: str = ""
    """System image of the arm, as Desk shows it; results name it."""

    lock_folder: str | None = None
    """Where the lock and the stop of this arm lie: a folder on this machine that all its users may
    write to. None: ``/var/tmp``."""

    def result_settings(self) -> dict[str, Any]:
        """Return what a result depends on, as plain values: all but where the devices are.

        No policy's result depends on how the arm yields to a hand.
        """
        values = self.model_dump(mode="json", exclude={"address", "lock_folder"})
        values["full_speed"] = not self.is_slow
        for name in ("guided_stiffness", "guided_damping", "guided_friction_nm"):
            del values["controller"][name]
        del values["gripper"]["device"]
        for camera in values["cameras"]:
            del camera["serial"], camera["device"]
        return values

    @property
    def period_s(self) -> float:
        """Seconds per step."""
        return 1.0 / self.control_hz

    @property
    def is_slow(self) -> bool:
        """Whether every step runs at ``slow_pace``."""
        return self.address is not None and not self.full_speed

    @property
    def robot(self) -> Embodiment:
        """The embodiment, with the rate and the axes of this workcell.

        Raises:
            UnknownNameError: there is none of that name.
        """
        found = load_embodiment(self.embodiment)
        return replace(
            found,
            action_frame=None if found.action_frame is None else self.action.frame,
            action_anchor=None if found.action_frame is None else self.action.anchor,
            timing=replace(found.timing, control_hz=self.control_hz),
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_conventions(cls, values: Any) -> Any:
        name = values.get("embodiment") if isinstance(values, Mapping) else None
        return values if not isinstance(name, str) else _with_conventions(values, _known(name))

    @model_validator(mode="before")
    @classmethod
    def _fill_in_joint_limits(cls, values: Any) -> Any:
        limits = values.get("limits", {}) if isinstance(values, Mapping) else None
        # Unknown arms and other mistakes are refused by the fields themselves.
        if not isinstance(limits, Mapping) or values.get("arm") not in tuple(JOINT_LIMITS):
            return values
        low, high = JOINT_LIMITS[values["arm"]]
        return {**values, "limits": {"joints_low": low, "joints_high": high, **limits}}

    @field_validator("embodiment")
    @classmethod
    def _embodiment_is_known(cls, value: str) -> str:
        _known(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        limits, reset = self.limits, self.reset
        keys, views = [camera.key for camera in self.cameras], self.robot.video_keys
        if self.cameras and sorted(keys) != sorted(views):
            yield f"cameras deliver {keys}, needed is each of {', '.join(views)} once"
        low, high = np.array(limits.workspace_low), np.array(limits.workspace_high)
        if not (low < high).all():
            yield f"limits.workspace_low={low} must lie below workspace_high={high}"
        room = np.array([reset.noise_xy_m, reset.noise_xy_m, 0.0])
        place = np.array(reset.position)
        if not ((place - room >= low) & (place + room <= high)).all():
            yield f"reset.position={place} with its noise must lie within {low} to {high}"
        if reset.noise_yaw_rad > limits.tilt[2]:
            yield f"reset.noise_yaw_rad={reset.noise_yaw_rad} exceeds limits.tilt {limits.tilt[2]}"
        if not all(0 < angle < np.pi / 2 for angle in limits.tilt):
            yield f"limits.tilt={limits.tilt} must lie between 0 and a quarter turn"
        if max(limits.hold_after_s, limits.deadman_s) >= limits.stop_after_s:
            yield "limits.hold_after_s and deadman_s must be shorter than stop_after_s"
        if limits.step_m > limits.call_m or limits.step_rad > limits.call_rad:
            yield "limits.step_* must not exceed call_*"
        yield from self._joint_faults()
        yield from self._threshold_faults()

    def _joint_faults(self) -> Iterator[str]:
        limits, joints = self.limits, self.reset.joints
        low, high = np.array(limits.joints_low), np.array(limits.joints_high)
        if not (low < high).all():
            yield f"limits.joints_low={low} must lie below joints_high={high}"
        if not min(limits.joint_speed_rad_s) > 0:
            yield f"limits.joint_speed_rad_s={limits.joint_speed_rad_s} must be above 0"
        yield from self._gain_faults()
        if limits.mounts and not limits.self_collision_m:
            yield "limits.mounts are checked with self_collision_m, which must be above 0"
        if limits.joint_step_rad > limits.joint_lag_rad:
            yield "limits.joint_step_rad must not exceed joint_lag_rad"
        if limits.joint_room_rad <= limits.joint_margin_rad:
            yield "limits.joint_room_rad must exceed joint_margin_rad"
        margin = limits.joint_margin_rad
        if joints is not None and not ((joints > low + margin) & (joints < high - margin)).all():
            yield f"reset.joints={joints} must lie within {low} to {high}, {margin} rad inside"

    def _gain_faults(self) -> Iterator[str]:
        controller = self.controller
        values = controller.model_dump()
        for name in ("joint_stiffness", "joint_damping", "guided_stiffness", "guided_damping"):
            gains = values[name]
            if gains is not None and not min(gains) > 0:
                yield f"controller.{name}={gains} must be above 0"
        for name in ("cartesian_stiffness", "cartesian_damping"):
            gains = values[name]
            if gains is not None and not min(gains) >= 0:
                yield f"controller.{name}={gains} must be 0 or more"
        if controller.cartesian_stiffness is None and controller.cartesian_damping is not None:
            yield "controller.cartesian_damping needs cartesian_stiffness; give null for both"
        friction = np.array(controller.guided_friction_nm)
        if not ((friction >= 0) & (friction <= MOST_FRICTION_NM)).all():
            yield (
                f"controller.guided_friction_nm={controller.guided_friction_nm} must lie between 0 "
                f"and {MOST_FRICTION_NM}"
            )

    def _threshold_faults(self) -> Iterator[str]:
        """Yield where the arm would stop by itself before the environment could."""
        limits, hard = self.limits, self.controller
        force, torque = min(hard.collision_force_n[:3]), min(hard.collision_force_n[3:])
        if not limits.force_n < force or not limits.torque_nm < torque:
            yield (
                f"limits.force_n={limits.force_n} and torque_nm={limits.torque_nm} must lie below "
                f"controller.collision_force_n={hard.collision_force_n}"
            )
        corners = itertools.product(*zip(limits.workspace_low, limits.workspace_high, strict=True))
        lever = max(float(np.linalg.norm(np.subtract(at, _SHOULDER))) for at in corners)
        if not limits.force_n * lever < min(hard.collision_torque_nm[:4]):
            yield (
                f"limits.force_n={limits.force_n} at {lever:.2f} m from the shoulder is "
                f"{limits.force_n * lever:.0f} Nm, which must lie below the first four of "
                f"controller.collision_torque_nm={hard.collision_torque_nm}"
            )
        if not limits.torque_nm < min(hard.collision_torque_nm[4:]):
            yield (
                f"limits.torque_nm={limits.torque_nm} must lie below the last three of "
                f"controller.collision_torque_nm={hard.collision_torque_nm}"
            )


DROID_HOME = (0.0, -np.pi / 5, 0.0, -4 * np.pi / 5, 0.0, 3 * np.pi / 5, 0.0)
"""Joint angles that episodes of DROID begin at, rad. The hand points straight down and is turned by
an eighth."""

_JOINT_COMMANDED: Mapping[str, Mapping[str, Any]] = {
    "gripper": {"preset": "droid"},
    "reset": {"joints": DROID_HOME, "euler": (np.pi, 0.0, np.pi / 4)},
    # DROID has no box for the hand.
    "limits": {"tilt": (1.0, 1.0, 1.5)},
}
"""What a workcell has, unless it says otherwise, where actions are joint angles: the only published
recordings of that kind are DROID's. The preset of a real arm's gripper is not filled in."""

_FRAMES_PER_STEP = 1.5
_FRAME_RATES = (15, 30, 60)


def _takes_joints(robot: Embodiment) -> bool:
    return any("joint_position" in (part.quantities or (part.name,)) for part in robot.action)


def recorded_preset(robot: Embodiment) -> str:
    """Return the gripper's preset that published recordings of such a robot were made with."""
    return "droid" if _takes_joints(robot) else "published"


def require_task(config: FrankaConfig) -> None:
    """Raise where no instruction was written: none is made up.

    Raises:
        ConfigError: there is none.
    """
    if not config.task.strip():
        raise ConfigError(
            "the workcell has no task, which is what policies read and recordings carry: write "
            "`task: put the cup on the plate`, or what you want, into its file, or give it with "
            "--env-arg task='...' (in Python task='...')"
        )


def _with_conventions(values: Mapping[str, Any], robot: Embodiment) -> dict[str, Any]:
    """Return a workcell with what the recordings of ``robot`` were made with where it is silent."""
    filled: dict[str, Any] = {"control_hz": robot.timing.control_hz, **values}
    if _takes_joints(robot):
        emulated = str(filled.get("address") or EMULATED).startswith(EMULATED)
        for section, defaults in _JOINT_COMMANDED.items():
            given = filled.get(section, {})
            if isinstance(given, Mapping) and (emulated or section != "gripper"):
                filled[section] = {**defaults, **given}
    rate = filled["control_hz"]
    if isinstance(rate, int | float) and isinstance(filled.get("cameras"), list | tuple):
        enough = [fps for fps in _FRAME_RATES if fps >= _FRAMES_PER_STEP * rate]
        fps = {"fps": (enough or _FRAME_RATES[-1:])[0]}
        filled["cameras"] = [
            {**fps, **camera} if isinstance(camera, Mapping) else camera
            for camera in filled["cameras"]
        ]
    return filled


def _known(name: str) -> Embodiment:
    """Return an embodiment; ValueError, as validators raise, where there is none."""
    try:
        return load_embodiment(name)
    except UnknownNameError as error:
        raise ValueError(str(error)) from error
