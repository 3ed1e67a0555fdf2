"""Corrupted images: other places, the same colors; everything else stays."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot.rollout.perturbation import AblatedImages
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes

FIRST, SECOND = plan_episodes(
    EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=2)
)
LISTED = replace(FIRST, init_state_id=7)
VIEWS = ("video.image", "video.wrist_image")


def seen(kind, case, steps=3):
    env = gym.make(case.env, disable_env_checker=True)
    if kind != "none":
        env = AblatedImages(env, kind, case)
    options = None if case.init_state_id is None else {"init_state_id": case.init_state_id}
    observation, info = env.reset(seed=case.seed, options=options)
    found = [observation]
    for _ in range(steps):
        found.append(env.step(np.full(7, 0.5, np.float32))[0])
    return found, info


@pytest.mark.parametrize("case", [FIRST, LISTED], ids=["seeded", "listed"])
@pytest.mark.parametrize("kind", ["shuffle", "other-start"])
def test_only_images_are_corrupted_and_always_alike(kind, case):
    (plain, told), (corrupted, info), (again, _) = (
        seen(k, case) for k in ("none", kind, kind)
    )  # fmt: skip
    assert info == told
    for one, other, repeated in zip(plain, corrupted, again, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(one["state.state"], other["state.state"])
        # Around the point there may be nothing to see at either start.
        assert (one["video.image"] != other["video.image"]).any()
        for view in VIEWS:
            np.testing.assert_array_equal(other[view], repeated[view])


def test_shuffling_moves_tiles_in_one_order_per_episode():
    (plain, _), (corrupted, _) = seen("none", FIRST), seen("shuffle", FIRST)
    for one, other in zip(plain, corrupted, strict=True):
        for view in VIEWS:
            np.testing.assert_array_equal(
                np.sort(one[view].reshape(-1, 3), axis=0),
                np.sort(other[view].reshape(-1, 3), axis=0),
            )
    # The same image is shuffled alike, and unlike in another episode or view.
    env = gym.make(FIRST.env, disable_env_checker=True)
    first, second = AblatedImages(env, "shuffle", FIRST), AblatedImages(env, "shuffle", SECOND)
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    given = dict.fromkeys(VIEWS, image)
    one, other = first.observation(given), second.observation(given)
    np.testing.assert_array_equal(one[VIEWS[0]], first.observation(given)[VIEWS[0]])
    assert (one[VIEWS[0]] != other[VIEWS[0]]).any()
    assert (one[VIEWS[0]] != one[VIEWS[1]]).any()


def test_another_start_is_shown_throughout():
    (plain, _), (corrupted, _) = seen("none", FIRST), seen("other-start", FIRST)
    for observation in corrupted:
        np.testing.assert_array_equal(observation["video.image"], corrupted[0]["video.image"])
    assert (plain[0]["video.image"] != plain[-1]["video.image"]).any()
