"""The robots and the network of a run, as frozen values; neither weights nor torch are needed.

Checks, ``dzrobot plan`` and the trainer all start from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dzrobot.documents import read_json
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment, Recorded
from dzrobot.embodiments.timing import Timing, frame_grid, walk_offsets
from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.policies.dreamzero.network.config import NetworkConfig, preset
from dzrobot.policies.dreamzero.options import LooseWeights
from dzrobot.training.sft_config import (
    CreditConfig,
    DataConfig,
    ModelConfig,
    SFTConfig,
    SourceConfig,
)

CONFIG_FILE = "config.json"
METADATA_FILE = Path("experiment_cfg/metadata.json")


@dataclass(frozen=True, kw_only=True)
class SourcePlan:
    """One source of samples, its defaults filled in."""

    field: str
    """Dotted name in the recipe, for messages."""

    paths: tuple[str, ...]
    weight: float
    embodiment: Embodiment
    metadata: Path | None
    """None: beside the weights the run starts from."""

    distribute_weights: bool
    recorded: Recorded = "actions"
    credit: CreditConfig | None = None
    """What is imitated of runs of a policy; None: every row."""

    @property
    def read_as(self) -> Embodiment:
        """The robot with the parts that its recordings hold."""
        return self.embodiment.holding(self.recorded)


def acting_plans(plans: Sequence[SourcePlan], config: SFTConfig) -> list[SourcePlan]:
    """Return the sources whose robots the trained policy can act as.

    Those with actions; where none has any, those of the run's own robot, which must bring
    statistics of its actions.
    """
    if acting := [plan for plan in plans if plan.recorded == "actions"]:
        return acting
    tag = load_embodiment(config.model.embodiment_tag).tag
    return [plan for plan in plans if plan.embodiment.tag == tag]


def run_embodiment(tag: str, model: ModelConfig, data: DataConfig) -> Embodiment:
    """Return the robot ``tag`` with the frame grid and horizon of this run.

    Raises:
        UnknownNameError: No such robot or frame grid.
        ConfigError: A horizon and a grid that do not go together.
    """
    embodiment = load_embodiment(tag)
    return replace(embodiment, timing=run_timing(embodiment.timing, model, data))


def run_timing(own: Timing, model: ModelConfig, data: DataConfig) -> Timing:
    """Return the frame grid and horizon of a run whose robot has ``own``; the rate stays its own.

    Raises:
        UnknownNameError: No such frame grid.
        ConfigError: Fields that do not go together, or that leave open which frames are drawn.
    """
    blocks = model.max_chunk_size or own.blocks
    horizon = model.action_horizon or own.action_horizon
    if data.frame_grid is not None:
        timing = _published(own, model, data)
    elif _walks_anew(own, horizon, data):
        timing = Timing(
            control_hz=own.control_hz,
            action_horizon=horizon,
            frame_offsets=data.video_in_chunk_offsets or walk_offsets(horizon),
            anchor_stride=data.macro_stride or horizon,
            blocks=blocks,
            sampling="multi_anchor",
        )
    elif horizon != own.action_horizon:
        # Offsets and stride follow from the horizon.
        timing = Timing(control_hz=own.control_hz, action_horizon=horizon, blocks=blocks)
    else:
        timing = own
    sampling = data.sampling_mode or timing.sampling
    return replace(timing, blocks=blocks, sampling=sampling, pad_tail=data.pad_tail)


def _published(own: Timing, model: ModelConfig, data: DataConfig) -> Timing:
    grid = frame_grid(str(data.frame_grid))
    if data.video_in_chunk_offsets or data.macro_stride:
        raise ConfigError(
            f"data.frame_grid={data.frame_grid} says which frames are drawn: leave it out, or "
            "data.video_in_chunk_offsets and data.macro_stride"
        )
    if model.action_horizon not in (None, grid.action_horizon):
        raise ConfigError(
            f"the frame grid {data.frame_grid!r} has a horizon of {grid.action_horizon}, "
            f"model.action_horizon is {model.action_horizon}: leave one of them out"
        )
    return replace(grid, control_hz=own.control_hz)


def _walks_anew(own: Timing, horizon: int, data: DataConfig) -> bool:
    """Return whether the run draws by a walk that the robot's own description does not have."""
    given = data.video_in_chunk_offsets is not None or data.macro_stride is not None
    if given and data.sampling_mode == "aligned":
        raise ConfigError(
            "data.video_in_chunk_offsets and data.macro_stride are drawn by "
            "data.sampling_mode=multi_anchor, the run has aligned: leave one of them out"
        )
    walks = (data.sampling_mode or own.sampling) == "multi_anchor"
    kept = own.sampling == "multi_anchor" and horizon == own.action_horizon
    return given or (walks and not kept)


def source_plans(config: SFTConfig) -> list[SourcePlan]:
    """Return every source of the run; plain folders share the model's robot and statistics.

    Raises:
        UnknownNameError: See :func:`run_embodiment`.
        ConfigError: See :func:`run_embodiment`.
    """
    model, data = config.model, config.data
    plain = tuple(entry for entry in data.train_data_paths if isinstance(entry, str))
    plans = []
    if plain:
        plans.append(
            SourcePlan(
                field="data.train_data_paths",
                paths=plain,
                weight=1.0,
                embodiment=run_embodiment(model.embodiment_tag, model, data),
                metadata=model.metadata_json_path,
                distribute_weights=True,
            )
        )
    for i, entry in enumerate(data.train_data_paths):
        if isinstance(entry, SourceConfig):
            plans.append(
                SourcePlan(
                    field=f"data.train_data_paths.{i}",
                    paths=entry.dataset_path,
                    weight=entry.weight,
                    embodiment=run_embodiment(entry.embodiment_tag, model, data),
                    metadata=entry.metadata_json_path,
                    distribute_weights=entry.distribute_weights,
                    recorded=entry.recorded,
                    credit=entry.credit,
                )
            )
    return plans


def run_network(base: NetworkConfig, model: ModelConfig, embodiment: Embodiment) -> NetworkConfig:
    """Return ``base`` with the horizon, sample length, frame size and adapters of this run.

    None of these changes a weight's shape: a checkpoint may be continued with another horizon or
    frame size.
    """
    height = model.target_video_height or base.head.target_video_height
    width = model.target_video_width or base.head.target_video_width
    head = replace(base.head, target_video_height=height, target_video_width=width)
    if model.is_lora:
        head = replace(
            head, train_architecture="lora", lora_rank=model.lora_rank or head.lora_rank,
            lora_alpha=model.lora_alpha or head.lora_alpha,
        )  # fmt: skip
    else:
        head = replace(head, train_architecture="full")
    network = replace(base, head=head).for_robot(embodiment)
    # A negative size is another attention pattern, which a sample's length must not switch off.
    if model.max_chunk_size is None or base.dit.max_chunk_size < 0:
        return network
    return replace(
        network, dit=replace(network.dit, max_chunk_size=embodiment.timing.blocks)
    )  # fmt: skip


def base_network(model: ModelConfig, file: Path | None) -> NetworkConfig:
    """Return the network the run starts from.

    Args:
        model: Says which preset, where there is no file.
        file: The checkpoint's config.json or ``config_path``; None for a preset.

    Raises:
        CheckpointError: The file describes no network.
        ConfigError: There is neither file nor preset.
    """
    if file is not None:
        return NetworkConfig.from_dict(read_json(file, dict[str, Any], CheckpointError))
    if model.preset is None:
        raise ConfigError(
            "no architecture: set model.model_path, model.preset (5b, 14b) or model.config_path"
        )
    return preset(model.preset)


def beside(path: str | Path) -> Path:
    """Return the folder where config.json and statistics of a checkpoint lie, if they do.

    Args:
        path: Its folder, or its file of loose weights.
    """
    given = Path(path).expanduser()
    return given.parent if given.is_file() else given


def loose_weights(model: ModelConfig, path: Path) -> LooseWeights | None:
    """Return what the recipe says of weights that have no config.json; None: they have one.

    Args:
        model: Has a preset or a config.json of its own.
        path: The weights on this machine.
    """
    has_own = (beside(path) / CONFIG_FILE).is_file()
    if has_own or (model.preset is None and model.config_path is None):
        return None
    return LooseWeights(network=base_network(model, model.config_path))
