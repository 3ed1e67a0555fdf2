"""``dzrobot init``: a small untrained checkpoint whose autoencoder knows the recordings."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import (
    add_damaged,
    add_sampling,
    sampled_robot,
    training_words,
)
from dzrobot.progress import waiting
from dzrobot.training.tiny.fit_plan import SIZES, AutoencoderPlan

SUMMARY = "write a small untrained checkpoint, its autoencoder fitted to recordings"

NEXT = "dzrobot train {words}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot init``."""
    parser.add_argument("output", type=flags.output, help="checkpoint folder to make")
    parser.add_argument(
        "--embodiment", type=flags.text, default="libero_mini",
        help="robot of the recordings: a built-in tag, or module:NAME",
    )  # fmt: skip
    parser.add_argument(
        "--dataset", nargs="+", type=flags.path, required=True, metavar="PATH",
        help="folders of LeRobot datasets",
    )  # fmt: skip
    parser.add_argument("--metadata", type=flags.path, required=True, help="from `dzrobot stats`")
    parser.add_argument(
        "--size", choices=list(SIZES), default="mini",
        help="of the network: mini, 5 million parameters; small, for several objects in many "
        "scenes (default: mini)",
    )  # fmt: skip
    parser.add_argument(
        "--holdout-episodes", type=flags.whole(0), default=0, metavar="N",
        help="last episodes of each folder to leave out, as data.holdout_episodes of the run; the "
        "PSNR is measured on them",
    )  # fmt: skip
    parser.add_argument(
        "--still-steps", type=flags.whole(3), default=AutoencoderPlan.still_steps,
        help="updates of the autoencoder on single frames",
    )  # fmt: skip
    parser.add_argument(
        "--clip-steps", type=flags.whole(3), default=AutoencoderPlan.clip_steps,
        help="then, updates on clips of nine frames",
    )  # fmt: skip
    parser.add_argument(
        "--decoder-steps", type=flags.whole(0), default=AutoencoderPlan.decoder_steps,
        help="then, updates of the decoder alone, for better predicted video (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default=AutoencoderPlan.dtype,
        help="what the fit computes in; weights stay float32 (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=flags.whole(1, 1024),
        help="processor threads of the fit; last bits depend on their number (default: "
        "OMP_NUM_THREADS, or 1)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=flags.seed, default=0, help="of new weights and the order of clips"
    )
    parser.add_argument(
        "--workers",
        "--num-workers",
        type=flags.whole(0, 1024),
        default=0,
        help="processes that read",
    )
    add_damaged(parser)
    add_sampling(parser.add_argument_group("how a run will cut samples, as in `dzrobot stats`"))


def run(arguments: argparse.Namespace) -> int:
    """Fit the autoencoder and write the checkpoint."""
    # Here, as help needs none of it.
    with waiting("loading libraries"):
        import torch

        from dzrobot.training.tiny.init import FittedTo, write_fitted_checkpoint

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    datasets = [str(path) for path in arguments.dataset]
    robot, _, data = sampled_robot(arguments, arguments.embodiment, datasets)
    plan = AutoencoderPlan(
        still_steps=arguments.still_steps,
        clip_steps=arguments.clip_steps,
        decoder_steps=arguments.decoder_steps,
        dtype=arguments.dtype,
        seed=arguments.seed,
        num_workers=arguments.workers,
        held_out=arguments.holdout_episodes,
        episodes=data.episodes,
        damaged=data.on_corrupt,
    )
    target = FittedTo(embodiment=robot, datasets=arguments.dataset, metadata=arguments.metadata)
    recipe = write_fitted_checkpoint(arguments.output, target, plan, arguments.size)
    arguments.words = [
        *training_words(arguments, arguments.embodiment, datasets),
        f"model.metadata_json_path={arguments.metadata}",
        f"model.model_path={arguments.output}",
    ]
    where = "held-out episodes" if plan.held_out else "the same episodes"
    print(
        f"{arguments.output}: mean absolute error of decoded pixels {recipe['error']:.4f} in clips "
        f"(range 2); PSNR {recipe['psnr']:.1f} dB in {where}"
    )
    return 0
