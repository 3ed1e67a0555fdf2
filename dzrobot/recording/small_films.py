"""Copy a dataset with small films: resized, each picture a key frame, kept without loss.

Training decodes the pictures of a sample alone, and each of them is smaller. The pictures are not
those of the source: a crop is taken from the resized picture. See docs/guides/datasets.md.
"""

import shutil
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dzrobot.documents import read_json
from dzrobot.errors import DatasetError, counted
from dzrobot.files import explained, replacing, write_json
from dzrobot.progress import Show
from dzrobot.recording import formats
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.key_frames import (
    KEY_FRAMES,
    RGB,
    check_kept,
    check_length,
    lossless_film,
    pictures,
)
from dzrobot.untrusted import parsing

BEGUN = "meta/small_films.json"
"""In an unfinished copy: of which dataset it is, and its size."""

Size = tuple[int, int]


def small_copy(root: Path, output: Path, size: Size, show: Show | None = None) -> None:
    """Write ``root`` with films of ``size`` to ``output``; interrupted, the same call goes on.

    Pictures are averaged over areas (OpenCV's ``INTER_AREA``). Rows, lists and statistics are
    copied as they are; ``info.json``, which makes the folder a dataset, comes last and says from
    which size each camera was resized.

    Args:
        root: Folder of a dataset with films.
        output: New folder, or one that an interrupted call with the same arguments left.
        size: (height, width) in pixels, of every camera.
        show: Takes how many pictures are written of how many.

    Raises:
        DatasetError: no films, a size that enlarges or distorts pictures, an ``output`` that is
            something else, or a film that is damaged or of another length than its episodes.
    """
    told: Show = show or (lambda *_: None)
    catalog = DatasetCatalog.open(root)
    info = formats.read_info(root)
    if not info.videos:
        raise DatasetError(f"{root} has no films, only images: leave --films small out")
    for camera in info.videos:
        _check_size(camera, catalog.frame_size(camera), size)
    if missing := catalog.missing(info.videos):
        ordinal, files = next(iter(missing.items()))
        raise DatasetError(
            f"{root} lacks files of {counted(len(missing), 'episode')}, such as {files[0]} of "
            f"episode {catalog.episodes.index[ordinal]}: get them first; `dzrobot inspect-data` "
            "lists them"
        )
    copy = _Copy(root, output, size, Fraction(info.fps).limit_denominator(1001))
    with explained(f"write a copy of {root} to {output}", DatasetError):
        films = _films(catalog, info.videos)
        _begin(root, output, size, films.keys())
        total, done = sum(films.values()), 0
        for name, rows in films.items():
            if (output / name).exists():
                done += rows
                told(done, total)
                continue
            for _ in copy.write(name, rows):
                done += 1
                told(done, total)
        _finish(catalog, output, info.videos, size)


@dataclass(frozen=True)
class _Copy:
    root: Path
    output: Path
    size: Size
    fps: Fraction

    def write(self, name: str, rows: int) -> Iterator[None]:
        """Write a film in small; yield after each of its pictures."""
        import av
        import cv2

        source, count = self.root / name, 0
        height, width = self.size
        with (
            parsing(source, DatasetError, "cannot be read", "see inspect-data"),
            replacing(self.output / name) as temporary,
            lossless_film(temporary, self.fps, source) as add,
        ):
            for stream, frame in pictures(source):
                check_kept(frame)
                picture = frame.to_ndarray(format="rgb24")
                small = cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)
                written = av.VideoFrame.from_ndarray(small, "rgb24").reformat(format=RGB)
                written.pts, written.time_base = frame.pts, stream.time_base
                add(stream, written)
                count += 1
                yield
            check_length(source, count, rows)


def _check_size(camera: str, source: Size, size: Size) -> None:
    (high, wide), (height, width) = source, size
    fitting = round(high * width / wide)
    if height > high or width > wide or abs(fitting - height) > 1:
        raise DatasetError(
            f"{camera} is {high}x{wide} (height x width): films of {height}x{width} would enlarge "
            f"or distort it; give a smaller size of the same shape, such as "
            f"{round(high / 2)}x{round(wide / 2)}"
        )


def _begin(root: Path, output: Path, size: Size, films: Set[str]) -> None:
    """Copy all but ``films`` and ``info.json`` to a new folder, or one that was begun so."""
    own = {"dataset": str(root.resolve()), "size": list(size)}
    if output.exists() and any(output.iterdir()):
        begun = output / BEGUN
        found = read_json(begun, dict[str, Any], DatasetError) if begun.is_file() else {}
        if found != own:
            raise DatasetError(
                f"{output} is not an unfinished copy of {root} at {size[0]}x{size[1]}: give a new "
                "folder, or remove that one"
            )
    (output / BEGUN).parent.mkdir(parents=True, exist_ok=True)
    write_json(output / BEGUN, own)
    left = {*films, str(formats.INFO), str(formats.ASIDE)}

    def is_left(folder: str, names: list[str]) -> list[str]:
        below = Path(folder).relative_to(root)
        return [name for name in names if str(below / name) in left]

    shutil.copytree(root, output, dirs_exist_ok=True, ignore=is_left)


def _films(catalog: DatasetCatalog, cameras: list[str]) -> Mapping[str, int]:
    """Return the number of pictures by file, relative to the dataset."""
    films: dict[str, int] = {}
    for camera in cameras:
        for ordinal, length in enumerate(catalog.episodes.length):
            name = str(catalog.video_file(ordinal, camera))
            films[name] = films.get(name, 0) + int(length)
    return films


def _finish(catalog: DatasetCatalog, output: Path, cameras: list[str], size: Size) -> None:
    content = read_json(catalog.root / formats.INFO, dict[str, Any], DatasetError)
    for camera in cameras:
        feature = content["features"][camera]
        names = formats.axes(feature.get("names"))
        for axis, length in zip("hw", size, strict=True):
            feature["shape"][names.index(axis)] = length
        described = feature.setdefault("info", {})
        described.setdefault(formats.RESIZED_FROM, list(catalog.frame_size(camera)))
        described |= {
            "video.codec": KEY_FRAMES, "video.pix_fmt": RGB, "video.height": size[0],
            "video.width": size[1],
        }  # fmt: skip
    write_json(output / formats.INFO, content)
    (output / BEGUN).unlink()
