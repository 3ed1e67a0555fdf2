"""What holds for every registered environment before anything is opened, and in company."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv
from scripts import printed_elsewhere

import dzrobot  # noqa: F401
from conftest import need_tasks
from dzrobot.envs.episodes import TEXT_LIMIT, Instruction
from dzrobot.envs.libero.listing import list_tasks
from dzrobot.envs.libero.suites import PACKAGES
from dzrobot.errors import DzrobotError, ModalityError
from dzrobot.registration import PLUS_SUITES, PRO_SUITES

# Of most suites of LIBERO-PRO with foreign objects, no task can be run.
LEFT_OUT = {suite.env for suite in PRO_SUITES if "_with_" in suite.name}
# It needs a server: test_remote_env.py.
LEFT_OUT.add("dzrobot/remote-v0")
IDS = sorted(
    name
    for name in gym.registry
    if name.startswith(("dzrobot/", "Franka-PnP")) and name not in LEFT_OUT
)


@pytest.fixture
def made(request):
    if "libero" in request.param:
        request.getfixturevalue("libero_assets")
    elif "lift" in request.param:
        pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    env = gym.make(request.param, **first_task(request.param))
    yield env
    env.close()


def first_task(name):
    """Return the arguments for the first task that can be run, of LIBERO-PRO and LIBERO-Plus."""
    suite = next((suite.name for suite in (*PRO_SUITES, *PLUS_SUITES) if suite.env == name), None)
    if suite is None:
        return {}
    need_tasks(PACKAGES[suite])
    runs = (task.task.task_id for task in list_tasks(suite) if not task.faults)
    return {"task_id": next(runs)}


@pytest.mark.sampled
@pytest.mark.parametrize("made", IDS, indirect=True)
def test_copies_and_pickles_before_it_connects(made):
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(other.unwrapped) is type(made.unwrapped)
        assert other.unwrapped is not made.unwrapped
        assert other.observation_space == made.observation_space
        assert other.unwrapped.task == made.unwrapped.task
        other.close()


def test_a_copied_franka_is_of_the_same_workcell_and_connects_by_itself():
    values = {"task": "stack the cups", "limits": {"speed_m_s": 0.15}}
    env = gym.make("dzrobot/Franka-PnP-fake-v0", **values)
    seen = env.reset(seed=4)[0]
    other = pickle.loads(pickle.dumps(env))
    assert other.unwrapped.config == env.unwrapped.config
    again = other.reset(seed=4)[0]
    assert again["annotation.task"] == "stack the cups"
    np.testing.assert_array_equal(again["video.image"], seen["video.image"])


ACTIONS = {
    "numpy": np.full(7, 0.25, np.float32),
    "float64": np.full(7, 0.25),
    "list": [0.25] * 7,
    "tuple": (0.25,) * 7,
    "tensor": torch.full((7,), 0.25),
}
BAD_ACTIONS = {
    "gradient": torch.zeros(7, requires_grad=True),
    "bfloat16": torch.zeros(7, dtype=torch.bfloat16),
    "meta": torch.zeros(7, device="meta"),
    "none": None,
    "text": "up",
    "texts": ["up"] * 7,
    "ragged": [[1], [2, 3]],
    "dict": {"x": 1},
    "short": np.zeros(6, np.float32),
    "nan": np.full(7, np.nan),
    "objects": np.array([object()] * 7),
}
LIGHT = ("dzrobot/point-v0", "dzrobot/Franka-PnP-fake-v0")


@pytest.mark.parametrize("name", LIGHT)
def test_kinds_of_actions(name):
    after = []
    for action in ACTIONS.values():
        env = gym.make(name, disable_env_checker=True)
        env.reset(seed=1)
        after.append(env.step(action)[0]["state.state"])
        env.close()
    for state in after[1:]:
        np.testing.assert_array_equal(state, after[0])


@pytest.mark.parametrize("kind", BAD_ACTIONS)
@pytest.mark.parametrize("name", LIGHT)
def test_no_action_ends_in_a_foreign_error(name, kind):
    env = gym.make(name, disable_env_checker=True)
    env.reset(seed=1)
    if kind == "nan" and "Franka" in name:
        assert env.step(BAD_ACTIONS[kind])[4]["abort"] == "invalid_action"
    else:
        with pytest.raises(DzrobotError, match="an action is 7"):
            env.step(BAD_ACTIONS[kind])
    env.close()


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("dzrobot/point-v0", "resolutoin", "resolution"),
        ("dzrobot/lift-v0", "resolutoin", "resolution"),
        ("dzrobot/droid-lift-v0", "setle_steps", "settle_steps"),
        ("dzrobot/libero_spatial-v0", "taskid", "task_id"),
        ("Franka-PnP-v0", "workcel", "workcell"),
    ],
)
def test_a_misspelled_argument_is_told_by_the_nearest(name, given, meant):
    with pytest.raises(DzrobotError, match=f"takes no argument '{given}'.* mean '{meant}'"):
        gym.make(name, **{given: 1})


AFTER_DRAWING = """
import gymnasium as gym, dzrobot
from dzrobot.errors import SimulatorError
def main(words):
    env = gym.make("dzrobot/lift-v0", resolution=64)
    env.reset(seed=0)
    env.close()
    envs = gym.make_vec(
        "dzrobot/lift-v0", num_envs=2, vectorization_mode="async", resolution=64,
        vector_kwargs={"context": words[0]},
    )
    try:
        envs.reset(seed=0)
        print("reset")
    except SimulatorError as error:
        print(error)
    envs.close(terminate=True)
"""


class TestVectorEnvironments:
    @pytest.mark.copies
    @pytest.mark.parametrize("backend", ["egl", pytest.param("osmesa", marks=pytest.mark.long)])
    @pytest.mark.parametrize(
        ("context", "said"),
        [
            ("fork", "vector_kwargs={'context': 'spawn'}"),
            pytest.param("spawn", "reset\n", marks=pytest.mark.long),
        ],
    )
    def test_async_after_drawing_works_or_names_the_cure(
        self, tmp_path, monkeypatch, backend, context, said
    ):
        pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
        (tmp_path / "program.py").write_text(AFTER_DRAWING)
        monkeypatch.setenv("MUJOCO_GL", backend)
        monkeypatch.delenv("PYOPENGL_PLATFORM", raising=False)
        assert said in printed_elsewhere(tmp_path / "program.py", [context], tmp_path)

    @pytest.mark.parametrize("mode", ["async", "sync"])
    def test_the_instruction_is_the_true_one_by_default(self, mode):
        envs = gym.make_vec("dzrobot/point-v0", num_envs=2, vectorization_mode=mode)
        seen, info = envs.reset(seed=[0, 1])
        assert seen["annotation.task"] == ("move the point to the red mark",) * 2
        assert seen in envs.observation_space
        seen = envs.step(np.zeros((2, 7), np.float32))[0]
        assert seen["annotation.task"] == tuple(info["task"])
        envs.close()

    def test_each_environment_has_its_own_and_it_may_change(self):
        envs = AsyncVectorEnv([lambda n=n: Talker(n) for n in range(2)], copy=False)
        seen = envs.reset()[0]
        assert list(seen["text"]) == ["environment 0, said 0 times", "environment 1, said 0 times"]
        seen = envs.step(np.zeros((2, 1)))[0]
        assert seen["text"][1] == "environment 1, said"
        assert seen["text"][0:1] == ("environment 0, said",)
        envs.close()

    def test_an_instruction_that_does_not_fit_is_refused(self):
        memory, space = gym.vector.utils.create_shared_memory(Instruction()), Instruction()
        gym.vector.utils.write_to_shared_memory(space, 0, "größer, 大", memory)
        assert gym.vector.utils.read_from_shared_memory(space, memory)[0] == "größer, 大"
        with pytest.raises(ModalityError, match=r"257 characters; 256 .*shared_memory=False"):
            gym.vector.utils.write_to_shared_memory(space, 0, "a" * (TEXT_LIMIT + 1), memory)


class Talker(gym.Env):
    """Says another thing at every step."""

    action_space = gym.spaces.Box(-1, 1, (1,))
    observation_space = gym.spaces.Dict({"text": Instruction()})

    def __init__(self, number):
        self.number = number

    def reset(self, *, seed=None, options=None):
        return {"text": f"environment {self.number}, said 0 times"}, {}

    def step(self, action):
        return {"text": f"environment {self.number}, said"}, 0.0, False, False, {}
