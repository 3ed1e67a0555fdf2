"""What may surround the emulated arm, by name: what moves it, and what its cameras see."""

from collections.abc import Sequence

from dzrobot.envs.emulators.dynamics import Dynamics, PlainDynamics
from dzrobot.envs.emulators.faults import Faults
from dzrobot.envs.emulators.table_objects import libero_objects
from dzrobot.envs.emulators.views import CameraView, PaintedView
from dzrobot.envs.mujoco.lift_scene import EMPTY_SCENE, LIFT_SCENE
from dzrobot.envs.mujoco.robosuite import check_versions
from dzrobot.errors import ConfigError, MissingDependencyError, SimulatorError, suggest

EMPTY = EMPTY_SCENE
"""The arm alone, without physics: it follows exactly, and cameras see where the hand is."""

LIFT = LIFT_SCENE
SCENES = (EMPTY, LIFT)
"""Besides, the name of any object of LIBERO whose assets are there: it lies in the cube's place."""


def check_scene(scene: str) -> None:
    """Raise unless ``scene`` is known, and what it needs is installed; imports nothing.

    Raises:
        ConfigError: there is no such scene.
        MissingDependencyError: it needs a simulator that is not installed.
        SimulatorError: the simulator has the wrong version, or LIBERO's assets are not there.
    """
    check_name(scene)
    if scene == EMPTY:
        return
    try:
        check_versions()
    except (MissingDependencyError, SimulatorError) as error:
        raise type(error)(
            f"the emulated arm's scene {scene!r} is simulated: {error} Without it there is the "
            f"arm alone: workcell='emulated:{EMPTY}', or `dzrobot emulate --scene {EMPTY}`."
        ) from error


def check_name(scene: str) -> None:
    """Raise unless there is a scene, or an object of LIBERO, of this name; imports nothing.

    Raises:
        ConfigError: there is none.
    """
    if scene in SCENES:
        return
    known, without = list(SCENES), ""
    try:
        known += sorted(libero_objects())
    except SimulatorError as error:
        without = f" Objects of LIBERO need its assets: {error}"
    if scene not in known:
        raise ConfigError(
            f"unknown scene {scene!r}.{suggest(scene, known)} Known: {', '.join(known)}.{without}"
        )


def dynamics_of(scene: str, faults: Faults) -> Dynamics:
    """Return what moves the arm in a scene.

    Raises:
        MissingDependencyError: the scene needs a simulator that is not installed.
        SimulatorError: the simulator has the wrong version.
    """
    if scene == EMPTY:
        return PlainDynamics(faults)
    from dzrobot.envs.emulators.physics import ScenePhysics

    return ScenePhysics(scene)


def views_of(scene: str, serials: Sequence[str]) -> list[CameraView]:
    """Return what each camera sees of a scene.

    Raises:
        MissingDependencyError: the scene needs a simulator that is not installed.
        SimulatorError: it has the wrong version, or there is no OpenGL to draw with.
    """
    if scene == EMPTY:
        return [PaintedView(serial) for serial in serials]
    from dzrobot.envs.emulators.rendered import rendered_views

    return rendered_views(scene, serials)
