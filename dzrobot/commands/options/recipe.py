"""What a recipe says of the samples that a run cuts."""

from typing import Any

from dzrobot.configuration import load_config, read_config
from dzrobot.embodiments.spec import Embodiment
from dzrobot.training.recipes.architecture import run_embodiment
from dzrobot.training.recipes.read import find_recipe
from dzrobot.training.recipes.rlinf import translate
from dzrobot.training.sft_config import DataConfig, ModelConfig

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
