"""LIBERO as a Gymnasium environment."""

from importlib.resources import as_file
from typing import Literal

import numpy as np

from dzrobot.envs.episodes import named_arguments
from dzrobot.envs.libero.install import import_libero, libero_folder
from dzrobot.envs.libero.listing import check_models, refuse_unrunnable
from dzrobot.envs.libero.object_classes import register_pro_classes
from dzrobot.envs.libero.plus_variants import apply_variant
from dzrobot.envs.libero.sim import Raw, Simulation
from dzrobot.envs.libero.simulated import ArmEnv, arguments_of
from dzrobot.envs.libero.suites import PACKAGES, SUITES, check_task, default_prompt, load_task
from dzrobot.envs.libero.task_packages import PRO
from dzrobot.envs.mujoco.simulator import check_versions
from dzrobot.errors import ConfigError


class LiberoEnv(ArmEnv):
    """One task of LIBERO, LIBERO-PRO or LIBERO-Plus; :class:`ArmEnv` has observation and action.

    ``dzrobot/libero_spatial-v0`` and the ids of the other suites make it with the time limits of
    the standard protocol. Each task of LIBERO has 50 stored initial states; fixtures (cabinet,
    stove, rack) are not in them and are placed by the seed.

    Args:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or
            ``libero_90``; of LIBERO-PRO such as ``libero_goal_swap``; of LIBERO-Plus such as
            ``libero_plus_goal``. ``dzrobot libero list`` shows all.
        task_id: Which task, in the official order.
        prompt: Where the instruction comes from: ``"name"``, the name of the task, or ``"bddl"``,
            the language of its problem file. None: the name for LIBERO, as published datasets
            have it, the problem file for the others.
        resolution: Height and width of the images in pixels.
        render_mode: ``"rgb_array"`` or None.
        settle_steps: Steps with an open, resting gripper before the episode begins.
        cameras: False leaves the images out of the observation, and the time they take.
        quality: ``"draft"`` draws faster and less well, for tests.
        stop_on_success: False never terminates; ``info["is_success"]`` still reports it.

    Raises:
        UnknownNameError: no such suite.
        ModalityError: no such task.
        ConfigError: an argument has a value that it cannot have.
        MissingDependencyError: LIBERO, the suite's tasks or the simulator are not installed.
        SimulatorError: the simulator has the wrong version, or the task cannot be run: it has no
            starts, objects of no known class, or a goal that does not parse.
    """

    @named_arguments
    def __init__(  # noqa: PLR0913 (Gymnasium passes plain keyword arguments)
        self,
        *,
        suite: str = "libero_spatial",
        task_id: int = 0,
        prompt: Literal["name", "bddl"] | None = None,
        resolution: int = 256,
        render_mode: str | None = None,
        settle_steps: int = 10,
        cameras: bool = True,
        quality: Literal["full", "draft"] = "full",
        stop_on_success: bool = True,
    ) -> None:
        arguments = arguments_of(locals())
        check_task(suite, task_id)
        if prompt not in (None, "name", "bddl"):
            raise ConfigError(f"prompt={prompt!r} must be 'name', 'bddl' or None.")
        super().__init__(arguments, SUITES[suite].init_states)
        libero_folder()
        check_versions()
        refuse_unrunnable(suite, task_id)
        self._task = load_task(suite, task_id)
        self.prompt = default_prompt(suite) if prompt is None else prompt
        self._language = self._task.language(self.prompt)
        self._init_states: np.ndarray | None = None

    @property
    def task(self) -> str:
        """The instruction."""
        return self._language

    def _open(self, seed: int) -> Simulation:
        task = self._task
        check_models(task)
        libero = import_libero()
        if PACKAGES[task.suite] is PRO:
            register_pro_classes()
        self._init_states = task.states()
        scene = libero.TASK_MAPPING[task.problem().scene]
        with as_file(task.bddl) as path:
            arguments = {"bddl_file_name": str(path), "initialization_noise": None}
            return Simulation(scene, arguments, self._image, seed, self._setup)

    def _begin(self, sim: Simulation, start: int) -> Raw:
        assert self._init_states is not None, "opened with its states"
        # Fixtures, controller goals and the gripper are not in the stored state: reset them first.
        sim.reset(self._draw_seed())
        raw = sim.restore(self._init_states[start])
        if self._task.variant is None:
            return raw
        apply_variant(sim, self._task.variant)
        # A step looks by itself; to look before it would move the times of all later looks.
        return raw if self._settle_steps else sim.refresh()
