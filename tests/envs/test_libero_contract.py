"""LIBERO and Lift keep Gymnasium's contract: one set of properties over both."""

import contextlib
import pickle
import warnings
from itertools import product
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import dzrobot  # noqa: F401
from dzrobot.envs.libero import sim
from dzrobot.errors import ConfigError, ModalityError, SimulatorError

DRAFT = {"resolution": 64, "quality": "draft", "settle_steps": 1}
CASES = {
    "lift": ("dzrobot/lift-v0", {}),
    "libero": ("dzrobot/libero_spatial-v0", {"task_id": 5}),
}
OTHERS = {
    suite: (f"dzrobot/libero_{suite}-v0", {"task_id": 2})
    for suite in ("object", "goal", "10", "90")
}
"""Suites that one property is tested for besides."""


@pytest.fixture(params=CASES, scope="module")
def case(request):
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    if request.param != "lift":
        request.getfixturevalue("libero_assets")
    return {**CASES, **OTHERS}[request.param]


@pytest.fixture
def make(case):
    made = []

    def make(**options):
        env = gym.make(case[0], **case[1], **{**DRAFT, **options})
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()


@pytest.fixture(scope="module")
def shared(case):
    """Return one environment that many tests start over: a first reset costs seconds."""
    env = gym.make(case[0], **case[1], **DRAFT, render_mode="rgb_array")
    yield env
    env.close()


lift_first = pytest.mark.parametrize(
    "case", ["lift", pytest.param("libero", marks=pytest.mark.long)],
    indirect=True, scope="module",
)  # fmt: skip
"""Of tests of what both share in one implementation: LIBERO's turn is a long form."""


def actions(count):
    return np.random.default_rng(5).uniform(-1, 1, (count, 7)).astype(np.float32)


def rollout(env, seed, count=4):
    seen = [env.reset(seed=seed)]
    seen += [env.step(action) for action in actions(count)]
    return seen


def assert_same(first, second):
    assert len(first) == len(second)
    for (one, *rest), (other, *others) in zip(first, second, strict=True):
        assert rest == others
        assert one.keys() == other.keys()
        for key, value in one.items():
            np.testing.assert_array_equal(value, other[key], err_msg=key)


@pytest.mark.long
def test_passes_gymnasium_without_a_warning(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(render_mode="rgb_array").unwrapped)


@lift_first
def test_a_seed_fixes_the_episode_and_those_after_it(shared):
    env = shared
    copy = pickle.loads(pickle.dumps(env.unwrapped))
    first = [*rollout(env, 57), env.reset()]
    # A second simulator in the same process, opened in between, shares nothing with it.
    other = [*rollout(copy, 57), copy.reset()]
    again = [*rollout(env, 57), env.reset()]
    copy.close()
    assert_same(first, other)
    assert_same(first, again)
    starts = [info["init_state_id"] for _, info in (first[0], first[-1])]
    assert starts == ([7, 8] if "libero" in env.spec.id else [57, 58])


@pytest.mark.long
@lift_first
def test_interleaved_simulators_draw_their_own_scene(shared, make):
    one, other = shared, make()
    alone = rollout(one, 3)
    for env, seed in ((one, 3), (other, 4)):
        env.reset(seed=seed)
    together = []
    for action in actions(4):
        together.append(one.step(action))
        other.step(action)
    other.close()
    together.append(one.step(actions(1)[0]))
    assert_same(alone[1:], together[:-1])
    assert together[-1][0]["video.image"].std() > 10, "an image is still drawn"


def refusing(judge):
    """Return ``judge`` with False for an answer."""

    def judged(*models):
        judge(*models)
        return False

    return judged


@lift_first
def test_a_scene_draws_the_same_with_the_context_of_the_one_before(make, monkeypatch):
    """Kept, the context saves most of a reset; nothing in an image may tell."""
    env = make(quality="full")
    env.reset(seed=8)
    context = env.unwrapped.simulation.env.sim._render_context_offscreen
    kept = rollout(env, 57, count=1)
    assert env.unwrapped.simulation.env.sim._render_context_offscreen is context
    for name in ("same_drawing", "put_back"):
        drawn_anew = refusing(getattr(sim, name))
        monkeypatch.setattr(sim, name, drawn_anew)
    fresh = rollout(env, 57, count=1)
    assert env.unwrapped.simulation.env.sim._render_context_offscreen is not context
    assert_same(kept, fresh)


def begun(env, resets):
    """Return what a robot sees and a scene holds at resets and a step after, some perturbed."""
    seen = []
    for seed in range(resets):
        env.unwrapped.perturb(env.unwrapped.perturbations[seed % 5] if seed % 2 else None, 3, seed)
        seen += [env.reset(seed=seed), env.step(actions(1)[0])]
        scene = env.unwrapped.simulation.env.sim
        model = {name: getattr(scene.model, name) for name in dir(scene.model)}
        arrays = {k: v.copy() for k, v in model.items() if isinstance(v, np.ndarray)}
        small = {name: value for name, value in arrays.items() if value.nbytes < 2**20}
        state = {"state": scene.get_state().flatten(), "force": scene.data.qacc.copy()}
        seen.append((small | state, {}))
    env.unwrapped.perturb(None, 1, 0)
    return seen


def mapped():
    """Return the bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize(
    ("case", "resets"),
    [
        ("lift", 2),
        *(
            pytest.param(name, resets, marks=pytest.mark.long)
            for name, resets in (("libero", 2), ("lift", 50), ("libero", 50), *product(OTHERS, [6]))
        ),
    ],
    indirect=["case"], scope="module",
)  # fmt: skip
def test_a_scene_that_begins_again_is_one_that_is_compiled_anew(shared, monkeypatch, resets):
    """And a scene that is closed is given back: with 1 GB each mapped, a process cannot fork."""
    from robosuite.utils.binding_utils import MjSim

    shared.reset(seed=0)
    compiled, compile_ = [], MjSim.from_xml_string
    monkeypatch.setattr(MjSim, "from_xml_string", lambda xml: compiled.append(1) or compile_(xml))
    again = begun(shared, resets)
    # Lift draws the size of its cube; the first start may be the one that it had.
    lift = "lift" in shared.spec.id
    assert len(compiled) in ((resets - 1, resets) if lift else (0,))
    compiled.clear()
    held = mapped()
    shared.unwrapped.close()
    assert held - mapped() > (1e8 if lift else 8e8)
    # Nothing to begin again with.
    monkeypatch.setattr(sim, "copy", lambda model: None)
    assert_same(begun(shared, resets), again)
    assert len(compiled) == resets + 1


@lift_first
def test_stages_of_a_step_are_computed_once_and_no_state_changes(shared, monkeypatch):
    """robosuite asks for all of them three times; the solver alone depends on how often it ran."""
    import mujoco

    names = ("qpos", "qvel", "qacc", "qacc_warmstart", "xpos", "qfrc_constraint", "sensordata")
    whole = []
    forward, step = mujoco.mj_forward, mujoco.mj_step
    monkeypatch.setattr(mujoco, "mj_forward", lambda *given: whole.append(1) or forward(*given))
    monkeypatch.setattr(mujoco, "mj_step", lambda *given: whole.append(1) or step(*given))

    def played():
        states = []
        shared.reset(seed=4)
        for action in actions(4):
            whole.clear()
            shared.step(action)
            data = shared.unwrapped.simulation.env.sim.data
            states += [np.array(getattr(data, name)) for name in names]
        return states, len(whole)

    once, few = played()
    monkeypatch.setattr(sim, "_stages_once", lambda sim: contextlib.nullcontext())
    thrice, many = played()
    assert many == 3 * few, "of three, one is left"
    for one, other in zip(once, thrice, strict=True):
        np.testing.assert_array_equal(one, other)


def test_observations_are_fresh_and_complete(shared):
    env = shared
    steps = rollout(env, 0, count=3)
    for observation, *_, info in steps:
        assert env.observation_space.contains(observation)
        assert info.keys() == {
            "is_success", "task", "init_state_id", "reset_reason", "failure_class",
        }  # fmt: skip
        assert info["task"] == observation["annotation.task"]
        assert all(
            value.flags.c_contiguous and value.flags.owndata
            for value in observation.values()
            if isinstance(value, np.ndarray)
        )
    assert all(type(reward) is float for _, reward, *_ in steps[1:])
    assert len({id(info) for *_, info in steps}) == len(steps)


@lift_first
def test_images_that_are_left_out_are_not_drawn_and_change_nothing_else(shared, monkeypatch):
    import mujoco

    renders, render = [], mujoco.mjr_render
    monkeypatch.setattr(mujoco, "mjr_render", lambda *a, **k: (renders.append(1), render(*a, **k)))
    whole = rollout(shared, 6)
    # One of each camera for the reset, and for every step.
    assert len(renders) == 2 * len(whole)
    renders.clear()
    first, bare = shared.reset(seed=6), []
    for step, action in enumerate(actions(4)):
        if step != 2:
            shared.unwrapped.omit_frames()
        bare.append(shared.step(action))
    assert len(renders) == 2 * 2
    assert_same([first, bare[2]], [whole[0], whole[3]])
    for (seen, *rest), (other, *others) in zip(bare, whole[1:], strict=True):
        assert rest == others
        for key in ("state.state", "annotation.task"):
            np.testing.assert_array_equal(seen[key], other[key])
    assert [set(seen) - {"state.state", "annotation.task"} for seen, *_ in bare] == [
        set(), set(), {"video.image", "video.wrist_image"}, set(),
    ]  # fmt: skip
    # What people are shown is drawn when they ask, never an image of a step before.
    np.testing.assert_array_equal(shared.render(), shared.unwrapped.simulation.photograph()[::-1])


@lift_first
def test_numpys_global_generator_is_left_alone(make):
    np.random.seed(1)  # noqa: NPY002
    expected = np.random.random(3)  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    make(cameras=False).reset(seed=0)
    np.testing.assert_array_equal(np.random.random(3), expected)  # noqa: NPY002


@lift_first
def test_time_limits_truncate_and_never_terminate(make):
    env = make(max_episode_steps=2, cameras=False)
    env.reset(seed=0)
    ends = [env.step(np.zeros(7, np.float32))[2:4] for _ in range(2)]
    assert ends == [(False, False), (False, True)]


@lift_first
def test_faults_in_use_are_named(make):
    # Unwrapped: Gymnasium's passive checker does not survive a step that raises.
    env = make(cameras=False).unwrapped
    with pytest.raises(gym.error.ResetNeeded):
        env.step(np.zeros(7, np.float32))
    with pytest.raises(ModalityError, match="does not exist; this task has 0 to"):
        env.reset(options={"init_state_id": -1})
    env.reset(seed=0)
    for action in (np.zeros(6, np.float32), np.full(7, np.nan, np.float32)):
        with pytest.raises(ModalityError, match="7 finite numbers"):
            env.step(action)
    sim = env.simulation.env.sim
    sim.data.qvel[:] = 1e12
    with pytest.raises(SimulatorError, match="diverged"):
        env.step(np.zeros(7, np.float32))
    # The next reset starts over.
    env.reset(seed=0)
    env.step(np.zeros(7, np.float32))


def test_faults_in_the_options_are_named_at_once_and_close_is_harmless(case):
    spec = gym.spec(case[0])
    kind = gym.envs.registration.load_env_creator(spec.entry_point)
    with pytest.raises(ConfigError, match=r"render_mode='tv'.*settle_steps=-1.*quality='best'"):
        kind(render_mode="tv", settle_steps=-1, quality="best")
    env = kind(**case[1])
    env.close()
    env.close()


@lift_first
def test_render_is_upright_where_the_policy_sees_a_mirror_image(shared, make):
    env = shared
    observation, _ = env.reset(seed=0)
    frame = env.render()
    np.testing.assert_array_equal(frame[:, ::-1], observation["video.image"])
    blind = make(render_mode="rgb_array", cameras=False)
    observation, _ = blind.reset(seed=0)
    assert set(observation) == {"state.state", "annotation.task"}
    assert blind.render().shape == frame.shape
    # robosuite samples its cameras a substep before the end of a step; on demand there is no lag.
    assert np.abs(blind.render().astype(int) - frame).mean() < 1


@lift_first
def test_the_stock_wrappers_record_it(make, tmp_path):
    env = make(render_mode="rgb_array", max_episode_steps=3)
    with warnings.catch_warnings():
        # moviepy, and that the folder is there already.
        warnings.simplefilter("ignore")
        video = gym.wrappers.RecordVideo(env, str(tmp_path), disable_logger=True)
        video = gym.wrappers.RecordEpisodeStatistics(video)
        video.reset(seed=0)
        for action in actions(3):
            *_, info = video.step(action)
        video.close()
    assert info["episode"]["l"] == 3
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]
