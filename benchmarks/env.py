"""Steps per second of a simulated arm: bare, without images that nothing reads, and of two workers.

python benchmarks/env.py                      # LIBERO where its assets are, otherwise Lift
python benchmarks/env.py --env dzrobot/lift-v0 --pairs 10
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

import dzrobot  # noqa: F401
from dzrobot.envs.libero.assets import assets_folder
from dzrobot.errors import SimulatorError
from dzrobot.training.bench.stepping import seconds, sparing

ACTION = np.array([0.1, 0, 0, 0, 0, 0, -1], np.float32)


def make(env_id):
    return gym.make(env_id, disable_env_checker=True, max_episode_steps=100_000)


def bare(env):
    """Return the step function of the robosuite environment inside ``env``, drawing as it does."""
    return env.unwrapped.simulation.env.step


def overhead(env_id, pairs, block):
    """Return (steps/s, wall ratio, processor ratio, reset s): blocks of both, taken in turns."""
    env = make(env_id)
    env.reset(seed=0)
    inner = bare(env)
    for step in (env.step, inner):
        seconds(step, ACTION, 2)
    ratios, times = [], []
    for pair in range(pairs):
        order = (env.step, inner) if pair % 2 else (inner, env.step)
        took = {step: seconds(step, ACTION, block) for step in order}
        ratios.append(took[env.step] / took[inner])
        times.append(took[env.step][0])
    start = time.perf_counter()
    env.reset(seed=1)
    reset = time.perf_counter() - start
    env.close()
    wall, processor = np.median(ratios, axis=0)
    return 1 / statistics.median(times), wall, processor, reset


def omission(env_id, pairs, every):
    """Return (steps/s, wall ratio, processor ratio) of one image in ``every`` against all."""
    env = make(env_id)
    env.reset(seed=0)
    some = sparing(env, every)
    ratios, times = [], []
    for pair in range(pairs):
        order = (env.step, some) if pair % 2 else (some, env.step)
        took = {step: seconds(step, ACTION, every) for step in order}
        ratios.append(took[env.step] / took[some])
        times.append(took[some][0])
    env.close()
    wall, processor = np.median(ratios, axis=0)
    return 1 / statistics.median(times), wall, processor


def workers(env_id, rounds, block):
    """Return env steps/s and processor s of a step, for one worker and two taken in turns."""
    fleets = {}
    for count in (1, 2):
        fleets[count] = gym.vector.AsyncVectorEnv(
            [lambda: make(env_id)] * count, context="forkserver", shared_memory=False
        )
        fleets[count].reset(seed=0)
    rates, busy = {1: [], 2: []}, {1: [], 2: []}
    for _ in range(rounds):
        for count, fleet in fleets.items():
            actions = np.tile(ACTION, (count, 1))
            start, before = time.perf_counter(), processor_seconds(fleet)
            for _ in range(block):
                fleet.step(actions)
            rates[count].append(count * block / (time.perf_counter() - start))
            busy[count].append((processor_seconds(fleet) - before) / (count * block))
    for fleet in fleets.values():
        fleet.close()
    gains = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return _medians(rates), _medians(busy), gains


def _medians(found):
    return {count: statistics.median(values) for count, values in found.items()}


def process_seconds(number: int) -> float:
    """Return the processor time of a process with all its threads so far, from Linux's /proc."""
    words = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def processor_seconds(fleet):
    """Return what the workers have used of the processor, threads of their renderers included."""
    return sum(process_seconds(worker.pid) for worker in fleet.processes)


def default_env():
    try:
        assets_folder()
    except SimulatorError as error:
        print(f"{error}\nMeasuring Lift instead.")
        return "dzrobot/lift-v0"
    return "dzrobot/libero_object-v0"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", help="Gymnasium id of a simulated arm")
    parser.add_argument("--pairs", type=int, default=6, help="measurements of each kind")
    parser.add_argument("--block", type=int, default=10, help="steps per measurement")
    parser.add_argument("--every", type=int, default=8, help="steps from one image to the next")
    arguments = parser.parse_args()
    env_id = arguments.env or default_env()
    rate, wall, processor, reset = overhead(env_id, arguments.pairs, arguments.block)
    faster, gain, processor_gain = omission(env_id, arguments.pairs, arguments.every)
    rates, busy, gains = workers(env_id, arguments.pairs, arguments.block)
    print(f"{env_id}, 2 cameras 256x256")
    print(f"  one environment     {rate:6.1f} steps/s, reset {reset:.2f} s")
    print(f"  over the bare one   {100 * (wall - 1):+6.1f} %  (target: at most +5 %)")
    print(f"    in processor time {100 * (processor - 1):+6.1f} %  (the same on a busy machine)")
    print(f"  images every {arguments.every} steps {faster:4.1f} steps/s, {gain:.2f} x")
    print(f"    in processor time {processor_gain:6.2f} x")
    print(f"  one worker          {rates[1]:6.1f} steps/s")
    print(f"  two workers         {rates[2]:6.1f} steps/s")
    print(f"  gain of the second  {statistics.median(gains):6.2f} x  (target: at least 1.8 x)")
    cores = len(os.sched_getaffinity(0))
    used, allowed = rates[1] * busy[1], cores / busy[2] / rates[1]
    one, two = (1e3 * busy[count] for count in (1, 2))
    print(f"  a step in processor time: {one:.0f} ms of one worker, {two:.0f} ms of two")
    print(f"  one worker uses {used:.2f} of {cores} cores, so they allow {min(allowed, 2):.2f} x")


if __name__ == "__main__":
    main()
