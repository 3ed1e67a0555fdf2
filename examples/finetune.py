"""Fine-tune a checkpoint from Python, and act with the result.

    python examples/finetune.py                # all small: two minutes on a laptop
    python examples/finetune.py --dataset ./libero --checkpoint ./DreamZero --steps 200

Without a dataset a few episodes are recorded in the light environment; without a checkpoint a tiny
random one is written. The same command resumes from the newest checkpoint. On several devices
use ``torchrun --nproc-per-node 8 training/sft.py RECIPE ...`` instead.
"""

import argparse
import json
import logging
from pathlib import Path

import gymnasium as gym
import numpy as np

from dzrobot import DreamZeroPolicy, Embodiment, EpisodeWriter, load_embodiment, run_episode, train
from dzrobot.rollout import EpisodeRules
from dzrobot.training import load_recipe, measure, write_tiny_checkpoint
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.run.launch import end_process

LIGHT = "dzrobot/point-v0"


def main() -> int:
    """Record, measure, train, act; return the exit code."""
    options = parse()
    robot = load_embodiment(options.embodiment)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    dataset = options.dataset or record(output / "dataset", robot)

    metadata = output / "metadata.json"
    reader = DatasetReader(str(dataset), robot, ReaderOptions(images=False))
    print(reader.report())
    metadata.write_text(json.dumps({robot.tag: measure([reader], robot)}))

    checkpoint = options.checkpoint or output / "tiny"
    if not options.checkpoint and not checkpoint.exists():
        write_tiny_checkpoint(checkpoint, robot)

    recipe = load_recipe(
        options.recipe,
        [
            f"model.model_path={checkpoint}",
            f"model.embodiment_tag={options.embodiment}",
            f"model.metadata_json_path={metadata}",
            f"data.train_data_paths={dataset}",
            f"runner.output_dir={output}",
            f"runner.max_steps={options.steps}",
            "runner.resume_dir=auto",
        ],
        world_size=1,
    )
    code = train(recipe)
    trained = output / "export" / f"step_{options.steps:08d}"
    if code == 0 and trained.exists() and not options.dataset:
        policy = DreamZeroPolicy.from_pretrained(trained)
        env = gym.make(LIGHT, resolution=robot.views[0].resolution[0], max_episode_steps=8)
        result = run_episode(env, policy, EpisodeRules(seed=0))
        print(f"the trained policy acted for {result.steps} steps: {result.ended}")
    print(f"give {trained} to `dzrobot eval --checkpoint`")
    return code


def record(folder: Path, robot: Embodiment, episodes: int = 3) -> Path:
    """Record straight paths to the mark in the light environment, unless ``folder`` has them."""
    env = gym.make(LIGHT, resolution=robot.views[0].resolution[0])
    with EpisodeWriter(folder, robot, fps=robot.timing.control_hz) as writer:
        for seed in range(writer.episodes, episodes):
            observation, _ = env.reset(seed=seed)
            for _ in range(60):
                state = observation["state.state"]
                action = np.zeros(robot.action_dim, np.float32)
                action[:2] = np.clip(state[3:5] - state[0:2], -1, 1)
                writer.add_frame(observation, action)
                observation, *_ = env.step(action)
            writer.save_episode(success=True)
    env.close()
    return folder


def parse() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", help="LeRobot folder, v2.0 to v3.0 (default: recorded here)")
    parser.add_argument("--checkpoint", help="folder or hub id (default: a tiny random one)")
    parser.add_argument("--embodiment", default="libero_mini", help="tag or module:NAME")
    parser.add_argument("--recipe", default="tiny_cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("logs") / "finetune")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    end_process(main())
