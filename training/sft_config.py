"""How one fine-tuning run trains: every field of a recipe, frozen and documented.

Field names are those of the published DreamZero recipes where the meaning is the same. What the
robot sees and does is the embodiment's; what the weights are is the checkpoint's: neither is
repeated here. Nothing here imports torch, so a recipe is checked in well under a second.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dzrobot.configuration import FrozenConfig
from dzrobot.embodiments.spec import ActionAnchor, Recorded
from dzrobot.embodiments.timing import frame_grid
from dzrobot.errors import UnknownNameError
from dzrobot.importing import install
from dzrobot.recording.formats import EpisodeChoice

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

DamagedFiles = Literal["refuse", "count"]
"""What becomes of episodes that cannot be used: see :attr:`DataConfig.on_corrupt`."""

GradientAccumulation = Literal["auto", "replicas"] | bool
"""See :attr:`ParallelConfig.enable_gradient_accumulation`."""


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str | Path | dict) else value


def _known_grid(name: str) -> str:
    try:
        frame_grid(name)
    except UnknownNameError as error:
        raise ValueError(str(error)) from error
    return name


def _known_decoder(name: object) -> object:
    if name == "decord":
        raise ValueError(
            f"decord is not used: 'pyav' is installed, 'torchcodec' is {install('video')}"
        )
    return name


def _known_choice(name: object) -> object:
    if name == "interventions":
        raise ValueError(
            "whole episodes would be imitated, the policy's mistakes before a takeover among them: "
            "give the folder an entry of its own in train_data_paths, with credit: {}"
        )
    return name


def uneven_batch(global_batch: int, micro_batch: int, processes: int) -> str | None:
    """Return why processes cannot share a global batch out evenly; None where they can."""
    at_once = micro_batch * processes
    if global_batch % at_once == 0:
        return None
    nearest = max(at_once, round(global_batch / at_once) * at_once)
    return (
        f"{global_batch} is not a multiple of micro_batch_size x processes = {micro_batch} x "
        f"{processes}; the nearest that is: {nearest}"
    )


class ModelConfig(FrozenConfig):
    """Which weights, which robot, and whether all of them are trained."""

    preset: Literal["5b", "14b"] | None = None
    """Architecture to build when ``model_path`` is null or has no config.json, and to expect when
    it has one."""

    model_path: str | None = None
    """Checkpoint of any layout (or hub id) to continue from: gives the weights, and where it has
    a config.json the architecture."""

    revision: str | None = None
    """Hub revision of ``model_path``."""

    config_path: Path | None = None
    """A config.json that gives the architecture where neither checkpoint nor preset does."""

    tokenizer_path: str | None = None
    """umT5 tokenizer: a directory or hub id; null: the one beside the checkpoint, else
    google/umt5-xxl."""

    diffusion_model_pretrained_path: str | None = None
    """Cold start: video transformer weights."""

    image_encoder_pretrained_path: str | None = None
    """Cold start: image encoder weights (those of Wan 2.1, for Wan 2.2 too)."""

    text_encoder_pretrained_path: str | None = None
    """Cold start: prompt encoder weights."""

    vae_pretrained_path: str | None = None
    """Cold start: video autoencoder weights."""

    random_init: bool = False
    """Train from random weights, encoders included: for tests, benchmarks and the bundled tiny
    policy."""

    metadata_json_path: Path | None = None
    """Normalization statistics; null: those of ``model_path``."""

    embodiment_tag: str
    """Robot of the run: a built-in tag or ``module:NAME``."""

    action_horizon: Positive | None = None
    """Actions per block, in the data and in the network; null: the embodiment's."""

    max_chunk_size: Positive | None = None
    """Blocks per sample, in the data and in the network; null: the embodiment's. Frames are 8 per
    block and one."""

    target_video_height: Positive | None = None
    """Rows of the tiled frame inside the network; null: as the checkpoint says."""

    target_video_width: Positive | None = None
    """Columns of the tiled frame inside the network; null: as the checkpoint says."""

    relative_action: bool | None = None
    """Expected use of relative actions; null: as the embodiment says. A contradiction is an error.
    """

    relative_action_keys: tuple[str, ...] | None = None
    """Expected relative action keys; null: as the embodiment says."""

    relative_action_per_horizon: bool | None = None
    """Expected form of the statistics: whether each step of a block of relative actions has its own
    (``dzrobot stats --per-step``); null: as they are."""

    is_lora: bool = False
    """Train adapters and the state and action modules instead of the whole transformer."""

    lora_rank: Positive | None = None
    """Rank of the adapters; null: the checkpoint's (4). Only with ``is_lora``."""

    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapter scale times rank; null: the checkpoint's (4). Only with ``is_lora``."""

    lora_base: Literal["full", "nf4"] = "full"
    """``nf4``: the weights that adapters are added to are held in four bits on every device, and
    adapters are trained against these rounded weights (QLoRA, arXiv 2305.14314): about a quarter of
    their memory, and other numbers. Needs torchao. Only with ``is_lora``."""

    cache_prompts: bool = True
    """Encode every instruction once, then free the prompt encoder."""

    prompt_rows: Literal["own", "cut"] = "own"
    """``own``: a prompt has as many rows as it is long; ``cut``: for experiments, every prompt of a
    micro-batch is zero from the length of the shortest on, as in the published trainer."""

    action_loss_norm: Literal["padded", "masked"] = "padded"
    """``padded``: divide by all 32 action dimensions, as published; ``masked``: by the real ones.
    """

    rtc_training_max_delay: NonNegative = 0
    """Train for ``--execution trained``: the first 0 to this many actions of every block, drawn
    evenly, are given without noise and left out of the loss (arXiv 2512.05964). 0: none."""

    action_only_ratio: Share = 0.0
    """Train for ``--video once`` or ``skip``: share of the samples, keyed by (seed, step, sample),
    whose actions are denoised as they are there, without a loss of the video. The video's loss
    stays a mean over all samples. 0: none."""

    action_only_video: Literal["once", "skip"] = "skip"
    """How: ``skip`` hides the noisy video from the actions; ``once`` makes it pure noise."""


class DistillConfig(FrozenConfig):
    """Step distillation: one solver step of the network learns what several of a teacher's do.

    Progressive distillation (arXiv 2202.00512).
    """

    to_steps: Positive | None = None
    """Solver steps that the network is trained for; null: no distillation."""

    from_steps: Positive = 16
    """Solver steps of the teacher, a multiple of ``to_steps``."""

    teacher_path: str | None = None
    """Checkpoint directory (or hub id) of the teacher; null: ``model.model_path``, from which the
    network itself starts."""

    @property
    def teacher_steps(self) -> int:
        """Return the steps of the teacher for one of the network; 0 without distillation."""
        return 0 if self.to_steps is None else self.from_steps // self.to_steps


class CreditConfig(FrozenConfig):
    """What a policy learns from the rows that it acted in itself, and from a person's help.

    A person's rows and demonstrations are imitated. What leads to a mistake is *given*: the network
    sees these actions without noise and learns from them what happens, not what to do.
    """

    own: Share = 1.0
    """Weight of the policy's own actions in episodes that succeeded without help; 0: given."""

    blame_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 1.0
    """Seconds before a takeover that led to it, and are never imitated."""

    failures: Literal["video", "leave_out"] = "video"
    """Episodes that failed: ``video``: what their last actor did is given; ``leave_out``: they are
    not used."""

    share: Share | None = 0.0
    """Share of the samples of this source in which every action is given, so that they train the
    video alone; null: as many as there are. None of them by default: a policy that learns the video
    of what it did wrong does it more often (``docs/guides/improve.md``)."""


class SourceConfig(FrozenConfig):
    """One source of a mixture."""

    dataset_path: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
    """LeRobot folder, or several that share robot and statistics."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples drawn from this source, relative to the other weights."""

    embodiment_tag: str
    """Robot of this source."""

    metadata_json_path: Path | None = None
    """Normalization statistics of this source; null, with ``recorded: images``: it needs none."""

    recorded: Recorded = "actions"
    """What the recordings hold beside images and instructions: ``actions``: state and actions;
    ``state``: no actions; ``images``: neither. The last two train the video alone."""

    distribute_weights: bool = False
    """Spread ``weight`` over several folders by their size instead of giving it to each."""

    credit: CreditConfig | None = None
    """Runs of a policy, with or without a person's help: what is imitated, by the marks of rows and
    episodes; ``{}`` for the defaults. Failures are read too. null: recordings of demonstrations,
    whose every row is imitated."""


class DataConfig(FrozenConfig):
    """What is read, how samples are cut, and who reads them."""

    train_data_paths: Annotated[
        tuple[str | SourceConfig, ...], BeforeValidator(_one_or_many), Field(min_length=1)
    ]
    """A LeRobot folder, several folders, or mixture entries."""

    holdout_episodes: NonNegative = 0
    """Last episodes of every folder kept for open-loop evaluation."""

    episodes: Annotated[EpisodeChoice, BeforeValidator(_known_choice)] = "successes"
    """Which episodes are used: ``successes`` are those that ``meta/recording_facts.jsonl`` does not
    mark as failures; ``all`` takes failures too. A source with ``credit`` decides by the row."""

    action_anchor: ActionAnchor | None = None
    """What an arm's Cartesian steps were measured from, where the recordings do not say it; the
    passport records it. null: what they say, else the embodiment's."""

    sampling_mode: Literal["aligned", "multi_anchor"] | None = None
    """``aligned``: frames cover their actions evenly; ``multi_anchor``: the published walk around a
    seed frame; null: that of ``frame_grid``, else the embodiment's."""

    video_in_chunk_offsets: tuple[NonNegative, ...] | None = None
    """Steps from a block's start to its frames, for ``multi_anchor``; null: those of
    ``frame_grid``, else 0, 3 .. 21 at the horizons whose published runs drew these, 16 and 24."""

    macro_stride: Positive | None = None
    """Steps between the starts of two blocks, for ``multi_anchor``; null: that of ``frame_grid``,
    else the horizon."""

    pad_tail: bool = False
    """Let samples begin near an episode's end and repeat its last row, whose actions there are not
    counted: a policy without memory learns the end of a task from these samples alone."""

    start_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the samples that begin within the first ``start_rows`` rows of an episode, on top of
    those that do so anyway. Where a demonstration heads straight for its object, later rows show in
    the arm's pose which one that is: only the first ones teach to read the instruction. 0: every
    sample of a folder is equally likely."""

    start_rows: Positive = 6
    """See ``start_share``."""

    frame_grid: Annotated[str, AfterValidator(_known_grid)] | None = None
    """Named published frame grid (``rlinf_libero_5b``, ``rlinf_franka``, ``official_droid``), drawn
    by ``multi_anchor``; null: the embodiment's own."""

    video_backend: Annotated[Literal["pyav", "torchcodec"], BeforeValidator(_known_decoder)] = (
        "pyav"
    )
    """Video decoder."""

    num_workers: NonNegative = 8
    """Reader processes per rank; 0 reads in the training process."""

    prefetch_factor: Positive = 2
    """Batches each reader prepares ahead."""

    on_corrupt: DamagedFiles = "refuse"
    """Episodes whose files are missing, damaged or of another episode: ``refuse`` names them and
    stops; ``count`` leaves them out, and windows with a picture that does not decode, and counts
    them. The same as ``--damaged`` of the commands."""

    augment: bool = True
    """Random crop and color jitter, keyed by (seed, sample)."""

    view_dropout: Share = 0.0
    """Share of samples in which one of ``dropped_views`` is black, keyed by (seed, sample). The
    prompt of DROID says that one exterior view may be; published runs had it switched off."""

    dropped_views: tuple[str, ...] = ()
    """Views that may be black, such as ``video.exterior_image_1_left``."""

    cache_features: bool = False
    """Encode the images of every sample once, to ``output_dir/features``, and train on the stored
    latents: the same numbers for less work. Needs ``augment: false``."""


class OptimConfig(FrozenConfig):
    """AdamW, its schedule, clipping and averaging."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""

    adam_beta1: Share = 0.95
    """Decay of the first moment."""

    adam_beta2: Share = 0.999
    """Decay of the second moment."""

    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of the second moment."""

    weight_decay: Annotated[float, Field(ge=0)] = 1e-5
    """Decoupled decay of matrices; norms, biases and modulation are never decayed."""

    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""

    moments: Literal["fp32", "8bit"] = "fp32"
    """``8bit``: both moments of the matrices in eight bits with a scale for each block (arXiv
    2110.02861): a quarter of their memory, and other numbers. Needs torchao."""

    lr_scheduler: Literal["constant", "cosine"] = "cosine"
    """Shape after the warm-up."""

    total_training_steps: Positive | None = None
    """Steps that the schedule is made for; a run may stop earlier. null: ``runner.max_steps``."""

    lr_warmup_steps: NonNegative | None = None
    """Steps of linear warm-up; null: ``lr_warmup_ratio`` decides."""

    lr_warmup_ratio: Share = 0.05
    """Warm-up as a share of the schedule's steps."""

    min_lr_ratio: Share = 0.0
    """Where the cosine ends, as a share of ``lr``."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an averaged copy of the weights, exported instead of the raw ones; null: none."""

    max_skips: Positive = 10
    """Non-finite steps in a row after which the run stops and names the samples."""

    def schedule_updates(self, max_steps: int) -> int:
        """Return the updates that the schedule is made for in a run of ``max_steps``."""
        return self.total_training_steps or max_steps

    def warmup_updates(self, max_steps: int) -> int:
        """Return the updates of linear warm-up in a run of ``max_steps``."""
        return (
            round(self.schedule_updates(max_steps) * self.lr_warmup_ratio)
            if self.lr_warmup_steps is None
            else self.lr_warmup_steps
        )


class ParallelConfig(FrozenConfig):
    """How the network is laid out over processes, and what is computed twice to save memory."""

    strategy: Literal["fsdp", "hsdp", "ddp", "single"] = "fsdp"
    """``fsdp``: shard over all ranks; ``hsdp``: shard within groups, replicate across; ``ddp``:
    replicate."""

    shard_size: Positive | None = None
    """Ranks that share one copy under ``hsdp``; null: the ranks of one machine."""

    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of weights and matrix products in forward and backward; master weights are float32."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are summed over ranks."""

    activation_checkpointing: Literal["none", "selective", "full"] = "full"
    """What a block recomputes in the backward pass: nothing, all but matrix products, everything.
    """

    compile: Literal["auto"] | bool = "auto"
    """Compile each transformer block, and what encodes images. The first step then takes minutes.
    ``auto``: on an accelerator; on a CPU it gains little."""

    cuda_graphs: Literal["none", "blocks"] = "none"
    """``blocks``: record each block's forward pass, and its recomputation and backward pass, as a
    CUDA graph, and launch it as one: for micro-batches so small that launching takes longer than
    computing. Blocks that keep their activations (``kept_blocks``) are not recorded. Not measured
    yet; see the guide on speed."""

    kept_blocks: NonNegative = 0
    """Last blocks that keep their activations even so, to use memory that is left."""

    fill_memory: bool = False
    """Set ``kept_blocks`` to as many as the device's memory is planned to hold."""

    float8: bool = False
    """Run the matrix products of the blocks in float8, scaled by row: faster on Hopper and newer,
    and other numbers. Needs torchao."""

    reshard_after_forward: bool = True
    """Free gathered weights between forward and backward."""

    reshard_after_backward: bool = True
    """Free gathered weights between the micro-batches of a step, too. False: fewer collectives, for
    the memory of all weights in ``param_dtype``."""

    enable_gradient_accumulation: GradientAccumulation = "auto"
    """When the gradients of a step's micro-batches are summed over processes. ``true``: with the
    last one, until when every device holds whole gradients; ``false``: with each; ``replicas``:
    within a copy of the weights with each, over the copies (``hsdp``, ``ddp``) with the last, which
    needs no more memory; ``auto``: the first of ``true``, ``replicas``, ``false`` that the device's
    memory is planned to hold, and ``false`` with ``reduce_dtype: bf16``, in which sums of many
    micro-batches would be rounded. The choice changes the order of sums, hence last bits."""

    cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory."""

    prefetch_blocks: NonNegative = 1
    """Blocks whose weights are gathered ahead."""


class CheckpointConfig(FrozenConfig):
    """When and how the training state is written."""

    save_interval: Positive = 1000
    """Steps between checkpoints."""

    keep_last_k: Annotated[int, Field(ge=2)] = 3
    """Checkpoints kept; at least 2, so that a damaged newest one costs one interval at most."""

    async_save: bool = True
    """Write in the background."""

    export: bool = True
    """Write the official checkpoint layout at the end of the run."""

    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of exported weights."""


class LoggingConfig(FrozenConfig):
    """Where numbers go; a JSONL file is always written."""

    log_interval: Positive = 10
    """Steps between log lines; the device is read once per line."""

    tensorboard: bool = True
    """Write TensorBoard events."""

    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""

    trackio_project: str | None = None
    """Also log to this project of Trackio, which keeps it on this machine."""

    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Dense bf16 peak of one device in TFLOP/s; null: looked up by its name."""


class RunnerConfig(FrozenConfig):
    """Size and course of the run."""

    recipe: str | None = None
    """Name or file that the run was started with; set by the reader, for the passport."""

    output_dir: Path
    """Everything the run writes: checkpoints, logs, export."""

    max_steps: Positive
    """Optimizer steps in the whole run."""

    micro_batch_size: Positive
    """Samples one process computes at once."""

    global_batch_size: Positive
    """Samples of one optimizer step over all processes."""

    hang_minutes: Positive | None = 5
    """Minutes without any process going on after which the run is ended with exit code 75 and a
    message that names process and phase. What takes long by nature does not count: the first step,
    compiling, encoding, checkpoints, exports, evaluations, plug-ins. Nor does less than ten times
    the longest wait so far. null: it is told, and the run goes on waiting."""

    seed: NonNegative = 0
    """Key of sample order, augmentation, noise and new weights."""

    resume_dir: Literal["auto"] | Path | None = None
    """Checkpoint or run folder to resume; ``auto``: the newest complete one in ``output_dir``, if
    any."""

    deterministic: bool = False
    """Refuse operations whose result depends on timing."""

    eval_interval: Positive | None = None
    """Steps between open-loop evaluations on the held-out episodes, and of ``own_rows``; null:
    none."""

    own_rows: NonNegative = 24
    """Samples that the policy is asked about after the last step, and every ``eval_interval``: of
    the held-out episodes, or of the training data where none are. Their first actions are compared
    with the mean action, which tells whether it does its data at all; nothing of the training
    depends on it. 0: none."""

    eval_windows: Positive = 16
    """Samples of one open-loop evaluation."""

    rollout_interval: Positive | None = None
    """Steps between evaluations in an environment; a checkpoint is saved and opened for each. null:
    none."""

    rollout_env: str | None = None
    """Environment of such an evaluation: a Gymnasium id, or ``module:id``."""

    rollout_episodes: Positive = 10
    """Episodes of such an evaluation, the same ones every time; the processes share them."""

    rollout_timeout_min: Positive = 60
    """Minutes that processes which have finished their episodes wait for the others."""

    plugins: tuple[str, ...] = ()
    """What a lab adds to the run, each ``module:Name`` of a :class:`dzrobot.training.Plugin` or a
    module that holds just one; ``plugin=NAME`` on the command line adds one."""


class SFTConfig(FrozenConfig):
    """One supervised fine-tuning run."""

    model: ModelConfig
    """Weights and robot."""

    data: DataConfig
    """Recordings and their reading."""

    distill: DistillConfig = DistillConfig()
    """Distillation to fewer solver steps."""

    optim: OptimConfig = OptimConfig()
    """Optimizer."""

    parallel: ParallelConfig = ParallelConfig()
    """Layout over processes."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Training checkpoints and export."""

    logging: LoggingConfig = LoggingConfig()
    """Logs."""

    runner: RunnerConfig
    """Size and course of the run."""

    def accumulation(self, world_size: int) -> int:
        """Return the micro-batches each of ``world_size`` processes computes per optimizer step."""
        return self.runner.global_batch_size // (self.runner.micro_batch_size * world_size)
