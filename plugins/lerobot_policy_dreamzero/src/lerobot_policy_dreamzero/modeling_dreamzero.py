"""A DreamZero policy behind LeRobot's interface; network, pipeline and loss are dzrobot's."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from huggingface_hub import snapshot_download
from lerobot.configs import PreTrainedConfig
from lerobot.policies import PreTrainedPolicy
from torch import Tensor

from dzrobot.code_identity import package_code
from dzrobot.errors import CheckpointError, ConfigError, SessionError
from dzrobot.policies.dreamzero.checkpoints.directory import (
    Checkpoint,
    Sidecars,
    open_checkpoint,
    write_directory,
)
from dzrobot.policies.dreamzero.checkpoints.load import official_state
from dzrobot.policies.dreamzero.checkpoints.passport import passport_for
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource
from dzrobot.policies.dreamzero.lerobot_folder import (
    ACTION_FEATURE,
    CHECKPOINT_FOLDER,
    POLICY_TYPE,
)
from dzrobot.policies.dreamzero.network.world_action import (
    LossOptions,
    PreparedBatch,
    TrainBatch,
)
from dzrobot.policies.dreamzero.options import WeightOptions
from dzrobot.policies.dreamzero.parts import load_parts
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.process import rank
from dzrobot.training.run.inputs import PromptEncoder, sample_noise
from dzrobot.training.run.optimizer import is_decayed
from lerobot_policy_dreamzero.configuration_dreamzero import LeRobotDreamZeroConfig
from lerobot_policy_dreamzero.observations import ColumnReader

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LeRobotDreamZeroPolicy(PreTrainedPolicy):
    """DreamZero for ``lerobot-eval``, ``lerobot-train`` and LeRobot's robots.

    Each environment of a batch has a session of its own, from one ``reset`` to the next.
    """

    config_class = LeRobotDreamZeroConfig
    name = POLICY_TYPE

    def __init__(
        self, config: LeRobotDreamZeroConfig, *, source: Checkpoint | None = None, **_given: object
    ) -> None:
        """Load the network.

        Args:
            config: See its fields.
            source: The weights; None: those of ``config.checkpoint``.
            _given: What LeRobot passes to all policies: statistics and facts of a dataset.

        Raises:
            ConfigError: No checkpoint is named, or features or options do not fit the robot.
            CheckpointError: It is incomplete, damaged, or made for something else.
        """
        super().__init__(config)
        if source is None and config.checkpoint is None:
            raise ConfigError(
                "a policy of type dreamzero starts from weights: give --policy.path with a folder "
                "of `dzrobot convert --to lerobot`, or --policy.checkpoint with any checkpoint of "
                "dzrobot"
            )
        config.validate_features()
        self._robot = config.robot
        self._checkpoint = source or open_checkpoint(str(config.checkpoint))
        parts = load_parts(
            self._checkpoint, embodiment=self._robot, device=config.device or "cpu",
            dtype=_DTYPES[config.dtype], revision=None, tokenizer=None, weights=WeightOptions(),
        )  # fmt: skip
        self.network = parts.network
        """Encoders and transformer; only the transformer is trained."""

        self.network.model.requires_grad_(config.dtype == "float32")
        self._pipeline = parts.pipeline
        self._prompts = PromptEncoder(parts.network, parts.tokenizer)
        self._acting = DreamZeroPolicy(parts, config.options)
        self._columns = ColumnReader(self._robot, config.declared_columns)
        self._sessions: list[str] = []
        self._begun = 0
        self.last_predicted_latents: Tensor | None = None
        """Imagined frames (1, 3, T, H, W) uint8 of the newest plans, the environments of a batch
        side by side; LeRobot collects them if ``save_predicted_video`` is set."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_name_or_path: str | Path,
        *,
        config: PreTrainedConfig | None = None,
        revision: str | None = None,
        **_given: object,
    ) -> Self:
        """Return the policy of a folder of ``dzrobot convert --to lerobot`` or of LeRobot's.

        Args:
            pretrained_name_or_path: The folder, or a Hugging Face id.
            config: In place of the folder's own.
            revision: Of a Hugging Face repository.
            _given: What LeRobot passes to all policies.

        Raises:
            CheckpointError: There is no checkpoint in the folder, or it does not fit.
            ConfigError: The configuration is of another policy, or does not fit.
        """
        folder = Path(pretrained_name_or_path)
        if not folder.is_dir():
            folder = Path(snapshot_download(str(pretrained_name_or_path), revision=revision))
        inner = folder / CHECKPOINT_FOLDER
        if not inner.is_dir():
            raise CheckpointError(
                f"{pretrained_name_or_path} has no folder {CHECKPOINT_FOLDER!r}: make it one of "
                "LeRobot's with `dzrobot convert --to lerobot`, or give --policy.type=dreamzero "
                "--policy.checkpoint"
            )
        if config is None:
            config = PreTrainedConfig.from_pretrained(folder)
        if not isinstance(config, LeRobotDreamZeroConfig):
            raise ConfigError(f"{folder} holds a policy of type {config.type}, not dreamzero")
        return cls(config, source=open_checkpoint(inner))

    def _save_pretrained(
        self, save_directory: Path, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Write LeRobot's config and the checkpoint in dzrobot's layout."""
        if state_dict is not None:
            raise ConfigError(
                "LeRobot's FSDP is not supported by policy.type=dreamzero: leave it out, or train "
                "with `dzrobot train`, which shards the network"
            )
        replace(self._config, checkpoint=None)._save_pretrained(save_directory)
        config = self.network.config
        # Adapters were merged when the weights were loaded.
        config = replace(config, head=replace(config.head, train_architecture="full"))
        passport = passport_for(self._robot, self._pipeline.statistics, config)
        passport = replace(passport, code=(package_code(),))
        own = self._checkpoint.own_passport
        if own is not None:
            passport = replace(
                passport,
                rtc_training_max_delay=own.rtc_training_max_delay,
                action_only_video=own.action_only_video,
                # Trained on, it is an ordinary network again.
                distilled_steps=None if self._config.trained_batches else own.distilled_steps,
            )
        sidecars = Sidecars(
            config_json=config.to_dict(), copy_from=self._checkpoint.folder, passport=passport
        )
        weights = StateDictSource(values=official_state(self.network))
        write_directory(save_directory / CHECKPOINT_FOLDER, weights, sidecars)

    @property
    def _config(self) -> LeRobotDreamZeroConfig:
        if not isinstance(self.config, LeRobotDreamZeroConfig):
            raise ConfigError(f"the configuration became one of {type(self.config).__name__}")
        return self.config

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the network itself stays as dzrobot trains it, without dropout."""
        super().train(mode)
        self.network.eval()
        return self

    def get_optim_params(self) -> list[dict[str, Any]]:
        """Return the transformer's parameters in two groups, with and without weight decay."""
        named = list(self.network.model.named_parameters())
        decayed = [p for name, p in named if is_decayed(name, p)]
        plain = [p for name, p in named if not is_decayed(name, p)]
        return [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
        """Return dzrobot's training loss of a batch, and its parts.

        Noise is that of dzrobot's trainer: a function of ``training_seed``, of how many batches
        were trained on, and of the sample's place in the batch.

        Args:
            batch: Columns (B, T, ...) at ``observation_delta_indices``, actions (B, A, D) at
                ``action_delta_indices``, and ``task``.

        Raises:
            ConfigError: The network is not one that LeRobot can train.
            ModalityError: A column is missing or does not fit.
        """
        self._check_trainable()
        prepared = self.prepare(batch)
        config, count = self._config, len(prepared.action_BAM)
        key = config.training_seed, config.trained_batches
        slots = range(rank() * count, (rank() + 1) * count)
        noise = sample_noise(self.network.config, prepared, *key, slots)
        config.trained_batches += self.training
        options = LossOptions(action_loss_norm=config.action_loss_norm)
        losses = self.network.loss(prepared, noise, options=options)
        return losses.loss, {
            "dynamics_loss": float(losses.dynamics_loss),
            "action_loss": float(losses.action_loss),
        }

    def prepare(self, batch: Mapping[str, Any]) -> PreparedBatch:
        """Return a batch as of :meth:`forward` after the frozen encoders.

        Raises:
            ModalityError: A column is missing or does not fit.
        """
        images = self._pipeline.encode_video(self._columns.images(batch))
        positions = self._config.state_positions
        states = {key: rows[:, positions] for key, rows in self._columns.states(batch).items()}
        actions = batch[ACTION_FEATURE].float().cpu().numpy()
        tasks = self._columns.tasks(batch, len(actions))
        samples = []
        for row, task in enumerate(tasks):
            window: dict[str, Any] = {self._robot.language: task}
            window |= {key: values[row] for key, values in states.items()}
            start = 0
            for part in self._robot.action:
                window[part.key] = actions[row, :, start : start + part.dim]
                start += part.dim
            samples.append(self._pipeline.encode_vectors(window))
        device = self.network.device
        return self.network.prepare(
            TrainBatch(
                images=images.to(device),
                state_BSM=torch.stack([sample["state"] for sample in samples]).to(device),
                action_BAM=torch.stack([sample["action"] for sample in samples]).to(device),
                action_mask_BAM=torch.stack([s["action_mask"] for s in samples]).to(device),
                has_real_action_B=torch.stack([s["has_real_action"] for s in samples]).to(device),
                prompt=self._prompts.embed([sample["prompt"] for sample in samples], device),
            )
        )

    def _check_trainable(self) -> None:
        timing, head = self._robot.timing, self.network.config.head
        wanted, given = (
            (head.num_frames, head.action_horizon),
            (timing.frames, timing.action_horizon),
        )
        if self._config.dtype != "float32":
            raise ConfigError(
                f"--policy.dtype={self._config.dtype} is for acting; train with float32, or with "
                "`dzrobot train`, which keeps float32 weights beside bfloat16"
            )
        if wanted != given:
            raise ConfigError(
                f"the network was made for samples of {wanted[0]} frames and plans of {wanted[1]} "
                f"actions; {self._robot.tag} with blocks={timing.blocks} has {given[0]} and "
                f"{given[1]}: give --policy.blocks so that they agree, or use `dzrobot train`"
            )

    def reset(self) -> None:
        """End the episodes of all environments; the next observations begin new ones."""
        self._acting.end_all()
        self._sessions = []
        self.last_predicted_latents = None

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], **_given: object) -> Tensor:
        """Return the next action (B, A) of each environment, planning where none is left.

        Args:
            batch: Columns (B, ...) and ``task``, of every step since :meth:`reset`.

        Raises:
            ModalityError: A column is missing or does not fit.
            SessionError: The size of the batch changed within an episode.
        """
        observations = list(self._columns.observations(batch))
        sessions = self._opened(len(observations))
        plans = self._acting.plans_next(session=sessions[0])
        actions = self._acting.act_batch(observations, sessions)
        if plans and self._config.save_predicted_video:
            self._imagine()
        return torch.from_numpy(np.stack(actions))

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **_given: object) -> Tensor:
        """Return the whole plan (B, H, A) of each environment, made from these observations.

        Args:
            batch: Columns (B, ...) and ``task``.

        Raises:
            ModalityError: A column is missing or does not fit.
            SessionError: The size of the batch changed within an episode.
        """
        observations = list(self._columns.observations(batch))
        sessions = self._opened(len(observations))
        plans = self._acting.infer_batch(observations, sessions)
        if self._config.save_predicted_video:
            self._imagine()
        return torch.from_numpy(np.stack([plan["actions"] for plan in plans]))

    def decode_predicted_latents(self, latents: Tensor) -> Tensor:
        """Return the frames (T, H, W, 3) uint8 of what LeRobot collected, one plan after another.

        Args:
            latents: ``last_predicted_latents`` of several plans, joined along the time.
        """
        return latents[0].permute(1, 2, 3, 0)

    def _imagine(self) -> None:
        videos = [self._acting.imagine(session) for session in self._sessions]
        side_by_side = torch.from_numpy(np.concatenate(videos, axis=2))
        self.last_predicted_latents = side_by_side.permute(3, 0, 1, 2)[None]

    def _opened(self, count: int) -> list[str]:
        if not self._sessions:
            self._sessions = [f"environment {number}" for number in range(count)]
            for session in self._sessions:
                self._acting.reset(session, episode=self._begun)
                self._begun += 1
        if len(self._sessions) != count:
            raise SessionError(
                f"a batch of {count} observations in an episode of {len(self._sessions)}: call "
                "reset() before the number of environments changes"
            )
        return self._sessions
