"""README.md with front matter, from the passport: what the Hugging Face hub shows of a model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dzrobot.documents import read_bytes, validated
from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.policies.dreamzero.checkpoints.hub import is_hub_id
from dzrobot.policies.dreamzero.checkpoints.passport import Passport, recorded_base
from dzrobot.yaml_values import LARGEST, read_yaml

CARD_FILE = "README.md"

_FENCE = "---"
_BODY = """# DreamZero for {robots}

{kind} of the world-action model DreamZero, written by [dzrobot](https://pypi.org/project/dzrobot).

| | |
|---|---|
| robots | {robots} |
| actions of one plan | {horizon} |
| frame | {frame} |

```python
from dzrobot import DreamZeroPolicy

{use}
```

`dzrobot_passport.json` holds the recipe, `experiment_cfg/metadata.json` the normalization
statistics. A policy refuses another robot, horizon, size or other statistics than these.
"""
_WHOLE = 'policy = DreamZeroPolicy.from_pretrained("THIS_FOLDER", embodiment="{robot}")'
_PART = """from dzrobot.policies.dreamzero.options import WeightOptions

weights = WeightOptions(base="WHAT_IT_WAS_TRAINED_ON")
policy = DreamZeroPolicy.from_pretrained("THIS_FOLDER", embodiment="{robot}", weights=weights)"""


class License(BaseModel):
    """Under what terms weights may be used, as front matter says it; None: not said."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


def read_license(folder: Path | None) -> License:
    """Return what the card in ``folder`` says of its license; nothing where that cannot be read.

    Training must not end without weights because somebody's README.md is odd.
    """
    file = None if folder is None else folder / CARD_FILE
    if file is None or not file.is_file():
        return License()
    try:
        text = read_bytes(file, CheckpointError, largest=LARGEST).decode("utf-8-sig")
        start, _, rest = text.partition("\n")
        front, fence, _ = rest.partition(f"\n{_FENCE}")
        if start.strip() != _FENCE or not fence:
            return License()
        return validated(read_yaml(front, str(file))[0], License, str(file), CheckpointError)
    except (CheckpointError, ConfigError, UnicodeDecodeError):
        return License()


def model_card(passport: Passport, terms: License, *, adapters: bool, complete: bool) -> str:
    """Return the text of README.md.

    Args:
        passport: What the weights were made for, and how.
        terms: Of the weights it was trained from.
        adapters: Whether LoRA matrices are among the weights.
        complete: Whether nothing else is to be loaded with them.
    """
    from huggingface_hub import ModelCardData

    robots = sorted(passport.embodiments)
    base = recorded_base(passport)
    if base is not None and not is_hub_id(base):
        # A folder on somebody's disk has no name that others could follow.
        base = None
    relation = "adapter" if adapters else "finetune"
    more: dict[str, Any] = {} if base is None else {"base_model_relation": relation}
    data = ModelCardData(
        library_name="dzrobot",
        pipeline_tag="robotics",
        tags=["dreamzero", "world-action-model", *robots, *(["lora"] if adapters else [])],
        base_model=base,
        datasets=sorted(set(filter(is_hub_id, _datasets(passport.recipe)))) or None,
        **terms.model_dump(),
        **more,
    )
    size = passport.frame_size
    body = _BODY.format(
        robots=", ".join(robots),
        kind="LoRA adapters" if adapters else "Weights" if complete else "Trained weights",
        horizon=passport.action_horizon,
        frame="as the robot tiles it" if size is None else f"{size[0]} x {size[1]} pixels",
        use=(_WHOLE if complete else _PART).format(robot=robots[0] if robots else "TAG"),
    )
    return f"{_FENCE}\n{data.to_yaml()}\n{_FENCE}\n\n{body}"


def _datasets(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield where the data of a recipe lay: folders and hub ids."""
    data = recipe.get("data")
    paths = data.get("train_data_paths") if isinstance(data, Mapping) else None
    for entry in paths if isinstance(paths, list) else ():
        given = entry.get("dataset_path") if isinstance(entry, Mapping) else entry
        yield from (path for path in (given if isinstance(given, list) else [given]) if path)
