"""Environments of the Franka from plain values: what ``gym.make`` of ``Franka-...`` ids calls."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dzrobot.configuration import read_config
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.franka.arm import Arm
from dzrobot.envs.franka.camera import Camera, camera_of
from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.envs.franka.console import OperatorConsole
from dzrobot.envs.franka.dry_run import DryRunArm
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.franky_arm import FrankyArm
from dzrobot.envs.franka.poses import euler_of
from dzrobot.envs.franka.quantities import ArmLayout
from dzrobot.envs.franka.workcells import (
    EMPTY_SCENE,
    LIFT_SCENE,
    EmulatedWorkcell,
    RealWorkcell,
    Workcell,
)
from dzrobot.errors import ConfigError, suggest

EMULATED = "emulated"
"""A workcell, and the address of an arm, that is started when it is opened: robosuite's Lift."""

EMULATED_EMPTY = "emulated:empty"
"""The same without a scene: the arm alone, which no simulator moves."""

_OF_SCENE = f"{EMULATED}:"
"""Before the name of a scene, or of an object of LIBERO that lies in the cube's place."""

WORKCELLS = (EMULATED, EMULATED_EMPTY, "fake")
"""Built-in workcells; any other name but `emulated:OBJECT` is a YAML file."""


def make_franka(
    *, workcell: str | None = None, render_mode: str | None = None, **values: Any
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
        **values: Fields of :class:`FrankaConfig` that replace the workcell's; sections are merged,
            as in ``limits={"speed_m_s": 0.2}``.

    Raises:
        ConfigError: a value is unknown or wrong; lists all of them.
    """
    config = load_workcell(workcell, values)
    if is_real(workcell, config):
        _require_taught(config)
    return _assembled(workcell, config, render_mode)


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
        # It is nobody else's: there is no lock and no stop that outlasts the program.
        config, workcell = config.model_copy(update={"address": None}), config.address
    if (scene := _scene_of(workcell)) is not None:
        serials = _emulated_serials(config)
        return EmulatedWorkcell(scene=scene, serials=serials), config
    return RealWorkcell(config.address), config


def _emulated_serials(config: FrankaConfig) -> tuple[str, ...]:
    """Return which cameras are emulated: those the workcell names, then the usual ones."""
    from dzrobot.envs.emulators.launcher import SECOND_EXTERIOR, SERIALS

    # Image and clock of a camera meet by its place in this order.
    named = [camera.serial for camera in config.cameras]
    known = [serial for serial in named if serial in (*SERIALS, SECOND_EXTERIOR)]
    return (*known, *(serial for serial in SERIALS if serial not in known))


def _require_taught(config: FrankaConfig) -> None:
    """Refuse a real arm of which only the address is known: its table is not our table."""
    limits, reset, reward = config.limits, config.reset, config.reward
    said = {
        "limits.workspace_low": "workspace_low" in limits.model_fields_set,
        "limits.workspace_high": "workspace_high" in limits.model_fields_set,
        "reset.position": "position" in reset.model_fields_set,
        "reward.rule": "rule" in reward.model_fields_set,
    }
    if missing := [name for name, known in said.items() if not known]:
        raise ConfigError(
            f"a real arm is not moved by default values: the workcell lacks {', '.join(missing)}. "
            f"`dzrobot init-workcell cell.yaml --address {config.address}` writes a file with all "
            "of them, taught by hand on the arm."
        )


def _assembled(workcell: str | None, config: FrankaConfig, render_mode: str | None) -> FrankaEnv:
    if workcell == "fake":
        env = _fake(config, render_mode)
    else:
        env = connectable(*located(workcell, config), render_mode)
    env.is_real = is_real(workcell, config)
    # The values, not the file they came from: it may change, or be elsewhere for another process.
    env.remake = partial(_assembled, workcell, config, render_mode)
    return env


def connectable(
    workcell: Workcell, config: FrankaConfig, render_mode: str | None = None
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
        render_mode=render_mode,
    )  # fmt: skip


_RLINF = {
    "robot_ip": "address",
    "camera_serials": "cameras, a list of key and serial,",
    "reset_ee_pose": "reset.position and reset.euler",
    "target_ee_pose": "reward.position",
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
    asked, said = (values or {}).get("embodiment"), raw.values.get("embodiment")
    if asked is not None and said not in (None, asked):
        raise ConfigError(
            f"{workcell} says embodiment: {said}, and {asked} was asked for: another id, such as "
            "Franka-PnP-v0, takes what the workcell says"
        )
    _merge(raw.values, dict(values or {}))
    theirs = [(name, f"is called {ours} here") for name, ours in _RLINF.items()
              if raw.values.pop(name, None) is not None]  # fmt: skip
    return raw.build(FrankaConfig, theirs)


def _embodiment(values: Mapping[str, Any] | None) -> Embodiment:
    """Return the embodiment that is asked for; its name is checked with everything else."""
    asked = (values or {}).get("embodiment")
    default: str = FrankaConfig.model_fields["embodiment"].default
    return load_embodiment(asked if isinstance(asked, str) else default)


def _built_in(workcell: str, robot: Embodiment) -> dict[str, Any]:
    """Return the values of a built-in workcell."""
    values = {} if workcell == "fake" else _emulated(robot)
    scene = _scene_of(workcell)
    if scene == EMPTY_SCENE:
        scene = None
    if scene is not None:
        values |= _lift(scene)
    if ArmLayout.of(robot).motion != "joint_position":
        return values
    limits = values.setdefault("limits", {})
    limits["tilt"] = (1.0, 1.0, 1.5)
    if scene is None:
        # They do without a simulator.
        limits["self_collision_m"] = 0.0
    else:
        values["reset"] |= _as_joints_stand()
    return values


def _as_joints_stand() -> dict[str, Any]:
    """Return where the simulated twin begins: its hand is tilted by 7 degrees."""
    from dzrobot.envs.emulators.kinematics import flange_to_hand, forward
    from dzrobot.envs.emulators.scene import READY

    pose = forward(READY, flange_to_hand())
    return {"position": pose[:3, 3].tolist(), "euler": euler_of(pose[:3, :3]).tolist()}


def _emulated(robot: Embodiment) -> dict[str, Any]:
    from dzrobot.envs.emulators.camera_server import SIZES
    from dzrobot.envs.emulators.launcher import SECOND_EXTERIOR, SERIALS

    views = robot.video_keys
    exterior, wrist = SERIALS
    # As policies of DROID have them: exterior views first, the wrist's last.
    serials = {2: SERIALS, 3: (exterior, SECOND_EXTERIOR, wrist)}.get(len(views))
    if serials is None:
        raise ConfigError(
            f"the emulated workcell has two or three cameras, and {robot.tag!r} has {len(views)} "
            "views"
        )
    tall, wide = robot.views[0].resolution
    # Of the views' shape, so that nothing is cut off; small leaves more of the machine to the arm.
    width, height = min(SIZES, key=lambda size: (abs(size[0] / size[1] - wide / tall), size))
    return {
        "cameras": [
            {"key": key, "serial": serial, "width": width, "height": height}
            for key, serial in zip(views, serials, strict=True)
        ],
        "task": "pick up the red block",
    }


def _lift(scene: str) -> dict[str, Any]:
    """Return where robosuite's Lift begins, and what may be reached there."""
    from dzrobot.envs.emulators.scene import READY
    from dzrobot.envs.emulators.scenes import check_name
    from dzrobot.envs.emulators.table_objects import Cube, task_of

    check_name(scene)
    return {
        "task": Cube.task if scene == LIFT_SCENE else task_of(scene),
        "reset": {
            "position": (0.457, 0.0, 0.10),
            "joints": READY.tolist(),
        },
        "limits": {
            "workspace_low": (0.35, -0.25, -0.11),
            "workspace_high": (0.70, 0.25, 0.25),
            "tilt": (0.1, 0.1, 0.9),
        },
        "reward": {"rule": "scene"},
    }


def _fake(config: FrankaConfig, render_mode: str | None) -> FrankaEnv:
    from dzrobot.envs.franka.fakes import FakeArm, FakeCamera

    arm = FakeArm(config.reset.pose)
    cameras = [FakeCamera(key, arm) for key in config.robot.video_keys]
    driven: Arm = DryRunArm(arm) if config.dry_run else arm
    return FrankaEnv(driven, cameras, config, clock=arm.clock, render_mode=render_mode)


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        inner = into.get(name)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            _merge(inner, value)
        else:
            into[name] = value
