"""``dzrobot download``: published checkpoints and datasets, and what each of them needs."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dzrobot.commands.options import flags
from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.hub import commit_of, fetch_to

Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class Published:
    """What lies on the hub under one id."""

    kind: Kind
    use: str
    parameters: float | None = None
    """Billions; in bfloat16 two gigabytes each, on disk and to act with."""

    files: tuple[str, ...] = ()
    """Files of a repository that is not needed as a whole."""


PUBLISHED = {
    "GEAR-Dreams/DreamZero-DROID": Published("model", "14B, robot oxe_droid", 22.92),
    "GEAR-Dreams/DreamZero-AgiBot": Published("model", "14B, robot agibot", 22.92),
    "robocurve/dreamzero-yam-molmoact2": Published(
        "model", "LoRA of rank 32 on DreamZero-AgiBot by third parties, robot yam"
    ),
    "KyleZ0906/DreamZero-LIBERO90-LoRA": Published(
        "model", "LoRA of rank 4 on DreamZero-AgiBot by third parties, LIBERO-90, horizon 24"
    ),
    "RLinf/RLinf-DreamZero-WAN2.2-5B-LIBERO-SFT-Step18000": Published(
        "model", "5B, robot libero_sim", 12.62
    ),
    "Wan-AI/Wan2.2-TI2V-5B": Published("model", "cold start of the 5B", None),
    "Wan-AI/Wan2.1-I2V-14B-480P": Published(
        "model", "cold start: the image encoder of 5B and 14B", None,
        ("models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",),
    ),
    "google/umt5-xxl": Published(
        "model", "tokenizer of all prompts", None, ("tokenizer*", "spiece.model", "*.json")
    ),
    "physical-intelligence/libero": Published("dataset", "LIBERO, robot libero_sim"),
    "GEAR-Dreams/DreamZero-DROID-Data": Published("dataset", "DROID, robot oxe_droid"),
    "RLinf/dreamzero-franka-pnp": Published("dataset", "a real Franka, robot franka_pnp"),
}  # fmt: skip
"""The ids that the guides name."""


def _next(arguments: argparse.Namespace) -> str:
    if arguments.id is None:
        return "dzrobot download OWNER/NAME"
    known = PUBLISHED.get(arguments.id)
    if arguments.dataset or (known is not None and known.kind == "dataset"):
        return "dzrobot inspect-data {output} --embodiment TAG"
    return "dzrobot inspect {output}"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot download``."""
    parser.description = (
        "Fetch a repository of the Hugging Face hub into a folder; a stopped download resumes. "
        "Without an id: what is published, what it is for and what it needs. HF_ENDPOINT names a "
        "mirror, HF_TOKEN an account."
    )
    parser.add_argument("id", nargs="?", type=flags.text, help="owner/name")
    parser.add_argument(
        "--output",
        "--to",
        type=flags.path,
        metavar="DIR",
        help="folder (default: the name, in this folder)",
    )
    parser.add_argument(
        "--dataset", action="store_true", help="a dataset, where the id is not one of the listed"
    )
    parser.add_argument("--revision", type=flags.text, help="branch, tag or commit")


def run(arguments: argparse.Namespace) -> int:
    """Fetch, or list."""
    if arguments.id is None:
        print("\n".join(_listed()))
        return 0
    known = PUBLISHED.get(arguments.id)
    if arguments.id.count("/") != 1:
        raise CheckpointError(
            f"{arguments.id!r} is not an id owner/name; `dzrobot download` lists the published ones"
        )
    kind: Kind = "dataset" if arguments.dataset else "model"
    target = arguments.output or flags.path(arguments.id.partition("/")[2])
    arguments.output = target
    files = known.files if known else ()
    fetch_to(
        target, arguments.id, known.kind if known else kind, arguments.revision, list(files) or None
    )
    print(f"{arguments.id} at commit {commit_of(target) or 'unknown'} is in {target}")
    return 0


def _listed() -> Iterator[str]:
    """Yield the lines of a list, not a table: no width of a terminal may cut what is typed."""
    for name, published in PUBLISHED.items():
        yield name
        # Both in bfloat16, two bytes a parameter.
        size = "" if published.parameters is None else f"{2 * published.parameters:.0f} GB"
        needs = f"{size} on disk, {size} of memory to act" if size else "for its size see the hub"
        yield f"    {published.kind}: {published.use}; {needs}"
