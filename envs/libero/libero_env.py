"""LIBERO as a Gymnasium environment."""

from collections.abc import Sequence
from importlib.resources import as_file
from typing import Any, Literal

import numpy as np

from dzrobot.envs.episodes import DRAWN, named_arguments
from dzrobot.envs.libero.assets import import_libero, libero_folder
from dzrobot.envs.libero.bddl import AskedGoal, another_goal, asked_goals
from dzrobot.envs.libero.goal_progress import GoalProgress
from dzrobot.envs.libero.listing import check_models, refuse_unrunnable
from dzrobot.envs.libero.perturbations import AXES
from dzrobot.envs.libero.plus_variants import apply_variant
from dzrobot.envs.libero.sim import Raw, Simulation
from dzrobot.envs.libero.simulated import ArmEnv, Info, arguments_of
from dzrobot.envs.libero.suites import PACKAGES, SUITES, check_task, default_prompt, load_task
from dzrobot.envs.libero.task_packages import PRO, register_pro_classes
from dzrobot.envs.mujoco.simulator import check_versions
from dzrobot.errors import ConfigError

GOAL, OWN_GOAL = "goal", "own_goal"
"""What :class:`~dzrobot.rollout.perturbation.PerturbableScene` calls the axis along which another
object is asked for, and whether the goal of the task held then."""


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
        goal: ``"own"``, the task's, or ``"any"``: the seed draws which object of the scene the
            instruction asks for, and the goal is made for that object.
        placement: ``"stored"``, one of the task's initial states, or ``"sampled"``: the seed
            draws a new one, objects as the problem file places them and joints as LIBERO did for
            the stored ones. Demonstrations from sampled starts leave every stored one unseen.
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
        goal: Literal["own", "any"] = "own",
        placement: Literal["stored", "sampled"] = "stored",
        resolution: int = 256,
        render_mode: str | None = None,
        settle_steps: int = 10,
        cameras: bool = True,
        quality: Literal["full", "draft"] = "full",
        stop_on_success: bool = True,
    ) -> None:
        arguments = arguments_of(locals())
        check_task(suite, task_id)
        _refuse_other(prompt=(prompt, (None, "name", "bddl")), goal=(goal, ("own", "any")),
                      placement=(placement, ("stored", "sampled")))  # fmt: skip
        self._is_sampled = placement == "sampled"
        super().__init__(arguments, DRAWN if self._is_sampled else SUITES[suite].init_states)
        libero_folder()
        check_versions()
        refuse_unrunnable(suite, task_id)
        self._task = load_task(suite, task_id)
        self.prompt = default_prompt(suite) if prompt is None else prompt
        self._language = self._task.language(self.prompt)
        self._init_states: np.ndarray | None = None
        self._goals = asked_goals(self._task.problem(), self._language)
        if len(self._goals) > 1:
            self.perturbations = (*AXES, GOAL)
        elif goal == "any":
            raise ConfigError(
                f"goal='any', but task {task_id} of {suite} does not ask for one object among "
                "several: leave it out, or take a task of libero_object"
            )
        self._draws_goal = goal == "any"
        self._swap: tuple[int, int] | None = None
        self._asked: AskedGoal | None = None
        self._own_held = False

    @property
    def task(self) -> str:
        """The instruction."""
        return self._language if self._asked is None else self._asked.language

    @property
    def scene_objects(self) -> tuple[str, ...]:
        """Names of the objects that the task's problem file puts into the scene."""
        return tuple(sorted(self._task.problem().objects))

    def perturb(self, axis: str | None, level: int, seed: int) -> None:
        """Make the next resets harder, as of :class:`ArmEnv`.

        The axis ``goal`` asks for another object of the scene, the seed's and level's choice.
        ``info["robot"]["own_goal"]`` then says whether the task's own goal held at any step.

        Raises:
            ConfigError: no such axis.
        """
        swapped = axis == GOAL and GOAL in self.perturbations
        super().perturb(None if swapped else axis, level, seed)
        self._swap = (level, seed) if swapped else None

    def _open(self, seed: int) -> Simulation:
        task = self._task
        check_models(task)
        libero = import_libero()
        if PACKAGES[task.suite] is PRO:
            register_pro_classes()
        self._init_states = task.states()
        scene = libero.TASK_MAPPING[task.problem().scene]
        with as_file(task.bddl) as path:
            noise = "default" if self._is_sampled else None
            arguments = {"bddl_file_name": str(path), "initialization_noise": noise}
            return Simulation(scene, arguments, self._image, seed, self._setup)

    def _begin(self, sim: Simulation, start: int) -> Raw:
        assert self._init_states is not None, "opened with its states"
        # Fixtures, controller goals and the gripper are not in the stored state: reset them first.
        raw = sim.reset(self._draw_seed())
        self._ask(sim)
        if not self._is_sampled:
            raw = sim.restore(self._init_states[start])
        if self._task.variant is None:
            return raw
        apply_variant(sim, self._task.variant)
        # A step looks by itself; to look before it would move the times of all later looks.
        return raw if self._settle_steps else sim.refresh()

    def _ask(self, sim: Simulation) -> None:
        """Choose what the episode asks for, and let the scene judge it."""
        was_asked = self._asked is not None
        self._asked, self._own_held = None, False
        if not self._goals:
            return
        if self._swap is not None:
            self._asked = another_goal(self._goals, *self._swap)
        elif self._draws_goal:
            self._asked = self._goals[int(self.np_random.integers(len(self._goals)))]
        if was_asked or self._asked is not None:
            chosen = self._asked or self._goals[0]
            sim.env.parsed_problem["goal_state"] = [list(chosen.predicate)]

    def _info(self, progress: GoalProgress, *, success: bool) -> Info:
        info = super()._info(progress, success=success)
        if self._asked is not None:
            own = list(self._goals[0].predicate)
            self._own_held |= bool(self.simulation.env._eval_predicate(own))
            info["robot"] = {OWN_GOAL: self._own_held}
        return info


def _refuse_other(**given: tuple[Any, Sequence[Any]]) -> None:
    """Raise ConfigError for a value that is none of those allowed."""
    for name, (value, allowed) in given.items():
        if value not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise ConfigError(f"{name}={value!r} must be one of {listed}.")
