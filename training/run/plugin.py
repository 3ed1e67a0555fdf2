"""What a lab changes in a training run without changing this package: see docs/extend/training.md.

A run takes plug-ins by name (``plugin=my_lab:Smooth``) or, from Python, as objects. Every process
makes its own; all processes call the same hooks in the same order.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dzrobot.embodiments.spec import Part
from dzrobot.errors import CheckpointError, ConfigError, UnknownNameError, preview
from dzrobot.importing import is_reference, load_module, load_reference
from dzrobot.policies.dreamzero.network.world_action import LossTerm, WorldActionModel
from dzrobot.training.data.mixture import MakeStream, SamplerInputs
from dzrobot.training.data.sampler import Stream
from dzrobot.training.run.metrics import LogRecord
from dzrobot.training.sft_config import SFTConfig

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What hooks see of the run; to be read, not changed."""

    config: SFTConfig
    """The whole recipe."""

    rank: int
    """Number of this process; 0 writes logs and exports."""

    world_size: int
    """Processes of the run."""

    device: torch.device
    """Where this process computes."""

    network: WorldActionModel
    """The network, laid out over the processes: a parameter is this process's part of it."""

    @property
    def is_main(self) -> bool:
        """Return whether this process writes logs and exports."""
        return self.rank == 0


class Plugin:
    """Changes a training run. Subclass it and override what you need; every hook has a default.

    Public attributes are saved with every checkpoint and restored from it: numbers, texts,
    booleans, None, lists and dictionaries of these, and tensors. All processes must set them alike.
    What begins with an underscore is lost when a run is resumed.
    """

    def losses(self) -> Mapping[str, LossTerm]:
        """Return terms to add to the loss, by name; called once, when the run is built.

        Each is called for every micro-batch, in every process, between the network's forward and
        backward pass, and logged as ``loss_NAME``. A term has no weights of its own.
        """
        return {}

    def sampler(self, inputs: SamplerInputs) -> Stream | None:
        """Return which samples are trained on, in which order; None: as the recipe says.

        Called in every process before the weights are loaded; the stream itself is asked in the
        training process, not in the workers that read.

        Args:
            inputs: The datasets, their weights and the seed.
        """
        return None

    def started(self, run: RunView) -> None:
        """Note that the run begins, or goes on after a resume. In every process."""

    def stepped(self, run: RunView, step: int) -> None:
        """Note that ``step`` optimizer steps are done. In every process, after each step.

        To read a number of the device here makes every step wait for it.

        Args:
            run: The run.
            step: Steps done.
        """

    def recorded(self, run: RunView, record: LogRecord) -> Mapping[str, float]:
        """Return numbers to log beside ``record``. In every process; the main one's are logged.

        Called every ``logging.log_interval`` steps.

        Args:
            run: The run.
            record: Losses, rates and times since the last one.
        """
        return {}

    def saved(self, run: RunView, folder: Path) -> None:
        """Note that the checkpoint in ``folder`` is complete. In the main process alone.

        Training waits meanwhile.

        Args:
            run: The run.
            folder: ``step_00001000`` in the run's checkpoints.
        """

    def ended(self, run: RunView, *, finished: bool) -> None:
        """Note that the run is over. In every process; before the export, and not after an error.

        Args:
            run: The run.
            finished: Whether its last step was reached, not a termination request.
        """


@dataclass(frozen=True, kw_only=True)
class Described:
    """Which code took part in a run, for checkpoints and passports."""

    name: str
    """``module:Class``; of an encoder, the state part behind it."""

    source: str | None
    """SHA256 of the file with its source; None: it has none, as in a notebook."""

    settings: Settings
    """Its public attributes when the run was built; tensors by their shape."""

    @classmethod
    def of(cls, plugin: Plugin) -> "Described":
        """Return the description of a plug-in."""
        shown = {
            name: list(value.shape) if isinstance(value, Tensor) else value
            for name, value in attributes(plugin).items()
        }
        # As they come back from a file.
        settings = json.loads(json.dumps(shown))
        return cls(name=name_of(plugin), source=_source(type(plugin)), settings=settings)

    @classmethod
    def of_encoder(cls, part: Part) -> "Described":
        """Return the description of a state part's own encoder."""
        assert part.encoder is not None, "a condition has an encoder"
        made = load_reference(part.encoder, f"encoder of {part.key}")
        name = f"{part.encoder} ({part.key})"
        return cls(name=name, source=_source(made), settings={"dim": part.dim})


def name_of(plugin: Plugin) -> str:
    """Return ``module:Class``."""
    return f"{type(plugin).__module__}:{type(plugin).__qualname__}"


def _source(thing: Any) -> str | None:
    try:
        file = inspect.getsourcefile(thing)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return None


def attributes(plugin: Plugin) -> dict[str, Any]:
    """Return the public attributes of ``plugin``: what is saved with a checkpoint.

    Raises:
        ConfigError: One cannot be saved.
    """
    found = {name: value for name, value in vars(plugin).items() if not name.startswith("_")}
    for name, value in found.items():
        if not (isinstance(value, Tensor) or _is_plain(value)):
            raise ConfigError(
                f"plug-in {name_of(plugin)}: its attribute {name!r} is a {type(value).__name__}, "
                "which checkpoints do not keep. Keep numbers, texts, lists, dictionaries of texts "
                f"to these, or tensors; call it '_{name}' if a resumed run can make it anew"
            )
    return found


def _is_plain(value: object) -> bool:
    match value:
        case None | bool() | int() | float() | str():
            return True
        case list() | tuple():
            return all(map(_is_plain, value))
        case dict():
            return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return False


def load_plugin(text: str) -> Plugin:
    """Return the plug-in that ``text`` names.

    Args:
        text: ``module:Name`` of a subclass of :class:`Plugin`, made without arguments, or of an
            object of one; or a module that holds just one of them. The import path is searched,
            then the current folder.

    Raises:
        UnknownNameError: There is none of that name.
        ConfigError: The class cannot be made without arguments.
    """
    if is_reference(text):
        found = load_reference(text, "plugin")
    else:
        found = _only_plugin(load_module(text, f"plugin {text!r}"))
    if isinstance(found, Plugin):
        return found
    if not (isinstance(found, type) and issubclass(found, Plugin)):
        raise UnknownNameError(
            f"plugin: {text} is a {type(found).__name__}; name a subclass of "
            "dzrobot.training.Plugin, or an object of one"
        )
    try:
        return found()
    except TypeError as error:
        raise ConfigError(
            f"plugin: {text}() cannot be made without arguments ({error}): give each a default, or "
            f"name an object in the module, such as smooth = {found.__name__}(...)"
        ) from error


def _only_plugin(module: ModuleType) -> object:
    named = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Plugin)
        or (
            (isinstance(value, type) and issubclass(value, Plugin))
            and value.__module__ == module.__name__
        )
    }
    if len(named) != 1:
        names = ", ".join(f"plugin={module.__name__}:{name}" for name in named)
        raise UnknownNameError(
            f"plugin: {module.__name__} holds {len(named)} plug-ins. "
            + (f"Write one of {names}" if named else "Write a subclass of dzrobot.training.Plugin")
        )
    return next(iter(named.values()))


@dataclass(frozen=True)
class Plugins:
    """The plug-ins of a run, in the order in which they were given."""

    all: tuple[Plugin, ...] = ()
    _run: list[RunView] = field(default_factory=list)

    @classmethod
    def of(cls, names: Sequence[str], given: Sequence[Plugin] = ()) -> "Plugins":
        """Return those that a recipe names and those that were given as objects.

        Raises:
            ConfigError: One is given twice, or cannot be used.
            UnknownNameError: There is no such plug-in.
        """
        found = (*map(load_plugin, names), *given)
        if odd := [type(one).__name__ for one in found if not isinstance(one, Plugin)]:
            raise ConfigError(f"plugins: {preview(odd)}: give objects of dzrobot.training.Plugin")
        known = [name_of(one) for one in found]
        if twice := {name for name in known if known.count(name) > 1}:
            raise ConfigError(f"plug-in {preview(twice)} is given more than once")
        plugins = cls(found)
        # Faults are found before anything is loaded.
        _ = plugins.settings, plugins.terms
        return plugins

    @cached_property
    def settings(self) -> tuple[Described, ...]:
        """Return what the plug-ins were when the run was built."""
        return tuple(map(Described.of, self.all))

    @cached_property
    def terms(self) -> dict[str, LossTerm]:
        """Return all terms that are added to the loss.

        Raises:
            ConfigError: Two have one name, or one has weights of its own.
        """
        found: dict[str, LossTerm] = {}
        for plugin in self.all:
            for name, term in plugin.losses().items():
                if name in found or not name.isidentifier():
                    raise ConfigError(
                        f"plug-in {name_of(plugin)}: the loss term {name!r} must be a word that no "
                        "other term has"
                    )
                if isinstance(term, torch.nn.Module) and any(True for _ in term.parameters()):
                    raise ConfigError(
                        f"plug-in {name_of(plugin)}: the loss term {name!r} has weights of its "
                        "own, which this trainer would neither update nor save: train them apart, "
                        "or make them an encoder of the robot (Part.encoder)"
                    )
                found[name] = term
        return found

    def sampler(self, config: SFTConfig) -> MakeStream | None:
        """Return what makes the stream of samples; None: the recipe alone decides.

        Raises:
            ConfigError: More than one plug-in does, or a field of the recipe would do too.
        """
        own = [p for p in self.all if type(p).sampler is not Plugin.sampler]
        if not own:
            return None
        if len(own) > 1:
            raise ConfigError(f"{preview(map(name_of, own))} both have a sampler: give one")
        if config.data.start_share:
            raise ConfigError(
                f"data.start_share and the sampler of {name_of(own[0])} both decide what is "
                "sampled: set data.start_share=0"
            )
        return own[0].sampler

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that checkpoints hold: plug-in, then attribute."""
        return {name: part for name, part in self._attributes(tensors=True) if part}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the other attributes that checkpoints hold, likewise."""
        return dict(self._attributes(tensors=False))

    def _attributes(self, *, tensors: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        for plugin in self.all:
            found = attributes(plugin)
            yield (
                name_of(plugin),
                {n: v for n, v in found.items() if isinstance(v, Tensor) is tensors},
            )

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes that a checkpoint holds, but for tensors.

        Raises:
            CheckpointError: It is not of these plug-ins.
        """
        if state.keys() != self.state().keys():
            raise CheckpointError(
                f"the checkpoint holds the state of the plug-ins {preview(state)}, the run has "
                f"{preview(self.state())}"
            )
        for plugin in self.all:
            vars(plugin).update(state[name_of(plugin)])

    def started(self, run: RunView) -> None:
        """Call every plug-in's hook, and keep ``run`` for the others."""
        self._run[:] = [run]
        for plugin in self.all:
            plugin.started(run)

    def stepped(self, step: int) -> None:
        """Call every plug-in's hook."""
        for plugin in self.all:
            plugin.stepped(self._run[0], step)

    def recorded(self, record: LogRecord) -> dict[str, float]:
        """Call every plug-in's hook; return all numbers.

        Raises:
            ConfigError: One is not a number.
        """
        numbers: dict[str, float] = {}
        for plugin in self.all:
            for name, value in plugin.recorded(self._run[0], record).items():
                if not isinstance(value, int | float):
                    raise ConfigError(
                        f"plug-in {name_of(plugin)}: recorded() returned {name}="
                        f"{type(value).__name__}; return numbers (tensor.item())"
                    )
                numbers[name] = value
        return numbers

    def saved(self, folder: Path) -> None:
        """Call every plug-in's hook."""
        for plugin in self.all:
            plugin.saved(self._run[0], folder)

    def ended(self, *, finished: bool) -> None:
        """Call every plug-in's hook."""
        for plugin in self.all:
            plugin.ended(self._run[0], finished=finished)
