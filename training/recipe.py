"""From ``RECIPE key=value ...`` to a checked configuration, before torch is imported."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dzrobot.config import read_config
from dzrobot.errors import ConfigError, UnknownNameError, suggest
from dzrobot.training.config import SFTConfig
from dzrobot.training.validate.recipe import find_faults
from dzrobot.yaml_values import dotted

RECIPES = Path(__file__).parent / "recipes"

RETIRED: Mapping[str, str] = {
    "actor": "sections are model, data, optim, parallel, checkpoint, logging and runner: write "
    "actor.model.x as model.x",
    "data.lazy_load": "every read is lazy; drop it",
    "data.parquet_cache_size": "numbers are mapped from disk; drop it",
    "data.dataset_type": "the format is read from meta/info.json; drop it",
    "model.model_type": "there is one kind of model; drop it",
    "model.num_action_per_block": "it equals model.action_horizon; set that",
    "model.state_horizon": "there is one state per block; drop it",
    "model.max_action_dim": "the network's config.json says it; drop it",
    "model.max_state_dim": "the network's config.json says it; drop it",
    "model.max_seq_len": "the network's config.json says it; drop it",
    "model.precision": "master weights are float32; parallel.param_dtype sets the rest",
    "model.relative_action_per_horizon": "per-step statistics are not supported; drop it",
    "model.droid_view_height": "the embodiment's View.size says it; drop it",
    "model.droid_view_width": "the embodiment's View.size says it; drop it",
    "model.action_head_cfg": "max_chunk_size is model.max_chunk_size; the rest is in the "
    "checkpoint's config.json",
    "data.sampling_strategy": "it is called data.sampling_mode (aligned or multi_anchor)",
    "data.macro_stride": "it equals the horizon; drop it, or choose data.frame_grid",
    "data.video_in_chunk_offsets": "offsets follow from the horizon; drop it, or choose "
    "data.frame_grid",
    "optim.clip_grad_norm": "it is called optim.clip_grad",
    "runner.max_epochs": "give runner.max_steps",
    "runner.save_interval": "it is called checkpoint.save_interval",
    "runner.val_check_interval": "it is called runner.eval_interval",
    "runner.logger": "the folder is runner.output_dir; see the section logging",
}
"""Fields of published recipes that have no meaning here, and what to do instead."""


def find_recipe(name: str) -> Path:
    """Return the file of a built-in recipe, or ``name`` itself if it is a YAML file.

    Raises:
        UnknownNameError: Neither.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    known = {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}
    if name in known:
        return known[name]
    raise UnknownNameError(
        f"unknown recipe {name!r}.{suggest(name, known)} Known: {', '.join(known)}; or give a "
        ".yaml file."
    )


def load_recipe(name: str, overrides: Sequence[str], world_size: int) -> SFTConfig:
    """Return the configuration of a run, checked.

    Args:
        name: Built-in recipe or YAML file.
        overrides: ``section.field=value`` each.
        world_size: Processes of the run.

    Raises:
        ConfigError: Every fault that can be known before anything is loaded.
        UnknownNameError: No such recipe.
    """
    raw = read_config(find_recipe(name), overrides)
    try:
        config = raw.build(SFTConfig)
    except ConfigError as error:
        hints = [f"  {field}: {hint}" for field, hint in _retired(map(dotted, raw.origins))]
        raise ConfigError("\n".join([str(error), *hints])) from error
    if faults := find_faults(config, world_size):
        raise raw.error([(fault.field, fault.message) for fault in faults])
    return config


def _retired(names: Iterable[str]) -> list[tuple[str, str]]:
    written = set(names)
    return [
        (field, hint)
        for field, hint in RETIRED.items()
        if any(name == field or name.startswith(f"{field}.") for name in written)
    ]
