"""One set of weights, many episodes: they do not know of each other."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.errors import ConfigError, ModalityError, SessionError
from dzrobot.modality.window import read_observation
from dzrobot.policies.base import frame_offsets
from dzrobot.policies.dreamzero.network.vae import Decoding
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy, PolicyOptions
from dzrobot.policies.dreamzero.tiny import write_tiny_checkpoint

TASKS = ("lift the cube", "turn on the stove", "put both moka pots on the stove")


def observe(embodiment, key, step):
    """Return the observation of one step of one episode, told apart by ``key``."""
    rng = np.random.default_rng([key, step])
    views = {
        view.key: rng.integers(0, 256, (*view.resolution, 3), dtype=np.uint8)
        for view in embodiment.views
    }
    state = {part.key: rng.uniform(-1, 1, part.dim).astype(np.float32) for part in embodiment.state}
    return {**views, **state, embodiment.language: TASKS[key % len(TASKS)]}


def policy_of(folder, embodiment, dtype=None, **options):
    options = PolicyOptions(**{"dit_steps": 5, "history": "recent", **options})
    return DreamZeroPolicy.from_pretrained(
        folder, embodiment=embodiment, dtype=dtype, options=options
    )


@pytest.fixture(scope="module")
def loaded(tiny_folders, libero):
    """Return the policy of each variant, loaded once."""
    return {folder: policy_of(folder, libero) for folder in tiny_folders.iterdir()}


@pytest.fixture
def policy(tiny, loaded):
    """Return a policy without sessions."""
    policy = loaded[tiny]
    policy.end_all()
    return policy


@pytest.mark.parametrize("device", ["cuda:99", "cuda:x", "gpu", "npu", "cuda:-1"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device, tmp_path):
    with pytest.raises(ConfigError, match=f"device '{device}': .*give cpu"):
        DreamZeroPolicy.from_pretrained(tmp_path / "not read", device=device)


@pytest.mark.parametrize(
    ("built_for", "count", "said"),
    [
        (None, 0, r"without CUDA; install one .*, or give cpu$"),
        ("12.8", 0, r"finds none; see that nvidia-smi lists one .*, or give cpu$"),
        ("12.8", 1, r"torch sees no such device; give cpu or cuda:0$"),
    ],
)
def test_the_remedy_is_for_what_is_missing(built_for, count, said, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=said):
        DreamZeroPolicy.from_pretrained(tmp_path / "not read", device="cuda:7")


def test_actions_of_every_embodiment(tmp_path):
    for tag, robot in EMBODIMENTS.items():
        policy = policy_of(write_tiny_checkpoint(tmp_path / tag, robot), robot)
        action = policy.act(observe(robot, 0, 0))
        chunk = policy.infer(observe(robot, 0, 1), session="other")["actions"]
        assert (action.shape, action.dtype) == ((robot.action_dim,), np.float32)
        assert chunk.shape == (robot.timing.action_horizon, robot.action_dim)
        assert chunk.dtype == np.float32
        assert np.isfinite(chunk).all()


@pytest.mark.long
def test_compiled_it_plans_the_same_and_compiles_in_the_first_window_only(
    tmp_path, libero, traced_dtype
):
    folder = write_tiny_checkpoint(tmp_path / "tiny", libero)
    plain, compiled = (
        policy_of(folder, libero, dtype=traced_dtype, compile=chosen) for chosen in (False, True)
    )
    horizon, names = libero.timing.action_horizon, ["a", "b"]

    def chunks(policy, plans):
        for step in range(plans * horizon):
            seen = [observe(libero, key, step) for key in range(len(names))]
            yield np.stack(policy.act_batch(seen, names))

    torch._dynamo.utils.counters.clear()
    for one, other in zip(chunks(plain, 5), chunks(compiled, 5), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in chunks(compiled, 5):
            pass
    torch.compiler.reset()


def test_interleaved_sessions_equal_sessions_alone(tiny, libero):
    """Bit for bit, over six plans: the network's window of four ends within them."""
    policy = policy_of(tiny, libero, noise="keyed")

    def alone(key):
        policy.reset("alone", episode=key)
        return [policy.infer(observe(libero, key, i), session="alone") for i in range(6)]

    wanted = [[plan["actions"] for plan in alone(key)] for key in range(2)]
    policy.end_all()
    for key in range(2):
        policy.reset(f"s{key}", episode=key)
    given = [[], []]
    for i in range(6):
        for key in range(2):
            plan = policy.infer(observe(libero, key, i), session=f"s{key}")
            given[key].append(plan["actions"])
    np.testing.assert_array_equal(given, wanted)
    # The test would be empty if episodes or plans were all alike.
    assert len({chunk.tobytes() for chunks in wanted for chunk in chunks}) == 12


@pytest.mark.long
def test_interleaved_steps_equal_steps_alone(tiny, libero):
    """Through ``act``, with sessions that plan at different steps."""
    policy = policy_of(tiny, libero, execute=6, history="grid")
    steps, shift = 20, 2

    def episode(key, session):
        return [policy.act(observe(libero, key, i), session=session) for i in range(steps)]

    wanted = [episode(key, f"alone {key}") for key in range(2)]
    policy.end_all()
    given = [[], []]
    for i in range(steps + shift):
        for key in range(2):
            if 0 <= (at := i - key * shift) < steps:
                given[key].append(policy.act(observe(libero, key, at), session=f"s{key}"))
    np.testing.assert_array_equal(given, wanted)


def test_batches_equal_sessions_alone(tiny, libero):
    """A joint call is another order of summation: 1e-4 of the range of actions, not bits."""
    policy = policy_of(tiny, libero, history="grid")
    names = [f"s{key}" for key in range(2)]
    for i in range(5):
        seen = [observe(libero, key, i) for key in range(2)]
        joint = policy.infer_batch(seen, sessions=names)
        for key in range(2):
            alone = policy.infer(seen[key], session=f"alone {key}")
            # The gripper, a threshold, may jump; all else is continuous.
            np.testing.assert_allclose(
                joint[key]["actions"][:, :6], alone["actions"][:, :6], rtol=0, atol=1e-4
            )


def test_cut_prompts_change_the_longer_one_alone(tiny, libero):
    """As much as an instruction that itself is so short would: the rest of the call is the same."""
    seen = [observe(libero, key, 0) for key in (0, 2)]
    own, cut = (
        [plan["actions"] for plan in policy.infer_batch(seen, sessions=["short", "long"])]
        for policy in (policy_of(tiny, libero, prompt_rows=rows) for rows in ("own", "cut"))
    )
    np.testing.assert_allclose(own[0][:, :6], cut[0][:, :6], rtol=0, atol=1e-5)
    assert np.abs(own[1] - cut[1]).max() > 1e-3


def test_independent_batches_equal_sessions_alone_in_every_bit(tiny, libero):
    policy = policy_of(tiny, libero, independent=True)
    names = [f"s{key}" for key in range(2)]
    for i in range(2):
        seen = [observe(libero, key, i) for key in range(2)]
        joint = policy.infer_batch(seen, sessions=names)
        alone = [policy.infer(o, session=f"alone {k}") for k, o in enumerate(seen)]
        for a, b in zip(joint, alone, strict=True):
            np.testing.assert_array_equal(a["actions"], b["actions"])


def test_calls_of_one_size_give_the_same_bits_whoever_shares_them(tiny, libero):
    policy = policy_of(tiny, libero, history="off", batch_size=3, noise="keyed")
    seen = [observe(libero, key, 0) for key in range(4)]
    found = []
    for keys in ([0], [0, 1], [2, 0, 3], [3, 1, 2, 0]):
        policy.end_all()
        for key in keys:
            policy.reset(f"s{key}", episode=key)
        plans = policy.infer_batch([seen[key] for key in keys], [f"s{key}" for key in keys])
        found.append(plans[keys.index(0)]["actions"])
        assert len(policy.imagine(f"s{keys[-1]}")) > 1
    for plan in found[1:]:
        np.testing.assert_array_equal(plan, found[0])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 1}, "batch_size=1: give 2 or more"),
        ({"batch_size": 4, "history": "recent"}, "a plan that remembers has no copy"),
        ({"batch_size": 4, "independent": True}, "batch_size=4 and independent"),
        ({"batch_size": 4, "dit_steps": "dynamic"}, "batch_size=4 and dit_steps='dynamic'"),
    ],
)
def test_calls_that_cannot_be_filled_up_are_refused(libero, options, why):
    with pytest.raises(ConfigError, match=why):
        PolicyOptions(**{"history": "off", **options}).for_robot(libero)


def test_batch_of_sessions_in_unlike_states(tiny, libero):
    """Some sessions plan, some execute, one is new."""
    policy = policy_of(tiny, libero, execute=3, independent=True)
    reference = policy_of(tiny, libero, execute=3)
    for i in range(8):
        keys = [0, 1, 2] if i >= 4 else [0, 1] if i >= 1 else [0]
        seen = [observe(libero, key, i) for key in keys]
        joint = policy.act_batch(seen, [f"s{key}" for key in keys])
        alone = [
            reference.act(o, session=f"s{k}") for k, o in zip(keys, seen, strict=True)
        ]  # fmt: skip
        np.testing.assert_array_equal(joint, alone)


def test_a_session_that_was_never_reset_is_told_once(tiny_folders, libero, caplog):
    policy = policy_of(tiny_folders / "5b", libero)
    policy.reset("a")
    policy.act(observe(libero, 1, 0), session="a")
    assert not caplog.records
    for session in ("b", "c"):
        policy.act(observe(libero, 1, 0), session=session)
    (told,) = caplog.messages
    assert told.startswith("session 'b' was never reset")
    assert "policy.reset('b')" in told


@pytest.mark.parametrize("named", [(), ("default",)])
def test_every_reset_begins_the_next_episode_of_keyed_noise(named, tiny_folders, libero, caplog):
    """As people of LeRobot write it, or by name; neither is told that it never reset."""
    policy = policy_of(tiny_folders / "5b", libero, noise="keyed")
    policy.reset("other")
    policy.act(observe(libero, 1, 0), session="other")

    def first_actions(count):
        for _ in range(count):
            policy.reset(*named)
            yield policy.act(observe(libero, 0, 0)).tobytes()

    begun = list(first_actions(3))
    assert len(set(begun)) == 3
    assert policy.sessions == ("other", "default")
    assert not policy.plans_next(session="other")
    policy.end_all()
    assert policy.sessions == ()
    assert list(first_actions(3)) == begun
    assert not caplog.records


def test_what_ended_all_sessions_once_says_what_does_now(policy):
    with pytest.raises(SessionError, match=r"None is a NoneType: .* call end_all\(\)"):
        policy.reset(None)


def test_reset_replaces_the_episode(policy, libero):
    def episode():
        return [policy.act(observe(libero, 1, i)) for i in range(20)]

    first = episode()
    policy.reset("default")
    np.testing.assert_array_equal(episode(), first)
    policy.end_all()
    assert policy.sessions == ()
    np.testing.assert_array_equal(episode(), first)


def test_reset_of_one_session_leaves_the_others(policy, libero):
    for key in range(2):
        policy.infer(observe(libero, key, 0), session=f"s{key}")
    policy.infer(observe(libero, 0, 0), session="twin")
    policy.reset("s1")
    given = policy.infer(observe(libero, 0, 1), session="s0")["actions"]
    wanted = policy.infer(observe(libero, 0, 1), session="twin")["actions"]
    np.testing.assert_array_equal(given, wanted)


def test_new_instruction_forgets_the_past(policy, libero):
    policy.prepare(["open the top drawer"])
    policy.infer(observe(libero, 0, 0))
    changed = {**observe(libero, 0, 1), libero.language: "open the top drawer"}
    given = policy.infer(changed)["actions"]
    fresh = policy.infer(changed, session="fresh")["actions"]
    np.testing.assert_array_equal(given, fresh)


def text_is_deferred(policy):
    """Return whether the prompt encoder has not been read, and holds no memory."""
    network = policy._network
    unread = network.text_encoder is None
    assert unread == network.is_text_deferred == (network.deferred_bytes > 0)
    return unread


def acts(policy, libero, steps=3):
    """Return the actions of an episode's first plans."""
    return [policy.infer(observe(libero, 0, step))["actions"] for step in range(steps)]


def test_the_prompt_encoder_is_read_once_on_a_machine(tiny, libero, tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    first = policy_of(tiny, libero)
    deferred = text_is_deferred(first)
    wanted = acts(first, libero)
    second = policy_of(tiny, libero)
    found = acts(second, libero)
    assert (deferred, text_is_deferred(first)) == (True, False)
    assert text_is_deferred(second)
    np.testing.assert_array_equal(found, wanted)
    # What is there may be used where nothing can be written, and its lack does no harm.
    (tmp_path / "cache" / "prompts").chmod(0o500)
    lean = policy_of(tiny, libero)
    np.testing.assert_array_equal(acts(lean, libero), wanted)
    assert text_is_deferred(lean)
    (tmp_path / "file").touch()
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "file"))
    np.testing.assert_array_equal(acts(policy_of(tiny, libero), libero), wanted)


def test_an_instruction_that_is_known_touches_no_file_of_the_checkpoint(
    tiny, libero, tmp_path, monkeypatch
):
    """What names its embedding was found out when the checkpoint was opened."""
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(tiny, tmp_path / "checkpoint")
    wanted = acts(policy_of(folder, libero), libero, 1)
    policy = policy_of(folder, libero)
    shutil.rmtree(folder)
    np.testing.assert_array_equal(acts(policy, libero, 1), wanted)


def test_an_instruction_that_is_new_during_an_episode_is_told_and_prepared(
    tiny, libero, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path))
    acts(policy_of(tiny, libero), libero, 1)
    changed = {**observe(libero, 0, 1), libero.language: "open the top drawer"}
    policy, ready = policy_of(tiny, libero), policy_of(tiny, libero)
    policy.infer(observe(libero, 0, 0))
    assert text_is_deferred(policy)
    wanted = policy.infer(changed)["actions"]
    assert "'open the top drawer' during an episode" in caplog.text
    assert not text_is_deferred(policy)
    caplog.clear()
    ready.prepare(["open the top drawer"])
    ready.infer(observe(libero, 0, 0))
    np.testing.assert_array_equal(ready.infer(changed)["actions"], wanted)
    assert "during an episode" not in caplog.text


def test_history_matters(policy, libero):
    policy.infer(observe(libero, 0, 0))
    seen = observe(libero, 0, 1)
    given = policy.infer(seen)["actions"]
    fresh = policy.infer(seen, session="fresh")["actions"]
    assert np.abs(given - fresh).max() > 1e-3


@pytest.mark.parametrize("history", ["off", None])
def test_without_history_every_plan_is_the_first(tiny, libero, history):
    policy = policy_of(tiny, libero, history=history)
    policy.infer(observe(libero, 0, 0))
    seen = observe(libero, 0, 1)
    np.testing.assert_array_equal(
        policy.infer(seen)["actions"], policy.infer(seen, session="fresh")["actions"]
    )


@pytest.mark.sampled
@pytest.mark.parametrize("execute", [1, 4, None])
def test_receding_horizon(tiny, libero, execute):
    """The first ``execute`` actions of each plan are given, then a new plan is made."""
    policy, planner = policy_of(tiny, libero, execute=execute), policy_of(tiny, libero)
    length = execute or libero.timing.action_horizon
    plan = planner.infer(observe(libero, 0, 0))["actions"]
    given = [policy.act(observe(libero, 0, i)) for i in range(length + 1)]
    np.testing.assert_array_equal(given[:length], plan[:length])
    if execute is not None:
        assert not np.array_equal(given[length], plan[length])


def test_what_options_leave_open_the_embodiment_decides(tiny, libero):
    robot = dataclasses.replace(libero, execute=3, cfg_scale=1.0)
    assert policy_of(tiny, libero, history=None).card["history"] == "off"
    remembers = dataclasses.replace(libero, history="grid")
    assert policy_of(tiny, remembers, history=None).card["history"] == "grid"
    assert policy_of(tiny, remembers, history="off").card["history"] == "off"
    assert policy_of(tiny, libero).card["cfg_scale"] == 5.0
    assert policy_of(tiny, libero).card["execute"] == libero.timing.action_horizon
    policy, planner = policy_of(tiny, robot), policy_of(tiny, robot, execute=8, cfg_scale=2.0)
    assert (policy.card["execute"], policy.card["cfg_scale"]) == (3, 1.0)
    assert (planner.card["execute"], planner.card["cfg_scale"]) == (8, 2.0)
    plan = policy_of(tiny, robot).infer(observe(robot, 0, 0))["actions"]
    given = [policy.act(observe(robot, 0, i)) for i in range(4)]
    np.testing.assert_array_equal(given[:3], plan[:3])
    assert not np.array_equal(given[3], plan[3])


def test_frames_that_are_fed_back(libero):
    droid = EMBODIMENTS["oxe_droid"]
    assert frame_offsets(droid, "recent") == (-23, -16, -8, 0)
    assert frame_offsets(droid, "grid") == (-24, -21, -18, -15, -12, -9, -6, -3, 0)
    assert frame_offsets(libero, "recent") == (-15, -10, -5, 0)
    assert frame_offsets(libero, "grid") == tuple(range(-16, 1, 2))
    assert frame_offsets(libero, "off") == (0,)


def test_act_feeds_back_the_frames_of_its_offsets(tiny, libero):
    """Planning after 16 steps equals a plan from a stack of exactly those frames."""
    policy, other = policy_of(tiny, libero), policy_of(tiny, libero)
    seen = [observe(libero, 0, i) for i in range(17)]
    given = [policy.act(o) for o in seen][16]
    other.infer(seen[0])
    picked = [seen[16 + offset] for offset in frame_offsets(libero, "recent")]
    stack = {
        **seen[16], **{k: np.stack([o[k] for o in picked]) for k in libero.video_keys}
    }  # fmt: skip
    np.testing.assert_array_equal(other.infer(stack)["actions"][0], given)


def test_an_episode_shorter_than_its_history_repeats_the_first_frame(tiny, libero):
    policy, other = policy_of(tiny, libero, execute=2), policy_of(tiny, libero)
    seen = [observe(libero, 0, i) for i in range(3)]
    given = [policy.act(o) for o in seen][2]
    other.infer(seen[0])
    picked = [seen[0], seen[0], seen[0], seen[2]]
    stack = {
        **seen[2], **{k: np.stack([o[k] for o in picked]) for k in libero.video_keys}
    }  # fmt: skip
    np.testing.assert_array_equal(other.infer(stack)["actions"][0], given)


def test_observations_are_copied(policy, libero):
    """An environment may write the next frame into the same array."""
    buffer = observe(libero, 0, 0)
    policy.infer(buffer)
    for key in libero.video_keys:
        buffer[key][:] = 0
    policy.infer(observe(libero, 0, 0), session="other")
    seen = observe(libero, 0, 1)
    np.testing.assert_array_equal(
        policy.infer(seen)["actions"], policy.infer(seen, session="other")["actions"]
    )


class TestNoise:
    def test_published_noise_is_the_same_for_every_plan(self, tiny, libero):
        policy = policy_of(tiny, libero, history="off")
        seen = observe(libero, 0, 0)
        plans = [policy.infer(seen)["actions"] for _ in range(2)]
        np.testing.assert_array_equal(*plans)

    def test_keyed_noise_depends_on_seed_episode_and_plan(self, tiny, libero):
        seen, plans = observe(libero, 0, 0), {}
        for seed in (0, 1):
            policy = policy_of(tiny, libero, history="off", noise="keyed", seed=seed)
            for episode in (0, 5):
                policy.reset("a", episode=episode)
                for plan in range(2):
                    actions = policy.infer(seen, session="a")["actions"]
                    plans[seed, episode, plan] = actions.tobytes()
        assert len(set(plans.values())) == 8
        policy.reset("b", episode=5)
        assert policy.infer(seen, session="b")["actions"].tobytes() == plans[1, 5, 0]

    def test_episodes_count_on_by_themselves(self, tiny, libero):
        policy = policy_of(tiny, libero, noise="keyed")
        seen = observe(libero, 0, 0)
        first = policy.infer(seen, session="a")["actions"]
        policy.reset("a")
        second = policy.infer(seen, session="a")["actions"]
        policy.reset("a", episode=0)
        np.testing.assert_array_equal(policy.infer(seen, session="a")["actions"], first)
        assert not np.array_equal(first, second)

    def test_slots_have_a_row_each_of_one_draw_and_keep_it(self, tiny, libero):
        policy = policy_of(tiny, libero, noise="slot", noise_slots=4)
        seen = observe(libero, 0, 0)
        plans = [policy.infer(seen, session=name)["actions"] for name in "abcd"]
        assert len({plan.tobytes() for plan in plans}) == 4
        fixed = policy_of(tiny, libero).infer(seen)["actions"]
        np.testing.assert_array_equal(plans[0], fixed)
        for episode in (None, 2, 6):
            policy.reset("c", episode=episode)
            np.testing.assert_array_equal(policy.infer(seen, session="c")["actions"], plans[2])
        with pytest.raises(SessionError, match="all 4 slots"):
            policy.act(seen, session="e")
        policy.evict("b")
        np.testing.assert_array_equal(policy.infer(seen, session="e")["actions"], plans[1])

    def test_the_rows_of_slots_are_those_of_a_batch_that_starts_from_the_seed(self, tiny, libero):
        policy = policy_of(tiny, libero, noise="slot", noise_slots=3)
        policy.reset("a", episode=2)
        episode = policy._episodes["a"]
        episode.see(read_observation(observe(libero, 0, 0), libero))
        request = policy._requests.make(policy._pipeline.encode(episode.window((0,))), episode)
        for name in ("video_CFYX", "action_AM"):
            row = getattr(request.noise, name)
            batch = torch.randn((3, *row.shape), generator=torch.Generator().manual_seed(1140))
            assert torch.equal(row, batch[2])


class TestSessions:
    def test_bounded_and_never_dropped(self, tiny, libero):
        policy = policy_of(tiny, libero, max_sessions=2)
        seen = observe(libero, 0, 0)
        for name in "ab":
            policy.act(seen, session=name)
        with pytest.raises(SessionError, match="no room for session 'c': 2 of max_sessions=2"):
            policy.act(seen, session="c")
        with pytest.raises(SessionError, match="no room"):
            policy.reset("c")
        assert policy.sessions == ("a", "b")
        policy.reset("a")
        policy.evict("b")
        policy.act(seen, session="c")

    def test_evicted_session_must_be_reset(self, policy, libero):
        seen = observe(libero, 0, 0)
        policy.act(seen, session="a")
        policy.evict("a")
        with pytest.raises(SessionError, match=r"'a' was evicted .* call reset\('a'\)"):
            policy.act(seen, session="a")
        with pytest.raises(SessionError, match="was evicted"):
            policy.imagine("a")
        policy.reset("a")
        policy.act(seen, session="a")

    def test_unknown_session_has_nothing_to_show(self, policy):
        with pytest.raises(SessionError, match="is not open"):
            policy.imagine("nobody")
        with pytest.raises(SessionError, match="is not open"):
            policy.evict("nobody")
        policy.reset("somebody")
        with pytest.raises(SessionError, match="has made no plan yet"):
            policy.imagine("somebody")

    @pytest.mark.parametrize("names", [["a"], ["a", "a"]])
    def test_one_observation_per_session(self, policy, libero, names):
        with pytest.raises(SessionError, match="give one each, every session once"):
            policy.act_batch([observe(libero, 0, 0)] * 2, names)


class TestImagination:
    def test_video_of_the_last_plan(self, policy, libero):
        for i in range(6):
            policy.infer(observe(libero, 0, i))
            frames, latents = policy.imagine(), policy.imagine_latents().latents
            # The network starts over at first, and after four blocks.
            fresh = i in (0, 4)
            assert frames.shape == ((9 if fresh else 8), 32, 64, 3)
            assert frames.dtype == np.uint8
            assert latents.shape[1] == (3 if fresh else 2)
        assert frames.std() > 1

    def test_decoded_once_it_is_what_the_whole_video_shows(self, policy, libero):
        parts, vae = [], policy._network.vae
        for i in range(4):
            seen = observe(libero, 0, i)
            policy.infer(seen, session="every plan")
            policy.infer(seen, session="at the end")
            frames = policy.imagine("every plan")
            np.testing.assert_array_equal(policy.imagine("every plan"), frames)
            parts.append(torch.from_numpy(policy.imagine_latents("every plan").latents))
            with torch.no_grad():
                whole = vae.decode(torch.cat(parts, dim=1)[None])[0, :, -len(frames) :]
            pixels = ((whole + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
            np.testing.assert_array_equal(frames, pixels)
        np.testing.assert_array_equal(policy.imagine("at the end"), frames)

    def test_frames_left_out_are_decoded_when_a_later_plan_needs_them(
        self, policy, libero, monkeypatch
    ):
        decoded, more = [], Decoding.more
        monkeypatch.setattr(
            Decoding, "more", lambda *given: decoded.append(given[3] - given[2]) or more(*given)
        )
        for i, (without, parts) in enumerate([(5, [2]), (0, [1, 2]), (7, [1]), (0, [1, 2])]):
            seen = observe(libero, 0, i)
            policy.infer(seen, session="whole")
            frames = policy.imagine("whole")
            policy.infer(seen, session="cut")
            decoded.clear()
            shown = policy.imagine_later("cut")(without)
            np.testing.assert_array_equal(shown, frames[: len(frames) - without])
            assert decoded == parts
        # Asked for again, with more of it: only the rest is decoded.
        policy.infer(observe(libero, 0, 4), session="cut")
        first, all_of_it = policy.imagine_later("cut")(8), policy.imagine("cut")
        assert decoded[2:] == [1, 2]
        np.testing.assert_array_equal(all_of_it[:1], first)

    def test_what_the_decoder_carries_is_counted(self, policy, libero):
        policy.infer(observe(libero, 0, 0))
        before = policy.footprint("default").session
        policy.imagine()
        assert policy.footprint("default").session > before

    def test_looking_does_not_change_the_actions(self, policy, libero):
        for i in range(3):
            seen = observe(libero, 0, i)
            a = policy.infer(seen, session="a")["actions"]
            b = policy.infer(seen, session="b")["actions"]
            policy.imagine("a")
            np.testing.assert_array_equal(a, b)


class TestLessVideo:
    """Plans without the video, or with its first evaluation alone."""

    @pytest.mark.parametrize("video", ["once", "skip"])
    def test_there_is_no_video_to_show_and_the_card_says_why(self, tiny, libero, video, caplog):
        policy = policy_of(tiny, libero, video=video)
        assert f"video={video!r}, and this checkpoint was not trained" in caplog.text
        assert policy.card["video"] == video
        assert policy.card["cfg_scale"] == 1
        for step in range(2):
            plan = policy.infer(observe(libero, 0, step))["actions"]
            assert np.isfinite(plan).all()
        for show in (policy.imagine, policy.imagine_latents):
            with pytest.raises(ConfigError, match=f"with video={video!r} no video is predicted"):
                show()

    def test_cards_of_whole_plans_are_those_of_earlier_versions(self, policy):
        assert not {"video", "graphs"} & policy.card.keys()

    def test_a_checkpoint_that_was_trained_so_is_used_without_a_word(
        self, continuing_checkpoint, tmp_path, libero, caplog
    ):
        folder = tmp_path / "trained"
        shutil.copytree(continuing_checkpoint, folder)
        file = folder / "dzrobot_passport.json"
        passport = json.loads(file.read_text())
        file.write_text(json.dumps({**passport, "action_only_video": "skip"}))
        policy_of(folder, libero, video="skip")
        assert "was not trained" not in caplog.text
        policy_of(folder, libero, video="once")
        assert "was not trained" in caplog.text

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"cfg_scale": 5.0}, "cfg_scale=5 guides the predicted video"),
            ({"dit_steps": "dynamic"}, "dit_steps='dynamic' goes by"),
        ],
    )
    def test_what_needs_the_video_is_refused(self, tiny, libero, options, said):
        with pytest.raises(ConfigError, match=said):
            policy_of(tiny, libero, video="skip", **options)


def test_timing(policy, libero):
    timing = policy.infer(observe(libero, 0, 0))["timing"]
    parts = timing["encode_ms"] + timing["generate_ms"] + timing["decode_ms"]
    assert timing["total_ms"] == pytest.approx(parts)
    assert all(value > 0 for value in timing.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.pop("state.state"), "state.state missing"),
        (lambda o: o.update({"video.more": o["video.image"]}), "unexpected video.more"),
        (lambda o: o.update({"video.image": o["video.image"][:9]}), "video.image has shape"),
        (lambda o: o.update({"video.image": o["video.image"][None]}), "unlike numbers of frames"),
        (lambda o: o.update({"state.state": np.full(8, np.nan, np.float32)}), "holds nan"),
        (lambda o: o.update({"annotation.task": " "}), "is empty"),
    ],
)
def test_bad_observation(policy, libero, change, message):
    seen = observe(libero, 0, 0)
    change(seen)
    with pytest.raises(ModalityError, match=message):
        policy.act(seen)


@pytest.mark.parametrize("options", [{"execute": 0}, {"execute": 17}, {"max_sessions": 0}])
def test_bad_options(tiny, libero, options):
    with pytest.raises(ConfigError):
        policy_of(tiny, libero, **options)


def test_card(policy):
    card = policy.card
    assert card["embodiment"] == "libero_sim"
    assert card["dtype"] == "float32"
    assert card["seed"] == 1140
    assert all(isinstance(v, str | int | float | bool | None) for v in card.values())


def test_nothing_episodic_on_the_network(policy, libero):
    """The network is the same object, with the same content, after any number of episodes."""
    network = policy._network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in network.named_modules()}
    for i in range(6):
        policy.infer(observe(libero, 0, i))
    assert all(torch.equal(before[n], t) for n, t in network.state_dict().items())
    assert attributes == {name: set(vars(module)) for name, module in network.named_modules()}
