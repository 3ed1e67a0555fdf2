"""The simulators say how an episode failed; scripted failures are told apart."""

import re

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401
from dzrobot.envs.episodes import FailureClass
from dzrobot.envs.expert import Expert, GraspPhase
from dzrobot.envs.libero.goal_progress import JOINT_RANGES, PLACED
from dzrobot.registration import LIBERO_SUITES

pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")

OPEN, CLOSE = -1.0, 1.0


class Script:
    """Moves the hand in one environment by what the scene holds."""

    def __init__(self, name, **options):
        self.env = gym.make(name, cameras=False, max_episode_steps=1000, **options)
        self.info = self.env.reset(seed=0)[1]
        self.expert = Expert(self.env)

    @property
    def robosuite(self):
        return self.env.unwrapped.simulation.env

    @property
    def failure(self):
        return self.info["failure_class"]

    def step(self, action):
        self.info = self.env.step(np.asarray(action, np.float32))[4]

    def body(self, name, *, off=(0, 0, 0)):
        sim = self.robosuite.sim
        return np.add(off, sim.data.body_xpos[sim.model.body_name2id(name)])

    @property
    def hand(self):
        sites = self.robosuite.sim.data.site_xpos
        return np.array(sites[self.robosuite.robots[0].eef_site_id])

    def go(self, goal, gripper, steps=40):
        """Bring the hand to ``goal`` (3,), without turning it."""
        for _ in range(steps):
            away = np.asarray(goal) - self.hand
            self.step([*np.clip(away / 0.03, -1, 1), 0, 0, 0, gripper])

    def rest(self, steps, gripper):
        for _ in range(steps):
            self.step([0, 0, 0, 0, 0, 0, gripper])

    def until(self, phase, limit=200):
        """Let the expert act until it begins ``phase``."""
        for _ in range(limit):
            if self.expert._phase is phase:
                return
            self.step(self.expert.act({}))
        raise AssertionError(f"the expert never came to {phase}")


@pytest.fixture
def script():
    made = []

    def make(name, **options):
        made.append(Script(name, **options))
        return made[-1]

    yield make
    for one in made:
        one.env.close()


def test_lift_tells_scripted_failures_apart(script):
    lift = script("dzrobot/lift-v0", stop_on_success=False)
    assert lift.failure == FailureClass.NEVER_REACHED
    # Closed fingers that push it touch it with both pads, and hold nothing.
    lift.go(lift.body("cube_main", off=(-0.12, 0, 0.05)), CLOSE, 20)
    lift.go(lift.body("cube_main", off=(-0.1, 0, 0)), CLOSE, 15)
    assert lift.failure == FailureClass.NEVER_REACHED
    lift.go(lift.body("cube_main", off=(0.06, 0, 0)), CLOSE, 20)
    assert lift.failure == FailureClass.NOT_GRASPED


def test_lift_knows_a_hold_a_drop_and_a_goal_that_was_lost(script):
    lift = script("dzrobot/lift-v0", stop_on_success=False)
    lift.until(GraspPhase.LIFT)
    assert lift.failure == FailureClass.HELD
    lift.rest(12, OPEN)
    assert lift.failure == FailureClass.DROPPED
    lift.expert.reset()
    seen = set()
    while not lift.info["is_success"]:
        lift.step(lift.expert.act({}))
        seen.add(lift.failure)
    assert FailureClass.NEAR_GOAL in seen
    assert lift.failure is None
    lift.rest(12, OPEN)
    assert lift.failure == FailureClass.GOAL_LOST
    lift.info = lift.env.reset(seed=1)[1]
    assert lift.failure == FailureClass.NEVER_REACHED, "nothing of the last episode is left"


@pytest.mark.long
@pytest.mark.libero
def test_an_object_that_was_not_asked_for_is_the_wrong_one(libero_assets, script):
    libero = script("dzrobot/libero_object-v0", task_id=0)
    asked = libero.robosuite.parsed_problem["goal_state"]
    other = next(n for n in libero.robosuite.objects_dict if n not in (asked[0][1], "basket_1"))
    # The expert takes what it is told to; what the episode asks for was settled at its start.
    libero.robosuite.parsed_problem["goal_state"] = [[asked[0][0], other, asked[0][2]]]
    libero.until(GraspPhase.LIFT)
    assert libero.failure == FailureClass.WRONG_OBJECT
    libero.robosuite.parsed_problem["goal_state"] = asked
    libero.rest(8, OPEN)
    libero.expert.reset()
    libero.until(GraspPhase.CARRY)
    assert libero.failure == FailureClass.HELD
    libero.until(GraspPhase.LOWER)
    assert libero.failure == FailureClass.NEAR_GOAL
    libero.go(libero.body(f"{asked[0][1]}_main", off=(0, -0.25, 0.1)), CLOSE, 20)
    libero.rest(10, OPEN)
    assert libero.failure == FailureClass.DROPPED


@pytest.mark.long
@pytest.mark.libero
def test_of_several_parts_the_one_that_is_missing_decides(libero_assets, script):
    libero = script("dzrobot/libero_object-v0", task_id=0, settle_steps=0)
    robosuite = libero.robosuite
    predicate, first, basket = robosuite.parsed_problem["goal_state"][0]
    second = next(n for n in robosuite.objects_dict if n not in (first, "basket_1"))
    robosuite.parsed_problem["goal_state"] = [[predicate, n, basket] for n in (first, second)]
    libero.info = libero.env.reset(seed=0)[1]
    place = robosuite.object_states_dict[basket].get_geom_state()["pos"].copy()

    def put(name, where):
        robosuite.sim.data.set_joint_qpos(f"{name}_joint0", [*where, 1, 0, 0, 0])
        libero.rest(1, OPEN)

    away = libero.body(f"{first}_main")
    put(first, place)
    assert libero.failure == FailureClass.NEVER_REACHED, "of the second"
    put(first, away)
    assert libero.failure == FailureClass.GOAL_LOST
    put(first, place)
    put(second, place)
    assert libero.failure is None


@pytest.mark.long
@pytest.mark.libero
def test_a_drawer_is_moved_rather_than_grasped(libero_assets, script):
    libero = script("dzrobot/libero_goal-v0", task_id=0, settle_steps=0)
    robosuite = libero.robosuite

    def pull(level, to):
        robosuite.sim.data.set_joint_qpos(f"wooden_cabinet_1_{level}_level", to)
        libero.rest(1, CLOSE)

    def touch(handle):
        """Come down on a handle of the open drawer, and go up again."""
        libero.go([*handle[:2], 1.2], CLOSE, 25)
        libero.go(handle, CLOSE, 25)
        libero.go([*handle[:2], 1.2], CLOSE, 12)

    pull("top", -0.14)
    touch([0.029, 0.01, 1.09])
    pull("top", -0.14)
    assert libero.failure == FailureClass.WRONG_OBJECT
    pull("top", 0.0)
    pull("middle", -0.12)
    assert libero.failure == FailureClass.NEVER_REACHED, "it moved, and no hand was there"
    touch([0.029, 0.0, 0.99])
    pull("middle", -0.12)
    assert libero.failure == FailureClass.NEAR_GOAL
    pull("middle", -0.03)
    assert libero.failure == FailureClass.NOT_GRASPED
    pull("middle", -0.155)
    assert libero.failure is None


@pytest.mark.libero
@pytest.mark.parametrize("suite", LIBERO_SUITES, ids=lambda suite: suite.name)
def test_every_goal_of_every_suite_is_of_a_known_kind(libero_assets, suite):
    from dzrobot.envs.libero.suites import load_task

    words = set()
    for task_id in range(suite.tasks):
        text = load_task(suite.name, task_id).bddl.read_text()
        goal = text[text.index("(:goal") :]
        words |= {word.lower() for word in re.findall(r"\(\s*(?!:|And)(\w+)", goal)}
    assert words
    assert words <= {*PLACED, *JOINT_RANGES}
