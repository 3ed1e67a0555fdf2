"""``policy.type=dreamzero``: which checkpoint, which robot, and what of LeRobot's data it reads."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamWConfig
from lerobot.optim.schedulers import CosineAnnealingWithWarmupSchedulerConfig

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Window, window
from dzrobot.errors import ConfigError, preview
from dzrobot.policies.dreamzero.lerobot_folder import (
    ACTION_FEATURE,
    POLICY_TYPE,
    columns_of,
    input_features,
)
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.training.sft_config import OptimConfig

_OPTIM = OptimConfig()


@PreTrainedConfig.register_subclass(POLICY_TYPE)
@dataclass
class LeRobotDreamZeroConfig(PreTrainedConfig):
    """Configuration of a DreamZero policy; ``dzrobot convert --to lerobot`` writes it.

    Images, states and actions are normalized by dzrobot with the checkpoint's own statistics, so
    LeRobot's processors change no number.
    """

    checkpoint: str | None = None
    """Checkpoint of dzrobot that a new policy starts from: folder or Hugging Face id. With
    ``policy.path`` it is not read."""

    embodiment: str | None = None
    """Tag or ``module:NAME`` of the robot, as in ``libero_sim@128x128``. Needed."""

    columns: dict[str, list[str]] = field(default_factory=dict)
    """LeRobot's name of an observation -> modality keys: one view, or the state parts that the
    column holds, in order. Empty: the dataset columns that the robot declares."""

    blocks: int | None = None
    """Action blocks of a training sample. None: the robot's number."""

    pad_tail: bool = False
    """Whether samples may begin near an episode's end and repeat its last row."""

    action_loss_norm: Literal["padded", "masked"] = "padded"
    """As ``model.action_loss_norm`` of a recipe."""

    training_seed: int = 0
    """Seed of the noise of training samples, as ``runner.seed`` of a recipe."""

    trained_batches: int = 0
    """Batches trained on so far, which the noise of the next one depends on. Training counts them,
    and LeRobot saves them, so that a resumed run draws what an uninterrupted one would."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the network computes in; training takes ``float32``."""

    execute: int | None = None
    """Actions of each plan that are executed; None: the robot's number."""

    history: Literal["off", "recent", "grid"] | None = None
    """Frames of the past that the network is shown; None: the robot's."""

    dit_steps: int | None = None
    """Solver steps that run the transformer; None: 8."""

    video: Literal["full", "once", "skip"] = "full"
    """How much of the video is denoised beside the actions; less than ``full`` predicts none."""

    cfg_scale: float | None = None
    """Guidance of the imagined video; None: the robot's."""

    noise: Literal["fixed", "keyed", "slot"] = "fixed"
    """What plans start from; ``keyed``: by seed, episode since the start, and plan."""

    noise_seed: int | None = None
    """Seed of the noise; None: 1140, as published."""

    independent: bool = False
    """Whether the environments of a batch are planned one by one: the numbers then do not depend
    on the batch size."""

    save_predicted_video: bool = False
    """LeRobot's own switch: ``lerobot-eval`` writes the imagined video beside the rollouts."""

    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: dict.fromkeys(
            ("VISUAL", "STATE", "ACTION"), NormalizationMode.IDENTITY
        )
    )
    """What LeRobot's processors do: nothing."""

    optimizer_lr: float = _OPTIM.lr
    """Peak learning rate."""

    optimizer_betas: tuple[float, float] = (_OPTIM.adam_beta1, _OPTIM.adam_beta2)
    """Betas of AdamW."""

    optimizer_eps: float = _OPTIM.adam_eps
    """Epsilon of AdamW."""

    optimizer_weight_decay: float = _OPTIM.weight_decay
    """Weight decay of matrices; norms, biases and modulation are not decayed."""

    optimizer_grad_clip_norm: float = _OPTIM.clip_grad
    """Largest global gradient norm."""

    scheduler_warmup_steps: int = 0
    """Steps of linear warm-up before the cosine."""

    @property
    def robot(self) -> Embodiment:
        """Return the robot, with the training samples that are asked for.

        Raises:
            ConfigError: None is named, or it trains on samples that LeRobot cannot cut.
            UnknownNameError: There is none of that name.
        """
        if self.embodiment is None:
            raise ConfigError(
                "policy.embodiment is not given: name the robot that the checkpoint acts for, as "
                "in --policy.embodiment=libero_sim, or give --policy.path with a folder of "
                "`dzrobot convert --to lerobot`"
            )
        robot = load_embodiment(self.embodiment)
        timing = replace(
            robot.timing, blocks=self.blocks or robot.timing.blocks, pad_tail=self.pad_tail
        )
        if timing.sampling != "aligned":
            raise ConfigError(
                f"{self.embodiment} has sampling={timing.sampling!r}, which depends on a whole "
                "episode; LeRobot cuts windows of fixed offsets: choose a robot with 'aligned'"
            )
        return replace(robot, timing=timing)

    @property
    def declared_columns(self) -> dict[str, list[str]]:
        """Return the columns given, else those that the robot declares."""
        return self.columns or columns_of(self.robot)

    @property
    def options(self) -> PolicyOptions:
        """Return how it acts.

        Raises:
            ConfigError: An option is out of range, or a video is to be saved and none predicted.
        """
        if self.save_predicted_video and self.video != "full":
            raise ConfigError(
                f"--policy.video={self.video} predicts no video that --policy.save_predicted_video "
                "could save: leave one of them out"
            )
        return PolicyOptions(
            execute=self.execute, history=self.history, dit_steps=self.dit_steps,
            video=self.video, cfg_scale=self.cfg_scale, noise=self.noise, seed=self.noise_seed,
            independent=self.independent,
        )  # fmt: skip

    @property
    def rows(self) -> Window:
        """Return the rows of a training sample, counted from its first."""
        timing = self.robot.timing
        return window(0, timing.span + 1, timing)

    @property
    def state_positions(self) -> list[int]:
        """Return where the states of a sample are among its observed rows."""
        rows = self.rows
        return [int(place) for place in np.searchsorted(rows.video, rows.state)]

    @property
    def observation_delta_indices(self) -> list[int]:
        """Return the rows whose observations a training sample holds."""
        return [int(row) for row in self.rows.video]

    @property
    def action_delta_indices(self) -> list[int]:
        """Return the rows whose actions a training sample holds."""
        return [int(row) for row in self.rows.action]

    @property
    def reward_delta_indices(self) -> None:
        """Return None: rewards are not read."""
        return

    @property
    def drop_n_last_frames(self) -> int:
        """Return how many last rows of an episode begin no sample."""
        return self.robot.timing.rows_needed - 1

    def validate_features(self) -> None:
        """Compare what LeRobot will hand over with what the robot has.

        Columns that the robot does not look at are taken out.

        Raises:
            ConfigError: A column is missing or of another shape, or actions have another size.
        """
        robot = self.robot
        wanted = {
            name: PolicyFeature(FeatureType[feature["type"]], tuple(feature["shape"]))
            for name, feature in input_features(robot, self.declared_columns).items()
        }
        given = self.input_features or {}
        faults = [
            f"{name} is {_said(given.get(name))} instead of {_said(feature)}"
            for name, feature in wanted.items() if _said(given.get(name)) != _said(feature)
        ]  # fmt: skip
        action = (self.output_features or {}).get(ACTION_FEATURE)
        if action is None or tuple(action.shape) != (robot.action_dim,):
            faults.append(f"{ACTION_FEATURE} is {_said(action)} instead of ({robot.action_dim},)")
        if faults:
            raise ConfigError(
                f"{robot.tag} does not fit LeRobot's features: {'; '.join(faults)}; given: "
                f"{preview(given, 12)}. Name the columns (--policy.columns, or --rename_map with "
                "--policy.path), or the robot with the images' size (--policy.embodiment="
                f"{robot.tag}@HEIGHTxWIDTH)"
            )
        self.input_features: dict[str, PolicyFeature] = wanted

    def get_optimizer_preset(self) -> AdamWConfig:
        """Return AdamW with the numbers above."""
        return AdamWConfig(
            lr=self.optimizer_lr, betas=self.optimizer_betas, eps=self.optimizer_eps,
            weight_decay=self.optimizer_weight_decay, grad_clip_norm=self.optimizer_grad_clip_norm,
        )  # fmt: skip

    def get_scheduler_preset(self) -> CosineAnnealingWithWarmupSchedulerConfig:
        """Return a linear warm-up and a cosine down to zero."""
        return CosineAnnealingWithWarmupSchedulerConfig(
            num_warmup_steps=self.scheduler_warmup_steps
        )


def _said(feature: PolicyFeature | None) -> str:
    return "missing" if feature is None else f"{feature.type.value} {tuple(feature.shape)}"
