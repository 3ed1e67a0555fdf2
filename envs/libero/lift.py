"""robosuite's Lift in the shape of LIBERO; it needs no download."""

from typing import Any, Literal

from gymnasium.utils import EzPickle

from dzrobot.envs.initial_states import DRAWN
from dzrobot.envs.libero.arm import ArmEnv
from dzrobot.envs.libero.sim import Raw, Simulation
from dzrobot.envs.mujoco.robosuite import check_versions, import_robosuite


class LiftEnv(ArmEnv, EzPickle):
    """Lift a red cube off the table; see :class:`ArmEnv` for observation and action.

    ``dzrobot/lift-v0`` makes it. An initial state fixes where the cube lies, how large it is and
    how the arm is bent; the goal holds while the cube is 4 cm above the table.

    Args:
        resolution: Height and width of the images in pixels.
        render_mode: ``"rgb_array"`` or None.
        settle_steps: Steps with an open, resting gripper before the episode begins.
        cameras: False leaves the images out of the observation, and the time they take.
        quality: ``"draft"`` draws faster and less well, for tests.
        stop_on_success: False never terminates; ``info["is_success"]`` still tells.

    Raises:
        MissingDependencyError: the simulator is not installed.
        SimulatorError: the simulator has the wrong version.
    """

    task = "lift the red cube"

    def __init__(  # noqa: PLR0913 (Gymnasium passes plain keyword arguments)
        self,
        *,
        resolution: int = 256,
        render_mode: str | None = None,
        settle_steps: int = 10,
        cameras: bool = True,
        quality: Literal["full", "draft"] = "full",
        stop_on_success: bool = True,
    ) -> None:
        options: dict[str, Any] = {
            "resolution": resolution,
            "render_mode": render_mode,
            "settle_steps": settle_steps,
            "cameras": cameras,
            "quality": quality,
            "stop_on_success": stop_on_success,
        }
        EzPickle.__init__(self, **options)
        super().__init__(starts=DRAWN, **options)
        check_versions()

    def _open(self, seed: int) -> Simulation:
        lift = import_robosuite().environments.manipulation.lift.Lift
        return Simulation(lift, {}, self._image, seed)

    def _begin(self, sim: Simulation, start: int) -> Raw:
        return sim.reset(start)
