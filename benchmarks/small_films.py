"""How far are the pictures that the network sees from small films from those of the source?

    dzrobot collect --env dzrobot/lift-v0 --video --output demonstrations
    python benchmarks/small_films.py demonstrations libero_mini@256x256 68x68

Reads the same samples from a recording with films and from a copy of
``dzrobot consolidate --films small``, crops and resizes both as training does, once with the crop
in the middle and once with the crops that training draws, and compares what the network is shown.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from dzrobot.commands.options.flags import size
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.modality.video import AugmentConfig, draw_augmentation, encode_views
from dzrobot.recording.small_films import small_copy
from dzrobot.training.data import DatasetReader, ReaderOptions

CROP_ALONE = AugmentConfig(brightness=0, contrast=0, saturation=0, hue=0)


def main() -> int:
    """Print mean and largest differences, of 255."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("embodiment")
    parser.add_argument("size", type=size, help="HEIGHTxWIDTH of the small films")
    parser.add_argument("--samples", type=int, default=32)
    options = parser.parse_args()
    robot = load_embodiment(options.embodiment)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        small_copy(options.dataset, small, options.size)
        readers = [
            DatasetReader(options.dataset, robot, ReaderOptions()),
            DatasetReader(small, robot.at_resolution(*options.size), ReaderOptions()),
        ]
        numbers = np.linspace(0, len(readers[0]) - 1, options.samples).astype(int)
        for name, augmented in (("in the middle", False), ("drawn", True)):
            apart = []
            for number in numbers:
                draws = [draw_augmentation(0, int(number), CROP_ALONE)] if augmented else None
                shown = [
                    encode_views(
                        {k: torch.from_numpy(v)[None] for k, v in reader.views(number).items()},
                        reader.embodiment, draws,
                    )
                    for reader in readers
                ]  # fmt: skip
                apart.append((shown[0].short() - shown[1].short()).abs().float().numpy())
            every = np.concatenate([one.ravel() for one in apart])
            print(
                f"crop {name}: {every.mean():.2f} of 255 on average, "
                f"{np.quantile(every, 0.99):.0f} in 99 of 100 pixels, {every.max():.0f} at most"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
