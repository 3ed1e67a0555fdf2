"""What type checkers see of the names that are loaded when they are used; for ``make types``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import dzrobot
from dzrobot import envs, policies, rollout, training

assert_type(dzrobot.load_embodiment("libero_sim"), dzrobot.Embodiment)
assert_type(dzrobot.default_checkpoint(), Path)
assert_type(
    dzrobot.DreamZeroPolicy.from_pretrained(dzrobot.default_checkpoint()), policies.DreamZeroPolicy
)
assert_type(training.load_recipe("tiny_cpu", (), 1), training.SFTConfig)
assert_type(envs.action_space(dzrobot.load_embodiment("libero_sim")).shape, tuple[int, ...])
run: Callable[..., rollout.EpisodeResult] = dzrobot.run_episode
sweep: Callable[[Any, Path], Any] = dzrobot.evaluate
