"""Time of turning source frames into network images, per training sample of 33 frames.

python benchmarks/encode_video.py --device cuda --batch 8
"""

import argparse
import time

import torch

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.modality.video import draw_augmentation, encode_views


def measure(tag, device, batch, repeats):
    """Return milliseconds per sample: (evaluation, training)."""
    robot = EMBODIMENTS[tag]
    generator = torch.Generator().manual_seed(0)
    views = {
        view.key: torch.randint(
            0,
            256,
            (batch, robot.timing.frames, *view.resolution, 3),
            dtype=torch.uint8,
            generator=generator,
        ).to(device)
        for view in robot.views
    }
    draws = [draw_augmentation(0, i) for i in range(batch)]
    return [run(views, robot, choice, repeats) / batch for choice in (None, draws)]


def run(views, robot, draws, repeats):
    """Return milliseconds per call, after one call to warm up."""
    encode_views(views, robot, draws)
    synchronize(views)
    start = time.perf_counter()
    for _ in range(repeats):
        encode_views(views, robot, draws)
    synchronize(views)
    return (time.perf_counter() - start) / repeats * 1000


def synchronize(views):
    """Wait for the accelerator, if there is one."""
    if next(iter(views.values())).is_cuda:
        torch.cuda.synchronize()


def main():
    """Print one line per embodiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for tag in EMBODIMENTS:
        evaluation, training = measure(tag, options.device, options.batch, options.repeats)
        print(f"{tag:12} {evaluation:8.2f} ms/sample plain {training:8.2f} ms/sample augmented")


if __name__ == "__main__":
    main()
