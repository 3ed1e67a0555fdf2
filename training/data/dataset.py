"""One LeRobot folder read as windows of one embodiment."""

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.declared import at_the_door
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import padded_actions
from dzrobot.embodiments.timing import window as rows_of_window
from dzrobot.errors import ConfigError, DatasetError, counted, find, preview
from dzrobot.files import cache_folder, one_at_a_time, replacing, spare_cache
from dzrobot.recording.catalog import RATE_TOLERANCE, DatasetCatalog
from dzrobot.recording.checks import unfit
from dzrobot.recording.formats import EPISODE_CHOICES, EpisodeChoice, EpisodeFacts
from dzrobot.training.data.claims import Claims
from dzrobot.training.data.column_mapping import ColumnSource, ResolvedColumns, resolve, table_lines
from dzrobot.training.data.columns import Columns, Progress, open_columns
from dzrobot.training.data.credit import (
    Credits,
    EpisodeMarks,
    RowCredit,
    mark_column,
    moves_nothing,
)
from dzrobot.training.data.embedded_images import EmbeddedImages
from dzrobot.training.data.video_decoding import DECODERS, Videos, load_decoder
from dzrobot.training.data.windows import WindowTable, build_windows, require_windows
from dzrobot.training.sft_config import CreditConfig, DamagedFiles, DataConfig

_log = logging.getLogger(__name__)

Window = dict[str, Any]
"""Modality keys to arrays, as :mod:`dzrobot.modality` defines them."""

DAMAGED = "damaged"
"""Why an episode has no window: its files are missing, damaged or of another episode."""

_FETCH = (
    "Fetch the files again, or leave these episodes out: --damaged count (in a recipe "
    "data.on_corrupt=count)."
)
_COMPARED = 256
"""Episodes whose numbers are compared with the robot's description, spread over all in use."""

_COMPARED_ROWS = 2**12
"""Rows of them that are compared, spread alike: twice as many at most."""


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """How recordings are read."""

    decoder: str = "pyav"
    """``pyav`` or ``torchcodec``."""

    damaged: DamagedFiles = "refuse"
    """Missing and corrupt files: ``refuse`` raises and names them; ``count`` leaves the episode or
    window out, reports it and counts it."""

    cache: Path | None = None
    """Folder for what is derived. None: ``DZROBOT_CACHE`` or ``~/.cache/dzrobot``."""

    images: bool = True
    """``False``: only numbers and texts are read, and videos need not be there."""

    episodes: EpisodeChoice = "successes"
    """``successes``: all that are not marked as failures; ``all``: those too. ``credit`` decides
    where it is given."""

    credit: CreditConfig | None = None
    """What is imitated of runs of a policy; None: every row, as of demonstrations."""

    start_share: float = 0.0
    """Share of the samples that begin within the first ``start_rows`` rows, on top of those that do
    so anyway."""

    start_rows: int = 6
    """See ``start_share``."""

    empty: DamagedFiles = "refuse"
    """A folder without a sample, or whose numbers the robot's description does not fit: ``refuse``
    raises; ``count`` leaves that to whoever opened it, see :meth:`DatasetReader.require_windows`
    and :meth:`DatasetReader.faults`."""

    @classmethod
    def of(cls, data: DataConfig) -> "ReaderOptions":
        """Return how a run reads its recordings, as its recipe says.

        Args:
            data: The recipe's section on data.
        """
        return cls(decoder=data.video_backend, damaged=data.on_corrupt, episodes=data.episodes)

    def __post_init__(self) -> None:
        find(DECODERS, "video decoder", self.decoder)
        for name, value in (("damaged", self.damaged), ("empty", self.empty)):
            if value not in ("refuse", "count"):
                raise ConfigError(f"{name}={value!r}: allowed are 'refuse' and 'count'")
        if self.episodes not in EPISODE_CHOICES:
            raise ConfigError(f"episodes={self.episodes!r}: allowed are {EPISODE_CHOICES}")

    def folder(self, catalog: DatasetCatalog) -> Path:
        """Return where what is derived from ``catalog`` is kept."""
        folder = Path(self.cache or cache_folder()) / "datasets" / catalog.identity[:24]
        return spare_cache(folder, DatasetError)


@dataclass(frozen=True)
class EpisodeSelection:
    """Episodes to use, by their number in the dataset."""

    only: frozenset[int] | None = None
    """None: all."""

    without: frozenset[int] = field(default_factory=frozenset)
    """Episodes that are left out."""

    def leaves_out(self, episode: int) -> bool:
        """Return whether ``episode`` is not to be used."""
        return episode in self.without or (self.only is not None and episode not in self.only)


def alike(faults: Iterable[str]) -> list[str]:
    """Return faults of episodes, those that differ in numbers alone as one, with the others' count.

    Args:
        faults: A line each; those of an episode begin with ``episode NUMBER``.
    """
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        kinds.setdefault(_DIGITS.sub("#", fault), []).append(fault)
    return [first + _and_others(others) for first, *others in kinds.values()]


def _and_others(faults: Sequence[str]) -> str:
    found = [number for number in map(_EPISODE.match, faults) if number]
    if len(found) < len(faults) or not faults:
        return f" (and {len(faults)} like it)" if faults else ""
    numbers = [number[1] for number in found]
    shown = ", ".join(numbers[:_NUMBERS]) + (", ..." if numbers[_NUMBERS:] else "")
    return f" (and {counted(len(numbers), 'episode')} like it: {shown})"


_DIGITS, _EPISODE, _NUMBERS = re.compile(r"\d+"), re.compile(r"episode (\d+)"), 12
"""What a fault is compared without; what one of an episode begins with; numbers that are shown."""


class DatasetReader:
    """Windows of one folder, by number; picklable, so that workers can share it."""

    @at_the_door
    def __init__(
        self,
        path: str | Path | DatasetCatalog,
        embodiment: Embodiment | str,
        options: ReaderOptions | None = None,
        selection: EpisodeSelection | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Open the folder, copy its numbers into the cache and list its windows.

        Args:
            path: Folder or hub name, or its catalog where that was read before.
            embodiment: Robot whose columns are read, or its tag.
            options: How the folder is read.
            selection: Which episodes are used. None: all.
            progress: Called with files done and files in all.

        Raises:
            DatasetError: Unreadable, unfitting, without a window, or, under ``refuse``, damaged;
                or its numbers are not those of the robot's description.
        """
        self.options = options or ReaderOptions()
        """How the folder is read."""

        if isinstance(embodiment, str):
            embodiment = load_embodiment(embodiment)
        self.embodiment: Embodiment = embodiment
        """Robot whose columns are read."""

        self.catalog = path if isinstance(path, DatasetCatalog) else DatasetCatalog.open(path)
        """What the folder says of itself."""

        self.resolution: ResolvedColumns = resolve(self.catalog, embodiment)
        """Which column holds which key."""

        views = self.resolution.views.values() if self.options.images else ()
        films = [one.column for one in views if one.kind == "video"]
        if films:
            load_decoder(self.options.decoder)
        cache = self.options.folder(self.catalog)
        marked = None if self.options.credit is None else mark_column(self.catalog)
        self._marked = marked
        self.columns: Columns = open_columns(
            self.catalog, self.resolution, cache, progress, more=() if marked is None else [marked]
        )
        """States, actions and instructions, mapped from the cache."""

        self.claims = Claims.of(self.catalog, films, self.options.decoder, cache, progress)
        """Which frames of which film each episode claims."""

        self._videos = Videos(self.options.decoder, cache)
        self._embedded = EmbeddedImages()
        left_out, unusable = self._excluded(selection or EpisodeSelection())
        self.windows: WindowTable = self._windows(cache, {**unusable, **left_out})
        """Where each window starts."""

        self.recorded_windows = len(self._windows(cache, unusable) if left_out else self.windows)
        """Windows of all episodes that can be used, whatever the selection."""
        self.credits: Credits | None = self._credits()
        """What is imitated of each row; None: everything."""

        if self.options.empty == "refuse":
            self.require_windows()
            self._require_fit()
        for warning in (*self._oddities(), *self._rate_warning()):
            _log.warning("%s: %s", self.catalog.root, warning)
        if self.catalog.uncommitted:
            _log.warning(
                "%s: %d unfinished episodes of an interrupted recording are not used",
                self.catalog.root,
                self.catalog.uncommitted,
            )

    def __len__(self) -> int:
        return len(self.windows)

    def require_windows(self) -> None:
        """Raise :class:`DatasetError` if there is nothing to train on."""
        if not len(self.windows) and DAMAGED in self.windows.dropped:
            raise DatasetError(
                f"{self.catalog.root} holds no sample that can be used "
                f"({self.windows.report()}). {self._summary(sorted(self._damage), 8)}"
            )
        longest = int(self.catalog.episodes.length.max(initial=0))
        timing = self.embodiment.timing
        require_windows(self.windows, str(self.catalog.root), timing, longest)

    def faults(self) -> list[str]:
        """Return what is wrong, a line for each episode that cannot be used, and what is odd."""
        numbers = self.catalog.episodes.index
        lines = [f"episode {numbers[at]}: {text}" for at, text in sorted(self._damage.items())]
        return [*lines, *self._unfit(), *self._oddities()]

    def _require_fit(self) -> None:
        if found := list(self._unfit()):
            raise DatasetError(
                f"{self.catalog.root}: {self.embodiment.tag} does not fit the recorded numbers:\n  "
                + "\n  ".join(found)
            )

    def _unfit(self) -> Iterator[str]:
        """Yield where the robot's description does not fit the numbers of the episodes in use."""
        used = np.unique(self.windows.episode)
        if not len(used):
            return
        some = used[np.linspace(0, len(used) - 1, min(len(used), _COMPARED)).astype(int)]
        first, length = self.catalog.episodes.offset[some], self.catalog.episodes.length[some]
        step = 1 + int(length.sum()) // _COMPARED_ROWS
        spans = zip(first, first + length, strict=True)
        rows = np.concatenate([np.arange(start, stop, step) for start, stop in spans])
        yield from unfit(self.embodiment, {
            key: np.asarray(self.columns.vector(source.column))[rows, source.start : source.stop]
            for key, source in self.resolution.vectors.items()
        })  # fmt: skip

    def _oddities(self) -> Iterator[str]:
        """Yield what is odd, and does not keep an episode from being used."""
        yield from self.catalog.notes
        yield from self.claims.notes
        if unlisted := self.columns.unlisted:
            number, name = next(iter(unlisted.items()))
            yield (
                f"{counted(len(unlisted), 'episode')} with rows and no entry in the list: "
                f"{preview(map(str, unlisted))} ({number} in {name}); not used"
            )
        if blank := self._uninstructed():
            yield (
                f"{counted(len(blank), 'episode')} with a blank instruction: {preview(blank)}; "
                "they are not trained on: give them one in the list of tasks"
            )

    def report(self) -> str:
        """Return the resolution table and the count of windows, as text."""
        lines = [f"{self.catalog.root} (LeRobot {self.catalog.version}, {self.catalog.fps:g} fps)"]
        lines += [f"  {line}" for line in table_lines(self.resolution)]
        if not self.embodiment.action:
            lines.append("  no actions: trains the video alone")
        return "\n".join([*lines, f"  {self.windows.report()}"])

    def _rate_warning(self) -> Iterator[str]:
        """Yield a warning if the recording's rate is not the robot's."""
        fps, hz = self.catalog.fps, self.embodiment.timing.control_hz
        if abs(fps - hz) <= RATE_TOLERANCE * hz:
            return
        yield (
            f"it says {fps:g} frames per second, {self.embodiment.tag} acts at "
            f"{hz:g} Hz. Rows are used as they are: what was recorded at another rate is learned "
            "at another speed. (The published LIBERO sets say 10 for 20 Hz data.)"
        )

    def vectors(self, number: int, choice: float = 0.0) -> Window:
        """Return states, actions and instruction of window ``number``.

        Args:
            number: Window.
            choice: In [0, 1): which of several instructions is taken.
        """
        ordinal, start = self.windows.locate(number)
        rows = self._rows(ordinal, start)
        offset = int(self.catalog.episodes.offset[ordinal])
        result: Window = {self.embodiment.language: self.instruction(ordinal, start, choice)}
        for kind, indices in (("state", rows.state), ("action", rows.action)):
            for part in self.embodiment.state if kind == "state" else self.embodiment.action:
                source = self.resolution.vectors[part.key]
                column = self.columns.vector(source.column)
                result[part.key] = np.array(column[offset + indices, source.start : source.stop])
        return result

    def padded_actions(self, number: int) -> int:
        """Return how many of the last actions of window ``number`` are not the recording's own."""
        ordinal, start = self.windows.locate(number)
        length = int(self.catalog.episodes.length[ordinal])
        return padded_actions(start, length, self.embodiment.timing)

    def credit(self, number: int) -> RowCredit | None:
        """Return what is asked of the actions of window ``number``; None: to predict them all."""
        if self.credits is None:
            return None
        ordinal, start = self.windows.locate(number)
        rows, horizon = self._rows(ordinal, start).action, self.embodiment.timing.action_horizon
        return self.credits.of(ordinal, rows, self.padded_actions(number), horizon)

    def imitating(self) -> NDArray[np.bool_]:
        """Return whether each window has an action to predict, (windows,)."""
        asked = (self.credit(number) for number in range(len(self)))
        return np.array([one is None or one.imitates for one in asked], bool)

    def _credits(self) -> Credits | None:
        config = self.options.credit
        if config is None:
            return None
        episodes = np.unique(self.windows.episode).tolist()
        hz = self.embodiment.timing.control_hz
        return Credits({ordinal: self._marks(ordinal) for ordinal in episodes}, config, hz)

    def _marks(self, ordinal: int) -> EpisodeMarks:
        """Return who acted in an episode, and how it ended."""
        rows = self._all_rows(ordinal)
        number = int(self.catalog.episodes.index[ordinal])
        facts = self.catalog.facts.get(number) or EpisodeFacts(episode_index=number)
        person = np.zeros(rows.stop - rows.start, bool)
        if self._marked is not None:
            marks = self.columns.vector(self._marked)[rows, 0]
            person = marks == 1
            if other := sorted({*marks[~person].tolist()} - {0.0}):
                raise DatasetError(
                    f"{self.catalog.root}: {self._marked} of episode {number} is {other[0]:g}: it "
                    "must be 1 or true where a person acted, else 0 or false"
                )
        return EpisodeMarks(
            person=person, rests=moves_nothing(self.embodiment, self.states(ordinal)),
            by_policy=self._marked is not None or bool(facts.policy), success=facts.success,
        )  # fmt: skip

    def views(self, number: int) -> dict[str, NDArray[np.uint8]]:
        """Return the frames of window ``number``: ``video.*`` to (T, H, W, 3) uint8.

        Raises:
            DatasetError: A file is missing or damaged.
        """
        ordinal, start = self.windows.locate(number)
        frames = self._rows(ordinal, start).video
        return {
            key: self.frames(ordinal, source, frames)
            for key, source in self.resolution.views.items()
        }

    def window(self, number: int, choice: float = 0.0) -> Window:
        """Return window ``number`` whole; ``choice`` as in :meth:`vectors`."""
        return {**self.views(number), **self.vectors(number, choice)}

    def frames(
        self, ordinal: int, source: ColumnSource, numbers: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Return frames of an episode from one camera, (N, H, W, 3) uint8.

        Args:
            ordinal: Which episode, counted from 0.
            source: The camera's column.
            numbers: Which N frames of the episode.

        Raises:
            DatasetError: The file is missing or damaged, or its frames have another size.
        """
        root = self.catalog.root
        if source.kind == "video":
            path = root / self.catalog.video_file(ordinal, source.column)
            first = self._first_frame(ordinal, source.column)
            clip = self._videos.clip(path, first, list(numbers))
        else:
            path = root / self.catalog.data_file(ordinal)
            rows = int(self.columns.first_row[ordinal]) + np.asarray(numbers)
            clip = self._embedded.clip(path, source.column, list(rows))
        expected = self.embodiment.view(source.key).resolution
        if clip.shape[1:3] != expected:
            raise DatasetError(
                f"{path}: frames of {source.column} are {clip.shape[1:3]}, info.json says "
                f"{expected}"
            )
        return clip

    def _first_frame(self, ordinal: int, column: str) -> int:
        """Return where an episode begins in its film; refuse what is not known to be its own."""
        if column not in self.claims.first:
            raise DatasetError(f"{self.catalog.root} was opened without images")
        if faults := self.claims.faults.get(ordinal):
            number = int(self.catalog.episodes.index[ordinal])
            raise DatasetError(f"{self.catalog.root}: episode {number}: {faults[0]}")
        return int(self.claims.first[column][ordinal])

    def instruction(self, ordinal: int, row: int, choice: float) -> str:
        """Return the instruction of a row of episode ``ordinal``.

        ``choice`` in [0, 1) picks one of several.
        """
        at = int(self.catalog.episodes.offset[ordinal]) + row
        texts = [
            self.columns.texts[source.column][int(self.columns.codes(source.column)[at])]
            for source in self.resolution.texts
        ]
        given = [text for text in texts if text.strip()]
        return given[int(choice * len(given))]

    def states(self, ordinal: int) -> dict[str, NDArray[np.float32]]:
        """Return all state and action rows (N, D) of episode ``ordinal``, by key."""
        rows = self._all_rows(ordinal)
        return {
            key: self.columns.vector(source.column)[rows, source.start : source.stop]
            for key, source in self.resolution.vectors.items()
        }

    def _all_rows(self, ordinal: int) -> slice:
        """Return where the rows of an episode lie in the columns."""
        first, stop = self.catalog.episodes.offset[ordinal : ordinal + 2].tolist()
        return slice(first, stop)

    def _rows(self, ordinal: int, start: int) -> Any:
        length = int(self.catalog.episodes.length[ordinal])
        marks = self._labels(ordinal).tolist()
        return rows_of_window(start, length, self.embodiment.timing, marks)

    def _labels(self, ordinal: int) -> NDArray[np.int64]:
        """Return a number per row that changes with the instruction; -1 where there is none."""
        rows = self._all_rows(ordinal)
        labels = np.zeros(rows.stop - rows.start, dtype=np.int64)
        empty = np.ones(len(labels), dtype=bool)
        for source in self.resolution.texts:
            blank = self.columns.blank(source.column)
            codes = np.asarray(self.columns.codes(source.column)[rows], dtype=np.int64)
            labels = labels * len(blank) + codes
            empty &= blank[codes]
        labels[empty] = -1
        return labels

    def _excluded(self, selection: EpisodeSelection) -> tuple[dict[int, str], dict[int, str]]:
        """Return the episodes that are not selected, and those that are unusable, with the reason.

        Raises:
            DatasetError: Under ``refuse``, something selected is damaged.
        """
        cameras = [source.column for source in self.resolution.views.values()]
        absent = self.catalog.missing(cameras if self.options.images else [])
        damage = {ordinal: "; ".join(texts) for ordinal, texts in self.claims.faults.items()}
        damage |= {
            ordinal: f"{preview(names)} missing or empty" for ordinal, names in absent.items()
        }
        damage |= self.columns.faults
        damage |= self._copied(damage)
        numbers = self.catalog.episodes.index
        chosen = {i for i, number in enumerate(numbers) if selection.leaves_out(int(number))}
        credit, choice = self.options.credit, self.options.episodes
        if credit is not None:
            choice = "all" if credit.failures == "video" else "successes"
        unwanted = self.catalog.left_out(choice)
        useless = {i: unwanted[int(n)] for i, n in enumerate(numbers) if int(n) in unwanted}
        missed = sorted(damage.keys() - chosen - useless.keys())
        self._damage = damage
        if missed and self.options.damaged == "refuse":
            raise DatasetError(f"{self._summary(missed, 8)}\n{_FETCH}")
        if missed:
            _log.warning("%s", self._summary(missed, 3))

        return dict.fromkeys(chosen, "not selected"), dict.fromkeys(damage, DAMAGED) | useless

    def _copied(self, damage: Mapping[int, str]) -> dict[int, str]:
        """Return the episodes that have a copy of another's film and other numbers than it."""
        found: dict[int, str] = {}
        for films in self.claims.copies:
            for alike in itertools.zip_longest(*films):
                whole = [at for at in alike if at is not None and at not in damage]
                if len(whole) > 1 and not self._same_numbers(np.array(whole)):
                    numbers = preview(map(str, self.catalog.episodes.index[whole]))
                    text = f"episodes {numbers} have copies of one film and other numbers"
                    found |= dict.fromkeys(whole, text)
        return found

    def _same_numbers(self, ordinals: NDArray[np.int64]) -> bool:
        """Return whether first, middle and last rows of some episodes are the same."""
        first = self.catalog.episodes.offset[ordinals]
        length = self.catalog.episodes.length[ordinals]
        rows = np.concatenate([first, first + length // 2, first + length - 1]).reshape(3, -1)
        columns = {source.column for source in self.resolution.vectors.values()}
        values = [self.columns.vector(column)[rows] for column in columns]
        return all(bool((value == value[:, :1]).all()) for value in values)

    def _uninstructed(self) -> list[int]:
        """Return the numbers of the episodes whose every row has a blank instruction."""
        if not all(self.columns.blank(one.column).any() for one in self.resolution.texts):
            return []
        ordinals = range(len(self.catalog.episodes))
        blank = [at for at in ordinals if at not in self._damage and (self._labels(at) < 0).all()]
        return [int(number) for number in self.catalog.episodes.index[blank]]

    def _summary(self, missed: Sequence[int], most: int) -> str:
        """Return what is wrong with the episodes ``missed``, those alike on one line."""
        numbers = self.catalog.episodes.index
        lines = alike(f"episode {numbers[ordinal]}: {self._damage[ordinal]}" for ordinal in missed)
        return (
            f"{self.catalog.root}: {len(missed)} of {len(numbers)} episodes cannot be used:\n  "
            + "\n  ".join(lines[:most])
            + (f"\n  ... and {counted(len(lines) - most, 'other fault')}" if lines[most:] else "")
        )

    def _windows(self, cache: Path, excluded: Mapping[int, str]) -> WindowTable:
        timing = self.embodiment.timing
        texts = [source.column for source in self.resolution.texts]
        key = json.dumps([self.catalog.identity, repr(timing), texts, sorted(excluded.items())])
        path = cache / f"windows-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
        if not path.exists():
            lock = path.with_suffix(".lock")
            with one_at_a_time(lock, f"listing the samples of {self.catalog.root}"):
                # Another process may have listed them meanwhile.
                if not path.exists():
                    self._list_windows(path, excluded)
        return WindowTable.load(path)

    def _list_windows(self, path: Path, excluded: Mapping[int, str]) -> None:
        timing = self.embodiment.timing
        table = build_windows(self.catalog.episodes.length, timing, self._labels, excluded)
        with replacing(path, derived=True) as temporary:
            table.save(temporary)
