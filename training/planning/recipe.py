"""A recipe as far as a plan needs it: no recordings, no weights, no tokenizer.

Nothing here imports torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dzrobot.configuration import read_config
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.training.config import SFTConfig
from dzrobot.training.recipe import find_recipe, read_recipe
from dzrobot.training.validate.recipe import find_faults
from dzrobot.training.validate.weights import known_network

_PLACEHOLDER = "not-given"
_NOT_NEEDED = (
    "data.train_data_paths", "model.metadata_json_path", "model.model_path",
    "model.tokenizer_path", "runner.resume_dir",
)  # fmt: skip


def read_planned(
    name: str, overrides: Sequence[str], devices: int
) -> tuple[SFTConfig, NetworkConfig]:
    """Return a recipe to plan with, and the network that it starts from.

    Args:
        name: Built-in recipe or YAML file.
        overrides: ``section.field=value`` each.
        devices: Processes, one device each.

    Raises:
        ConfigError: The recipe cannot be run, or names no architecture.
        UnknownNameError: No such recipe.
    """
    recipe = find_recipe(name)
    written = read_config(recipe).values
    _, config = read_recipe(name, [*_placeholders(written), *overrides])
    faults = [
        f"  {fault.field}: {fault.message}"
        for fault in find_faults(config, devices)
        if not fault.field.startswith(_NOT_NEEDED) and "_pretrained_path" not in fault.field
    ]
    if faults:
        raise ConfigError("\n".join([f"{recipe} cannot be run:", *faults]))
    base = known_network(config.model)
    if base is None:
        raise ConfigError(
            "no architecture to plan with: give model.preset, or a model.model_path on this machine"
        )
    return config, base


def _placeholders(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values for what a plan does not look at, where the recipe leaves it open."""
    data = values.get("data")
    sources = data.get("train_data_paths") if isinstance(data, dict) else None
    if sources is None:
        yield f"data.train_data_paths={_PLACEHOLDER}"
    for i, entry in enumerate(sources if isinstance(sources, list) else []):
        for name in ("dataset_path", "metadata_json_path"):
            if isinstance(entry, dict) and name not in entry:
                yield f"data.train_data_paths.{i}.{name}={_PLACEHOLDER}"
