"""From ``RECIPE key=value ...`` to a checked configuration, before torch is imported."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dzrobot.configuration import RawConfig, load_config, place_of, read_config
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, UnknownNameError, suggest
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.training.recipes.architecture import run_embodiment, source_plans
from dzrobot.training.recipes.check import start_faults
from dzrobot.training.recipes.check_inputs import (
    NOT_GIVEN,
    Input,
    Problem,
    known_network,
    on_the_hub,
)
from dzrobot.training.recipes.rlinf import translate
from dzrobot.training.sft_config import DataConfig, ModelConfig, SFTConfig

_log = logging.getLogger(__name__)

RECIPES = Path(__file__).parent


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


def read_recipe(name: str, overrides: Sequence[str]) -> tuple[RawConfig, SFTConfig]:
    """Return a recipe under our field names, as it was written and as a configuration.

    Args:
        name: Built-in recipe or YAML file.
        overrides: ``section.field=value`` each.

    Raises:
        ConfigError: Unknown names or values; other trainers' with their counterparts here.
        UnknownNameError: There is no such recipe.
    """
    written = translate(read_config(find_recipe(name), _with_plugins(overrides)))
    try:
        config = written.raw.build(SFTConfig, written.faults)
    except ConfigError as error:
        origins = [written.raw.where(place_of(field)) for field, _ in written.faults]
        if not any(origin.startswith(f"{name}:") for origin in origins):
            raise
        raise ConfigError(
            f"{error}\n`dzrobot import-rlinf {name}` writes this file as one of our recipes"
        ) from error
    for theirs, ours in written.read_as:
        _log.warning("%s is %s here", theirs, ours)
    runner = config.runner.model_copy(update={"recipe": config.runner.recipe or name})
    return written.raw, config.model_copy(update={"runner": runner})


_PLUGIN = "plugin="


def _with_plugins(overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` with every ``plugin=NAME`` as part of one ``runner.plugins=[...]``."""
    names = [word.removeprefix(_PLUGIN) for word in overrides if word.startswith(_PLUGIN)]
    rest = [word for word in overrides if not word.startswith(_PLUGIN)]
    return [*rest, f"runner.plugins=[{', '.join(names)}]"] if names else rest


def load_recipe(name: str, overrides: Sequence[str], world_size: int) -> SFTConfig:
    """Return the checked configuration of a run.

    Args:
        name: Built-in recipe or YAML file.
        overrides: ``section.field=value`` each.
        world_size: Processes of the run.

    Raises:
        ConfigError: All faults that can be found before anything is loaded.
        UnknownNameError: There is no such recipe.
    """
    raw, config = read_recipe(name, overrides)
    if faults := start_faults(config, world_size):
        raise raw.error([(fault.field, fault.message) for fault in faults])
    return config


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A recipe that can be planned."""

    config: SFTConfig
    network: NetworkConfig
    """What it starts from."""

    unread: tuple[Problem, ...]
    """What was not given, or lies on the hub, and why it was not looked at."""

    @property
    def lacking(self) -> frozenset[Input]:
        """Return which of a run's inputs cannot be opened for it."""
        found: set[Input] = {
            "data" if fault.field.startswith("data.") or "metadata" in fault.field else "weights"
            for fault in self.unread
        }
        beside = any(plan.metadata is None for plan in source_plans(self.config))
        return frozenset({*found, "data"} if "weights" in found and beside else found)


def plan_recipe(name: str, overrides: Sequence[str], devices: int) -> PlannedRun:
    """Return a recipe to plan with, refused for whatever :func:`load_recipe` refuses.

    Recordings, statistics, weights and tokenizer need not be given; what is given is checked.

    Args:
        name: Built-in recipe or YAML file.
        overrides: ``section.field=value`` each.
        devices: Processes, one device each.

    Raises:
        ConfigError: The recipe cannot be run, or names no architecture.
        UnknownNameError: There is no such recipe.
    """
    written = read_config(find_recipe(name)).values
    raw, config = read_recipe(name, [*_placeholders(written), *overrides])
    found = start_faults(config, devices)
    if faults := [fault for fault in found if not fault.not_given]:
        raise raw.error([(fault.field, fault.message) for fault in faults])
    base = known_network(config.model)
    if base is None:
        raise ConfigError(
            "no architecture to plan with: give model.preset, or a model.model_path on this machine"
        )
    return PlannedRun(
        config=config, network=base, unread=(*found, *on_the_hub(config, source_plans(config)))
    )  # fmt: skip


def _placeholders(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values for paths that a recipe leaves to the command line."""
    data = values.get("data")
    sources = data.get("train_data_paths") if isinstance(data, dict) else None
    if sources is None:
        yield f"data.train_data_paths={NOT_GIVEN}"
    for i, entry in enumerate(sources if isinstance(sources, list) else []):
        for name in ("dataset_path", "metadata_json_path"):
            if isinstance(entry, dict) and name not in entry:
                yield f"data.train_data_paths.{i}.{name}={NOT_GIVEN}"


Sections = dict[str, dict[str, Any]]


def recipe_sections(recipe: str | None) -> Sections:
    """Return the sections ``model`` and ``data`` of a recipe; empty ones of none.

    Raises:
        ConfigError: There is no such recipe, or it cannot be read.
    """
    written = {} if recipe is None else translate(read_config(find_recipe(recipe))).raw.values
    return {name: dict(written.get(name) or {}) for name in ("model", "data")}


def robot_of_run(
    tag: str, dataset: list[str], sections: Sections
) -> tuple[Embodiment, ModelConfig, DataConfig]:
    """Return ``tag`` with the frame grid and horizon of a run, and the sections, checked.

    Args:
        tag: A built-in robot, or ``module:NAME``.
        dataset: Folders, where the recipe names none.
        sections: Of the recipe, changed where the command line says so.

    Raises:
        ConfigError: They do not go together.
    """
    sections["model"]["embodiment_tag"] = tag
    sections["data"].setdefault("train_data_paths", dataset)
    model = load_config(ModelConfig, sections["model"])
    data = load_config(DataConfig, sections["data"])
    return run_embodiment(tag, model, data), model, data
