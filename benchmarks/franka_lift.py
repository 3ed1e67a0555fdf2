"""How fast the emulated arm with its scene is, and what it takes of the processor.

``python benchmarks/franka_lift.py`` lets the scripted expert lift the cube through the real drivers
and prints, by episode, the arm's time, the wall time, and the processor time of all processes.
"""

import argparse
import os
import time
from pathlib import Path

from dzrobot.envs.expert import expert_for
from dzrobot.envs.franka.make import make_franka

_LATE = {"frame_age_s": 5.0, "state_age_s": 2.0, "hold_after_s": 2.0}
_MOST_STEPS = 150


def processor_s() -> dict[str, float]:
    """Return the processor time (s) of this process and of its children, by their names."""
    used: dict[str, float] = {}
    for number in [os.getpid(), *_children(os.getpid())]:
        name = Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
        kind = next(
            (kind for kind in ("arm_server", "camera_server", "driver") if kind in name), ""
        )
        seconds = process_seconds(number)
        used[kind or "environment"] = used.get(kind or "environment", 0.0) + seconds
    return used


def process_seconds(number: int) -> float:
    """Return the processor time of a process with all its threads so far, from Linux's /proc."""
    words = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _children(parent: int) -> list[int]:
    # Drivers are started by threads, and each thread has children of its own.
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    direct = [int(word) for task in tasks for word in task.read_text().split()]
    return [child for one in direct for child in (one, *_children(one))]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=3)
    arguments = parser.parse_args()
    env = make_franka(workcell="emulated", limits=_LATE)
    env.reset(seed=0)
    lifted = 0.0
    for seed in range(arguments.episodes):
        observation, info = env.reset(seed=seed)
        expert = expert_for(env)
        began, wall, used = info["robot_time_s"], time.perf_counter(), processor_s()
        for _ in range(_MOST_STEPS):
            observation, reward, terminated, truncated, info = env.step(expert.act(observation))
            if terminated or truncated:
                break
        lifted += reward
        robot, passed = info["robot_time_s"] - began, time.perf_counter() - wall
        shares = {name: (value - used[name]) / robot for name, value in processor_s().items()}
        said = ", ".join(f"{name} {share:.2f}" for name, share in sorted(shares.items()))
        print(
            f"start {seed}: reward {reward:.0f}, {robot:.1f} s of the arm's time in {passed:.1f} s "
            f"({robot / passed:.2f} times real time); processor seconds per second of the arm's: "
            f"{said}, all {sum(shares.values()):.2f}"
        )
    print(f"{lifted:.0f} of {arguments.episodes} lifted")
    env.close()


if __name__ == "__main__":
    main()
