"""Lift by joint positions: what an action does, what is seen, and that the task can be solved."""

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.expert import expert_for
from dzrobot.errors import ModalityError

pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")

ID = "dzrobot/droid-lift-v0"


@pytest.fixture(scope="module")
def arm():
    env = gym.make(ID, cameras=False)
    yield env
    env.close()


def test_joints_go_to_where_an_action_says_as_softly_as_the_arm(arm):
    seen, _ = arm.reset(seed=0)
    start = seen["state.joint_position"]
    target = start + np.array([0.1, -0.1, 0.1, 0.1, -0.1, 0.1, 0.1], np.float32)
    share = []
    for _ in range(25):
        seen, *_ = arm.step(np.array([*target, 0.0], np.float32))
        share.append((seen["state.joint_position"] - start) / (target - start))
    # Dry friction keeps a soft joint a few milliradians off.
    np.testing.assert_allclose(seen["state.joint_position"], target, atol=8e-3)
    # The emulated arm, told the same from the same joints: nothing after one step, half after five.
    half = [int(np.argmax(np.array(share)[:, joint] > 0.5)) for joint in range(7)]
    assert np.abs(share[0]).max() < 0.05
    assert np.median(half) in (4, 5)
    # The same action again holds: it is a place, not a step.
    seen, *_ = arm.step(np.array([*target, 0.0], np.float32))
    np.testing.assert_allclose(seen["state.joint_position"], target, atol=8e-3)


def test_a_far_target_is_approached_at_the_speed_of_the_arm(arm):
    seen = [arm.reset(seed=0)[0]["state.joint_position"]]
    far = np.clip(seen[0] + 2.0, arm.action_space.low[:7], arm.action_space.high[:7])
    for _ in range(12):
        seen.append(arm.step(np.array([*far, 0.0], np.float32))[0]["state.joint_position"])
    fastest = np.abs(np.diff(seen, axis=0)).max(axis=0) * arm.metadata["render_fps"]
    # Soft joints swing past the speed of their targets, 1 rad/s.
    assert fastest.max() < 1.6
    assert seen[-1][0] > seen[0][0] + 0.1


def test_the_gripper_is_0_open_and_1_closed(arm):
    seen, _ = arm.reset(seed=0)
    assert seen["state.gripper_position"] == pytest.approx(0, abs=0.1)
    joints = seen["state.joint_position"]
    for told, reached in ((1.0, 1.0), (0.0, 0.0)):
        for _ in range(15):
            seen, *_ = arm.step(np.array([*joints, told], np.float32))
        assert seen["state.gripper_position"] == pytest.approx(reached, abs=0.1)


def test_the_expert_lifts_the_cube(arm):
    for seed in (0, 1):
        seen, _ = arm.reset(seed=seed)
        expert, success = expert_for(arm), False
        for _ in range(60):
            seen, _, terminated, _, info = arm.step(expert.act(seen))
            success = info["is_success"]
            if terminated:
                break
        assert success


def test_an_action_of_another_width_says_what_is_taken(arm):
    arm.reset(seed=0)
    with pytest.raises(ModalityError, match=r"8 finite numbers, as env\.action_space says"):
        arm.step(np.zeros(7, np.float32))


def test_images_have_the_size_of_the_robots():
    env = gym.make(ID, quality="draft", settle_steps=0, render_mode="rgb_array")
    seen, _ = env.reset(seed=0)
    views = [seen[view.key] for view in load_embodiment("oxe_droid").views]
    assert {view.shape for view in views} == {(180, 320, 3)}
    assert all(view.std() > 10 for view in views)
    np.testing.assert_array_equal(env.render(), views[0])
    env.close()


@pytest.mark.long
def test_it_is_what_gymnasium_expects():
    check_env(gym.make(ID, quality="draft", render_mode="rgb_array").unwrapped)


@pytest.mark.long
def test_demonstrations_repeat_exactly_and_have_relative_statistics(tmp_path, capsys):
    data, draft = str(tmp_path / "demonstrations"), ("--env", ID, "--env-arg", "quality=draft")
    # A sample of four blocks is 96 rows, the task takes about 40.
    collected = ("--episodes", "1", "--workers", "1", "--hold-steps", "75", "--output", data)
    assert main(["collect", *draft, *collected]) == 0
    metadata = str(tmp_path / "metadata.json")
    assert main(["stats", "oxe_droid", "--dataset", data, "--output", metadata]) == 0
    told = json.loads((tmp_path / "metadata.json").read_text())["oxe_droid"]
    relative = told["statistics"]["action"]["joint_position"]
    assert np.abs([relative["q01"], relative["q99"]]).max() < 1.5
    capsys.readouterr()
    assert main(["replay", data, *draft]) == 0
    said = capsys.readouterr().out
    assert "ended by success" in said
    assert "state.joint_position: largest difference 0.0000\n" in said
