"""Fine-tune a checkpoint on a LeRobot dataset and act with the result.

    python examples/finetune.py --dataset ./libero --checkpoint ./DreamZero --steps 200

Without a checkpoint a tiny random one is made, so the whole way can be tried on a laptop. On
several devices use ``torchrun --nproc-per-node 8 training/sft.py RECIPE ...`` instead.
"""

import argparse
import json
from pathlib import Path

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.data.statistics import measure
from dzrobot.training.launch import leave, train
from dzrobot.training.recipe import load_recipe


def main() -> None:
    """Measure statistics, train, and say where the result is."""
    options = parse()
    robot = load_embodiment(options.embodiment)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)

    metadata = output / "metadata.json"
    reader = DatasetReader(options.dataset, robot, ReaderOptions(images=False))
    print(reader.report())
    metadata.write_text(json.dumps({robot.tag: measure([reader], robot)}))

    checkpoint = options.checkpoint
    if checkpoint is None:
        from dzrobot.policies.dreamzero.tiny import write_tiny_checkpoint

        checkpoint = output / "tiny"
        if not checkpoint.exists():
            write_tiny_checkpoint(checkpoint, robot)

    recipe = load_recipe(
        options.recipe,
        [
            f"model.model_path={checkpoint}",
            f"model.embodiment_tag={options.embodiment}",
            f"model.metadata_json_path={metadata}",
            f"data.train_data_paths={options.dataset}",
            f"runner.output_dir={output}",
            f"runner.max_steps={options.steps}",
            "runner.resume_dir=auto",
        ],
        world_size=1,
    )
    code = train(recipe)
    print(f"give {output / 'export' / f'step_{options.steps:08d}'} to `dzrobot eval --checkpoint`")
    leave(code)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", required=True, help="LeRobot folder, v2.0 to v3.0")
    parser.add_argument("--checkpoint", help="folder or hub id (default: a tiny random one)")
    parser.add_argument("--embodiment", default="libero_sim", help="tag or module:NAME")
    parser.add_argument("--recipe", default="tiny_cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("logs") / "finetune")
    return parser.parse_args()


if __name__ == "__main__":
    main()
