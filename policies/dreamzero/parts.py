"""What a DreamZero policy is made of, and how a checkpoint becomes that."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from dzrobot.embodiments.registry import EMBODIMENTS, described_embodiment, load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.modality.pipeline import Pipeline
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.directory import (
    TOKENIZER_FOLDER,
    Checkpoint,
    open_checkpoint,
)
from dzrobot.policies.dreamzero.checkpoints.load import LoadOptions, load_deferring_text
from dzrobot.policies.dreamzero.checkpoints.passport import (
    PASSPORT_FILE,
    check_compatible,
    check_passport,
    passport_for,
    recorded_robots,
)
from dzrobot.policies.dreamzero.checkpoints.trained_inputs import TrainedInputs
from dzrobot.policies.dreamzero.network.dit import CausalDiT
from dzrobot.policies.dreamzero.network.prompt import (
    DEFAULT_TOKENIZER,
    PromptFiles,
    PromptTokenizer,
)
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.offload import is_offloaded
from dzrobot.policies.dreamzero.options import ActingOptions, Quantization, WeightOptions


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyParts:
    """What a policy is made of."""

    network: WorldActionModel
    """The weights, on their device."""

    pipeline: Pipeline
    """Observations to tensors and back, with the statistics."""

    tokenizer: PromptTokenizer
    """What turns prompts into tokens."""

    prompt_files: PromptFiles | None = None
    """Where embeddings of prompts are kept from start to start; None: nowhere."""

    source: str
    """Where the weights come from, for records."""

    quantize: Quantization | None = None
    """How its blocks are quantized; None: not."""

    negative: CausalDiT | None = None
    """A copy of the transformer on another device, which runs the negative prompt; None: both
    prompts run in one batch."""

    trained_delay: int = 0
    """Most first rows that the network was trained to be given of a plan; 0: none."""

    trained_video: Literal["full", "once", "skip"] = "full"
    """With how little of the video it was trained to plan."""

    distilled_steps: int | None = None
    """Solver steps that the network was distilled for; None: it was not."""

    inputs: TrainedInputs | None = None
    """What training showed it, in small; None: that was not kept."""


def load_parts(  # noqa: PLR0913 - those of DreamZeroPolicy.from_pretrained
    path_or_repo: str | Path | Checkpoint,
    *,
    embodiment: Embodiment | str | None,
    device: str | torch.device,
    dtype: torch.dtype | None,
    revision: str | None,
    tokenizer: str | Path | PromptTokenizer | None,
    weights: WeightOptions,
) -> PolicyParts:
    """Return the parts of a checkpoint's policy; see :meth:`DreamZeroPolicy.from_pretrained`."""
    checkpoint = (
        path_or_repo
        if isinstance(path_or_repo, Checkpoint)
        else open_checkpoint(
            path_or_repo, revision=revision, config_from=weights.config_from, base=weights.base
        )
    )
    robot = as_trained(checkpoint, embodiment_of(checkpoint, embodiment))
    trained_horizon = checkpoint.passport.horizon(robot.tag)
    shorter = trained_horizon == robot.timing.action_horizon
    check_compatible(robot, checkpoint.config, shorter=shorter)
    statistics = Statistics.from_metadata(checkpoint.metadata_file, robot)
    wanted = replace(
        passport_for(robot, statistics, checkpoint.config), lora_alpha=checkpoint.lora_alpha
    )
    check_passport(checkpoint.passport, wanted, str(checkpoint.path))
    trained = checkpoint.passport.embodiments.get(robot.tag)
    prompts = _tokenizer(checkpoint, tokenizer)
    if checkpoint.passport.tokenizer is not None:
        wanted = replace(wanted, tokenizer=prompts.fingerprint)
        check_passport(checkpoint.passport, wanted, str(checkpoint.path))
    target = torch.device(device)
    network, files = load_deferring_text(
        checkpoint,
        LoadOptions(
            device=target,
            dtype=dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16),
            adapters=weights.adapters,
            base=weights.base,
            memory=weights.memory,
            quantize=weights.quantize,
            conditions=robot.conditions,
        ),
    )
    return PolicyParts(
        network=network,
        pipeline=Pipeline(robot, statistics),
        tokenizer=prompts,
        prompt_files=files,
        source=str(checkpoint.path if path_or_repo is checkpoint else path_or_repo),
        quantize=weights.quantize,
        negative=_copy(network, weights.cfg_device),
        trained_delay=checkpoint.passport.rtc_training_max_delay or 0,
        trained_video=checkpoint.passport.action_only_video or "full",
        distilled_steps=checkpoint.passport.distilled_steps,
        inputs=None if trained is None else trained.inputs,
    )


def check_combinations(parts: PolicyParts, options: ActingOptions) -> None:
    """Raise ConfigError where what is asked for excludes what the parts are, with the reason."""
    device = parts.network.device
    records = options.compile or options.graphs
    for name, excluded, reason in (
        (
            "compile=True" if options.compile else "graphs=True",
            records and is_offloaded(parts.network.model),
            "with the memory that was given blocks of the transformer wait on the host: what is "
            "compiled or recorded cannot fetch its weights; give more memory",
        ),
        (
            "graphs=True",
            options.graphs and device.type != "cuda",
            f"the network is on {device}, and only what a GPU is given to do can be recorded",
        ),
        (
            "cfg_device",
            parts.negative is not None and options.prompts == 1,
            "it is where the negative prompt runs, which "
            + ("cfg_scale=1" if options.video == "full" else "a plan without video")
            + " leaves out",
        ),
    ):
        if excluded:
            raise ConfigError(f"{name}: {reason}, or leave {name.partition('=')[0]} out")


def _copy(network: WorldActionModel, device: str | torch.device | None) -> CausalDiT | None:
    """Return a copy of the transformer on ``device``."""
    if device is None:
        return None
    if is_offloaded(network.model):
        raise ConfigError(
            f"cfg_device={str(device)!r}, and with the memory that was given blocks of the "
            "transformer wait on the host: give more memory, or leave cfg_device out"
        )
    return copy.deepcopy(network.model).to(device)


def embodiment_of(checkpoint: Checkpoint, wanted: Embodiment | str | None = None) -> Embodiment:
    """Return the robot that a checkpoint acts for.

    Args:
        checkpoint: The checkpoint.
        wanted: The robot, or its tag. None: the one that the checkpoint names.

    Raises:
        CheckpointError: none is given, and the checkpoint names several robots.
        UnknownNameError: there is no such robot.
    """
    if isinstance(wanted, Embodiment):
        return wanted
    if wanted is not None:
        return load_embodiment(wanted)
    tags = sorted(checkpoint.metadata)
    if len(tags) != 1:
        raise CheckpointError(
            f"{checkpoint.path} was trained for {preview(tags)}: say for which of them, "
            f"embodiment={tags[0] if tags else 'TAG'!r}"
        )
    return _named(checkpoint, tags[0])


def _named(checkpoint: Checkpoint, tag: str) -> Embodiment:
    """Return the robot ``tag`` of a checkpoint: one that is built in, or as it is described there.

    Raises:
        CheckpointError: it is neither, or the description cannot be read.
    """
    passport = checkpoint.own_passport
    trained = None if passport is None else passport.embodiments.get(tag)
    if tag in EMBODIMENTS:
        return EMBODIMENTS[tag]
    if trained is not None and trained.description is not None:
        where = f"{checkpoint.folder / PASSPORT_FILE}: {tag}"
        return described_embodiment(trained.description, where, CheckpointError)
    # Never loaded unasked: a checkpoint must not choose which code runs.
    own = recorded_robots(passport)
    recipe = f" Its recipe calls it {' or '.join(own)}." if own else ""
    code = "" if trained is None or not trained.conditions else preview(trained.conditions)
    reason = f"and its {code} is code, which no checkpoint carries" if code else (
        "and the checkpoint does not describe it"
    )  # fmt: skip
    given = own[0] if own else "module:NAME"
    raise CheckpointError(
        f"{checkpoint.path} was trained for {tag!r}, which is not built in, {reason}.{recipe} "
        f"Give embodiment={given!r} (on the command line --embodiment {given}), in the folder of "
        "that module"
    )


def as_trained(checkpoint: Checkpoint, robot: Embodiment) -> Embodiment:
    """Return ``robot`` with the anchor of actions that the checkpoint was trained with.

    A published checkpoint acts as the robot's recordings were made; one with a passport that does
    not say it leaves it open.
    """
    passport = checkpoint.own_passport
    if passport is None:
        return replace(robot, action_anchor=EMBODIMENTS.get(robot.tag, robot).action_anchor)
    trained = passport.embodiments.get(robot.tag)
    return replace(robot, action_anchor=None if trained is None else trained.action_anchor)


def _tokenizer(
    checkpoint: Checkpoint, given: str | Path | PromptTokenizer | None
) -> PromptTokenizer:
    if isinstance(given, PromptTokenizer):
        return given
    own = checkpoint.folder / TOKENIZER_FOLDER
    source = given or (own if own.is_dir() else DEFAULT_TOKENIZER)
    return PromptTokenizer(source, text_len=checkpoint.config.dit.text_len)
