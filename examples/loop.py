"""The loop that everything else is built on: observe, act, step, in one process.

    python examples/loop.py
    python examples/loop.py --env dzrobot/libero_spatial-v0 --checkpoint PATH --device cuda

Start from here for a program of your own. `dzrobot eval` adds protocols, workers, videos, resuming.
"""

import argparse

import gymnasium as gym

from dzrobot import DreamZeroPolicy, PolicyOptions, default_checkpoint


def main() -> None:
    """Run one episode and print how it ended."""
    arguments = parse()
    policy = DreamZeroPolicy.from_pretrained(
        arguments.checkpoint or default_checkpoint(),
        device=arguments.device,
        # Every plan starts from its own noise, as in `dzrobot eval`. By default all plans share the
        # same noise, as in the published code.
        options=PolicyOptions(noise="keyed"),
    )
    # The network was trained on images of one size, so the cameras must deliver it.
    height = policy.embodiment.views[0].resolution[0]
    env = gym.make(arguments.env, resolution=height, max_episode_steps=arguments.max_steps)

    observation, info = env.reset(seed=arguments.seed)
    # A session holds what the policy remembers of one episode.
    policy.reset("mine", episode=arguments.seed)
    print(
        f"{info['task']}: {policy.embodiment.timing.action_horizon} actions are planned at a time"
    )
    steps, over = 0, False
    while not over:
        action = policy.act(observation, session="mine")
        observation, _, terminated, truncated, info = env.step(action)
        steps, over = steps + 1, terminated or truncated
    print(f"{'success' if info['is_success'] else 'no success'} after {steps} steps")
    env.close()


def parse() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--env", default="dzrobot/lift-v0", help="Gymnasium id (default: Lift)")
    parser.add_argument("--checkpoint", help="folder or Hugging Face id (default: the bundled one)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--seed", type=int, default=0, help="of the start")
    parser.add_argument("--max-steps", type=int, default=150, help="of the episode")
    return parser.parse_args()


if __name__ == "__main__":
    main()
