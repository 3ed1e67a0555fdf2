"""A whole training file of RLinf as one of our recipes, by what its fields mean there.

Every field of the file is taken over, refused, or listed as without effect here, with one reason.
What the file leaves out has RLinf's default, not ours (:mod:`rlinf_files`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dzrobot.configuration import RawConfig, field_notes, place_of
from dzrobot.documents import shorten
from dzrobot.embodiments.timing import WALK_OFFSETS, Timing
from dzrobot.errors import ConfigError, DzrobotError
from dzrobot.training.recipes.architecture import source_plans
from dzrobot.training.recipes.check_inputs import relative_faults, tiling_faults
from dzrobot.training.recipes.rlinf import DROPPED, MEANT, VALUES, dropped_by, name_here
from dzrobot.training.recipes.rlinf_files import (
    FILES,
    HEAD,
    OPEN,
    PRESETS,
    PROGRAM,
    UNKNOWN,
    VERSION,
    Composed,
    leaves,
    network_faults,
    put,
)
from dzrobot.training.sft_config import SFTConfig
from dzrobot.yaml_values import dotted

_CODE = f"code of RLinf {VERSION}"

Note = tuple[str, str]
"""Name of a field, and what is said about it."""

_UNSET_BELOW_ZERO = {
    "runner.max_epochs", "runner.max_steps", "runner.eval_interval", "optim.lr_warmup_steps",
}  # fmt: skip
_MODE = "data.sampling_mode"
_WALK = ("data.video_in_chunk_offsets", "data.macro_stride")
_COMPONENTS = tuple(
    f"model.{part}_pretrained_path"
    for part in ("diffusion_model", "image_encoder", "text_encoder", "vae")
)
_TORCH_RATE = 1e-3
"""Learning rate of torch's AdamW where none is given to it as a whole. RLinf gives one to each
group of weights, and a cosine's ``min_lr`` is divided by this one."""


@dataclass(frozen=True)
class Imported:
    """A training file of RLinf, translated."""

    values: dict[str, Any]

    defaults: list[Note]
    """Fields that the file leaves out and whose default there is not ours: field here and value,
    and where the value comes from."""

    missing: list[Note]
    """Files of defaults that do not lie beside the file, and the values that therefore come from
    the table of RLinf's defaults."""

    changed: list[Note]
    """What a run does otherwise than there, in spite of its field."""

    stopped: list[Note]
    """What ``dzrobot train`` refuses of the recipe as it stands."""

    unused: list[Note]
    """Fields without effect here, and why."""

    needed: list[str]
    """Required fields that the file does not give."""


def import_composed(file: Path, composed: Composed) -> Imported:
    """Return a training file of RLinf as a recipe.

    Args:
        file: RLinf's YAML file.
        composed: What it says with the files of its ``defaults`` that lie beside it.

    Raises:
        ConfigError: Some field has a meaning that a run here cannot have; all of them are listed.
    """
    work = _Import(composed)
    work.read_fields()
    for step in (
        work.read_network, work.read_frames, work.read_schedule, work.read_sources,
        work.read_weights, work.read_adapters, work.read_layout, work.read_logs,
    ):  # fmt: skip
        step()
    work.add_defaults()
    return work.finish(file)


@dataclass
class _Import:
    """State of one translation."""

    composed: Composed
    given: dict[str, Any] = field(default_factory=dict)
    """Fields here -> value."""

    theirs: dict[str, str] = field(default_factory=dict)
    """Fields here -> name as written."""

    notes: dict[str, str] = field(default_factory=dict)
    """Fields here -> where a value came from that the file does not give."""

    changed: list[Note] = field(default_factory=list)
    refused: list[Note] = field(default_factory=list)
    unused: list[Note] = field(default_factory=list)

    def read_fields(self) -> None:
        """Bring every field under its name here, and sort out those without one."""
        for place, value in leaves(self.composed.values):
            theirs = dotted(place)
            ours = name_here(theirs)
            unset = ours in _UNSET_BELOW_ZERO and isinstance(value, int) and value < 0
            if value in (None, OPEN, {}) or unset:
                if theirs in self.composed.written and value != OPEN:
                    self.unused.append((theirs, f"{value}: says that nothing is given"))
                continue
            if theirs.startswith(("runner.logger.", "actor.model.action_head_cfg.")):
                if ours == "model.max_chunk_size":
                    self._take(theirs, ours, value)
                continue
            entry = theirs if theirs in DROPPED else dropped_by(ours)
            if entry == "actor":
                self.refused.append((theirs, UNKNOWN))
            elif entry is not None:
                self._drop(theirs, ours, entry, value)
            elif isinstance(value, str) and "${" in value:
                self.refused.append((theirs, f"{value} is not in the file; write it out"))
            else:
                self._take(theirs, ours, value)

    def _drop(self, theirs: str, ours: str, entry: str, value: Any) -> None:
        meant = next((MEANT[name] for name in (theirs, ours, entry) if name in MEANT), None)
        if theirs == "runner.max_epochs":
            meant = ()
        # Several are taken over together, by a step of their own.
        if ours == "model.num_action_per_block":
            self.given[ours], self.theirs[ours] = value, theirs
            return
        # 1 is not true.
        if meant is not None and not any(type(v) is type(value) and v == value for v in meant):
            allowed = f" (here: {', '.join(map(str, meant))})" if meant else ""
            self.refused.append((theirs, f"{value}: {_reason(entry)}{allowed}"))
        elif theirs in self.composed.written:
            self.unused.append((theirs, _reason(entry)))

    def _take(self, theirs: str, ours: str, value: Any) -> None:
        became = {ours: value}
        for known, meaning in VALUES.get(ours, {}).items():
            if type(known) is type(value) and known == value:
                became = dict(meaning)
        for name, one in became.items():
            if name in self.given and self.given[name] != one:
                if name == "parallel.cpu_offload":
                    self.given[name] = True
                elif name != "parallel.reshard_after_forward":
                    other = self.theirs[name]
                    self.refused.append((theirs, f"{one} contradicts {other}={self.given[name]}"))
                continue
            self.given[name], self.theirs[name] = one, theirs
            if theirs not in self.composed.written:
                self.notes[name] = f"{self.composed.origins[theirs]}.yaml"

    def _default(self, name: str) -> Any:
        """Return what the file says of a field, else what RLinf's code takes."""
        if name not in self.given:
            self.given[name] = PROGRAM[name]
            self.notes[name] = _CODE
        return self.given[name]

    def _pop(self, name: str) -> Any:
        self.notes.pop(name, None)
        return self.given.pop(name, None)

    def read_network(self) -> None:
        """Compare the network that the file describes with the preset that it names."""
        files = (*self.composed.read, *self.composed.missing)
        named = [PRESETS[name] for name in files if name in PRESETS]
        if named and "model.preset" not in self.given:
            self.given["model.preset"] = named[0]
        for name in files:
            if name in self.composed.missing and name not in FILES:
                self.refused.append(("defaults", f"{name}.yaml does not lie beside the file"))
        model = self.composed.values.get("actor", {}).get("model", {})
        head = model.get("action_head_cfg") if isinstance(model, dict) else None
        chosen = self.given.get("model.preset")
        if isinstance(head, dict) and "_target_" in head and chosen in ("5b", "14b"):
            self.refused += network_faults(model, chosen, "actor.model")
            self.unused += [
                (theirs, f"the published network {chosen} has it so, or reads it nowhere")
                for theirs in sorted(self.composed.written)
                if theirs.startswith("actor.model.action_head_cfg.")
                and not theirs.endswith(".max_chunk_size")
            ]
        elif isinstance(head, dict):
            inner = (place for place, _ in leaves(head))
            for place in inner:
                if place[-1] != "max_chunk_size":
                    self._head_entry(place)

    def _head_entry(self, place: tuple[Any, ...]) -> None:
        """Note an entry of a network whose other entries are in a file that is missing."""
        theirs = dotted(("actor", "model", "action_head_cfg", *place))
        if theirs not in self.composed.written:
            return
        entry = dotted(place).removeprefix("config.")
        values_ = HEAD.get(entry.partition(".")[0])
        if values_ == ():
            self.unused.append((theirs, "the published network reads it nowhere"))
        else:
            self.changed.append((theirs, "the published network's own is taken; put RLinf's model "
                                 "file beside this one to have it compared"))  # fmt: skip

    def read_frames(self) -> None:
        """Give the run the frames that RLinf's sampler draws."""
        mode = self._default(_MODE)
        horizon = self.given.get("model.action_horizon")
        block = self._pop("model.num_action_per_block")
        written = self.theirs.get("model.num_action_per_block", "") in self.composed.written
        if None not in (horizon, block) and block != horizon:
            there = f"{block} a block in the network, model.action_horizon={horizon} in the data"
            if written:
                self.refused.append((self.theirs["model.num_action_per_block"], f"{there}: give "
                                     "both the same"))  # fmt: skip
            else:
                self.changed.append(
                    ("model.num_action_per_block", f"RLinf's model file leaves {there}, which the "
                     f"published network does not take; here both are {horizon}")
                )  # fmt: skip
        elif written:
            self.unused.append(
                (self.theirs["model.num_action_per_block"], "it equals model.action_horizon")
            )
        if mode == "aligned":
            for name in _WALK:
                if self._pop(name) is not None:
                    self.unused.append((self.theirs[name], "data.sampling_mode=aligned has none"))
        elif mode != "multi_anchor":
            self.refused.append(
                (self.theirs[_MODE], f"{mode}: frames one after the other, which "
                 "do not lie on their actions, have no counterpart. data.sampling_mode=aligned "
                 "spreads them over their actions, multi_anchor is RLinf's default")
            )  # fmt: skip
            self._pop(_MODE)
        elif isinstance(horizon, int):
            self._walk(horizon)

    def _walk(self, horizon: int) -> None:
        offsets = self._default("data.video_in_chunk_offsets")
        stride = self.given.setdefault("data.macro_stride", horizon)
        if stride == horizon:
            self._pop("data.macro_stride")
        try:
            Timing(
                control_hz=1, action_horizon=horizon, frame_offsets=tuple(offsets),
                anchor_stride=stride, sampling="multi_anchor",
            )  # fmt: skip
        except (ConfigError, TypeError) as error:
            self.refused.append(("data.video_in_chunk_offsets", str(error)))

    def read_schedule(self) -> None:
        """Give the run the learning rates of RLinf's scheduler."""
        kind = self._default("optim.lr_scheduler")
        total = self.given.get("optim.total_training_steps", 0)
        ratio = self._default("optim.lr_warmup_ratio")
        steps = self.given.get("runner.max_steps")
        warmup = self.given.get("optim.lr_warmup_steps")
        floor = self._pop("optim.min_lr")
        if kind in ("torch_constant", "torch_cosine"):
            self.given["optim.lr_scheduler"] = kind = kind.removeprefix("torch_")
            warmup = 0
            floor = None
            if kind == "cosine" and "optim.lr" in self.given:
                self.given["optim.min_lr_ratio"] = 1e-6 / self.given["optim.lr"]
        if not all(isinstance(value, int | float) for value in (total, ratio)):
            return
        exact = warmup is None and int(ratio * total) == round(total * ratio) and total
        if not exact:
            self._pop("optim.lr_warmup_ratio")
            self.given["optim.lr_warmup_steps"] = int(ratio * total) if warmup is None else warmup
        if kind == "cosine" and (not total or (isinstance(steps, int) and total < steps)):
            self.refused.append(
                ("actor.optim.total_training_steps", f"{total or 'not given'}: past its end a "
                 "cosine there rises again; give at least runner.max_steps")
            )  # fmt: skip
        elif kind == "constant":
            self._constant(total, steps)
        elif floor and self.given.get("optim.min_lr_ratio") is None:
            self.given["optim.min_lr_ratio"] = floor / _TORCH_RATE
            self.changed.append(
                ("optim.min_lr", f"{floor} is divided there by torch's own rate of {_TORCH_RATE}, "
                 f"not by optim.lr: optim.min_lr_ratio={floor / _TORCH_RATE:g}")
            )  # fmt: skip

    def _constant(self, total: float, steps: Any) -> None:
        """Drop what a constant rate has no use for."""
        if self._pop("optim.min_lr_ratio") is not None:
            self.unused.append(("actor.optim.min_lr", "a constant rate has no floor"))
        if total and isinstance(steps, int) and total < steps:
            if "optim.lr_warmup_steps" not in self.given:
                ratio = self._pop("optim.lr_warmup_ratio")
                self.given["optim.lr_warmup_steps"] = int(ratio * total)
            self._pop("optim.total_training_steps")
            self.unused.append(("actor.optim.total_training_steps", "the rate is constant"))

    def read_sources(self) -> None:
        """Fill in what each source of a mixture takes from the model there."""
        entries = self.given.get("data.train_data_paths")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            return
        self.given["data.train_data_paths"] = [
            self._source_entry(i, dict(entry)) for i, entry in enumerate(entries)
        ]

    def _source_entry(self, index: int, entry: dict[str, Any]) -> dict[str, Any]:
        name = f"data.train_data_paths.{index}"
        for theirs, ours in (("data_path", "dataset_path"), ("dataset_weight", "weight")):
            if theirs in entry:
                entry.setdefault(ours, entry.pop(theirs))
        if entry.pop("embodiment_tag_mapping", None) is not None:
            reason = _reason("model.embodiment_tag_mapping")
            self.unused.append((f"{name}.embodiment_tag_mapping", reason))
        for key in ("embodiment_tag", "metadata_json_path"):
            of_model = self.given.get(f"model.{key}")
            if entry.get(key) is None and of_model is not None:
                entry[key] = of_model
                self.notes[f"{name}.{key}"] = f"actor.model.{key}"
        paths, weight = entry.get("dataset_path"), entry.get("weight", 1.0)
        shared = entry.get("distribute_weights", False)
        if isinstance(paths, list) and len(paths) > 1 and not shared:
            entry["weight"] = weight / len(paths)
            self.notes[f"{name}.weight"] = f"{weight} for {len(paths)} folders together"
        return entry

    def read_weights(self) -> None:
        """Name one origin of the weights: a checkpoint there hides the component files."""
        if self.given.get("model.model_path") is None:
            return
        for name in _COMPONENTS:
            if self._pop(name) is not None:
                self.unused.append((self.theirs[name], "model.model_path has all weights"))

    def read_adapters(self) -> None:
        """Say how adapters differ."""
        if not self.given.get("model.is_lora"):
            return
        rank = self.given.get("model.lora_rank")
        if rank is not None:
            self.given["model.lora_alpha"] = rank
        self.changed.append(
            ("model.is_lora", "RLinf adapts with peft what its list of names finds (q of every "
             "attention, and no k, v or o) and trains nothing else; here the layers that "
             "config.json names are adapted, and state and action modules trained whole")
        )  # fmt: skip

    def read_layout(self) -> None:
        """Fill in the dtype of sums, and refuse what cannot be resumed."""
        dtype = self._default("parallel.param_dtype")
        if "parallel.reduce_dtype" not in self.given:
            self.given["parallel.reduce_dtype"] = dtype
            self.notes["parallel.reduce_dtype"] = "that of the weights, as there"
        resume = self.given.get("runner.resume_dir")
        if resume not in (None, "auto"):
            self.refused.append(
                ("runner.resume_dir", f"{resume}: a state of RLinf's cannot be resumed here; turn "
                 "its weights into a checkpoint with `dzrobot convert` and give "
                 "actor.model.model_path=THAT")
            )  # fmt: skip
        interval = self.given.get("checkpoint.save_interval")
        if isinstance(interval, int) and interval <= 0:
            self._pop("checkpoint.save_interval")
            self.unused.append(
                ("runner.save_interval", f"{interval}: none are kept there; here every "
                 "checkpoint.save_interval steps, for a run that is ended")
            )  # fmt: skip

    def read_logs(self) -> None:
        """Give the run its folder and its logs."""
        logger = self.composed.values.get("runner", {}).get("logger", {})
        logger = dict(logger) if isinstance(logger, dict) else {}
        folder, name = logger.pop("log_path", None), logger.pop("experiment_name", None)
        if folder is not None:
            self.given["runner.output_dir"] = str(Path(str(folder), str(name or "")))
        backends = logger.pop("logger_backends", None)
        project = logger.pop("project_name", None)
        listed = backends if isinstance(backends, list) else []
        if listed:
            self.given["logging.tensorboard"] = "tensorboard" in listed
        elif backends is not None:
            self.refused.append(("runner.logger.logger_backends", f"{backends}: give a list"))
        if "wandb" in listed:
            self.given["logging.wandb_project"] = project or "rlinf"
        elif project is not None:
            self.unused.append(("runner.logger.project_name", "names a project of a logger"))
        self.unused += [(f"runner.logger.{key}", _reason("runner.logger")) for key in logger]

    def add_defaults(self) -> None:
        """Add every default of RLinf's code that the file leaves to it."""
        keys = self.given.get("model.relative_action_keys")
        if self.given.get("model.relative_action") is True and not keys:
            self.given["model.relative_action"] = False
            self.changed.append(
                ("model.relative_action", "true without relative_action_keys makes nothing "
                 "relative there")
            )  # fmt: skip
        for name in PROGRAM:
            if name.startswith("optim.lr_") or name in (_MODE, *_WALK):
                continue
            self._default(name)

    def finish(self, file: Path) -> Imported:
        """Return the recipe, or refuse it with all reasons."""
        recipe: dict[str, Any] = {}
        for name, value in sorted(self.given.items(), key=lambda item: _ORDER.get(item[0], 0)):
            put(recipe, place_of(name), value)
        needed = []
        for name, message in RawConfig(recipe).faults(SFTConfig):
            if message.startswith("is needed"):
                needed.append(name)
            elif message.startswith("no such field"):
                self.refused.append((self.theirs.get(name, name), UNKNOWN))
            else:
                self.refused.append((self.theirs.get(name, name), message))
        if self.refused:
            raise ConfigError(refusal(file, self.refused))
        defaults = [
            (f"{name}={_shown(recipe, name)}", source)
            for name, source in self.notes.items()
            if shorten(_at(recipe, name)) != _OURS.get(name)
        ]
        return Imported(
            recipe, defaults, list(self._missing(recipe)), self.changed,
            [] if needed else list(_stopped(recipe)), self.unused, needed,
        )  # fmt: skip

    def _missing(self, recipe: Mapping[str, Any]) -> Iterator[Note]:
        for file in self.composed.missing:
            names = [name for name, source in self.notes.items() if source == f"{file}.yaml"]
            taken = ", ".join(f"{name}={_shown(recipe, name)}" for name in names)
            yield f"{file}.yaml", taken or "the file says itself what a run takes from there"


_FIELDS = list(field_notes(SFTConfig))
_ORDER = {note.name: at for at, note in enumerate(_FIELDS)}
_OURS: Mapping[str, str] = {note.name: note.default for note in _FIELDS}
"""Default here of every field, as text."""


def _stopped(recipe: Mapping[str, Any]) -> Iterator[Note]:
    """Yield what of a whole recipe a run would refuse, paths and weights aside."""
    config = RawConfig(dict(recipe)).build(SFTConfig)
    try:
        plans = source_plans(config)
    except DzrobotError as error:
        yield "model.embodiment_tag", str(error)
        return
    for fault in (*relative_faults(config.model, plans), *tiling_faults(plans)):
        yield fault.field, fault.message


def _at(recipe: Mapping[str, Any], name: str) -> Any:
    inner: Any = recipe
    for key in place_of(name):
        inner = inner.get(key, {}) if isinstance(inner, dict) else inner[key]
    return inner


def _shown(recipe: Mapping[str, Any], name: str) -> str:
    value = _at(recipe, name)
    if isinstance(value, list) and tuple(value) == WALK_OFFSETS:
        return "[0, 3 .. 21]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reason(entry: str) -> str:
    return DROPPED[entry].removesuffix("; drop it")


def refusal(file: Path, refused: Sequence[Note]) -> str:
    """Return the message that lists what a file says and no run here can do."""
    listed = [f"  {name}: {reason}" for name, reason in refused]
    return "\n".join(
        [
            f"{file} is not imported: it says what a run here cannot do as RLinf does:",
            *listed,
            "change the file, or add KEY=VALUE under its names to this command",
        ]
    )
