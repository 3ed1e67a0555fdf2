"""How fast a simulator steps, with all its images and with those that a policy looks at."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import ConfigError
from dzrobot.rng import numpy_generator
from dzrobot.rollout.environment import bounds_of, facts_of, look_at, made_environment, omitter
from dzrobot.training.bench.document import BenchSettings, Measurement

STEPS = 16
"""Steps of one repeat."""

EVERY = 8
"""Steps from one image to the next, where a policy executes eight actions of a plan."""

_RESETS = 2

Step = Callable[[NDArray[np.float32]], Any]


def measure_env(settings: BenchSettings, _: Path) -> tuple[list[Measurement], list[str]]:
    """Return steps per second, with every image and with one in :data:`EVERY`, and reset times."""
    check_simulator(settings.env)
    env = made_environment(settings.env, {})
    try:
        return _measured(env, settings.repeats)
    finally:
        env.close()


def _measured(env: gym.Env[Any, Any], repeats: int) -> tuple[list[Measurement], list[str]]:
    resets = []
    for seed in range(_RESETS + 1):
        start = time.perf_counter()
        env.reset(seed=seed)
        resets.append(time.perf_counter() - start)
    action = small_action(env)
    forms: dict[str, Step] = {"steps, every image": env.unwrapped.step}
    notes = []
    if omitter(env, facts_of(env)) is None:
        notes.append("steps with few images: the environment draws every image")
    else:
        forms[f"steps, one image in {EVERY}"] = sparing(env.unwrapped, EVERY)
    rates: dict[str, list[float]] = {name: [] for name in forms}
    for step in forms.values():
        seconds(step, action, 2)
    for _ in range(repeats):
        # In turns, so that the machine's company hits both alike.
        for name, step in forms.items():
            rates[name].append(1 / max(seconds(step, action, STEPS)[0], 1e-9))
    found = [
        Measurement(name=name, unit="/s", values=tuple(values), better="more")
        for name, values in rates.items()
    ]
    # The first one builds the scene, and is a measurement of its own.
    first, later = resets[:1], resets[1:]
    for name, values in (("reset, first", first), ("reset, later", later)):
        found.append(Measurement(name=name, unit="s", values=tuple(values), better="less"))
    return found, notes


def small_action(env: gym.Env[Any, Any]) -> NDArray[np.float32]:
    """Return an action (A,) that moves a robot a little, the same at every call."""
    space = bounds_of(env)
    drawn = numpy_generator("benchmark of an environment").uniform(-0.1, 0.1, space.shape)
    return np.clip(drawn, space.low, space.high).astype(np.float32)


def seconds(step: Step, action: NDArray[np.float32], count: int) -> NDArray[np.float64]:
    """Return (wall, processor) seconds of one of ``count`` steps, their mean."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        step(action)
    return np.array([time.perf_counter() - wall, time.process_time() - processor]) / count


def sparing(env: Any, every: int) -> Step:
    """Return the step function of ``env`` that leaves out all images but every so many."""
    taken = 0

    def step(action: NDArray[np.float32]) -> Any:
        nonlocal taken
        taken += 1
        if taken % every:
            env.unwrapped.omit_frames()
        return env.step(action)

    return step


def check_simulator(env: str) -> None:
    """Check that stepping ``env`` moves nothing in the world.

    Raises:
        ConfigError: it drives an arm.
        UnknownNameError: no such environment.
    """
    if look_at(env, None, {}).moves_an_arm:
        raise ConfigError(
            f"{env} drives an arm, and a benchmark moves none: give a simulator, such as "
            "dzrobot/lift-v0"
        )
