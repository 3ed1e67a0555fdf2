"""Images that nobody looks at are not drawn, and nobody can tell."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ModalityError
from dzrobot.policies.base import Policy, frame_offsets, reads_next
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.checkpoints.checksums import weights_hash
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.wrapping import Wrapper
from dzrobot.rollout.asynchronous.engine import EngineActor, VirtualDesk
from dzrobot.rollout.asynchronous.execution import ExecutionOptions, parse_latency, schedule
from dzrobot.rollout.environment import facts_of, omitter
from dzrobot.rollout.episode import Actor, PolicyActor, run_episode
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.policy_spec import HoldPolicy, PolicySpec, RandomPolicy, open_coder
from dzrobot.rollout.predictions import (
    PredictingActor,
    PredictionError,
    decode,
    prediction_files,
    read_predictions,
)
from dzrobot.rollout.protocol import PROTOCOLS, EpisodeRules, EvalSpec
from dzrobot.rollout.records import ERROR_FOLDER, RecordFile

pytestmark = pytest.mark.copies
MINI = load_embodiment("libero_mini")
STEPS = 8


class Watched(gym.Wrapper):
    """Keeps whether each observation had images."""

    takes_missing_frames = True

    def __init__(self, env, drawn):
        super().__init__(env)
        self.drawn = drawn

    def reset(self, **how):
        self.drawn.clear()
        return self._kept(self.env.reset(**how))

    def step(self, action):
        return self._kept(self.env.step(action))

    def _kept(self, returned):
        self.drawn.append("video.image" in returned[0])
        return returned


class Needy(Watched):
    """The same, of which nobody knows whether it looks."""

    takes_missing_frames = False


def point(**arguments):
    return gym.make("dzrobot/point-v0", disable_env_checker=True, resolution=128, **arguments)


@pytest.fixture(scope="module")
def trained():
    """Return the bundled policy without and with memory; with it, it executes whole plans."""
    return {
        history: DreamZeroPolicy.from_pretrained(
            default_checkpoint(),
            embodiment=MINI,
            options=PolicyOptions(history=history, execute=execute, dit_steps=5),
        )
        for history, execute in (("off", 3), ("recent", 8))
    }


def outcome(actor, wrapper=Watched):
    """Return the hash of an episode's actions and which of its observations had images."""
    drawn = []
    rules = EpisodeRules(seed=0, max_steps=STEPS)
    found = run_episode(wrapper(point(), drawn), actor, rules)
    assert found.steps == STEPS
    return found.action_sha256, [step for step, there in enumerate(drawn) if there]


@pytest.mark.parametrize("history", ["off", "recent", "grid"])
@pytest.mark.parametrize("tag", ["libero_mini", "libero_sim", "oxe_droid"])
def test_what_is_read_is_what_plans_are_made_from(tag, history):
    """Over every length of execution, against the frames that each plan picks."""
    robot = load_embodiment(tag)
    horizon, offsets = robot.timing.action_horizon, frame_offsets(robot, history)
    for every in range(1, horizon + 1):
        length = 4 * horizon
        picked = {
            max(0, plan + offset)
            for plan in range(0, length + 2 * horizon, every)
            for offset in (offsets if plan else (0,))
        }
        for step in range(1, length):
            assert reads_next(offsets, -step % every, every) == (step in picked), (every, step)


ALL = list(range(STEPS + 1))


@pytest.mark.parametrize(("history", "read"), [("off", [0, 3, 6]), ("recent", [0, 1, 3, 5, 8])])
def test_actions_are_the_same_and_only_what_is_read_is_drawn(trained, history, read):
    actor = PolicyActor(policy=trained[history], session="a", noise_key=0)
    (skipped, drawn), (whole, every) = outcome(actor), outcome(actor, Needy)
    assert skipped == whole
    assert (drawn, every) == (read, ALL)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("execution", "execute", "read"),
    [
        # Asked at 0, there at 2, four steps executed, then it asks again.
        ("sync", 4, [0, 6]),
        ("naive", 4, [0, 6]),
        # The next plan is due as soon as one is there.
        ("naive", 2, [0, 4, 6, 8]),
    ],
)
def test_plans_that_take_time_are_made_of_the_same_images(trained, execution, execute, read):
    said = ExecutionOptions(execution=execution, latency=parse_latency("steps:2"))
    plan = schedule(said, MINI, 20.0, execute)

    def actor():
        desk = VirtualDesk(said.latency, plan.hz, ("key",))
        return EngineActor(policy=trained["off"], schedule=plan, desk=desk, noise_key=0)

    (skipped, drawn), (whole, every) = outcome(actor()), outcome(actor(), Needy)
    assert skipped == whole
    assert (drawn, every) == (read, ALL)
    remembering = EngineActor(
        policy=trained["recent"], schedule=plan, desk=VirtualDesk(said.latency, plan.hz, ())
    )
    remembering.begin(None)
    remembering.act(point().reset(seed=0)[0])
    assert remembering.reads_frames(), "a later plan may look back at any step"


def test_predictions_keep_the_frames_they_show(trained, tmp_path):
    found = {}
    for wrapper in (Watched, Needy):
        folder = tmp_path / wrapper.__name__
        inner = PolicyActor(policy=trained["off"], noise_key=0)
        actor = PredictingActor(inner=inner, folder=folder, case="one")
        # This robot predicts a frame of every step, so every step is shown.
        assert outcome(actor, wrapper)[1] == ALL
        assert actor.finish() is None
        found[wrapper] = prediction_files(folder, "one")[1].read_bytes()
    assert found[Watched] == found[Needy]


class Unwilling(Wrapper):
    """The policy as on a GPU, where nothing may be computed beside."""

    def __init__(self, policy):
        super().__init__(policy)
        self.threads = set()

    @property
    def can(self):
        return replace(super().can, defers=False)

    def imagine(self, session="default"):
        self.threads.add(threading.current_thread())
        return super().imagine(session)

    def encode_images(self, images):
        self.threads.add(threading.current_thread())
        return super().encode_images(images)


class Prompt(Unwilling):
    """Its images are there only when they are asked for at once."""

    imagine_later = Policy.imagine_later


@pytest.mark.long
def test_predictions_computed_beside_are_those_computed_at_once(trained, tmp_path):
    assert trained["off"].can.defers
    prompt, unwilling = Prompt(trained["off"]), Unwilling(trained["off"])
    found = []
    for policy in (trained["off"], prompt, unwilling):
        folder = tmp_path / type(policy).__name__
        inner = PolicyActor(policy=policy, noise_key=0)
        actor = PredictingActor(inner=inner, folder=folder, case="one")
        hashed, _ = outcome(actor, Needy)
        assert actor.finish() is None
        kept = read_predictions(folder, "one")
        plans = [(chunk.frames, chunk.planned, chunk.latents) for chunk in kept.chunks]
        found.append((hashed, plans, prediction_files(folder, "one")[1].read_bytes()))
    assert found[0] == found[1] == found[2]
    assert prompt.threads == unwilling.threads == {threading.current_thread()}


class Judged(Actor):
    """A policy whose predictions are compared with what is seen as it acts."""

    def __init__(self, inner):
        self.inner, self.found = inner, []

    def begin(self, env):
        self.inner.begin(env)
        self.errors = PredictionError(self.inner)

    def act(self, observation):
        acted = self.inner.act(observation)
        self.found.append(self.errors.see(observation))
        return acted


@pytest.mark.parametrize("history", ["off", "recent"])
def test_predictions_decoded_later_are_those_decoded_at_once(trained, tmp_path, history):
    policy, found = trained[history], []
    rules = EpisodeRules(seed=0, max_steps=2 * STEPS + 1)
    for later in (False, True):
        folder = tmp_path / str(later)
        inner = PolicyActor(policy=policy, noise_key=0)
        actor = PredictingActor(inner=inner, folder=folder, case="one", later=later)
        hashed = run_episode(point(), actor, rules).action_sha256
        assert actor.finish() is None
        if later:
            assert read_predictions(folder, "one") is None
            weights = weights_hash(open_checkpoint(default_checkpoint()).weights)
            card = {"weights": weights, "dtype": "float32"}
            coder = open_coder(PolicySpec(name=str(default_checkpoint())), card)
            decode(folder, "one", coder, coder.decode)
        kept = read_predictions(folder, "one")
        about = [replace(chunk, timing={}) for chunk in kept.chunks]
        assert sum(chunk.latents != {} for chunk in about) >= 2
        video = prediction_files(folder, "one")[1].read_bytes()
        found.append((hashed, about, kept.executed, kept.states, kept.fps, video))
    assert found[0] == found[1]
    judged = Judged(PolicyActor(policy=policy, noise_key=0))
    run_episode(point(), judged, rules)
    # While it acts, each is known when the next plan is made; the last plan has not ended.
    known = [(step, error) for step, error in enumerate(judged.found) if error is not None]
    assert known == [
        (after.step, one.latents["latent_error"]) for one, after in pairwise(about) if one.latents
    ]
    assert known


def test_a_video_asked_for_later_is_that_of_its_plan(trained):
    # With memory: then both plans are parts of one video.
    policy, env = trained["recent"], point()
    policy.reset("now", episode=0)
    policy.reset("later", episode=0)
    seen, _ = env.reset(seed=0)
    shown, waiting = [], []
    for step in range(9):
        action = policy.act(seen, session="now")
        np.testing.assert_array_equal(policy.act(seen, session="later"), action)
        if step % 8 == 0:
            shown.append(policy.imagine("now"))
            waiting.append(policy.imagine_later("later"))
        seen = env.step(action)[0]
    with ThreadPoolExecutor(1) as thread:
        for video, late in zip(shown, thread.map(lambda compute: compute(0), waiting), strict=True):
            np.testing.assert_array_equal(late, video)
    assert len(shown[1]) < len(shown[0]), "the second goes on where the first ended"


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [0, 1])
def test_a_video_that_cannot_be_computed_is_the_error_of_its_episode(
    workers, tmp_path, monkeypatch
):
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=2, max_steps=4,
        arguments={"resolution": 128},
    )  # fmt: skip
    # A user's own: what a checkpoint predicts is decoded later.
    player = PolicySpec(name="rollout_policies:dreaming", embodiment="libero_mini")
    ready = prepare(EvaluationRequest(spec=spec, policy=player))
    policy = ready.policy
    later = policy.imagine_later

    def fail(without):
        raise RuntimeError("no video of this")

    first = iter([fail])
    monkeypatch.setattr(policy, "imagine_later", lambda session: next(first, later(session)))
    evaluate(ready, tmp_path, RunOptions(workers=workers, videos="none", predictions=True))
    errors = [record.error for record in RecordFile(tmp_path).records.values()]
    assert errors == ["RuntimeError: no video of this", None]
    details = [*(tmp_path / ERROR_FOLDER).iterdir()]
    assert len(details) == 1
    assert "in fail" in details[0].read_text()


@pytest.mark.parametrize("policy", [RandomPolicy(7, 0), HoldPolicy(MINI)])
def test_policies_that_do_not_look_draw_nothing_but_the_first(policy):
    skipped, drawn = outcome(policy)
    policy.end_all()
    assert outcome(policy, Needy)[0] == skipped
    assert drawn == [0]


def test_workers_and_films_show_what_is_asked_for(tmp_path):
    """The policy checks every observation for images: there where it wants them, and only there."""
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=2, max_steps=9,
        arguments={"resolution": 32},
    )  # fmt: skip
    ready = prepare(
        EvaluationRequest(spec=spec, policy=PolicySpec(name="rollout_policies:Glancing"))
    )
    shown = sys.modules["rollout_policies"].Glancing.shown
    results = []
    for workers, videos in ((0, "none"), (1, "none"), (0, "failures")):
        shown.clear()
        folder = tmp_path / f"{workers}-{videos}"
        evaluate(ready, folder, RunOptions(workers=workers, videos=videos))
        records = RecordFile(folder).records.values()
        assert [record.error for record in records] == [None, None]
        results.append([record.result() for record in records])
        wanted = [videos != "none" or step % 3 == 0 for step in range(9)]
        assert shown == 2 * wanted
    assert results[0] == results[1] == results[2]


def test_only_who_is_known_not_to_look_goes_without():
    env = point()
    assert omits(env) == env.unwrapped.omit_frames
    assert omits(gym.wrappers.RecordEpisodeStatistics(env)) is None
    assert omits(gym.make("dzrobot/point-v0")) is None, "Gymnasium's checker looks"
    assert omits(Watched(env, [])) is not None

    class Blind(gym.Env):
        """Cannot leave anything out."""

    assert omits(Blind()) is None

    drawn, seen = [], []
    rules = EpisodeRules(seed=0, max_steps=4)
    run_episode(Watched(env, drawn), HoldPolicy(MINI), rules)
    assert drawn == [True] + [False] * 4
    run_episode(Watched(env, drawn), HoldPolicy(MINI), rules, watch=seen.append)
    assert drawn == [True] * 5
    assert len(seen) == 5
    # Left out once: whoever steps it next, or resets it, sees everything again.
    env.reset(seed=0)
    env.unwrapped.omit_frames()
    shown = [env.step(np.zeros(7, np.float32))[0] for _ in range(2)]
    assert ["video.image" in observation for observation in shown] == [False, True]
    env.unwrapped.omit_frames()
    assert "video.image" in env.reset(seed=0)[0]


def observations(count):
    env = point()
    first = env.reset(seed=0)[0]
    return [first, *(env.step(np.zeros(7, np.float32))[0] for _ in range(count - 1))]


def omits(env):
    return omitter(env, facts_of(env))


def bare(observation):
    return {key: value for key, value in observation.items() if not key.startswith("video.")}


def test_a_missing_image_that_is_read_is_refused(trained):
    policy, seen = trained["off"], observations(4)
    policy.reset("a")
    with pytest.raises(ModalityError, match=r"video\.\w*image.* missing"):
        policy.act(bare(seen[0]), session="a")
    wanted = [policy.act(observation, session="a") for observation in seen]
    policy.reset("a", episode=0)
    reads = []
    for step, observation in enumerate(seen):
        reads.append(policy.reads_frames(session="a"))
        if reads[-1]:
            with pytest.raises(ModalityError, match="missing"):
                policy.act(bare(observation), session="a")
        else:
            one = {key: value for key, value in observation.items() if key != "video.image"}
            with pytest.raises(ModalityError, match=r"video\.image missing"):
                policy.act(one, session="a")
            floats = {**observation, "video.image": observation["video.image"] / 255.0}
            with pytest.raises(ModalityError, match=r"video\.image is float64"):
                policy.act(floats, session="a")
            observation = bare(observation)
        np.testing.assert_array_equal(policy.act(observation, session="a"), wanted[step])
    assert reads == [True, False, False, True]


def test_no_plan_is_made_from_an_image_that_was_left_out(trained):
    policy, seen = trained["off"], observations(3)
    policy.reset("a")
    policy.observe(seen[0], session="a")
    policy.observe(bare(seen[1]), session="a")
    with pytest.raises(ModalityError, match=r"without video\.image, video\.wrist_image"):
        policy.ask(session="a")
    with pytest.raises(ModalityError, match="missing"):
        policy.infer(bare(seen[2]), session="a")
    remembering = trained["recent"]
    remembering.reset("a")
    with pytest.raises(ModalityError, match="missing"):
        remembering.observe(bare(seen[0]), session="a")
    # Stacks of frames are counted in frames, not in steps: nothing is foretold then.
    stack = {k: v[None].repeat(2, 0) if k.startswith("video.") else v for k, v in seen[0].items()}
    policy.reset("b")
    policy.act(stack, session="b")
    assert policy.reads_frames(session="b")
