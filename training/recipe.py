"""From ``RECIPE key=value ...`` to a checked configuration, before torch is imported."""

import logging
from collections.abc import Sequence
from pathlib import Path

from dzrobot.configuration import RawConfig, place_of, read_config
from dzrobot.errors import ConfigError, UnknownNameError, suggest
from dzrobot.training.config import SFTConfig
from dzrobot.training.rlinf import translate
from dzrobot.training.validate.recipe import find_faults, folder_faults

_log = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"


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
    """Return a recipe as it was written, under our names, and as a configuration.

    Args:
        name: Built-in recipe or YAML file.
        overrides: ``section.field=value`` each.

    Raises:
        ConfigError: Names or values that are not ours, each with what it is here.
        UnknownNameError: No such recipe.
    """
    written = translate(read_config(find_recipe(name), overrides))
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
    return written.raw, config


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
    raw, config = read_recipe(name, overrides)
    if faults := [*find_faults(config, world_size), *folder_faults(config.runner)]:
        raise raw.error([(fault.field, fault.message) for fault in faults])
    return config
