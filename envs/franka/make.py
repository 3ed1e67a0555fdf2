"""Make Franka environments from plain values, as ``gym.make`` of the ``Franka-...`` ids does."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dzrobot.configuration import lay_over, read_config
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import ActionAnchor, Embodiment
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.camera import DriverCamera
from dzrobot.envs.franka.cameras.realsense import RealSenseCamera
from dzrobot.envs.franka.cameras.uvc import UvcCamera
from dzrobot.envs.franka.drivers.dry_run import DryRunArm
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.emulated import (
    EmulatedWorkcell,
    emulated_serials,
    emulated_values,
    hand_at,
    scene_values,
)
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.franka_config import DROID_HOME, EMULATED, FrankaConfig, require_task
from dzrobot.envs.franka.operator.console import OperatorConsole
from dzrobot.envs.franka.workcells import Arm, Camera, RealWorkcell, Workcell
from dzrobot.envs.mujoco.lift_scene import EMPTY_SCENE, LIFT_SCENE, READY
from dzrobot.envs.panda.quantities import ArmLayout
from dzrobot.errors import ConfigError, UnknownNameError, suggest

EMULATED_EMPTY = "emulated:empty"
"""The same without a scene: the arm alone, which no simulator moves."""

_OF_SCENE = f"{EMULATED}:"
"""Before the name of a scene, or of an object of LIBERO that lies in the cube's place."""

WORKCELLS = (EMULATED, EMULATED_EMPTY, "fake")
"""Built-in workcells; any other name but `emulated:OBJECT` is a YAML file."""


_FAKE_TASK = "pick up the object and place it in the bin"

ARGUMENTS = ("workcell", "render_mode", "unattended", "action_anchor")
"""Arguments of :func:`make_franka`, beside the fields of a workcell."""


def make_franka(
    *,
    workcell: str | None = None,
    render_mode: str | None = None,
    unattended: bool = False,
    action_anchor: ActionAnchor | None = None,
    **values: Any,
) -> FrankaEnv:
    """Return an environment; nothing is connected, started or moved yet.

    Its copies and pickles are of the same workcell, and connect by themselves.

    Args:
        workcell: ``emulated`` starts an emulated robot and cameras at the first reset, over a table
            with a cube; ``emulated:empty`` the same without a scene, and without a simulator;
            ``emulated:OBJECT`` with an object of LIBERO, such as ``emulated:alphabet_soup``;
            ``fake`` needs no library; anything else is a YAML file with the fields of
            :class:`FrankaConfig`. None: only ``values`` count.
        render_mode: ``"rgb_array"`` or None.
        unattended: Whether a real arm moves without anybody being asked; else it needs an operator,
            see :meth:`FrankaEnv.attend`.
        action_anchor: What the steps of a policy are measured from, ``policy.embodiment`` says it;
            counts where the workcell leaves ``action.anchor`` out. None: the workcell decides.
        **values: Fields of :class:`FrankaConfig` that replace the workcell's; sections are merged,
            as in ``limits={"speed_m_s": 0.2}``.

    Raises:
        UnknownNameError: A name is none of these, and near one.
        ConfigError: a value is unknown or wrong; lists all of them. Or the workcell names another
            ``action.anchor``.
    """
    for name in values.keys() - FrankaConfig.model_fields.keys():
        if near := suggest(name, ARGUMENTS):
            raise UnknownNameError(f"the environment of an arm takes no argument {name!r}.{near}")
    config = _anchored(load_workcell(workcell, values), action_anchor)
    if is_real(workcell, config):
        _require_taught(config)
    elif config.address is not None:
        require_task(config)
    return _assembled(workcell, config, render_mode, unattended=unattended)


def _anchored(config: FrankaConfig, wanted: ActionAnchor | None) -> FrankaConfig:
    """Return the workcell with the anchor that a policy needs."""
    action = config.action
    if wanted is None or wanted == action.anchor:
        return config
    if "anchor" in action.model_fields_set:
        raise ConfigError(
            f"the workcell has action.anchor = {action.anchor}, and the policy was made for "
            f"{wanted}: its steps would have another size. Set it to {wanted}, leave it out, or "
            f"choose a policy that was trained with {action.anchor}"
        )
    return config.model_copy(update={"action": action.model_copy(update={"anchor": wanted})})


def is_real(workcell: str | None, config: FrankaConfig) -> bool:
    """Return whether an environment of this workcell reaches hardware."""
    if workcell == "fake" or _scene_of(workcell) is not None:
        return False
    return config.address is not None and _scene_of(config.address) is None


def _scene_of(name: str | None) -> str | None:
    """Return what surrounds the emulated arm that a workcell or an address names; None: none."""
    if name == EMULATED:
        return LIFT_SCENE
    if name is None or not name.startswith(_OF_SCENE):
        return None
    return name.removeprefix(_OF_SCENE)


def located(workcell: str | None, config: FrankaConfig) -> tuple[Workcell, FrankaConfig]:
    """Return where the devices of a workcell are, and its configuration as it is used there."""
    if _scene_of(config.address) is not None:
        # It is this program's alone: there is no lock and no stop that outlasts the program.
        config, workcell = config.model_copy(update={"address": None}), config.address
    if (scene := _scene_of(workcell)) is not None:
        serials = emulated_serials(config)
        return EmulatedWorkcell(scene=scene, serials=serials), config
    return RealWorkcell(config.address), config


def _require_taught(config: FrankaConfig) -> None:
    """Refuse a real arm of which only the address is known: its table is not our table."""
    limits, reset, reward = config.limits, config.reset, config.reward
    stated = {
        "limits.workspace_low": "workspace_low" in limits.model_fields_set,
        "limits.workspace_high": "workspace_high" in limits.model_fields_set,
        "reset.position": "position" in reset.model_fields_set,
        "reward.rule": "rule" in reward.model_fields_set,
        "task": bool(config.task.strip()),
        "gripper.preset": (
            "preset" in config.gripper.model_fields_set or config.gripper.kind == "none"
        ),
    }
    if missing := [name for name, known in stated.items() if not known]:
        raise ConfigError(
            f"a real arm is not moved by default values: the workcell lacks {', '.join(missing)}. "
            f"`dzrobot init-workcell cell.yaml --address {config.address}` writes a file with all "
            "of them, taught by hand on the arm. gripper.preset is gentle (0.1 m/s, 40 N, for "
            "first trials), published (0.3 m/s, 130 N, as the recordings of franka_pnp were made) "
            "or droid (published, and the arm never waits for the fingers)."
        )


def _assembled(
    workcell: str | None, config: FrankaConfig, render_mode: str | None, *, unattended: bool
) -> FrankaEnv:
    if workcell == "fake":
        env = _fake(config, render_mode, unattended=unattended)
    else:
        env = connectable(*located(workcell, config), render_mode, unattended=unattended)
    # The values, not the file they came from: it may change, or be elsewhere for another process.
    env.remake = partial(_assembled, workcell, config, render_mode, unattended=unattended)
    return env


def connectable(
    workcell: Workcell,
    config: FrankaConfig,
    render_mode: str | None = None,
    *,
    unattended: bool = False,
) -> FrankaEnv:
    """Return an environment with the real drivers on ``workcell``."""
    drivers: list[Camera] = [
        camera_of(camera, workcell.camera_settings, patience=workcell.patience)
        for camera in config.cameras
    ]
    arm, cameras, clock = workcell.keep_time(FrankyArm(workcell, config), drivers)
    if config.dry_run:
        arm = DryRunArm(arm)
    operator = OperatorConsole() if config.reward.rule == "operator" else None
    return FrankaEnv(
        arm, cameras, config, clock=clock, operator=operator, scene=workcell.scene,
        render_mode=render_mode, unattended=unattended,
    )  # fmt: skip


def camera_of(
    config: CameraConfig, settings: Callable[[], dict[str, Any]], *, patience: float
) -> DriverCamera:
    """Return the camera that a workcell describes; nothing is opened yet.

    Args:
        config: What it is.
        settings: Of RealSense's context; see :class:`RealSenseCamera`.
        patience: See :class:`~dzrobot.envs.driver_process.DriverProcess`.
    """
    if config.kind == "uvc":
        return UvcCamera(config, patience=patience)
    return RealSenseCamera(config, settings, patience=patience)


_RLINF = {
    "robot_ip": "is called address here",
    "camera_serials": "is called cameras here, a list of maps: cameras=[{'key': 'video.image', "
    "'serial': '1'}, ...]; `dzrobot init-workcell` finds and writes them",
    "ee_pose_limit_min": "is called limits.workspace_low here",
    "ee_pose_limit_max": "is called limits.workspace_high here",
    "is_dummy": "is workcell='fake' here, and workcell='emulated' where the libraries of arm and "
    "cameras shall run",
    "max_num_steps": "is gym.make's own max_episode_steps",
    "reset_ee_pose": "is called reset.position and reset.euler here",
    "step_frequency": "is the rate of the embodiment (timing.control_hz); drop it",
    "target_ee_pose": "is called reward.position here",
    "task_description": "is called task here",
}
"""Names of RLinf's evaluations on a robot, and what they are in a workcell."""


def load_workcell(workcell: str | None, values: Mapping[str, Any] | None = None) -> FrankaConfig:
    """Return the configuration of a named workcell or a YAML file, with ``values`` on top.

    Raises:
        ConfigError: there is no such workcell, or a value is unknown or wrong.
    """
    if workcell is None:
        raw = read_config({})
    elif workcell == "fake" or _scene_of(workcell) is not None:
        raw = read_config(_built_in(workcell, _embodiment(values)))
    elif workcell.endswith((".yaml", ".yml")) or Path(workcell).exists():
        raw = read_config(Path(workcell))
    else:
        raise ConfigError(
            f"unknown workcell {workcell!r}.{suggest(workcell, WORKCELLS)} Known: "
            f"{', '.join(WORKCELLS)}, {_OF_SCENE}OBJECT with an object of LIBERO, or a YAML file."
        )
    requested, stated = (values or {}).get("embodiment"), raw.values.get("embodiment")
    if requested is not None and stated not in (None, requested):
        raise ConfigError(
            f"{workcell} says embodiment: {stated}, and {requested} was asked for: another "
            "id, such as Franka-PnP-v0, takes what the workcell says"
        )
    lay_over(raw.values, values or {})
    theirs = [(name, ours) for name, ours in _RLINF.items()
              if raw.values.pop(name, None) is not None]  # fmt: skip
    return raw.build(FrankaConfig, theirs)


def _embodiment(values: Mapping[str, Any] | None) -> Embodiment:
    """Return the requested embodiment; its name is checked with everything else."""
    requested = (values or {}).get("embodiment")
    default: str = FrankaConfig.model_fields["embodiment"].default
    return load_embodiment(requested if isinstance(requested, str) else default)


def _built_in(workcell: str, robot: Embodiment) -> dict[str, Any]:
    """Return the values of a built-in workcell."""
    values: dict[str, Any] = {"task": _FAKE_TASK} if workcell == "fake" else emulated_values(robot)
    scene = _scene_of(workcell)
    if scene == EMPTY_SCENE:
        scene = None
    if scene is not None:
        values |= scene_values(scene)
    if ArmLayout.of(robot).motion != "joint_position":
        return values
    if scene is None:
        # They do without a simulator.
        values["limits"] = {"self_collision_m": 0.0}
        values["reset"] = {"position": hand_at(DROID_HOME)["position"]}
    else:
        values["limits"]["tilt"] = (1.0, 1.0, 1.5)
        values["reset"] |= hand_at(READY)
    return values


def _fake(config: FrankaConfig, render_mode: str | None, *, unattended: bool) -> FrankaEnv:
    from dzrobot.envs.franka.fake_devices import FakeArm, FakeCamera

    arm = FakeArm(config.reset.pose)
    cameras = [FakeCamera(key, arm) for key in config.robot.video_keys]
    driven: Arm = DryRunArm(arm) if config.dry_run else arm
    return FrankaEnv(
        driven, cameras, config, clock=arm.clock, render_mode=render_mode, unattended=unattended
    )
