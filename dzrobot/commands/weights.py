"""Flags that say which weights are opened, and where they compute."""

from typing import Any

from dzrobot.commands import flags


def add_weights(group: Any) -> None:
    """Declare device, precision and source of a checkpoint's weights."""
    group.add_argument(
        "--device", type=flags.device, default="cpu",
        help="cpu, cuda, cuda:1, or auto: a GPU where there is one",
    )  # fmt: skip
    group.add_argument(
        "--dtype", choices=["float32", "bfloat16"],
        help="what the network computes in (default: float32 on a CPU, else bfloat16)",
    )  # fmt: skip
    group.add_argument(
        "--revision", type=flags.text, help="branch, tag or commit of a Hugging Face checkpoint"
    )
    group.add_argument(
        "--base", type=flags.text, metavar="PATH",
        help="what the checkpoint was trained on, where it holds only what was trained",
    )  # fmt: skip
    group.add_argument(
        "--config-from", type=flags.text, metavar="DIR",
        help="folder with config.json and experiment_cfg, where the checkpoint has none",
    )  # fmt: skip
    group.add_argument(
        "--batch", action="store_true",
        help="act for waiting episodes in one call: faster on a GPU, last bits vary",
    )  # fmt: skip
