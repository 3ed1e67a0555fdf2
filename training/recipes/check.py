"""Checks of a recipe before anything is loaded.

Each check yields problems: a dotted field, what is wrong and what to do. All checks run, so one
start shows every mistake. Only small text files are read, and torch is not imported.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from dzrobot.errors import DzrobotError, suggest
from dzrobot.importing import install, is_module_name, is_reference, module_exists
from dzrobot.policies.dreamzero.checkpoints.hub import step_path, steps_beside
from dzrobot.training.recipes.architecture import SourcePlan, source_plans
from dzrobot.training.recipes.check_inputs import (
    Problem,
    adapter_faults,
    missing_path,
    mixture_faults,
    network_faults,
    relative_faults,
    source_faults,
    weight_faults,
)
from dzrobot.training.sft_config import ParallelConfig, RunnerConfig, SFTConfig, uneven_batch


def find_faults(config: SFTConfig, world_size: int) -> list[Problem]:
    """Return everything that is wrong with a run of ``config`` on ``world_size`` processes.

    The one list of ``dzrobot train`` and ``dzrobot plan``, but for what was not given.
    """
    faults = [
        *_batch(config, world_size),
        *_schedule(config),
        *_layout(config, world_size),
        *_copies(config.parallel),
        *_recorded(config),
        *weight_faults(config.model),
        *adapter_faults(config.model),
        *_evaluation(config),
        *_distillation(config),
        *_view_dropout(config),
        *_features(config),
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
    faults += [*_given(config, sources), *_dropped_views(config, sources), *_less_video(config)]
    faults += _starts(config)
    faults += _measured(config, sources)
    return [*faults, *network_faults(config, sources)]


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


def _less_video(config: SFTConfig) -> Iterator[Problem]:
    if config.model.action_only_video != "skip" and not config.model.action_only_ratio:
        yield Problem(
            "model.action_only_video",
            "has no meaning while model.action_only_ratio is 0; give a share, such as 0.25, or "
            "leave it out",
        )


def _starts(config: SFTConfig) -> Iterator[Problem]:
    rows = type(config.data).model_fields["start_rows"].default
    if config.data.start_rows != rows and not config.data.start_share:
        yield Problem(
            "data.start_rows",
            "has no meaning while data.start_share is 0; give a share, such as 0.3, or leave this "
            "out",
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
    if optim.lr_scheduler == "constant" and optim.min_lr_ratio > 0:
        yield Problem(
            "optim.min_lr_ratio",
            "has no meaning for lr_scheduler='constant'; leave it out or choose 'cosine'",
        )


def _layout(config: SFTConfig, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.strategy == "single" and world_size > 1:
        yield Problem(
            "parallel.strategy", f"'single' on {world_size} processes; choose fsdp, hsdp or ddp"
        )
    if parallel.shard_size is not None and parallel.strategy != "hsdp":
        yield Problem(
            "parallel.shard_size",
            f"only 'hsdp' has it, strategy is {parallel.strategy!r}; leave one out",
        )
    if parallel.shard_size is not None and world_size % parallel.shard_size:
        yield Problem(
            "parallel.shard_size", f"{parallel.shard_size} does not divide {world_size} processes"
        )
    for name in ("kept_blocks", "fill_memory"):
        if getattr(parallel, name) and parallel.activation_checkpointing == "none":
            yield Problem(
                f"parallel.{name}",
                "all blocks keep their activations when activation_checkpointing is 'none'",
            )
    if parallel.kept_blocks and parallel.fill_memory:
        yield Problem(
            "parallel.kept_blocks", "parallel.fill_memory chooses the number; leave one of them out"
        )
    if parallel.float8 and config.model.is_lora:
        yield Problem(
            "parallel.float8",
            "the products of adapters are too small to gain from it; leave it out with "
            "model.is_lora",
        )
    if parallel.cpu_offload and config.optim.moments == "8bit":
        yield Problem(
            "optim.moments",
            "'8bit' with parallel.cpu_offload: moments in host memory need no eight bits; choose "
            "one of the two",
        )
    if parallel.param_dtype == "fp32" and parallel.reduce_dtype == "bf16":
        yield Problem("parallel.reduce_dtype", "'bf16' would round float32 gradients; choose fp32")


def _recorded(config: SFTConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.cuda_graphs == "none":
        return
    if parallel.activation_checkpointing != "full":
        yield Problem(
            "parallel.cuda_graphs",
            "'blocks' records blocks together with their recomputation, and "
            f"activation_checkpointing is {parallel.activation_checkpointing!r}: choose full, or "
            "none of both",
        )
    for name, is_used in (
        ("parallel.float8", parallel.float8),
        ("model.lora_base", config.model.lora_base != "full"),
    ):
        if is_used:
            yield Problem(
                "parallel.cuda_graphs",
                f"'blocks' copies weights of plain dtypes; leave it or {name} out",
            )


def _copies(parallel: ParallelConfig) -> Iterator[Problem]:
    puts_off = parallel.enable_gradient_accumulation == "replicas"
    if puts_off and parallel.strategy not in ("hsdp", "ddp"):
        yield Problem(
            "parallel.enable_gradient_accumulation",
            f"'replicas' on strategy {parallel.strategy!r}, which has one copy of the weights; "
            "choose auto, true or false, or strategy hsdp",
        )


def _evaluation(config: SFTConfig) -> Iterator[Problem]:
    if config.runner.eval_interval is not None and not config.data.holdout_episodes:
        yield Problem("runner.eval_interval", "needs held-out episodes: set data.holdout_episodes")
    if config.runner.rollout_interval is not None and config.runner.rollout_env is None:
        yield Problem("runner.rollout_interval", "needs an environment: set runner.rollout_env")
    data = config.data
    if data.pad_tail and (data.sampling_mode == "multi_anchor" or data.frame_grid is not None):
        yield Problem(
            "data.pad_tail",
            "needs sampling_mode='aligned' and no frame_grid; the published walk pads nothing",
        )
    if data.frame_grid is not None and data.sampling_mode == "aligned":
        yield Problem(
            "data.frame_grid",
            "published grids are drawn by sampling_mode='multi_anchor'; leave sampling_mode out",
        )


def _distillation(config: SFTConfig) -> Iterator[Problem]:
    distill = config.distill
    if distill.to_steps is None:
        if distill.teacher_path is not None:
            yield Problem("distill.to_steps", "is needed: how many solver steps the student takes")
        return
    if distill.from_steps <= distill.to_steps or distill.from_steps % distill.to_steps:
        yield Problem(
            "distill.from_steps",
            f"{distill.from_steps} is not a multiple of distill.to_steps={distill.to_steps} beyond "
            f"it; the next ones: {2 * distill.to_steps}, {3 * distill.to_steps}",
        )
    if config.model.action_only_ratio:
        yield Problem(
            "model.action_only_ratio",
            "a teacher plans with its video; distill first, and train without video from the "
            "student's checkpoint, or leave one of the two out",
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
    if data.view_dropout and not data.augment:
        yield Problem("data.view_dropout", "is part of the augmentation: set data.augment=true")


def _features(config: SFTConfig) -> Iterator[Problem]:
    if not config.data.cache_features:
        return
    if config.data.augment:
        yield Problem(
            "data.cache_features",
            "stored latents cannot be augmented; set data.augment=false too, or leave it out",
        )
    if config.data.on_corrupt != "refuse":
        yield Problem(
            "data.cache_features", "needs every image to be readable: data.on_corrupt=refuse"
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
