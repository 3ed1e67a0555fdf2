"""Several datasets as one: weights, and an embodiment, statistics and grid for each source."""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dzrobot.embodiments.spec import ActionAnchor, Embodiment
from dzrobot.errors import ConfigError, DatasetError
from dzrobot.modality.pipeline import EncodedVectors, Pipeline
from dzrobot.modality.stats import Statistics
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.rng import seed_sequence
from dzrobot.training.data.columns import Progress
from dzrobot.training.data.credit import RowCredit
from dzrobot.training.data.dataset import DatasetReader, EpisodeSelection, ReaderOptions
from dzrobot.training.data.provenance import check_provenance
from dzrobot.training.data.sampler import SampleStream, Stream, check_stream
from dzrobot.training.sft_config import CreditConfig

_log = logging.getLogger(__name__)

SUBSTITUTES = 8
"""Windows tried in place of one that cannot be read, before giving up."""


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One entry of a mixture."""

    paths: Sequence[str | Path | DatasetCatalog]
    """Folders, hub names, or catalogs that were read before; all recorded with ``embodiment``."""

    embodiment: Embodiment
    """What the recordings hold, and with which horizon and stride windows are cut. Without actions:
    what :meth:`Embodiment.holding` returns."""

    metadata: str | Path | Mapping[str, Any]
    """``metadata.json`` with the statistics to normalize by."""

    inherited: bool = False
    """Whether ``metadata`` is that of the checkpoint the run starts from."""

    weight: float = 1.0
    """Share in the mixture, relative to the other entries."""

    distribute_weights: bool = True
    """``True`` splits ``weight`` over the paths by the windows recorded there, used or not;
    ``False`` gives it to each."""

    selections: Sequence[EpisodeSelection] = ()
    """Episodes used, by number, of each path. Empty: all."""

    credit: CreditConfig | None = None
    """What is imitated of runs of a policy; None: every row."""

    @property
    def is_imitated(self) -> bool:
        """Whether every recorded action is to be predicted."""
        return bool(self.embodiment.action) and self.credit is None


@dataclass(frozen=True)
class MixtureSource:
    """An opened entry."""

    spec: SourceSpec
    pipeline: Pipeline
    readers: tuple[DatasetReader, ...]

    def weights(self) -> list[float]:
        """Return the weight of each reader."""
        if not self.spec.distribute_weights:
            return [self.spec.weight] * len(self.readers)
        # Over all recorded windows: held-out episodes must not change the mixture.
        windows = [reader.recorded_windows for reader in self.readers]
        return [self.spec.weight * count / sum(windows) for count in windows]


class SampleKey(NamedTuple):
    """A slot of the sample stream and its sample."""

    step: int
    """Optimizer step."""

    slot: int
    """Place in the step's global batch."""

    sample_id: int
    """``epoch * windows + window``."""


class ActionCredit(NamedTuple):
    """What is asked of actions: (A,) of a sample, (B, A) of a batch."""

    given: Tensor
    """bool: seen without noise, and not predicted."""

    weight: Tensor
    """float32: of the error."""


class Sample(NamedTuple):
    """One sample before collation."""

    key: SampleKey
    source: int
    views: dict[str, Tensor]
    vectors: EncodedVectors
    skipped: int
    credit: ActionCredit | None
    """None: every action is predicted, and counts."""


class _Choice(NamedTuple):
    """Windows that are drawn as one dataset."""

    part: int
    """Which reader's."""

    windows: NDArray[np.int64] | None
    """None: all."""

    weight: float


@dataclass(frozen=True)
class SamplerInputs:
    """What a sampler of a user's own is made of."""

    datasets: tuple[DatasetReader, ...]
    """Every dataset of the run, with its windows; ``part`` of :class:`~.sampler.Draws` counts them.
    """

    weights: tuple[float, ...]
    """Weight of each in the recipe."""

    seed: int
    """``runner.seed``."""


MakeStream = Callable[[SamplerInputs], Stream | None]


class TrainingData(Dataset[Sample]):
    """All windows of all sources; an item is addressed by :class:`SampleKey`."""

    def __init__(
        self, sources: Sequence[MixtureSource], options: ReaderOptions, seed: int,
        sampler: MakeStream | None = None,
    ) -> None:  # fmt: skip
        self.sources = tuple(sources)
        """Entries of the mixture, opened."""

        self.seed = seed
        """Key of the order of samples and of all that is random in one."""

        self._options = options
        self._parts = [
            (index, reader)
            for index, source in enumerate(self.sources)
            for reader in source.readers
        ]
        sizes = [len(reader) for _, reader in self._parts]
        self._offset = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        weights = [weight for source in self.sources for weight in source.weights()]
        self._choices = _choices([reader for _, reader in self._parts], weights, options)
        self.stream: Stream = SampleStream(
            [sizes[one.part] if one.windows is None else len(one.windows) for one in self._choices],
            [one.weight for one in self._choices], seed,
        )  # fmt: skip
        """Which window is at which position; those with a share of their own follow as parts."""

        self._sampler = sampler
        own = None
        if sampler is not None:
            own = sampler(SamplerInputs(tuple(r for _, r in self._parts), tuple(weights), seed))
        if own is not None:
            if any(one.windows is not None for one in self._choices):
                raise ConfigError(
                    f"the sampler {type(own).__name__} and credit.share both decide what is "
                    "sampled: set credit.share to null"
                )
            check_stream(own, sizes, type(own).__name__)
            self.stream = own

        self._credited = any(reader.credits is not None for _, reader in self._parts)

        self._horizon = max(source.spec.embodiment.timing.action_horizon for source in self.sources)

    @classmethod
    def open(
        cls,
        specs: Sequence[SourceSpec],
        *,
        seed: int,
        options: ReaderOptions | None = None,
        progress: Progress | None = None,
        sampler: MakeStream | None = None,
    ) -> "TrainingData":
        """Open every path of every entry.

        Args:
            specs: Entries of the mixture.
            seed: Decides the order of samples and the choice among several instructions.
            options: How recordings are read.
            progress: Called with files done and files in all, per path.
            sampler: Makes the stream of samples; None: every window once per epoch, the sources by
                weight.

        Raises:
            ConfigError: The entries cannot share a batch.
            DatasetError: A dataset is unreadable, unfitting or, under ``refuse``, damaged.
            StatisticsError: Statistics are missing, stale or of the wrong size.
        """
        _check_together(specs)
        chosen = options or ReaderOptions()
        sources = []
        for spec in specs:
            statistics = Statistics.from_metadata(spec.metadata, spec.embodiment)
            selections = spec.selections or [EpisodeSelection()] * len(spec.paths)
            reading = replace(chosen, credit=spec.credit)
            readers = tuple(
                DatasetReader(path, spec.embodiment, reading, selection, progress=progress)
                for path, selection in zip(spec.paths, selections, strict=True)
            )
            identities = [reader.catalog.identity for reader in readers]
            # Without actions, the numbers are normalized as those of the robot that acts.
            if spec.embodiment.action:
                check_provenance(
                    spec.metadata, spec.embodiment, identities, inherited=spec.inherited
                )
            sources.append(MixtureSource(spec, Pipeline(spec.embodiment, statistics), readers))
        return cls(sources, chosen, seed, sampler)

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self._offset[-1])

    def identity(self) -> str:
        """Return a name that changes with what a sample number means."""
        parts = []
        for source in self.sources:
            parts.append(repr(source.spec.embodiment))
            for reader in source.readers:
                parts += [reader.catalog.identity, reader.windows.identity()]
            if source.spec.credit is not None:
                parts.append(repr(source.spec.credit))
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    def without_images(self) -> "TrainingData":
        """Return the same samples with empty ``views``."""
        options = replace(self._options, images=False)
        return TrainingData(self.sources, options, self.seed, self._sampler)

    @property
    def image_bytes(self) -> int:
        """Return the bytes of one sample's images, of the source with the largest."""
        if not self._options.images:
            return 0
        robots = [source.spec.embodiment for source in self.sources]
        return max(
            robot.timing.frames * sum(3 * math.prod(view.resolution) for view in robot.views)
            for robot in robots
        )

    def report(self) -> str:
        """Return what was opened, as text: resolution tables, windows and shares."""
        total = sum(weight for source in self.sources for weight in source.weights())
        lines = []
        for source in self.sources:
            for reader, weight in zip(source.readers, source.weights(), strict=True):
                lines += [reader.report(), f"  share {weight / total:.1%}"]
        return "\n".join(lines)

    def sample_keys(self, step: int, slots: Sequence[int], global_batch: int) -> list[SampleKey]:
        """Return the samples in ``slots`` of the ``global_batch`` samples of ``step``."""
        draws = self.stream.at([step * global_batch + slot for slot in slots])
        part = np.array([one.part for one in self._choices])[draws.part]
        window = draws.window
        for number, choice in enumerate(self._choices):
            if choice.windows is not None:
                mine = draws.part == number
                window[mine] = choice.windows[window[mine]]
        ids = draws.epoch * len(self) + self._offset[part] + window
        return [SampleKey(step, slot, int(number)) for slot, number in zip(slots, ids, strict=True)]

    def locate(self, sample_id: int) -> tuple[int, DatasetReader, int]:
        """Return the source, the reader and the window of the sample ``sample_id``."""
        number = sample_id % len(self)
        part = int(np.searchsorted(self._offset, number, side="right")) - 1
        source, reader = self._parts[part]
        return source, reader, number - int(self._offset[part])

    def describe(self, sample_id: int) -> str:
        """Return where the sample ``sample_id`` comes from: folder, episode and start row."""
        _, reader, window = self.locate(sample_id)
        ordinal, start = reader.windows.locate(window)
        episode = reader.catalog.episodes.index[ordinal]
        return f"sample {sample_id}: {reader.catalog.root}, episode {episode}, frame {start}"

    def __getitem__(self, key: SampleKey) -> Sample:
        """Return the sample for ``key``; equal arguments give equal results in every process.

        Raises:
            DatasetError: The window cannot be read; under ``count``, neither can its substitutes.
        """
        source, reader, window = self.locate(key.sample_id)
        generator = np.random.default_rng(seed_sequence("sample", self.seed, key.sample_id))
        choice = float(generator.random())
        for skipped in range(SUBSTITUTES + 1):
            try:
                views = reader.views(window) if self._options.images else {}
            except DatasetError as error:
                if self._options.damaged == "refuse" or skipped == SUBSTITUTES:
                    raise DatasetError(f"{self.describe(key.sample_id)}: {error}") from error
                _log.warning("%s is replaced: %s", self.describe(key.sample_id), error)
                window = int(generator.integers(len(reader)))
                continue
            break
        vectors = self.sources[source].pipeline.encode_vectors(reader.vectors(window, choice))
        if repeated := reader.padded_actions(window):
            vectors["action_mask"][-repeated:] = False
        credit = self._credit(reader, window)
        if credit is not None and not credit.weight.any():
            vectors["has_real_action"] = torch.tensor(False)
        tensors = {key: torch.from_numpy(frames) for key, frames in views.items()}
        padded = _pad_blocks(vectors, self.sources[source].spec.embodiment, self._horizon)
        return Sample(key, source, tensors, padded, skipped, credit)

    def _credit(self, reader: DatasetReader, window: int) -> ActionCredit | None:
        """Return what is asked of a sample's actions; None where no source is credited.

        A sample without credit gets one as well, so that the sums of a step do not depend on which
        samples share a batch.
        """
        if not self._credited:
            return None
        timing = reader.embodiment.timing
        rows = timing.blocks * timing.action_horizon
        every = RowCredit(np.zeros(rows, bool), np.ones(rows, np.float32))
        found = reader.credit(window) or every
        given, weight = (
            _filled_blocks(torch.from_numpy(values), reader.embodiment, self._horizon)
            for values in found
        )
        return ActionCredit(given, weight)


def _choices(
    readers: Sequence[DatasetReader], weights: Sequence[float], options: ReaderOptions
) -> list[_Choice]:
    """Return what alternates by weight: every dataset, then windows with a share of their own."""
    first, more, share = [], [], options.start_share
    for part, (reader, weight) in enumerate(zip(readers, weights, strict=True)):
        of_given = None if reader.options.credit is None else reader.options.credit.share
        if of_given and share:
            raise ConfigError(
                "data.start_share and credit.share both decide what is sampled: give one"
            )
        drawn = [_Choice(part, None, weight)]
        if of_given is not None:
            drawn = _by_credit(reader, drawn[0], of_given)
        if share and drawn:
            starts = _starts(reader, drawn[0].windows, options)
            more.append(_Choice(part, starts, share * weight))
            drawn = [drawn[0]._replace(weight=(1 - share) * weight)]
        first += drawn[:1]
        more += drawn[1:]
    if not first:
        raise DatasetError(
            "no sample has an action to imitate: add demonstrations, or set credit.share to null "
            "to train the video alone"
        )
    return [*first, *more]


def _by_credit(reader: DatasetReader, whole: _Choice, share: float) -> list[_Choice]:
    """Return the windows with an action to predict and those without, as far as both are drawn."""
    imitates = reader.imitating()
    if not share and not imitates.any():
        _log.warning(
            "%s has no sample with an action to imitate, and nothing of it is trained; "
            "credit.share: null trains its video",
            reader.catalog.root,
        )
        return []
    parts = [
        whole._replace(windows=np.flatnonzero(chosen), weight=by * whole.weight)
        for chosen, by in ((imitates, 1 - share), (~imitates, share))
        if chosen.any() and by
    ]
    return parts or [whole]


def _starts(
    reader: DatasetReader, drawn: NDArray[np.int64] | None, options: ReaderOptions
) -> NDArray[np.int64]:
    """Return the windows of ``reader``, of those ``drawn``, that begin where an episode does.

    Raises:
        DatasetError: There is none.
    """
    windows = reader.windows.within(options.start_rows)
    if drawn is not None:
        windows = np.intersect1d(windows, drawn)
    if not len(windows):
        what = "" if drawn is None else " with an action to imitate"
        raise DatasetError(
            f"{reader.catalog.root} has no sample{what} that begins in the first "
            f"{options.start_rows} rows of an episode: raise data.start_rows, or set "
            "data.start_share=0"
        )
    return windows


def _check_together(specs: Sequence[SourceSpec]) -> None:
    """Raise :class:`ConfigError` unless the entries fit into one batch."""
    if not specs or not all(spec.paths for spec in specs):
        raise ConfigError("no training data: give at least one path for every entry")
    for name, values in (
        ("blocks", [spec.embodiment.timing.blocks for spec in specs]),
        ("frames per sample", [spec.embodiment.timing.frames for spec in specs]),
        ("size of the tiled image", [spec.embodiment.image_size for spec in specs]),
        ("conditions", [_described_conditions(spec.embodiment) for spec in specs]),
    ):
        if len(set(values)) > 1:
            given = ", ".join(
                f"{spec.embodiment.tag} {value}" for spec, value in zip(specs, values, strict=True)
            )
            raise ConfigError(f"one batch needs the same {name} in all sources: {given}")
    anchors: dict[str, ActionAnchor | None] = {}
    for robot in (spec.embodiment for spec in specs if spec.embodiment.action):
        if anchors.setdefault(robot.tag, robot.action_anchor) != robot.action_anchor:
            raise ConfigError(
                f"sources of {robot.tag} measure actions from {anchors[robot.tag]} and from "
                f"{robot.action_anchor}: train on recordings of one anchor"
            )


def _described_conditions(robot: Embodiment) -> str:
    parts = [f"{part.key} ({part.dim} numbers, {part.encoder})" for part in robot.conditions]
    return ", ".join(parts) or "(none)"


def _pad_blocks(vectors: EncodedVectors, embodiment: Embodiment, horizon: int) -> EncodedVectors:
    """Return ``vectors`` with every action block filled up to ``horizon`` masked rows."""
    if embodiment.timing.action_horizon == horizon:
        return vectors
    padded = vectors.copy()
    for key in ("action", "action_mask"):
        padded[key] = _filled_blocks(vectors[key], embodiment, horizon)
    return padded


def _filled_blocks(rows: Tensor, embodiment: Embodiment, horizon: int) -> Tensor:
    """Return (A, ...) with the rows of every action block filled up to ``horizon`` with zeros."""
    timing = embodiment.timing
    blocks = rows.reshape(timing.blocks, timing.action_horizon, *rows.shape[1:])
    filled = blocks.new_zeros(timing.blocks, horizon, *blocks.shape[2:])
    filled[:, : timing.action_horizon] = blocks
    return filled.flatten(0, 1)
