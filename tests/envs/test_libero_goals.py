"""Another object of a LIBERO scene asked for: instruction, goal, starts and the study of both."""

import json

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401
from dzrobot.cli import main
from dzrobot.envs.libero.bddl import another_goal, asked_goals, read_problem
from dzrobot.errors import ConfigError
from dzrobot.rollout.perturbation import LEVELS

PROBLEM = """(define (problem Floor) (:domain robosuite) (:language Pick the milk)
  (:regions (bin (:target floor)) (contain_region (:target basket_1)))
  (:fixtures floor - floor)
  (:objects milk_1 - milk basket_1 - basket cream_cheese_1 - cream_cheese
            butter_1 butter_2 - butter ketchup_1 - ketchup)
  (:goal (And ({goal}))))"""


def goals(goal="In milk_1 basket_1_contain_region", language="pick up the milk and place it"):
    return asked_goals(read_problem(PROBLEM.format(goal=goal)), language)


def test_every_other_object_that_can_be_told_apart_is_a_goal():
    assert [(goal.language, goal.predicate[1]) for goal in goals()] == [
        ("pick up the milk and place it", "milk_1"),
        ("pick up the cream cheese and place it", "cream_cheese_1"),
        ("pick up the ketchup and place it", "ketchup_1"),
    ]
    assert {goal.predicate[::2] for goal in goals()} == {("in", "basket_1_contain_region")}


@pytest.mark.parametrize(
    "words",
    [
        {"goal": "In milk_1 basket_1_contain_region) (In ketchup_1 basket_1_contain_region"},
        {"goal": "Open basket_1"},
        {"language": "pick up the carton"},
        {"language": "put the milk beside the milk"},
    ],
)
def test_a_task_that_asks_for_no_single_named_object_has_none(words):
    assert goals(**words) == ()


def test_levels_of_one_draw_ask_for_different_objects_and_never_for_the_own():
    known = (*goals(), *goals()[1:], *goals()[1:])
    drawn = [another_goal(known, 1, seed).predicate for seed in range(20)]
    assert len(set(drawn)) == 2
    assert known[0].predicate not in drawn
    five = goals()[:1] * 1 + tuple(range(5))
    assert {another_goal(five, level, 3) for level in LEVELS} == set(range(5))


@pytest.fixture(scope="module")
def sampled(libero_assets):
    env = gym.make(
        "dzrobot/libero_object-v0", task_id=3, cameras=False, goal="any", placement="sampled"
    )
    yield env
    env.close()


def placed(env):
    scene = env.unwrapped.simulation.env
    return np.concatenate([scene.sim.data.body_xpos[body] for body in scene.obj_body_id.values()])


@pytest.mark.libero
def test_a_seed_draws_start_and_object_and_the_scene_judges_that_object(sampled):
    asked = {}
    for seed in (5, 6, 7, 8, 5):
        observation, info = sampled.reset(seed=seed)
        state = observation["state.state"]
        there, task = placed(sampled), observation["annotation.task"]
        assert info["task"] == task
        scene = sampled.unwrapped.simulation.env
        (predicate,) = scene.parsed_problem["goal_state"]
        assert predicate[1].removesuffix("_1").replace("_", " ") in task
        if seed in asked:
            np.testing.assert_array_equal(asked[seed][0], there)
            np.testing.assert_array_equal(asked[seed][1], state)
        asked[seed] = (there, state, task)
    assert len({task for _, _, task in asked.values()}) > 1
    assert np.std([there for there, _, _ in asked.values()], axis=0).max() > 1e-3
    assert np.std([state for _, state, _ in asked.values()], axis=0)[:3].min() > 1e-4


@pytest.mark.libero
def test_what_a_task_does_not_have_is_refused(libero_assets):
    with pytest.raises(ConfigError, match="does not ask for one object"):
        gym.make("dzrobot/libero_goal-v0", task_id=0, goal="any")
    with pytest.raises(ConfigError, match="placement='here' must be one of 'stored', 'sampled'"):
        gym.make("dzrobot/libero_goal-v0", task_id=0, placement="here")
    spatial = gym.make("dzrobot/libero_spatial-v0", task_id=0).unwrapped
    with pytest.raises(ConfigError, match="axis 'goal'"):
        spatial.perturb("goal", 1, 0)


@pytest.mark.long
@pytest.mark.libero
def test_an_expert_takes_what_it_is_asked_for_and_leaves_the_tasks_own(
    libero_assets, tmp_path, capsys
):
    words = ["eval", "--suite", "libero_object", "--tasks", "3,8", "--episodes", "2",
             "--policy", "expert", "--env-arg", "cameras=False", "--videos", "none",
             "--workers", "0", "--perturb", "goal", "--output", str(tmp_path)]  # fmt: skip
    assert main(words) == 0
    assert "goal:3: the task's own" in capsys.readouterr().out
    found = json.loads((tmp_path / "goals.json").read_text())
    assert {name: (one["successes"], one["episodes"]) for name, one in found.items()} == {
        "unperturbed: asked": (4, 4), "goal:3: asked": (4, 4), "goal:3: the task's own": (0, 4),
    }  # fmt: skip
    # What became of the task's own goal is kept with every episode.
    records = [json.loads(line) for line in (tmp_path / "goal-3" / "records.jsonl").open()]
    assert all(record["robot"] == {"own_goal": False} for record in records)
    asked = {record["task"] for record in records}
    assert not asked & {json.loads(line)["task"] for line in
                        (tmp_path / "unperturbed" / "records.jsonl").open()}  # fmt: skip
