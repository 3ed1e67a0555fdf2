"""The passport: what a checkpoint was made for, in a file beside its weights, and compared.

Published checkpoints carry none; for them the same questions are put to config.json, metadata.json
and the training config, as far as those answer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dzrobot.code_identity import CodeIdentity
from dzrobot.documents import read_bytes, read_json, validated
from dzrobot.embodiments.registry import EMBODIMENTS, description_of
from dzrobot.embodiments.spec import ActionAnchor, Embodiment
from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.importing import is_reference
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.hub import is_hub_id
from dzrobot.policies.dreamzero.checkpoints.shards import write_json
from dzrobot.policies.dreamzero.checkpoints.trained_inputs import TrainedInputs
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.yaml_values import LARGEST, read_yaml

PASSPORT_FILE = "dzrobot_passport.json"

TRANSFORM_VERSION = 1
"""Raised whenever the same observation or action would be encoded to other numbers than before."""

_FORMAT = 1

_MOST = 2**20
"""Most numbers or actions that a passport is believed to speak of."""

# JSON has lists where these values are tuples.
_Names = Annotated[tuple[str, ...], Field(strict=False)]
_Count = Annotated[int, Field(strict=True, ge=0, le=_MOST)]
_Size = Annotated[tuple[_Count, _Count], Field(strict=False)]
_EXACT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class TrainedEmbodiment:
    """What a checkpoint knows of one embodiment; None: not recorded."""

    __pydantic_config__ = _EXACT

    state_dim: _Count | None = None
    action_dim: _Count | None = None
    relative: _Names | None = None
    """Names of the action parts measured from the state."""

    statistics: str | None = None
    """Fingerprint of the normalization statistics."""

    action_frame: str | None = None
    """Axes of its Cartesian actions, as the embodiment names them."""

    action_anchor: ActionAnchor | None = None
    """What its Cartesian steps were measured from."""

    conditions: _Names | None = None
    """State parts with an encoder of their own: key, then who made it, ``module:Name``."""

    action_horizon: _Count | None = None
    """Actions of one of its plans, where that is not the passport's: in a mixture the network's
    plans are as long as the longest of its robots'."""

    description: Mapping[str, Any] | None = None
    """A robot of one's own as data, see ``description_of``; None: it is built in, or data cannot
    express it."""

    inputs: TrainedInputs | None = None
    """What training showed the network, in small."""


@dataclass(frozen=True, kw_only=True)
class Passport:
    """What a checkpoint was made for; None: not recorded."""

    __pydantic_config__ = _EXACT

    embodiments: Mapping[str, TrainedEmbodiment]
    """By tag."""

    action_horizon: _Count
    """Actions that the network plans at a time."""

    frame_size: _Size | None = None
    """(height, width) in pixels of the frame the network sees."""

    base: str | None = None
    """Fingerprint of the weights it was fine-tuned from."""

    transforms: _Count | None = None
    """:data:`TRANSFORM_VERSION` of the pipeline it was trained with."""

    rtc_training_max_delay: _Count | None = None
    """Most first rows of a plan that the network was trained to be given without noise."""

    action_only_video: Literal["once", "skip"] | None = None
    """What of the video the network was trained to do without; see ``PolicyOptions.video``."""

    distilled_steps: Annotated[int, Field(strict=True, ge=1, le=1000)] | None = None
    """Solver steps, of Euler's, that the network was distilled for."""

    plugins: Annotated[tuple[Mapping[str, Any], ...], Field(strict=False)] = ()
    """Code of a lab's own that took part in training: name, hash of its source, settings."""

    tokenizer: str | None = None
    """Fingerprint of the tokenizer of its prompts."""

    lora_alpha: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    """What its adapters were trained to be multiplied by, over their rank; of adapters alone."""

    weights: str | None = None
    """SHA-256 of the files of the weights that training started from; see ``weights_hash``."""

    commit: str | None = None
    """Commit of the hub's repository that these came from."""

    code: Annotated[tuple[CodeIdentity, ...], Field(strict=False)] = ()
    """Code that wrote it; of a training that was resumed by other code, every one in turn."""

    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Training configuration, plain values."""

    @property
    def resized_from(self) -> dict[str, tuple[int, int]]:
        """Recorded size (height, width), by view whose pictures were small copies of it."""
        inputs = [one.inputs for one in self.embodiments.values() if one.inputs is not None]
        return {view: size for one in inputs for view, size in one.resized_from.items()}

    def horizon(self, tag: str) -> int:
        """Return the actions of one plan that ``tag`` was trained with."""
        trained = self.embodiments.get(tag)
        own = None if trained is None else trained.action_horizon
        return self.action_horizon if own is None else own


class PublishedTraining(BaseModel):
    """What is read of experiment_cfg/conf.yaml, the training config beside published weights."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    relative_action: bool | None = None
    relative_action_per_horizon: bool | None = None
    relative_action_keys: list[str] | None = None


def passport_for(
    embodiment: Embodiment,
    statistics: Statistics,
    config: NetworkConfig,
    *,
    base: str | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Passport:
    """Return the passport of a network that runs, or is trained, as described; names no code."""
    trained = TrainedEmbodiment(
        state_dim=embodiment.state_dim,
        action_dim=embodiment.action_dim,
        relative=_relative(embodiment),
        statistics=statistics.fingerprint,
        action_frame=embodiment.action_frame,
        action_anchor=embodiment.action_anchor,
        conditions=tuple(f"{part.key} by {part.encoder}" for part in embodiment.conditions),
        description=None if embodiment.tag in EMBODIMENTS else description_of(embodiment),
    )
    return Passport(
        embodiments={embodiment.tag: trained},
        action_horizon=embodiment.timing.action_horizon,
        frame_size=config.target_size or embodiment.image_size,
        base=base,
        transforms=TRANSFORM_VERSION,
        recipe=dict(recipe or {}),
    )


def published_passport(
    config: NetworkConfig, metadata: Mapping[str, Any], training: PublishedTraining | None
) -> Passport:
    """Return what the files of a checkpoint without a passport say.

    Args:
        config: From config.json.
        metadata: metadata.json.
        training: experiment_cfg/conf.yaml, if there is one.
    """
    relative = None if training is None else _published_relative(training)
    return Passport(
        embodiments={tag: TrainedEmbodiment(relative=relative) for tag in metadata},
        action_horizon=config.head.action_horizon,
        frame_size=config.target_size,
    )


def _published_relative(training: PublishedTraining) -> tuple[str, ...] | None:
    if training.relative_action is None:
        return None
    if not (training.relative_action or training.relative_action_per_horizon):
        return ()
    keys = training.relative_action_keys or ()
    return tuple(sorted(key.removeprefix("action.") for key in keys))


def _relative(embodiment: Embodiment) -> tuple[str, ...]:
    return tuple(sorted(key.removeprefix("action.") for key in embodiment.relative_keys))


def write_passport(folder: Path, passport: Passport) -> None:
    """Write ``passport`` beside the weights in ``folder``."""
    write_json(folder / PASSPORT_FILE, {"format": _FORMAT, **asdict(passport)})


def read_passport(folder: Path) -> Passport | None:
    """Return the passport in ``folder``, None if there is none.

    Raises:
        CheckpointError: The file is damaged or of a newer format.
    """
    file = folder / PASSPORT_FILE
    if not file.is_file():
        return None
    data = read_json(file, dict[str, Any], CheckpointError)
    if data.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{file} is of a format this version cannot read; update dzrobot")
    return validated(data, Passport, str(file), CheckpointError)


def recorded_base(passport: Passport | None) -> str | None:
    """Return the path or hub id that training started from, None if it is not recorded."""
    model = None if passport is None else passport.recipe.get("model")
    path = model.get("model_path") if isinstance(model, dict) else None
    return path if isinstance(path, str) else None


def recorded_robots(passport: Passport | None) -> list[str]:
    """Return the robots of a lab's own that training named, each ``module:NAME``."""
    recipe = {} if passport is None else passport.recipe
    model, data = recipe.get("model"), recipe.get("data")
    sources = data.get("train_data_paths") if isinstance(data, Mapping) else None
    entries = [model, *(sources if isinstance(sources, list) else [])]
    named = [entry.get("embodiment_tag") for entry in entries if isinstance(entry, Mapping)]
    return sorted({name for name in named if isinstance(name, str) and is_reference(name)})


def check_passport(passport: Passport, wanted: Passport, origin: str) -> None:
    """Check that a checkpoint was made for what is asked of it.

    Args:
        passport: The checkpoint's.
        wanted: Of the one embodiment to run or train, from :func:`passport_for`.
        origin: The checkpoint's path, for the message.

    Raises:
        CheckpointError: It was not; lists every difference.
    """
    lines = [
        f"  {name}: checkpoint {_shown(held)}, wanted {_shown(other)}"
        for name, held, other in differences(passport, wanted)
    ]
    if lines:
        raise CheckpointError(
            "\n".join([f"{origin} was made for something else:", *lines])
            + "\nChoose the embodiment, statistics and tokenizer it was trained with, or another "
            "checkpoint."
        )


def differences(passport: Passport, wanted: Passport) -> Iterator[tuple[str, object, object]]:
    """Yield (what, in the checkpoint, asked) wherever both are recorded and differ."""
    pairs: list[tuple[str, object, object]] = [
        ("frame size", passport.frame_size, wanted.frame_size),
        ("base weights", passport.base, wanted.base),
        ("transform version", passport.transforms, wanted.transforms),
        ("tokenizer", passport.tokenizer, wanted.tokenizer),
        ("lora_alpha", passport.lora_alpha, wanted.lora_alpha),
    ]
    for tag, expected in wanted.embodiments.items():
        if tag not in passport.embodiments:
            yield "embodiment", ", ".join(sorted(passport.embodiments)) or "none", tag
            continue
        held = passport.embodiments[tag]
        pairs += [
            (f"{tag} action horizon", passport.horizon(tag), wanted.horizon(tag)),
            (f"{tag} state numbers", held.state_dim, expected.state_dim),
            (f"{tag} action numbers", held.action_dim, expected.action_dim),
            (f"{tag} relative actions", held.relative, expected.relative),
            (f"{tag} encoders of its own", held.conditions, expected.conditions),
            (f"{tag} action frame", held.action_frame, expected.action_frame),
            (f"{tag} statistics", held.statistics, expected.statistics),
        ]
    for name, held_value, wanted_value in pairs:
        if held_value is not None and wanted_value is not None and held_value != wanted_value:
            yield name, held_value, wanted_value


def _shown(value: object) -> str:
    match value:
        case tuple():
            return (
                " x ".join(map(str, value))
                if all(isinstance(v, int) for v in value) and value
                else ", ".join(value) or "none"
            )
        case str() if len(value) == 64:
            return value[:12]
        case _:
            return str(value)


def check_compatible(
    embodiment: Embodiment, config: NetworkConfig, *, shorter: bool = False
) -> None:
    """Check that a network can see and act as ``embodiment``.

    Args:
        embodiment: The robot.
        config: The network.
        shorter: Whether the robot may use only the beginning of what the network plans.

    Raises:
        CheckpointError: It cannot; lists every reason.
    """
    dit, timing = config.dit, embodiment.timing
    faults = []
    if embodiment.state_dim > dit.max_state_dim:
        faults.append(
            f"a state of {embodiment.state_dim} numbers, the network takes {dit.max_state_dim}"
        )
    if embodiment.action_dim > dit.action_dim:
        faults.append(
            f"an action of {embodiment.action_dim} numbers, the network makes {dit.action_dim}"
        )
    for name, value in (
        ("action_horizon", config.head.action_horizon),
        ("num_action_per_block", dit.num_action_per_block),
    ):
        if timing.action_horizon > value or (timing.action_horizon < value and not shorter):
            faults.append(
                f"a horizon of {timing.action_horizon} actions, the network has {name}={value}"
            )
    frames = dit.num_frame_per_block * config.vae.temporal_stride
    if len(timing.frame_offsets) != frames:
        faults.append(f"{len(timing.frame_offsets)} frames per block, the network takes {frames}")
    try:
        config.check_size(*(config.target_size or embodiment.image_size))
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise CheckpointError(
            f"the embodiment {embodiment.tag!r} does not fit the network: {'; '.join(faults)}. "
            "Choose the embodiment the "
            "checkpoint was trained for, or dataclasses.replace its timing or sizes."
        )


CARD_FILE = "README.md"

_FENCE = "---"
_BODY = """# DreamZero for {robots}

{kind} of the world-action model DreamZero, written by [dzrobot](https://pypi.org/project/dzrobot).

| | |
|---|---|
| robots | {robots} |
| actions of one plan | {horizon} |
| frame | {frame} |
{steps}
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
    """Under what terms weights may be used, as front matter states it; None: not stated."""

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
        steps=""
        if passport.distilled_steps is None
        else f"| solver steps, distilled | {passport.distilled_steps} |\n",
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
