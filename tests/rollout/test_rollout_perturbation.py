"""Episodes made harder in one respect: drawn from the episode, on the card, beside their pairs."""

import json

import gymnasium as gym
import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.errors import ConfigError
from dzrobot.rollout.perturbation import (
    KINDS,
    LEVELS,
    Perturbation,
    PerturbedEpisodes,
    noisy,
    reworded,
)
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes

CASES = plan_episodes(EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=3))


def test_what_is_written_is_what_is_meant():
    assert Perturbation.read("camera") == Perturbation(axis="camera", level=3)
    assert Perturbation.read("robot_init:5").text == "robot_init:5"


@pytest.mark.parametrize(
    "text", ["", "smell", "camera:0", "camera:6", "camera:", "camera:3:1", "Camera"]
)
def test_what_is_no_perturbation_is_refused(text):
    with pytest.raises(ConfigError, match="camera, light, texture"):
        Perturbation.read(text)


def draws(seed=0):
    return np.random.default_rng(seed)


def test_a_task_is_asked_for_in_other_words():
    task = "pick up the milk and place it in the basket"
    for level in LEVELS:
        said = {reworded(task, level, draws(seed)) for seed in range(20)}
        assert task not in said
        assert len(said) > 1
        assert all("milk" in words and "basket" in words for words in said)
        assert reworded(task, level, draws()) == reworded(task, level, draws())


@pytest.mark.parametrize("kind", KINDS)
def test_a_higher_level_spoils_an_image_more(kind):
    image = draws(1).integers(0, 256, (8, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    away = [
        np.abs(noisy(image, kind, level, draws()).astype(int) - image).mean() for level in LEVELS
    ]
    assert 0 < away[0] < away[2] < away[4]


def first(axis, level, case):
    env = gym.make("dzrobot/point-v0", resolution=32)
    shown = PerturbedEpisodes(env, Perturbation(axis=axis, level=level), case)
    observation, info = shown.reset(seed=case.seed)
    return observation, info, shown.step(np.zeros(7, np.float32))[0]


def test_the_episode_decides_what_is_drawn():
    one, info, later = first("language", 5, CASES[0])
    again, _, _ = first("language", 5, CASES[0])
    assert one["annotation.task"] == again["annotation.task"] == later["annotation.task"]
    assert one["annotation.task"] != info["task"] == "move the point to the red mark"
    images = [first("noise", 5, case)[0]["video.image"] for case in (*CASES, CASES[0])]
    np.testing.assert_array_equal(images[0], images[3])
    clean, _ = gym.make("dzrobot/point-v0", resolution=32).reset(seed=CASES[0].seed)
    assert not np.array_equal(images[0], clean["video.image"])
    np.testing.assert_array_equal(clean["state.state"], one["state.state"])


WORDS = ["eval", "--env", "dzrobot/point-v0", "--policy", "rollout_policies:Seeker", "--privileged",
         "--episodes", "3", "--workers", "0", "--videos", "none"]  # fmt: skip


def test_a_pair_is_run_kept_apart_and_compared(tmp_path, capsys):
    words = [*WORDS, "--output", str(tmp_path), "--perturb", "language:2", "--perturb", "noise"]
    assert main(words) == 0
    out = capsys.readouterr().out
    arms = ["unperturbed", "language-2", "noise-3"]
    assert [f"against {tmp_path}" in out.replace("\n", "")] == [True]
    # On a screen of 80 columns too, every column of the table can be read.
    (head,) = [line for line in out.splitlines() if "bootstrap" in line]
    names = [part.strip() for part in head.strip("┃").split("┃")]
    assert names[:5] == ["run", "pairs", "rate, %", "base, %", "difference"]
    assert names[5:] == ["95 % (bootstrap)", "95 % (adjusted)", "lost", "won", "p (McNemar)",
                         "p (Holm)", "e"]  # fmt: skip
    cards = [json.loads((tmp_path / arm / "card.json").read_text()) for arm in arms]
    assert [card.get("perturbation") for card in cards] == [
        None,
        {"axis": "language", "level": 2, "definition": 1},
        {"axis": "noise", "level": 3, "definition": 1},
    ]
    assert len({card["cases_sha256"] for card in cards}) == 1
    records = {arm: (tmp_path / arm / "records.jsonl").read_bytes() for arm in arms}
    assert main(words) == 0
    assert records == {arm: (tmp_path / arm / "records.jsonl").read_bytes() for arm in arms}
    capsys.readouterr()
    pair = [str(tmp_path / arm) for arm in arms[:2]]
    assert main(["compare", *pair]) == 2
    assert "perturbation" in capsys.readouterr().err
    assert main(["compare", *pair, "--perturbed"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "{0}", "--perturb", "camera"], "it can along language, noise"),
        (["--output", "{0}", "--perturb", "smell"], "axes are camera, light"),
        (["--output", "{0}", "--perturb", "noise", "--perturb", "noise:3"], "twice"),
        (["--perturb", "noise"], "--output DIR"),
        (["--perturb", "noise", "--steps", "all"], "give one of them"),
    ],
)
def test_what_cannot_be_perturbed_is_one_message(words, said, tmp_path, capsys):
    assert main([*WORDS, *(word.format(tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err


def scenes(env, seed, perturbations):
    """Yield the first observation of one start under each perturbation."""
    for axis, level in perturbations:
        env.unwrapped.perturb(axis, level, 11)
        yield env.reset(seed=seed)[0]


def check_scenes(env):
    """Check what each axis changes: some the images alone, some the arm's state, some neither."""
    axes = env.unwrapped.perturbations
    asked = [(None, 0), *((axis, 5) for axis in axes), ("layout", 5), (None, 0)]
    plain, *changed, layout, last = scenes(env, 3, asked)
    for axis, shown in zip(axes, changed, strict=True):
        assert not np.array_equal(shown["video.image"], plain["video.image"]), axis
        moved = np.abs(shown["state.state"] - plain["state.state"]).max()
        assert (moved > 0.01) == (axis == "robot_init"), axis
        on_hand = np.array_equal(shown["video.wrist_image"], plain["video.wrist_image"])
        assert on_hand == (axis == "camera"), axis
    for key in ("video.image", "state.state"):
        # The same draw is the same scene, and nothing of a perturbation stays behind.
        np.testing.assert_array_equal(layout[key], changed[axes.index("layout")][key])
        np.testing.assert_array_equal(last[key], plain[key])


@pytest.mark.long
def test_the_scene_of_lift_changes_in_one_respect():
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    env = gym.make("dzrobot/lift-v0", resolution=32, quality="draft", settle_steps=1)
    check_scenes(env)
    with pytest.raises(ConfigError, match="allowed are camera"):
        env.unwrapped.perturb("smell", 3, 0)
    env.close()


@pytest.mark.long
@pytest.mark.libero
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_goal"])
def test_the_scenes_of_libero_change_in_one_respect(suite, libero_assets):
    env = gym.make(f"dzrobot/{suite}-v0", resolution=32, quality="draft", settle_steps=1)
    check_scenes(env)
    env.close()
