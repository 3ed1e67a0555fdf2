"""Which frames of which film every episode of a dataset claims, for every camera.

Lists say where in a file an episode begins (v3.0) or give it a file of its own (v2.x); the rows say
how long it is; the file says how many pictures it holds and when each is shown. An episode is used
only where these agree, so that no row ever gets another row's picture:

- Rows of all episodes of a file fill it exactly: each begins where the ones before it end. Times up
  to a frame off, as sums of rounded times are, are corrected by that; others are not believed.
- They do not, because the lists leave some of the film out or the film is too short: times decide,
  and whatever they cannot decide is left out: overlaps, and gaps shorter than any episode.
- The times give another order than the numbers of the episodes: the pictures decide, by the mean
  colors that the lists give of each episode.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dzrobot.documents import read_json
from dzrobot.errors import DatasetError, counted, preview
from dzrobot.files import replacing
from dzrobot.recording.catalog import DatasetCatalog, listed_colors
from dzrobot.training.data.columns import Progress
from dzrobot.training.data.films import Ints, mean_colors, read_film
from dzrobot.training.data.video_decoding import DECODERS, Decoder

_FORMAT = 2
"""Raised when the layout or the rules of the cache change."""

_OFF_GRID = 0.5
"""Share of a frame by which a picture may lie off the grid of the rows."""

_TELLING = 4
"""Frames between key frames from which on it tells something that an episode begins with one."""

_SHARING = "episodes"
"""What begins the fault of episodes that claim the same frames."""

ALIKE = 0.04
"""Difference of mean colors, of 1, below which pictures may be those of an episode."""


class _Kept(BaseModel):
    """The file in which claims are kept."""

    model_config = ConfigDict(extra="forbid")

    first: dict[str, list[int]]
    faults: dict[int, list[str]]
    copies: list[list[list[int]]]
    notes: list[str]


@dataclass
class Claims:
    """What was found, for the cameras that were asked for."""

    first: dict[str, Ints]
    """Number in its film of each episode's first frame, (episodes,), by camera."""

    faults: dict[int, list[str]] = field(default_factory=dict)
    """What is wrong with an episode's films, by ordinal: such an episode cannot be used."""

    copies: list[list[list[int]]] = field(default_factory=list)
    """Films that are copies of each other: for each of them the episodes that claim it."""

    notes: list[str] = field(default_factory=list)
    """What is odd, and does not keep an episode from being used."""

    @classmethod
    def of(
        cls, catalog: DatasetCatalog, cameras: Sequence[str], decoder: str,
        cache: Path | None = None, progress: Progress | None = None,
    ) -> "Claims":  # fmt: skip
        """Compare lists and films; what was found is kept in the folder ``cache``.

        Args:
            catalog: The dataset.
            cameras: Columns of videos.
            decoder: Name of what will decode them.
            cache: Folder of what is derived from the dataset. None: nothing is kept.
            progress: Called with films done and films in all.
        """
        cameras = sorted(set(cameras))
        file = None if cache is None else cache / f"claims-{_key(catalog, cameras, decoder)}.json"
        if file is not None and file.exists():
            # One that is damaged, as by a full disk, is made anew.
            with suppress(DatasetError):
                return cls._read(file)
        films = {camera: _films(catalog, camera) for camera in cameras}
        count = len(catalog.episodes)
        claims = cls({camera: np.full(count, -1, np.int64) for camera in films})
        done, every = 0, sum(map(len, films.values()))
        for camera, names in films.items():
            alike: dict[str, list[list[int]]] = {}
            size = catalog.frame_size(camera)
            for name, ordinals in names.items():
                film = _Film(catalog, camera, name, np.array(ordinals), size)
                content = film.claim(claims, DECODERS[decoder], cache)
                alike.setdefault(content, []).append(film.episodes)
                done += 1
                if progress and (done % 64 == 0 or done == every):
                    progress(done, every)
            claims.notes += claims._in_no_list(catalog, camera, names)
            claims.copies += [each for key, each in alike.items() if key and len(each) > 1]
        if file is not None:
            claims._write(file)
        return claims

    def fault(self, ordinal: int, camera: str, text: str) -> None:
        """Keep an episode from being used."""
        self.faults.setdefault(int(ordinal), []).append(f"{camera}: {text}")

    def _in_no_list(
        self, catalog: DatasetCatalog, camera: str, films: Mapping[str, list[int]]
    ) -> Iterator[str]:
        """Yield which films no episode has, where others are claimed by several at once."""
        faults = (text for texts in self.faults.values() for text in texts)
        if not any(text.startswith(f"{camera}: {_SHARING}") for text in faults):
            return
        kind = Path(next(iter(films))).suffix
        spare = [
            name for name in catalog.sizes
            if f"/{camera}/" in name and name.endswith(kind) and name not in films
        ]  # fmt: skip
        if spare:
            yield (
                f"{counted(len(spare), 'film')} of {camera} belong to no episode of the list: "
                f"{preview(spare)}; if the list names the wrong files, correct it"
            )

    @classmethod
    def _read(cls, file: Path) -> "Claims":
        known = read_json(file, _Kept, DatasetError, largest=2**30)
        first = {camera: np.array(row, np.int64) for camera, row in known.first.items()}
        return cls(first, known.faults, known.copies, known.notes)

    def _write(self, file: Path) -> None:
        first = {camera: row.tolist() for camera, row in self.first.items()}
        content = {
            "first": first, "faults": self.faults, "copies": self.copies, "notes": self.notes,
        }  # fmt: skip
        with replacing(file, derived=True) as temporary:
            temporary.write_text(json.dumps(content))


def _films(catalog: DatasetCatalog, camera: str) -> dict[str, list[int]]:
    """Return the episodes of every film, by name, as ordinals."""
    films: dict[str, list[int]] = {}
    for ordinal, name in enumerate(catalog.files("video", camera)):
        films.setdefault(name, []).append(ordinal)
    return films


def _key(catalog: DatasetCatalog, cameras: Sequence[str], decoder: str) -> str:
    """Return a text that changes with the lists and with every film."""
    episodes = catalog.episodes
    digest = hashlib.sha256(f"{_FORMAT} {decoder} {catalog.fps} {catalog.version}".encode())
    digest.update(episodes.index.tobytes() + episodes.length.tobytes())
    for camera in cameras:
        place, names = episodes.videos.get(camera), catalog.files("video", camera)
        digest.update(camera.encode() + (b"" if place is None else place.start_s.tobytes()))
        digest.update("\n".join(names).encode())
        for facts in (catalog.sizes, catalog.changed):
            digest.update(np.array([facts.get(name, -1) for name in names], np.int64).tobytes())
    return digest.hexdigest()[:24]


class _Film:
    """One file, and the episodes that claim a part of it."""

    def __init__(
        self, catalog: DatasetCatalog, camera: str, name: str, ordinals: Ints, size: tuple[int, int]
    ) -> None:
        self._catalog, self._camera, self._name, self._size = catalog, camera, name, size
        self._ordinals = ordinals  # In the order of their numbers, as a catalog's are.
        self._numbers = catalog.episodes.index[self._ordinals]
        self._rows = catalog.episodes.length[self._ordinals]
        self._broken: dict[int, str] = {}
        """What is wrong, by place among the film's episodes."""

    @property
    def episodes(self) -> list[int]:
        """Ordinals of the episodes that claim a part of it, in their order."""
        ordinals: list[int] = self._ordinals.tolist()
        return ordinals

    def claim(self, claims: Claims, decoder: type[Decoder], cache: Path | None) -> str:
        """Enter where each episode begins, or why it cannot be used.

        Returns:
            A text that copies of the film have too; empty where that is not known.
        """
        path = f"{self._catalog.root}/{self._name}"
        try:
            self._table, content = read_film(path, cache)
            fault = decoder.unfit(path, self._table) or self._other_size()
        except (DatasetError, OSError) as error:
            fault = str(error)
        if fault:
            for ordinal in self._ordinals:
                claims.fault(ordinal, self._camera, fault)
            return ""
        first = self._placed(claims)
        self._check_grid(first)
        claims.first[self._camera][self._ordinals] = first
        for place, text in self._broken.items():
            claims.fault(self._ordinals[place], self._camera, text)
        return content

    def _other_size(self) -> str:
        """Return what is wrong with the size of the pictures, upright; empty: nothing."""
        shown, said = self._table.size, self._size
        if shown == said:
            return ""
        return (
            f"{self._name} shows {shown[0]}x{shown[1]} (height x width), info.json says "
            f"{said[0]}x{said[1]}"
        )

    def _placed(self, claims: Claims) -> Ints:
        """Return the first frame of each episode; what cannot be decided is noted as broken."""
        held, rows = len(self._table.pts), int(self._rows.sum())
        starts = self._catalog.episodes.videos.get(self._camera)
        if starts is None:
            if len(self._ordinals) > 1:
                self._break(range(len(self._ordinals)), self._sharing(range(len(self._ordinals))))
            elif held != rows:
                self._break([0], f"{self._name} has {held} frames, the list says {rows}")
            return np.zeros(len(self._ordinals), np.int64)
        times = starts.start_s[self._ordinals]
        said = np.array([self._table.at(float(time)) for time in times])
        if held == rows:
            return self._filled(said)
        return self._by_times(said, claims)

    def _filled(self, said: NDArray[np.float64]) -> Ints:
        """Return the places in a film that the rows fill exactly."""
        expected = np.cumsum(self._rows) - self._rows
        wrong = np.abs(said - expected) >= 1
        if not wrong.any():
            return expected
        if (ordered := self._in_other_order(said)) is not None:
            return ordered
        for place in np.flatnonzero(wrong).tolist():
            self._break([place], (
                f"the list says that it begins at frame {said[place]:.0f} of {self._name}, by the "
                f"rows of the episodes before it that is frame {expected[place]}"
            ))  # fmt: skip
        found = np.where(wrong, np.rint(said).astype(np.int64), expected)
        self._break_overlaps(found)
        return found

    def _in_other_order(self, said: NDArray[np.float64]) -> Ints | None:
        """Return the places in a film whose episodes follow each other in another order.

        None where they do not fill it, or where the pictures do not confirm it.
        """
        order = np.argsort(said, kind="stable")
        expected = np.empty(len(order), np.int64)
        expected[order] = np.cumsum(self._rows[order]) - self._rows[order]
        if (np.abs(said - expected) >= 1).any():
            return None
        plain = np.cumsum(self._rows) - self._rows
        moved = np.flatnonzero(expected != plain)
        listed = listed_colors(self._catalog, self._camera)
        own = [listed.get(int(self._numbers[place])) for place in moved]
        told = np.array([mean for mean in own if mean is not None])
        for at, place in enumerate(moved.tolist()):
            start, stop = expected[place], expected[place] + self._rows[place]
            seen = mean_colors(self._catalog.root / self._name, self._table, start, stop)
            if len(told) < len(moved) or seen is None:
                return None
            away = np.abs(seen - told).max(1)
            if away[at] > ALIKE or away[at] > np.delete(away, at).min() / 2:
                return None
        return expected

    def _by_times(self, said: NDArray[np.float64], claims: Claims) -> Ints:
        """Return the places in a film that the rows do not fill, as the times say."""
        order = np.argsort(said, kind="stable")
        first, end = np.empty(len(order), np.int64), 0
        gaps: list[int] = []
        for place in order:
            # Times up to a frame off are sums of rounded ones.
            first[place] = end if abs(said[place] - end) < 1 else int(np.rint(said[place]))
            gaps.append(int(first[place]) - end)
            end = int(first[place] + self._rows[place])
        gaps.append(len(self._table.pts) - end)
        self._judge(order, np.array(gaps), self._shortest_film(first[order], np.array(gaps)))
        if max(gaps) > 0:
            claims.notes.append(
                f"{self._name}: {counted(sum(gap for gap in gaps if gap > 0), 'frame')} belong to "
                "no episode of the list"
            )
        return first

    def _shortest_film(self, first: Ints, gaps: Ints) -> int:
        """Return how many unclaimed frames may be the film of an episode that is not listed.

        As many as the shortest listed one has; or from one group on, where all episodes and all
        that lies between them begin with a key frame. So do films that were made one by one and
        joined, when a short one is dropped later.
        """
        keys, held, shortest = self._table.key_frames, len(self._table.pts), int(self._rows.min())
        group = int(np.median(np.diff(keys))) if len(keys) > 1 else 0
        ends = np.append(first, held)[gaps > 0] - gaps[gaps > 0]
        bounds = np.concatenate([first, ends])
        if group < _TELLING or not np.isin(bounds, np.append(keys, held)).all():
            return shortest
        return min(shortest, group)

    def _judge(self, order: Ints, gaps: Ints, film: int) -> None:
        """Break the episodes of which times and film do not say where they lie.

        Args:
            order: Places of the episodes by their beginning.
            gaps: (episodes + 1,): unclaimed frames before each of them and after the last;
                negative where two overlap, or the film ends too early.
            film: Unclaimed frames that may be the film of an episode that is not listed.
        """
        held, shortest = len(self._table.pts), int(self._rows.min())
        odd = (gaps < 0) | ((gaps > 0) & (gaps < film))
        for at in np.flatnonzero(odd).tolist():
            before, after = order[:at], order[at:]
            if at and not gaps[at + 1 :].any() and len(after) and abs(gaps[at]) * 2 <= shortest:
                # All that follows fits to the end of the film: its times were measured on it, and
                # the film of the one before is too short or too long.
                affected = before[-1:]
            else:
                affected = np.concatenate([_last_run(before, gaps), _first_run(after, gaps, at)])
            shown, rows = held, int(self._rows.sum())
            if gaps[at] < 0 and at == len(order):
                what = f"{self._name} has {-gaps[at]} frames too few"
            elif gaps[at] < 0:
                what = self._sharing(*_overlapping(order, gaps, at))
            else:
                what = f"{self._name}: {counted(int(gaps[at]), 'frame')} belong to no episode"
            self._break(affected, f"{what} ({shown} frames, {rows} rows)")

    def _sharing(self, places: Sequence[int] | range | Ints, frames: int | None = None) -> str:
        numbers = preview([str(int(self._numbers[place])) for place in places], 12)
        much = "the same frames" if frames is None else f"the same {counted(frames, 'frame')}"
        return f"{_SHARING} {numbers} claim {much} of {self._name}"

    def _break_overlaps(self, first: Ints) -> None:
        order = np.argsort(first, kind="stable")
        stops = (first + self._rows)[order]
        for at in range(1, len(order)):
            reach = int(np.argmax(stops[:at]))
            if (shared := int(stops[reach] - first[order[at]])) > 0:
                pair = np.array([order[reach], order[at]])
                frames = min(shared, int(self._rows[order[at]]))
                self._break(pair, self._sharing(pair, frames))

    def _check_grid(self, first: Ints) -> None:
        """Break the episodes whose pictures are not shown when their rows were recorded."""
        table, fps = self._table, self._catalog.fps
        if table.keeps(fps, _OFF_GRID):
            return
        for place, start in enumerate(first):
            rows = int(self._rows[place])
            pts = table.pts[start : start + rows]
            if place in self._broken or not len(pts):
                continue
            times = (pts - pts[0]) * table.seconds_per_tick
            off = np.abs(times - np.arange(len(times)) / fps)
            if off.max() > _OFF_GRID / fps:
                frame = int(off.argmax())
                self._break([place], (
                    f"{self._name}: frame {frame} is shown {off[frame]:.3f} s off the grid of "
                    f"{fps:g} frames per second"
                ))  # fmt: skip

    def _break(self, places: Sequence[int] | range | Ints, text: str) -> None:
        for place in places:
            self._broken.setdefault(int(place), text)


def _overlapping(order: Ints, gaps: Ints, at: int) -> tuple[Ints, int | None]:
    """Return the episodes around the ``at``-th that overlap one by one; of two, by how much."""
    start, stop = at, at
    while start > 0 and gaps[start] < 0:
        start -= 1
    while stop < len(order) and gaps[stop] < 0:
        stop += 1
    return order[start:stop], -int(gaps[at]) if stop - start == 2 else None


def _last_run(order: Ints, gaps: Ints) -> Ints:
    """Return the last episodes of ``order`` that follow each other without a gap."""
    first = len(order) - 1
    while first > 0 and not gaps[first]:
        first -= 1
    return order[max(first, 0) :]


def _first_run(order: Ints, gaps: Ints, at: int) -> Ints:
    """Return the first episodes of ``order``, the ``at``-th of all, that follow without a gap."""
    stop = 1
    while stop < len(order) and not gaps[at + stop]:
        stop += 1
    return order[:stop]


def first_frame(catalog: DatasetCatalog, camera: str, ordinal: int) -> int:
    """Return where the ``ordinal``-th episode begins in its film.

    Raises:
        DatasetError: The film is damaged, or it is not known which of its frames are the episode's.
    """
    name = catalog.video_file(ordinal, camera)
    claims = Claims({camera: np.full(len(catalog.episodes), -1, np.int64)})
    ordinals = np.array(_films(catalog, camera)[name])
    film = _Film(catalog, camera, name, ordinals, catalog.frame_size(camera))
    film.claim(claims, DECODERS["pyav"], None)
    if faults := claims.faults.get(ordinal):
        raise DatasetError(f"{catalog.root}: {faults[0]}")
    return int(claims.first[camera][ordinal])
