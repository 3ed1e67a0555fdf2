"""Several environments at once, with one policy call for all and Gymnasium's wrappers.

    python examples/many_environments.py
    python examples/many_environments.py --env dzrobot/lift-v0 --environments 4 --steps 150

Start from here to collect or score in parallel. Every environment runs in a process of its own,
and Gymnasium resets it when its episode is over.
"""

import argparse
from functools import partial

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from dzrobot import DreamZeroPolicy, default_checkpoint


def make(name: str, resolution: int, steps: int) -> gym.Env:
    """Return one environment; the wrappers are Gymnasium's."""
    env = gym.make(name, resolution=resolution)
    return RecordEpisodeStatistics(TimeLimit(env, steps))


def main() -> None:
    """Run all environments for some steps and print every finished episode."""
    arguments = parse()
    policy = DreamZeroPolicy.from_pretrained(default_checkpoint())
    height = policy.embodiment.views[0].resolution[0]
    one = partial(make, arguments.env, height, arguments.episode)
    # The observation after an episode's last step is then the first one of the next episode.
    mode = gym.vector.AutoresetMode.SAME_STEP
    envs = gym.vector.AsyncVectorEnv([one] * arguments.environments, autoreset_mode=mode)
    sessions = [f"environment {number}" for number in range(arguments.environments)]

    observations, _ = envs.reset(seed=0)
    print(f"{observations['annotation.task'][0]}: {arguments.environments} environments")
    over = np.ones(arguments.environments, bool)
    for _ in range(arguments.steps):
        for session in np.array(sessions)[over]:
            policy.reset(str(session))
        actions = policy.act_batch(observations, sessions)
        observations, _, terminated, truncated, infos = envs.step(actions)
        over = terminated | truncated
        for number in np.flatnonzero(over):
            episode = infos["final_info"]["episode"]
            print(f"{sessions[number]}: over after {episode['l'][number]} steps")
    envs.close()


def parse() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--env", default="dzrobot/point-v0", help="Gymnasium id")
    parser.add_argument("--environments", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of every environment, in all")
    parser.add_argument("--episode", type=int, default=5, help="steps of an episode at most")
    return parser.parse_args()


if __name__ == "__main__":
    main()
