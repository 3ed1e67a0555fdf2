"""LIBERO-PRO and LIBERO-Plus: what their files say, what cannot be run, and what is simulated."""

import hashlib
import io
import re
import types
import zipfile
from collections import Counter
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from conftest import need_tasks, skip_or_fail
from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.libero import listing, suites, task_packages
from dzrobot.envs.libero.assets import pro_manifest, verify
from dzrobot.envs.libero.bddl import read_problem
from dzrobot.envs.libero.listing import describe, list_tasks
from dzrobot.envs.libero.plus_variants import _move_camera, variant_of
from dzrobot.envs.libero.suites import axis_of
from dzrobot.envs.libero.task_packages import PLUS, PRO
from dzrobot.errors import ConfigError, ProtocolError, SimulatorError
from dzrobot.registration import PLUS_SUITES, PRO_SUITES, SUITES
from dzrobot.rollout.environment import EnvironmentFacts
from dzrobot.rollout.evaluation.card import build_card, refuse_unlike, tasks_by_axis
from dzrobot.rollout.evaluation.report import summarize
from dzrobot.rollout.evaluation.tables import table
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes

MODELS = "libero_object_object"
"""A suite with objects that LIBERO does not have."""

CORE = [suite.name for suite in PRO_SUITES if suite.name.split("_")[2] != "with"]
PROBLEM = """
(define (problem LIBERO_Tabletop_Manipulation)  ; a comment (with a parenthesis
  (:domain robosuite)
  (:language Put the Bowl on the plate)
  (:regions (top_side (:target wooden_cabinet_1))
            (front (:target main_table) (:ranges ((0 0 1 1)))))
  (:fixtures main_table - table wooden_cabinet_1 - wooden_cabinet)
  (:objects akita_black_bowl_1 akita_black_bowl_2 - akita_black_bowl plate_1 - plate)
  (:init (On plate_1 main_table_front))
  (:goal (And (On akita_black_bowl_1 plate_1) (Open wooden_cabinet_1_top_side)))
)
"""


class TestProblemFiles:
    def test_what_one_says(self):
        problem = read_problem(PROBLEM)
        assert problem.scene == "libero_tabletop_manipulation"
        assert problem.language == "put the bowl on the plate"
        assert problem.classes == {"wooden_cabinet", "akita_black_bowl", "plate"}
        expected = (("on", "akita_black_bowl_1", "plate_1"), ("open", "wooden_cabinet_1_top_side"))
        assert problem.goal == expected
        assert problem.faults == ()

    @pytest.mark.parametrize(
        ("goal", "fault"),
        [
            ("(On akita_black_bowl_3 plate_1)", "about akita_black_bowl_3, which the scene does"),
            ("(And (On plate_1))", r"\(on plate_1\) is none of LIBERO's predicates"),
            ("(And (Beside plate_1 akita_black_bowl_1))", "none of LIBERO's predicates"),
            ("(Or (On plate_1 main_table_front) (Open plate_1))", "not a list of predicates"),
            ("(And)", "does not parse"),
            ("", "no goal"),
        ],
    )
    def test_a_goal_that_cannot_be_judged_is_named(self, goal, fault):
        whole = PROBLEM[: PROBLEM.index("(:goal")]
        (found,) = read_problem(f"{whole} (:goal {goal}))").faults
        assert re.search(fault, found)

    @pytest.mark.parametrize(
        "text", ["", "(define", "(define))", "(problem x)", "(define (problem x))"]
    )
    def test_what_is_no_problem_file_is_refused(self, text):
        with pytest.raises(SimulatorError):
            read_problem(text)


class TestVariants:
    BASE = "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate"

    @pytest.mark.parametrize(
        ("ending", "axis", "file", "states"),
        [
            ("_view_45_15_100_0_0_initstate_0", "camera", "", "libero_spatial/{}"),
            ("_view_0_0_100_0_0_initstate_13", "robot_init", "", "libero_spatial/{}"),
            ("_view_0_0_100_0_0_initstate_0_noise_3", "noise", "", "libero_spatial/{}"),
            ("_language_2_view_0_0_100_0_0_initstate_0", "language", "_language_2",
             "libero_spatial/{}"),
            ("_light_7", "light", "_light_7", "libero_spatial/{}"),
            ("_table_1", "texture", "_table_1", "libero_spatial/{}"),
            ("_tb_12", "texture", "_tb_12", "libero_spatial/{}"),
            ("_add_10", "layout", "_add_10", "libero_newobj/libero_spatial/{}_add_10"),
            ("_level2_sample3", "layout", "_level2_sample3",
             "libero_newobj/libero_spatial/{}_level2_sample3"),
        ],
    )  # fmt: skip
    def test_a_name_says_what_was_changed(self, ending, axis, file, states):
        variant = variant_of("libero_spatial", self.BASE + ending)
        assert variant.axis == axis
        assert variant.problem == self.BASE + file
        assert variant.states == states.format(self.BASE) + ".pruned_init"

    @pytest.mark.parametrize("ending", ["", "_view_1_0_100_0_0_initstate_2"])
    def test_a_name_that_changes_nothing_or_two_things_is_refused(self, ending):
        with pytest.raises(SimulatorError, match="which one thing"):
            variant_of("libero_spatial", self.BASE + ending)

    def test_the_camera_moves_around_a_point_above_the_table(self):
        place, turn = [0.6, 0.0, 1.6], [0.5, 0.5, 0.5, 0.5]

        def moved(*view):
            model = types.SimpleNamespace(cam_pos=np.array([place]), cam_quat=np.array([turn]))
            inner = types.SimpleNamespace(_model=model, camera_name2id=lambda name: 0)
            sim = types.SimpleNamespace(model=inner)
            _move_camera(types.SimpleNamespace(camera_names=["agentview"], sim=sim), view)
            return model.cam_pos[0], model.cam_quat[0]

        np.testing.assert_allclose(moved(90, 0, 100, 0, 0)[0], [0, 0.6, 1.6], atol=1e-4)
        np.testing.assert_allclose(moved(0, 0, 150, 0, 0)[0], [0.9, 0, 2.0], atol=1e-4)
        # A tilt by 90 degrees turns what is before the point to what is above it.
        np.testing.assert_allclose(moved(0, 90, 100, 0, 0)[0], [-0.8, 0, 1.4], atol=1e-4)
        there, turned = moved(0, 0, 100, 0, 350)
        np.testing.assert_allclose(there, place, atol=1e-4)
        assert np.arccos(abs(turned @ turn)) == pytest.approx(np.radians(5), abs=1e-3)


def test_suites_of_pro_are_named_after_base_and_axis():
    assert len(CORE) == 16
    assert Counter(map(axis_of, CORE)) == dict.fromkeys(("swap", "object", "lan", "task"), 4)
    assert axis_of("libero_10_with_milk") == "with_milk"
    assert axis_of("libero_goal") is None
    steps = {name: SUITES[name].max_steps for name in ("libero_10_swap", "libero_plus_goal")}
    assert steps == {"libero_10_swap": 520, "libero_plus_goal": 300}


def test_an_unknown_source_of_instructions_is_refused():
    with pytest.raises(ConfigError, match="prompt='file' must be one of None, 'name', 'bddl'"):
        gym.make("dzrobot/libero_goal_swap-v0", prompt="file")


NAMES = [f"turn_on_number_{n}" for n in range(10)]


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A wheel in place of LIBERO-PRO's; tasks 1 to 4 of its ``libero_goal_swap`` are broken."""
    pytest.importorskip("libero", reason="hf-libero is missing: run `dzrobot libero setup`")
    states = io.BytesIO()
    np.savez(states, states=np.zeros((50, 9)))
    empty = io.BytesIO()
    np.savez(empty, states=np.zeros(0))
    files = {
        "benchmark/libero_suite_task_map.py": f"libero_task_map = {{'libero_goal_swap': {NAMES}}}",
        "envs/objects/hope_objects.py": "@register_object\nclass Ghost(X): pass\n",
    }
    for n, name in enumerate(NAMES):
        files[f"bddl_files/libero_goal_swap/{name}.bddl"] = PROBLEM
        files[f"init_files/libero_goal_swap/{name}.pruned_init.npz"] = states.getvalue()
        if n == 1:
            del files[f"bddl_files/libero_goal_swap/{name}.bddl"]
        if n == 2:
            wrong = PROBLEM.replace("(On akita_black_bowl_1 plate_1)", "(On it)")
            files[f"bddl_files/libero_goal_swap/{name}.bddl"] = wrong
        if n == 3:
            files[f"init_files/libero_goal_swap/{name}.pruned_init.npz"] = empty.getvalue()
        if n == 4:
            wrong = PROBLEM.replace("plate_1 - plate", "plate_1 - ghost ball_1 - basketball")
            files[f"bddl_files/libero_goal_swap/{name}.bddl"] = wrong
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path))
    PRO.wheel.parent.mkdir()
    with zipfile.ZipFile(PRO.wheel, "w") as wheel:
        for path, content in files.items():
            wheel.writestr(PRO.root + path, content)
    package = replace(PRO, sha256=hashlib.sha256(PRO.wheel.read_bytes()).hexdigest())
    for module in (suites, listing, task_packages):
        monkeypatch.setattr(module, "PRO", package)
    monkeypatch.setitem(suites.PACKAGES, "libero_goal_swap", package)
    monkeypatch.setitem(
        SUITES, "libero_goal_swap", replace(SUITES["libero_goal_swap"], assets=None)
    )
    return package


class TestTasksThatCannotBeRun:
    def test_they_are_named_when_listed(self, broken, capsys):
        listed = list(list_tasks("libero_goal_swap"))
        assert {n: task.faults for n, task in enumerate(listed) if task.faults} == {
            1: ("no problem file",),
            2: ("goal does not parse: (on it) is none of LIBERO's predicates",),
            3: ("no starts",),
            4: (
                "objects basketball are of no known class",
                "objects ghost have no models in any package",
            ),
        }
        assert [task.starts for task in listed] == [50, 50, 50, 0, *[50] * 6]
        assert listed[0].language == "put the bowl on the plate"
        assert listed[0].has_own_language
        assert main(["libero", "list", "--suite", "libero_goal_swap"]) == 0
        said = capsys.readouterr().out
        assert "no starts" in said
        assert "swap: --tasks 0,5-9\n" in said

    @pytest.mark.parametrize("task", [1, 2, 3, 4])
    def test_they_are_refused_when_made(self, broken, task):
        pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
        with pytest.raises(SimulatorError, match=f"task {task} of libero_goal_swap cannot be run"):
            gym.make("dzrobot/libero_goal_swap-v0", task_id=task)

    def test_an_evaluation_of_them_is_refused_before_it_begins(self, broken, capsys):
        pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
        command = ["eval", "--suite", "libero_goal_swap", "--policy", "hold", "--episodes", "1"]
        assert main([*command, "--output", str(broken.wheel.parent / "results")]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "4 of 10 tasks of libero_goal_swap cannot be run (task 1: no pro" in said
        assert "which --tasks can" in said
        assert not (broken.wheel.parent / "results" / "card.json").exists()

    def test_others_of_the_suite_are_described(self, broken):
        assert describe("libero_goal_swap", [0, 5]) == {"axes": {"swap": [0, 5]}}


class TestCards:
    def card(self, prompt, suite="libero_goal_swap"):
        spec = EvalSpec(protocol=PROTOCOLS["custom"], suites=(suite,), tasks=(0, 5), episodes=1)
        env = SUITES[suite].env
        facts = {env: EnvironmentFacts(embodiment=load_embodiment("libero_sim"), prompt=prompt)}
        return build_card(spec, plan_episodes(spec), {}, {env: {}}, facts)

    def test_results_of_unlike_prompts_do_not_compare(self, broken):
        one, other = self.card("bddl"), self.card("name")
        assert one["suites"]["libero_goal_swap"]["prompt"] == "bddl"
        refuse_unlike(one, self.card("bddl"), "a", "b")
        with pytest.raises(ProtocolError, match=r'goal_swap\.prompt: "bddl" in a, "name" b'):
            refuse_unlike(one, other, "a", "b")

    def test_an_axis_is_a_row_of_the_table(self, broken):
        axes = tasks_by_axis(self.card("bddl"))
        assert axes == {"swap": {("libero_goal_swap", 0), ("libero_goal_swap", 5)}}
        spec = EvalSpec(
            protocol=PROTOCOLS["custom"], suites=("libero_goal_swap",), tasks=(0, 1, 5), episodes=2
        )
        summary = summarize([], plan_episodes(spec), axes=axes)
        (row,) = summary.axes
        assert (row.suite, row.missing, summary.total.missing) == ("axis swap", 4, 6)
        assert summary.results()["axes"][0]["suite"] == "axis swap"
        assert "axis swap" in map(str, table(summary, "").columns[0].cells)


@pytest.fixture(scope="module")
def pro(libero_assets):
    """LIBERO-PRO's own wheel, and its models."""
    need_tasks(PRO)
    verdict = verify(libero_assets, pro_manifest())
    if verdict.missing or verdict.altered:
        skip_or_fail("pro", f"{verdict.summary}; run `dzrobot libero setup --pro`")


@pytest.mark.libero
class TestPublishedTasks:
    def test_all_of_pro(self, libero_assets):
        need_tasks(PRO)
        listed = {suite.name: list(list_tasks(suite.name)) for suite in PRO_SUITES}
        core = [task for name in CORE for task in listed[name]]
        assert len(core) == 160
        assert not [task for task in core if task.faults or task.starts != 50]
        assert sum(task.has_own_language for task in core) == 130
        runs = {name: sum(not task.faults for task in tasks) for name, tasks in listed.items()}
        whole = {name for name, count in runs.items() if count == 10} - set(CORE)
        assert sum(runs.values()) == 258
        assert {axis_of(name) for name in whole} == {"with_mug", "with_yellow_book", "with_milk"}
        assert runs["libero_10_with_milk"] == 8
        assert not {task.faults for task in listed["libero_10_with_milk"]} - {
            (),
            ("no starts",),
        }

    def test_all_of_plus(self, libero_assets):
        need_tasks(PLUS)
        listed = [task for suite in PLUS_SUITES for task in list_tasks(suite.name)]
        assert len(listed) == 10_030
        assert all(task.language and task.starts for task in listed)
        assert Counter(task.task.axis for task in listed) == {
            "camera": 1599, "robot_init": 1550, "language": 1537, "layout": 1525,
            "light": 1142, "texture": 1076, "noise": 1601,
        }  # fmt: skip
        assert Counter(task.task.axis for task in listed if not task.faults) == {
            "camera": 1599, "robot_init": 1550, "language": 1537, "layout": 696,
        }  # fmt: skip

    def test_instructions_are_the_problem_files_unless_asked_otherwise(self, pro):
        said = {}
        for suite in ("libero_object", "libero_object_lan", "libero_object_task"):
            for prompt in (None, "name", "bddl"):
                env = gym.make(f"dzrobot/{suite}-v0", prompt=prompt)
                said[suite, prompt] = (env.unwrapped.prompt, env.unwrapped.task)
                env.close()
        name = "pick up the alphabet soup and place it in the basket"
        assert said["libero_object", None] == ("name", name)
        assert said["libero_object_lan", "name"] == ("name", name)
        wording = "grab alphabet soup and put it into basket"
        assert said["libero_object_lan", None] == ("bddl", wording)
        other = "pick the cream cheese and place it in the basket"
        assert said["libero_object_task", None] == ("bddl", other)

    @pytest.mark.parametrize(
        "suite",
        [
            "libero_object_object",
            *(
                pytest.param(name, marks=pytest.mark.long)
                for name in CORE
                if name[-7:] != "_object"
            ),
        ],
    )
    def test_a_task_is_simulated(self, pro, suite):
        first = played(suite, 0)
        second = played(suite, 0)
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.long
    @pytest.mark.parametrize("axis", ["camera", "robot_init", "language", "layout"])
    def test_a_task_of_plus_is_simulated(self, libero_assets, axis):
        need_tasks(PLUS)
        number = next(
            task.task.task_id
            for task in list_tasks("libero_plus_object")
            if task.task.axis == axis and not task.faults
        )
        image, state = played("libero_plus_object", number)
        plain_image, plain_state = played("libero_object", 0)
        name = suites.load_task("libero_plus_object", number).name
        assert name.startswith(suites.load_task("libero_object", 0).name)
        assert np.array_equal(image, plain_image) == (axis == "language")
        # A changed layout has a stored start of its own.
        assert np.array_equal(state, plain_state) == (axis in ("camera", "language"))


def played(suite, task):
    """Return image and state after a few steps; both are what the space says."""
    env = gym.make(
        f"dzrobot/{suite}-v0", task_id=task, resolution=64, quality="draft", settle_steps=1
    )
    seen = env.reset(seed=0, options={"init_state_id": 0})[0]
    assert seen in env.observation_space
    seen = env.step(np.zeros(7, np.float32))[0]
    env.close()
    return seen["video.image"], seen["state.state"]
