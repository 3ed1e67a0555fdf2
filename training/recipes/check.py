"""Checks of a recipe before anything is loaded.

Each check yields problems: a dotted field, what is wrong and what to do. All checks run, so one
start shows every mistake. Only small text files are read, and torch is not imported.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dzrobot.errors import DzrobotError, suggest
from dzrobot.importing import install, is_module_name, is_reference, module_exists
from dzrobot.policies.dreamzero.checkpoints.hub import step_path, steps_beside
from dzrobot.training.recipes.architecture import SourcePlan, source_plans
from dzrobot.training.recipes.check_inputs import (
    Problem,
    missing_path,
    mixture_faults,
    network_faults,
    relative_faults,
    source_faults,
    weight_faults,
)
from dzrobot.training.sft_config import DataConfig, RunnerConfig, SFTConfig, uneven_batch


def find_faults(config: SFTConfig, world_size: int) -> list[Problem]:
    """Return everything that is wrong with a run of ``config`` on ``world_size`` processes.

    The one list of ``dzrobot train`` and ``dzrobot plan``, but for what was not given.
    """
    faults = [
        *_batch(config, world_size),
        *_schedule(config),
        *_excluded(config),
        *_layout(config, world_size),
        *weight_faults(config.model),
        *_distillation(config),
        *_view_dropout(config),
        *_resume(config),
        *_packages(config),
        *_plugins(config),
        *mixture_faults(config),
    ]
    try:
        sources = source_plans(config)
    except DzrobotError as error:
        return [*faults, Problem("model.embodiment_tag", str(error))]
    faults += [*source_faults(config, sources), *relative_faults(config.model, sources)]
    faults += [*_given(config, sources), *_dropped_views(config, sources)]
    faults += _measured(config, sources)
    return [*faults, *network_faults(config, sources)]


class _Exclusion(NamedTuple):
    """What fields of a recipe cannot be together."""

    field: str
    """The one that is named."""

    holds: Callable[[SFTConfig], object]
    """Whether it is so in a recipe."""

    text: str
    """What is wrong and what to do; fields of the recipe ``c`` are filled in."""


_ALL_KEPT = "all blocks keep their activations when activation_checkpointing is 'none'"
_PLAIN = "'blocks' copies weights of plain dtypes; leave it or {} out"
_FULL = "is set, but is_lora is false: full training has no adapters; choose one"
_START_ROWS = DataConfig.model_fields["start_rows"].default

_EXCLUSIONS = (
    _Exclusion("optim.min_lr_ratio",
               lambda c: c.optim.lr_scheduler == "constant" and c.optim.min_lr_ratio > 0,
               "has no meaning for lr_scheduler='constant'; leave it out or choose 'cosine'"),
    _Exclusion("parallel.shard_size",
               lambda c: c.parallel.shard_size is not None and c.parallel.strategy != "hsdp",
               "only 'hsdp' has it, strategy is {c.parallel.strategy!r}; leave one out"),
    _Exclusion("parallel.kept_blocks",
               lambda c: c.parallel.kept_blocks and not _recomputes(c), _ALL_KEPT),
    _Exclusion("parallel.fill_memory",
               lambda c: c.parallel.fill_memory and not _recomputes(c), _ALL_KEPT),
    _Exclusion("parallel.kept_blocks", lambda c: c.parallel.kept_blocks and c.parallel.fill_memory,
               "parallel.fill_memory chooses the number; leave one of them out"),
    _Exclusion("parallel.float8", lambda c: c.parallel.float8 and c.model.is_lora,
               "the products of adapters are too small to gain from it; leave it out with "
               "model.is_lora"),
    _Exclusion("optim.moments", lambda c: c.parallel.cpu_offload and c.optim.moments == "8bit",
               "'8bit' with parallel.cpu_offload: moments in host memory need no eight bits; "
               "choose one of the two"),
    _Exclusion("parallel.reduce_dtype",
               lambda c: c.parallel.param_dtype == "fp32" and c.parallel.reduce_dtype == "bf16",
               "'bf16' would round float32 gradients; choose fp32"),
    _Exclusion("parallel.enable_gradient_accumulation",
               lambda c: c.parallel.enable_gradient_accumulation == "replicas"
               and c.parallel.strategy not in ("hsdp", "ddp"),
               "'replicas' on strategy {c.parallel.strategy!r}, which has one copy of the weights; "
               "choose auto, true or false, or strategy hsdp"),
    _Exclusion("parallel.cuda_graphs",
               lambda c: _records(c) and c.parallel.activation_checkpointing != "full",
               "'blocks' records blocks together with their recomputation, and "
               "activation_checkpointing is {c.parallel.activation_checkpointing!r}: choose full, "
               "or none of both"),
    _Exclusion("parallel.cuda_graphs", lambda c: _records(c) and c.parallel.float8,
               _PLAIN.format("parallel.float8")),
    _Exclusion("parallel.cuda_graphs", lambda c: _records(c) and c.model.lora_base != "full",
               _PLAIN.format("model.lora_base")),
    _Exclusion("model.lora_rank", lambda c: c.model.lora_rank is not None and not c.model.is_lora,
               _FULL),
    _Exclusion("model.lora_alpha",
               lambda c: c.model.lora_alpha is not None and not c.model.is_lora, _FULL),
    _Exclusion("model.lora_base",
               lambda c: c.model.lora_base != "full" and not c.model.is_lora, _FULL),
    _Exclusion("model.is_lora", lambda c: c.model.is_lora and c.model.random_init,
               "adapters on random weights train nothing useful; start from a checkpoint"),
    _Exclusion("runner.eval_interval",
               lambda c: c.runner.eval_interval is not None
               and not (c.data.holdout_episodes or c.runner.own_rows),
               "needs held-out episodes or rows of its own: set data.holdout_episodes, or "
               "runner.own_rows"),
    _Exclusion("runner.rollout_interval",
               lambda c: c.runner.rollout_interval is not None and c.runner.rollout_env is None,
               "needs an environment: set runner.rollout_env"),
    _Exclusion("data.pad_tail",
               lambda c: c.data.pad_tail
               and (c.data.sampling_mode == "multi_anchor" or c.data.frame_grid is not None),
               "needs sampling_mode='aligned' and no frame_grid; the published walk pads nothing"),
    _Exclusion("data.frame_grid",
               lambda c: c.data.frame_grid is not None and c.data.sampling_mode == "aligned",
               "published grids are drawn by sampling_mode='multi_anchor'; leave sampling_mode "
               "out"),
    _Exclusion("distill.to_steps",
               lambda c: c.distill.to_steps is None and c.distill.teacher_path is not None,
               "is needed: how many solver steps the student takes"),
    _Exclusion("model.action_only_ratio",
               lambda c: c.distill.to_steps is not None and c.model.action_only_ratio,
               "a teacher plans with its video; distill first, and train without video from the "
               "student's checkpoint, or leave one of the two out"),
    _Exclusion("model.action_only_video",
               lambda c: c.model.action_only_video != "skip" and not c.model.action_only_ratio,
               "has no meaning while model.action_only_ratio is 0; give a share, such as 0.25, or "
               "leave it out"),
    _Exclusion("data.start_rows",
               lambda c: c.data.start_rows != _START_ROWS and not c.data.start_share,
               "has no meaning while data.start_share is 0; give a share, such as 0.3, or leave "
               "this out"),
    _Exclusion("data.view_dropout", lambda c: c.data.view_dropout and not c.data.augment,
               "is part of the augmentation: set data.augment=true"),
    _Exclusion("data.cache_features", lambda c: c.data.cache_features and c.data.augment,
               "stored latents cannot be augmented; set data.augment=false too, or leave it out"),
    _Exclusion("data.cache_features",
               lambda c: c.data.cache_features and c.data.on_corrupt != "refuse",
               "needs every image to be readable: data.on_corrupt=refuse"),
)  # fmt: skip
"""What excludes each other within a recipe, whatever the devices and recordings are."""


def _recomputes(config: SFTConfig) -> bool:
    return config.parallel.activation_checkpointing != "none"


def _records(config: SFTConfig) -> bool:
    return config.parallel.cuda_graphs != "none"


def _excluded(config: SFTConfig) -> Iterator[Problem]:
    for one in _EXCLUSIONS:
        if one.holds(config):
            yield Problem(one.field, one.text.format(c=config))


def _plugins(config: SFTConfig) -> Iterator[Problem]:
    """Yield plug-ins whose module is not there; which names it has is known when it is loaded."""
    for name in config.runner.plugins:
        module = name.partition(":")[0]
        if not is_reference(name) and not is_module_name(name):
            yield Problem("runner.plugins", f"{name!r} is not written module or module:Name")
        elif not module_exists(module):
            yield Problem(
                "runner.plugins",
                f"there is no module {module!r} on the import path or in {Path.cwd()}; install it, "
                "set PYTHONPATH, or change to its folder",
            )
    if config.runner.plugins and len(set(config.runner.plugins)) < len(config.runner.plugins):
        yield Problem("runner.plugins", f"{list(config.runner.plugins)}: name each once")


def _batch(config: SFTConfig, world_size: int) -> Iterator[Problem]:
    runner = config.runner
    if fault := uneven_batch(runner.global_batch_size, runner.micro_batch_size, world_size):
        yield Problem("runner.global_batch_size", fault)


def _given(config: SFTConfig, sources: Sequence[SourcePlan]) -> Iterator[Problem]:
    most = config.model.rtc_training_max_delay
    for source in sources:
        horizon = source.embodiment.timing.action_horizon
        if 2 * most > horizon:
            yield Problem(
                "model.rtc_training_max_delay",
                f"{most} of the {horizon} actions of {source.embodiment.tag}: a robot that does "
                f"not wait has at most {horizon // 2} steps for a plan; choose 0 to {horizon // 2}",
            )


def _dropped_views(config: SFTConfig, sources: Sequence[SourcePlan]) -> Iterator[Problem]:
    views = {view.key for source in sources for view in source.embodiment.views}
    for name in config.data.dropped_views:
        if name not in views:
            yield Problem(
                "data.dropped_views",
                f"{name!r} is not a view of the robots of this run.{suggest(name, views)} They "
                f"have: {', '.join(sorted(views))}",
            )
    for robot in (source.embodiment for source in sources):
        (first, *others) = robot.views
        if not others and first.key in config.data.dropped_views:
            yield Problem("data.dropped_views", f"{robot.tag} has no other view than {first.key}")


def _measured(config: SFTConfig, sources: Sequence[SourcePlan]) -> Iterator[Problem]:
    if config.runner.eval_interval and all(source.recorded != "actions" for source in sources):
        yield Problem(
            "runner.eval_interval",
            "compares actions, and no source has any: leave it out, or add one with "
            "recorded: actions",
        )


def _schedule(config: SFTConfig) -> Iterator[Problem]:
    steps, optim = config.runner.max_steps, config.optim
    warmup = optim.warmup_updates(steps)
    # A run may end within the warm-up of a longer schedule that is given.
    if warmup >= optim.schedule_updates(steps):
        field = (
            "optim.lr_warmup_ratio" if optim.lr_warmup_steps is None else "optim.lr_warmup_steps"
        )
        length = (
            f"runner.max_steps={steps}" if optim.total_training_steps is None
            else f"optim.total_training_steps={optim.total_training_steps}"
        )  # fmt: skip
        yield Problem(
            field,
            f"{warmup} warm-up steps leave none of {length} at full rate; lower it",
        )
    if optim.schedule_updates(steps) < steps:
        yield Problem(
            "optim.total_training_steps",
            f"the schedule ends at {optim.total_training_steps}, before runner.max_steps={steps}; "
            "raise it, or leave it out",
        )


def _layout(config: SFTConfig, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.strategy == "single" and world_size > 1:
        yield Problem(
            "parallel.strategy", f"'single' on {world_size} processes; choose fsdp, hsdp or ddp"
        )
    if parallel.shard_size is not None and world_size % parallel.shard_size:
        yield Problem(
            "parallel.shard_size", f"{parallel.shard_size} does not divide {world_size} processes"
        )


def _distillation(config: SFTConfig) -> Iterator[Problem]:
    distill = config.distill
    if distill.to_steps is None:
        return
    if distill.from_steps <= distill.to_steps or distill.from_steps % distill.to_steps:
        yield Problem(
            "distill.from_steps",
            f"{distill.from_steps} is not a multiple of distill.to_steps={distill.to_steps} beyond "
            f"it; the next ones: {2 * distill.to_steps}, {3 * distill.to_steps}",
        )
    if distill.teacher_path is not None:
        yield from missing_path("distill.teacher_path", distill.teacher_path)
    elif config.model.model_path is None:
        yield Problem(
            "distill.teacher_path",
            "without model.model_path there is no other teacher; give one",
            not_given=True,
        )


def _view_dropout(config: SFTConfig) -> Iterator[Problem]:
    data = config.data
    if bool(data.view_dropout) != bool(data.dropped_views):
        yield Problem(
            "data.view_dropout",
            f"{data.view_dropout} with dropped_views={list(data.dropped_views)}: give both, the "
            "share and the views that may be black, or neither",
        )


def _resume(config: SFTConfig) -> Iterator[Problem]:
    resume = config.runner.resume_dir
    if isinstance(resume, Path) and not step_path(resume).is_dir():
        yield Problem(
            "runner.resume_dir",
            f"no folder {resume}; 'auto' takes the newest checkpoint of output_dir, if any"
            f"{steps_beside(resume)}",
        )


def start_faults(config: SFTConfig, world_size: int) -> list[Problem]:
    """Return what is wrong with starting a run of ``config``: its folder too."""
    return [*find_faults(config, world_size), *_folder(config.runner)]


def _folder(runner: RunnerConfig) -> Iterator[Problem]:
    """Refuse to start a new run in the folder of another: its checkpoints and log would be lost."""
    left = [
        name for name in ("checkpoints", "metrics.jsonl") if (runner.output_dir / name).exists()
    ]
    if left and runner.resume_dir is None:
        yield Problem(
            "runner.output_dir",
            f"{runner.output_dir} holds a run ({', '.join(left)}): runner.resume_dir=auto resumes "
            "it, another runner.output_dir starts over",
        )


def _packages(config: SFTConfig) -> Iterator[Problem]:
    wanted = {
        "logging.wandb_project": ("wandb", "wandb", config.logging.wandb_project is not None),
        "logging.trackio_project": (
            "trackio", "trackio", config.logging.trackio_project is not None,
        ),
        "optim.moments": ("torchao", "quantize", config.optim.moments == "8bit"),
        "model.lora_base": ("torchao", "quantize", config.model.lora_base == "nf4"),
        "parallel.float8": ("torchao", "quantize", config.parallel.float8),
        "data.video_backend": ("torchcodec", "video", config.data.video_backend == "torchcodec"),
    }  # fmt: skip
    for field, (package, extra, is_used) in wanted.items():
        if is_used and find_spec(package) is None:
            yield Problem(
                field,
                f"needs the package {package}, which is not installed: {install(extra)}, or leave "
                "the field out",
            )
