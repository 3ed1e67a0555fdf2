"""What the arm's controller does on the emulated arm, by ``benchmarks/franka_control.py``."""

from pathlib import Path

import numpy as np
import pytest
from emulated import printer
from scripts import loaded

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.robot


@pytest.fixture(scope="module")
def benchmark():
    with loaded(ROOT / "benchmarks/franka_control.py") as module:
        yield module


@pytest.fixture(scope="module")
def env(cell, benchmark):
    env = benchmark.make(cell, action={"frame": "base"})
    env.reset()
    yield env
    env.close()


@pytest.fixture
def say(request, capsys):
    return printer(request, capsys)


def test_the_speed_is_even_while_every_action_is_the_same(env, benchmark, say):
    found = benchmark.speeds(env, metres_per_second=0.15, seconds=1.8)
    ripple = benchmark.ripple(found)
    say(f"\nspeed {found.mean():.3f} m/s, ripple {ripple:.1%} of {len(found)} samples")
    assert found.mean() == pytest.approx(0.15, rel=0.05)
    assert ripple < 0.1


@pytest.mark.long
def test_an_unknown_load_does_not_pull_a_still_arm_down(cell, env, benchmark, say):
    away = benchmark.drift_under_load(cell, env, newtons=3.0, seconds=6.0)
    say(f"\nzero action for 6 s with 3 N unknown load: {1000 * away.max():.2f} mm at most")
    assert away.max() < 0.002


@pytest.mark.long
def test_the_joints_are_home_after_every_reset(env, benchmark, say):
    joints = benchmark.joints_after_episodes(env, episodes=8, steps=60)
    away = np.degrees(np.abs(joints - joints[0]).max())
    say(f"\n8 random episodes: joints within {away:.2f} degrees of home")
    assert away < 1.0
