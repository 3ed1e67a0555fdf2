"""What a policy's steps are measured from: in the passport, compared, and as large as trained."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from emulated import need_libraries

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.franka.make import make_franka
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.checkpoints.load import expected_shapes
from dzrobot.policies.dreamzero.checkpoints.passport import PASSPORT_FILE
from dzrobot.policies.dreamzero.checkpoints.shards import ShardOptions
from dzrobot.policies.dreamzero.options import WeightOptions
from dzrobot.policies.dreamzero.parts import load_parts
from dzrobot.policies.dreamzero.tiny import (
    NewCheckpoint,
    TinyOptions,
    TinyWeightsSource,
    tiny_config,
    tiny_metadata,
    write_new_checkpoint,
)
from dzrobot.rollout.environment import KeptEnvironment
from dzrobot.rollout.episode import run_episode
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec

ROBOT = load_embodiment("franka_pnp")
STEPS, SIZE = 20, 0.4
ASKED_MM = 1000 * STEPS * SIZE * 0.03

# Straight along x: the lever term of `ee_adjoint` would turn the hand, at the height it has.
STRAIGHT = [SIZE, 0.0, 0.0, 0.0, SIZE * 0.4869, 0.0, 1.0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a function that writes a checkpoint of an anchor: it always moves straight."""

    def write(anchor):
        robot = replace(ROBOT, action_anchor=anchor)
        config, metadata = tiny_config("5b", robot), tiny_metadata(robot)
        # Numbers that never varied are predicted as they are, whatever the network says.
        for part in metadata["franka_pnp"]["statistics"]["action"].values():
            part.update(dict.fromkeys(part, STRAIGHT))
        content = NewCheckpoint(
            config=config, metadata=metadata, shards=ShardOptions(),
            weights=TinyWeightsSource(expected_shapes(config), 0, TinyOptions().dtype),
            recipe=None if anchor is None else {"recipe": "always straight"},
        )  # fmt: skip
        folder = tmp_path_factory.mktemp("policies") / str(anchor)
        return str(write_new_checkpoint(folder, robot, content))

    return write


class Travel(gym.Wrapper):
    """Notes where the hand is from its start, in mm."""

    def reset(self, **arguments):
        observation, info = self.env.reset(**arguments)
        self.start = self.unwrapped.arm.state().pose[:3, 3]
        self.anchor = self.unwrapped.config.action.anchor
        return observation, info

    def step(self, action):
        *rest, info = self.env.step(action)
        state = self.unwrapped.arm.state()
        self.mm = 1000 * float(np.linalg.norm(state.pose[:3, 3] - self.start))
        return *rest, info


def evaluated(checkpoint, folder, env="dzrobot/Franka-PnP-fake-v0", **arguments):
    """Return the environment of an evaluation of one episode, and its card."""
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], suites=(), env=env, tasks=None, episodes=1,
        max_steps=STEPS, seed=0, arguments={"reward": {"rule": "none"}, **arguments},
    )  # fmt: skip
    prepared = prepare(EvaluationRequest(spec=spec, policy=PolicySpec(name=checkpoint)))
    seen = []

    def opened(env):
        seen.append(Travel(env))
        return seen[-1]

    with closing(KeptEnvironment(opened)) as kept:
        summary = evaluate(prepared, folder, RunOptions(videos="none", environment=kept))
        assert (summary.total.episodes, summary.errors) == (1, ())
        (env,) = seen
        assert env.unwrapped.config.action.anchor == env.anchor
        return env, prepared.card


@pytest.mark.robot
def test_of_240_mm_that_are_asked_for_an_arm_goes_as_far_as_the_anchor_lets_it(
    checkpoint, tmp_path
):
    need_libraries()
    gone = {}
    for anchor in ("target", "measured"):
        env, card = evaluated(
            checkpoint(anchor), tmp_path / anchor, "dzrobot/Franka-PnP-emulated-v0",
            workcell="emulated:empty",
        )  # fmt: skip
        assert env.anchor == card["policy"]["action_anchor"] == anchor
        (suite,) = card["suites"].values()
        assert suite["workcell"]["action"]["anchor"] == anchor
        gone[anchor] = env.mm
    assert pytest.approx(240) == ASKED_MM
    assert gone == {
        "target": pytest.approx(231, abs=8), "measured": pytest.approx(129, abs=12)
    }  # fmt: skip


def test_a_published_checkpoint_acts_as_its_data_were_recorded(checkpoint, tmp_path):
    env, card = evaluated(checkpoint(None), tmp_path / "results")
    assert env.anchor == card["policy"]["action_anchor"] == "measured"
    # What nobody chose is the target, which holds at a zero action.
    assert make_franka(workcell="fake").config.action.anchor == "target"


def test_a_workcell_that_says_otherwise_is_refused_before_anything_is_opened(
    checkpoint, tmp_path, capsys
):
    words = ["eval", "--env", "dzrobot/Franka-PnP-fake-v0", "--episodes", "1", "--max-steps", "2"]
    words += ["--output", str(tmp_path / "results"), "--env-arg"]
    trained, published = checkpoint("target"), checkpoint(None)
    for name, anchor in ((trained, "measured"), (published, "target")):
        assert main([*words, f"action={{anchor: {anchor}}}", "--checkpoint", name]) == 2
        said = capsys.readouterr().err
        assert "action.anchor = " + anchor in said
        assert "target" in said and "measured" in said  # noqa: PT018
    assert main([*words, "action_anchor=measured", "--checkpoint", trained]) == 2
    assert "from the anchor 'measured', the policy was made for 'target'" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    assert main([*words, "action={anchor: target}", "--checkpoint", trained]) == 0


def test_record_takes_a_policy_at_its_anchor_and_the_recording_says_it(checkpoint, tmp_path):
    data = tmp_path / "set"
    words = ["record", "--workcell", "fake", "--env-arg", "reward={rule: none}", "--max-steps", "3"]
    words += ["--attempts", "1", "--keep-failures", "--policy", checkpoint(None)]
    assert main([*words, "--output", str(data)]) == 0
    (line,) = (data / "meta/recording_facts.jsonl").read_text().splitlines()
    assert json.loads(line)["action.anchor"] == "measured"
    assert main([*words, "--env-arg", "action={anchor: target}", "--output", str(data)]) == 2


def test_a_plain_script_is_told_too(checkpoint):
    class Says:
        embodiment = ROBOT

        def reset(self, session=None, *, episode=None):
            pass

        def act(self, obs, *, session="default"):
            return np.zeros(7, np.float32)

    with pytest.raises(ConfigError, match="action_anchor='measured'"):
        run_episode(make_franka(workcell="fake"), Says())
    anchored = make_franka(workcell="fake", action_anchor=Says.embodiment.action_anchor)
    assert run_episode(gym.wrappers.TimeLimit(anchored, 2), Says()).steps == 2


def test_a_passport_without_an_anchor_leaves_it_open(checkpoint):
    folder = checkpoint("target")
    path = Path(folder, PASSPORT_FILE)
    passport = json.loads(path.read_text())
    assert passport["embodiments"]["franka_pnp"].pop("action_anchor") == "target"
    path.write_text(json.dumps(passport))
    parts = load_parts(
        folder, embodiment="franka_pnp", device="cpu", dtype=None, revision=None, tokenizer=None,
        weights=WeightOptions(),
    )  # fmt: skip
    assert parts.pipeline.embodiment.action_anchor is None
