"""LIBERO as a Gymnasium environment."""

from typing import Literal

import numpy as np

from dzrobot.envs.libero.install import import_libero, libero_folder
from dzrobot.envs.libero.sim import Raw, Simulation
from dzrobot.envs.libero.simulated import ArmEnv, arguments_of
from dzrobot.envs.libero.suites import check_task, load_init_states, load_task
from dzrobot.envs.mujoco.simulator import check_versions
from dzrobot.registration import SUITES


class LiberoEnv(ArmEnv):
    """One task of LIBERO; see :class:`ArmEnv` for observation and action.

    ``dzrobot/libero_spatial-v0`` and the ids of the other suites make it with the time limits of
    the standard protocol. Each task has 50 stored initial states; fixtures (cabinet, stove, rack)
    are not in them and are placed by the seed.

    Args:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or
            ``libero_90``.
        task_id: Which task, in the official order.
        resolution: Height and width of the images in pixels.
        render_mode: ``"rgb_array"`` or None.
        settle_steps: Steps with an open, resting gripper before the episode begins.
        cameras: False leaves the images out of the observation, and the time they take.
        quality: ``"draft"`` draws faster and less well, for tests.
        stop_on_success: False never terminates; ``info["is_success"]`` still reports it.

    Raises:
        UnknownNameError: no such suite.
        ModalityError: no such task.
        MissingDependencyError: LIBERO or the simulator is not installed.
        SimulatorError: the simulator has the wrong version.
    """

    def __init__(  # noqa: PLR0913 (Gymnasium passes plain keyword arguments)
        self,
        *,
        suite: str = "libero_spatial",
        task_id: int = 0,
        resolution: int = 256,
        render_mode: str | None = None,
        settle_steps: int = 10,
        cameras: bool = True,
        quality: Literal["full", "draft"] = "full",
        stop_on_success: bool = True,
    ) -> None:
        arguments = arguments_of(locals())
        check_task(suite, task_id)
        super().__init__(arguments, SUITES[suite].init_states)
        libero_folder()
        check_versions()
        self._task = load_task(suite, task_id)
        self._init_states: np.ndarray | None = None

    @property
    def task(self) -> str:
        """The instruction."""
        return self._task.language

    def _open(self, seed: int) -> Simulation:
        libero = import_libero()
        self._init_states = load_init_states(self._task.init_states)
        path = str(self._task.bddl)
        utilities = libero.bddl_base_domain.BDDLUtils
        problem = utilities.get_problem_info(path)["problem_name"]
        arguments = {"bddl_file_name": path, "initialization_noise": None}
        return Simulation(libero.TASK_MAPPING[problem], arguments, self._image, seed, self._setup)

    def _begin(self, sim: Simulation, start: int) -> Raw:
        assert self._init_states is not None, "opened with its states"
        # Fixtures, controller goals and the gripper are not in the stored state: reset them first.
        sim.reset(self._draw_seed())
        return sim.restore(self._init_states[start])
