"""What the arm's controller does on the emulated arm: drift, elbow, smoothness.

``python benchmarks/franka_control.py`` prints how far a hand that carries an unknown load drifts
while the action is zero, how far the joints are from home after random episodes, and how even the
speed is while every action is the same.
"""

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.make import connectable, load_workcell

Array = NDArray[np.float64]

_FRAMES_MAY_BE_LATE = {"frame_age_s": 5.0, "state_age_s": 2.0, "hold_after_s": 2.0}


def make(cell: EmulatedWorkcell, **values: Any) -> FrankaEnv:
    """Return an environment on ``cell`` that a busy machine does not stop."""
    given = {"limits": _FRAMES_MAY_BE_LATE, "reward": {"rule": "none"}}
    return connectable(cell, load_workcell("emulated:empty", given | values))


def drift_under_load(
    cell: EmulatedWorkcell, env: FrankaEnv, *, newtons: float, seconds: float
) -> Array:
    """Return how far the hand is from where it began (steps,), with zero actions and a load."""
    cell.emulators.set(payload_kg=newtons / 9.81)
    try:
        env.reset()
        places = [env.arm.state().pose[:3, 3]]
        for _ in range(round(seconds * env.config.control_hz)):
            *_, truncated, info = env.step(np.zeros(7, np.float32))
            if truncated:
                raise RuntimeError(info["abort_message"])
            places.append(env.arm.state().pose[:3, 3])
    finally:
        cell.emulators.set(payload_kg=0.0)
    return np.linalg.norm(np.array(places) - places[0], axis=1)


def joints_after_episodes(env: FrankaEnv, *, episodes: int, steps: int) -> Array:
    """Return the joints (episodes + 1, 7) after every reset, with random actions between them."""
    generator = np.random.default_rng([0x656C626F77])
    env.reset(seed=0)
    joints = [env.arm.state().joints]
    for _ in range(episodes):
        for _ in range(steps):
            action = generator.uniform(-1.0, 1.0, 7).astype(np.float32)
            action[6] = 1.0
            *_, truncated, info = env.step(action)
            if truncated:
                raise RuntimeError(info["abort_message"])
        env.reset(seed=0)
        joints.append(env.arm.state().joints)
    return np.array(joints)


def speeds(env: FrankaEnv, *, metres_per_second: float, seconds: float) -> Array:
    """Return the hand's speed (samples,) along y while every action asks for the same."""
    env.reset()
    share = metres_per_second / (env.config.action.translation_m * env.config.control_hz)
    action = np.array([0, share, 0, 0, 0, 0, 0], np.float32)
    sampled = _Sampled(env)
    steps = round(seconds * env.config.control_hz)
    for number in range(steps):
        *_, truncated, info = env.step(action)
        if truncated:
            raise RuntimeError(info["abort_message"])
        if number == steps // 3:
            sampled.start()
    found = sampled.stop()
    return np.abs(found)


class _Sampled:
    """Reads the arm's velocity along y as often as it is asked to sleep."""

    def __init__(self, env: FrankaEnv) -> None:
        self._env = env
        self._found: dict[float, float] = {}
        self._clock: Any = env._clock
        self._sleep = env._clock.sleep_until

    def start(self) -> None:
        self._clock.sleep_until = self._sleep_and_look

    def stop(self) -> Array:
        self._clock.sleep_until = self._sleep
        return np.array(list(self._found.values()))

    def _sleep_and_look(self, deadline_s: float) -> None:
        # The emulated arm's clock counts whole milliseconds, and may end just before.
        while deadline_s - self._clock.now() > 0.001:
            self._sleep(min(deadline_s, self._clock.now() + 0.01))
            state = self._env.arm.state()
            self._found[state.robot_time_s] = float(state.twist[1])


def ripple(found: Array) -> float:
    """Return how far the speed strays from its mean, as a share of it."""
    return float(np.abs(found - found.mean()).max() / found.mean())


def main() -> None:
    """Print the three figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--anchor", choices=["target", "measured"], default="target")
    arguments = parser.parse_args()
    cell = EmulatedWorkcell()
    env = make(cell, action={"frame": "base", "anchor": arguments.anchor})
    try:
        env.reset()
        found = speeds(env, metres_per_second=0.15, seconds=1.8)
        print(f"speed {found.mean():.3f} m/s, ripple {ripple(found):.1%} of {len(found)} samples")
        away = drift_under_load(cell, env, newtons=3.0, seconds=6.0)
        print(f"zero action, 3 N unknown load: {1000 * away.max():.2f} mm at most in 6 s")
        joints = joints_after_episodes(env, episodes=arguments.episodes, steps=60)
        home = np.degrees(np.abs(joints - joints[0])).max()
        print(f"{arguments.episodes} random episodes: joints within {home:.2f} degrees of home")
    finally:
        env.close()


if __name__ == "__main__":
    main()
