"""Film one episode: what happens, beside the video that DreamZero predicted.

    python examples/imagine.py                          # the bundled checkpoint, on Lift
    python examples/imagine.py --env dzrobot/libero_object-v0 --env-arg task_id=2 --execute 3
    python examples/imagine.py --checkpoint PATH --seed 3 --output imagined.webp
    python examples/imagine.py --env Franka-PnP-v0 --env-arg workcell=emulated \
        --env-arg embodiment=franka_mini --embodiment franka_mini --checkpoint PATH

Left: the tiled camera images. Right: the network's video for the same moments, predicted before
the actions that lead there were executed.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import dzrobot  # noqa: F401 (registers the environments)
from dzrobot.commands.options import flags
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.bundled import (
    EMBODIMENT,
    RESOLUTION,
    SCORED,
    bundled_task,
    default_checkpoint,
)
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy, PolicyOptions
from dzrobot.rollout.predictions import tiled

FRAME_MS = 100
SCALE = 3
GAP = 4


def main() -> None:
    """Run the episode and write the animation."""
    options = _arguments()
    robot = load_embodiment(options.embodiment)
    checkpoint, values = options.checkpoint, flags.keywords(options.env_arg)
    acts = PolicyOptions(execute=options.execute, noise="keyed")
    if checkpoint is None:
        task = bundled_task(options.env)
        checkpoint, acts = default_checkpoint(task), replace(acts, **SCORED[task])
        values.setdefault("resolution", RESOLUTION)
    policy = DreamZeroPolicy.from_pretrained(
        checkpoint,
        embodiment=robot,
        options=acts,
    )
    env = gym.make(options.env, max_episode_steps=options.max_steps, **values)
    pairs = [_beside(real, imagined) for real, imagined in episode(env, policy, options.seed)]
    env.close()
    animation = cv2.Animation()
    animation.frames = [cv2.cvtColor(pair, cv2.COLOR_RGB2BGR) for pair in pairs]
    animation.durations = [FRAME_MS] * len(pairs)
    cv2.imwriteanimation(str(options.output), animation)
    print(f"{options.output}: {len(pairs)} frames")


def episode(
    env: gym.Env[Any, Any], policy: DreamZeroPolicy, seed: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield the tiled image after each action, and the frame that was predicted for it."""
    observation, info = env.reset(seed=seed)
    policy.reset("film", episode=seed)
    step, over, every = 0, False, policy.options.execute
    assert every is not None, "a policy has its options filled in"
    while not over:
        action = policy.act(observation, session="film")
        if step % every == 0:
            # A prediction ends with the last planned step; it need not begin with the current one.
            imagined = policy.imagine("film")[-policy.embodiment.timing.action_horizon :]
        observation, _, terminated, truncated, info = env.step(action)
        yield tiled(observation, policy.embodiment), imagined[step % every]
        step, over = step + 1, terminated or truncated
    print(f"seed {seed}: {'success' if info['is_success'] else 'no success'}")


def _beside(real: NDArray[np.uint8], imagined: NDArray[np.uint8]) -> NDArray[np.uint8]:
    gap = np.full((real.shape[0], GAP, 3), 255, np.uint8)
    joined = np.concatenate([real, gap, imagined], axis=1)
    size = (joined.shape[1] * SCALE, joined.shape[0] * SCALE)
    larger: NDArray[np.uint8] = cv2.resize(joined, size, interpolation=cv2.INTER_CUBIC)  # type: ignore[assignment]
    return larger


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkpoint", type=Path, help="folder (default: the bundled one for ENV)")
    parser.add_argument("--env", default="dzrobot/lift-v0")
    parser.add_argument("--env-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--embodiment", default=EMBODIMENT, help="of environment and checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of the start")
    parser.add_argument("--execute", type=int, default=8, help="actions executed of each plan")
    parser.add_argument("--max-steps", type=int, default=180)
    parser.add_argument("--output", type=Path, default=Path("imagined.webp"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
