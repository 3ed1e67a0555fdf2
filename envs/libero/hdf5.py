"""LIBERO's own demonstrations, HDF5 files in robomimic's layout, as a LeRobot dataset.

Layout of ``TASK_demo.hdf5``: group ``data`` with the attributes ``problem_info`` (JSON with the
instruction of the BDDL file), ``bddl_file_name`` and ``macros_image_convention``; below it one
group ``demo_N`` per episode with ``actions`` (T, 7), ``obs/ee_states`` (T, 6),
``obs/gripper_states`` (T, 2), ``obs/agentview_rgb`` and ``obs/eye_in_hand_rgb`` (T, H, W, 3).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dzrobot.documents import parse_json, shorten
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.libero.hdf5_file import Hdf5Group, Hdf5Table, open_hdf5
from dzrobot.envs.libero.suites import language_of
from dzrobot.errors import DatasetError, counted, preview
from dzrobot.files import stand_in, stand_ins
from dzrobot.importing import required
from dzrobot.progress import Show
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.catalog import episode_facts
from dzrobot.untrusted import LARGEST_BLOCK

Array = NDArray[np.float32]
Prompt = Literal["name", "bddl"]

IDLE = 1e-4
"""Length of an arm command, of 1 for full speed, below which the published conversion drops it."""

_VIEWS = {"video.image": "obs/agentview_rgb", "video.wrist_image": "obs/eye_in_hand_rgb"}
_WIDTHS = {"actions": 7, "obs/ee_states": 6, "obs/gripper_states": 2}
_CONVENTION = "macros_image_convention"
_LAYOUTS = {"opengl": (slice(None, None, -1),) * 2, "opencv": (slice(None), slice(None, None, -1))}
"""How the file's images were read -> rows and columns that make them robosuite's, half turned."""

_ROWS_AT_ONCE = 64
"""Images that are read at once; fewer where they are large."""


class _Problem(BaseModel):
    """What is read of ``problem_info``."""

    model_config = ConfigDict(extra="ignore")

    language_instruction: str | list[str]


@dataclass(frozen=True)
class Demonstration:
    """One episode of one file."""

    path: Path
    name: str
    task: str
    rows: int

    @property
    def source(self) -> str:
        """Where it came from, for the dataset's facts."""
        return f"{self.path.name}:{self.name}"


@dataclass(frozen=True)
class ImportCounts:
    """What an import has written."""

    episodes: int
    rows: int
    idle: int
    """Rows that the filter of idle actions left out."""

    damaged: tuple[str, ...] = ()
    """What was wrong with each demonstration that was left out."""


@dataclass(frozen=True)
class Found:
    """The episodes of several files."""

    demonstrations: tuple[Demonstration, ...]
    skipped: tuple[str, ...] = ()
    """What is wrong with files that are left out; one message may be about several."""


def find_demonstrations(
    sources: Sequence[Path], prompt: Prompt, *, skip_damaged: bool = False
) -> Found:
    """Return all episodes of HDF5 files, or of those in folders, in a fixed order.

    Args:
        sources: Files and folders.
        prompt: ``name`` takes the instruction from the file's name, as the benchmark and the
            published datasets do; ``bddl`` from the task's definition.
        skip_damaged: Whether files that cannot be imported are left out; else all are named.

    Raises:
        DatasetError: there is no file, or one is not of LIBERO's layout.
        MissingDependencyError: h5py is not installed.
    """
    required("reading HDF5", "libero", "h5py")
    paths = [path for source in sources for path in _files(source)]
    names = [path.name for path in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DatasetError(f"two files are called {twice[0]}: import them into datasets apart")
    found: list[Demonstration] = []
    faults, faulty = stand_ins(paths), [path for path in paths if stand_in(path)]
    for path in (path for path in paths if path not in faulty):
        try:
            found += _listed(path, prompt)
        except DatasetError as error:
            faulty.append(path)
            faults.append(str(error))
    if faults and (not found or not skip_damaged):
        raise DatasetError(_refusal(faults, len(faulty), len(paths)))
    return Found(tuple(found), tuple(faults))


def _refusal(faults: Sequence[str], faulty: int, files: int) -> str:
    if files == 1:
        return faults[0]
    lines = "".join(f"\n  {fault}" for fault in faults)
    way = "" if faulty == files else "; --skip-damaged imports the others"
    return f"{faulty} of {counted(files, 'file')} cannot be imported{way}:{lines}"


def import_demonstrations(  # noqa: PLR0913
    demonstrations: Sequence[Demonstration],
    root: Path,
    *,
    drop_idle: bool = False,
    version: str = "v2.1",
    video: bool = False,
    skip_damaged: bool = False,
    show: Show,
) -> ImportCounts:
    """Write ``demonstrations`` as a dataset of ``libero_sim``; after an interruption, go on.

    Images are turned by 180 degrees from robosuite's bottom-up buffer, as in the published
    datasets, and keep their size. State (8,): hand position (m), rotation vector (rad), finger
    positions (m). Actions (7,) are taken as they are.

    Args:
        demonstrations: All of one image size.
        root: Folder of the dataset.
        drop_idle: Leave out rows whose arm command is shorter than :data:`IDLE` and whose gripper
            command is that of the row kept before. What is left is not simulated again.
        version: Of the LeRobot format.
        video: Whether images are stored as video.
        skip_damaged: Whether demonstrations that cannot be read are left out.
        show: Takes how many episodes are written.

    Raises:
        DatasetError: a demonstration is damaged or of another size, or ``root`` holds other ones.
    """
    robot = _robot(demonstrations[0])
    rows = idle = 0
    damaged: list[str] = []
    with EpisodeWriter(
        root, robot, fps=robot.timing.control_hz, version=version, video=video
    ) as writer:
        done = _check_continues(root, writer.episodes, demonstrations, drop_idle, skip_damaged)
        for number, one in enumerate(demonstrations):
            if number in done:
                left = done[number]
            elif number < max(done, default=-1):
                damaged.append(f"{one.source} was left out by the run that this one resumes")
                continue
            else:
                try:
                    left, success, objects = _write(writer, one, drop_idle=drop_idle)
                except DatasetError as error:
                    writer.discard()
                    if not skip_damaged:
                        raise
                    damaged.append(str(error))
                    continue
                facts: dict[str, int | str] = {"idle_rows_dropped": left} if drop_idle else {}
                if objects:
                    facts["scene_objects"] = " ".join(objects)
                writer.save_episode(success=success, source=one.source, **facts)
            rows, idle = rows + one.rows - left, idle + left
            show(number + 1, len(demonstrations))
        return ImportCounts(writer.episodes, rows, idle, tuple(damaged))


def idle_rows(actions: Array) -> NDArray[np.bool_]:
    """Return (T,) which of ``actions`` (T, 7) neither move the arm nor change the gripper.

    The first row is judged by its motion alone. A gripper command is compared with that of the
    last row that is kept.
    """
    idle: NDArray[np.bool_] = np.linalg.norm(actions[:, :6], axis=1) < IDLE
    gripper: float | None = None
    for row in range(len(actions)):
        if gripper is not None and actions[row, 6] != gripper:
            idle[row] = False
        if not idle[row]:
            gripper = float(actions[row, 6])
    return idle


def _files(source: Path) -> list[Path]:
    if not source.exists():
        raise DatasetError(f"{source} does not exist; give HDF5 files of LIBERO, or their folder")
    found = sorted(source.rglob("*.hdf5")) if source.is_dir() else [source]
    if not found:
        raise DatasetError(f"{source} holds no .hdf5 file")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Hdf5Group]:
    """Yield the group ``data`` of a file.

    Raises:
        DatasetError: it is damaged, or has no such group.
    """
    with open_hdf5(path) as root:
        if (data := root.group("data")) is None:
            raise DatasetError(
                f"{path} has no group 'data', but {preview(root.names())}: it is not one of "
                "LIBERO's files"
            )
        yield data


def _listed(path: Path, prompt: Prompt) -> Iterator[Demonstration]:
    with _opened(path) as data:
        _refuse_raw(path, data)
        names = [name for name in data.names() if name.startswith("demo_")]
        if not names:
            raise DatasetError(f"{path} has no group data/demo_N, but {preview(data.names())}")
        if odd := [name for name in names if not re.fullmatch("demo_[0-9]{1,9}", name)]:
            raise DatasetError(f"{path} has data/{preview(odd)} where demo_NUMBER is expected")
        task = language_of(path.stem.removesuffix("_demo"))
        if prompt == "bddl":
            task = _instruction(path, data)
        for name in sorted(names, key=lambda name: int(name[5:])):
            demo = _demo(path, data, name)
            one = Demonstration(path, name, task, _length(_values(demo, "actions")))
            for table in _WIDTHS:
                _values(demo, table)
            for view in _VIEWS:
                _images(one, demo, view)
            yield one


def _refuse_raw(path: Path, data: Hdf5Group) -> None:
    """Refuse what robosuite's collector writes: states to be played again, and no images."""
    for name in data.names():
        if not name.startswith("demo"):
            continue
        group = _demo(path, data, name)
        names = group.names()
        if "states" in names and "actions" in names and "obs" not in names:
            raise DatasetError(
                f"{path} is a raw recording: {group.name} has states and actions, and no images "
                "(no group obs). Play it again in the simulator with LIBERO's "
                "scripts/create_dataset.py, which writes the images, and import its file"
            )


def _instruction(path: Path, data: Hdf5Group) -> str:
    where = f"{path}: the attribute problem_info of 'data'"
    content = data.text("problem_info", "").encode("utf-8", "replace")
    written = parse_json(content, _Problem, where, DatasetError).language_instruction
    instruction = "".join(written).strip().strip('"')
    if not instruction.isprintable():
        raise DatasetError(f"{where} holds control characters: {shorten(instruction)}")
    return instruction


def _robot(first: Demonstration) -> Embodiment:
    with _opened(first.path) as data:
        demo = _demo(first.path, data, first.name)
        shape = _images(first, demo, "video.image").shape or ()
    return load_embodiment("libero_sim").at_resolution(shape[1], shape[2])


def _demo(path: Path, data: Hdf5Group, name: str) -> Hdf5Group:
    found = data.group(name)
    if found is None:
        raise DatasetError(f"{path}: {data.name}/{name} leads to nothing")
    return found


def _length(table: Hdf5Table) -> int:
    return table.shape[0] if table.shape else 0


def _described(table: Hdf5Table) -> str:
    return f"is {table.dtype} {'without numbers' if table.shape is None else table.shape}"


def _values(group: Hdf5Group, name: str) -> Hdf5Table:
    """Return a table of a demonstration; its shape is checked, its numbers are not read."""
    found, width = group.table(name), _WIDTHS[name]
    if found is None:
        raise DatasetError(f"{group.where}/{name} is missing; expected (rows, {width})")
    if not _length(found) or found.shape is None or found.shape[1:] != (width,):
        raise DatasetError(f"{found.where} {_described(found)}; expected (rows, {width})")
    if found.dtype.kind not in "biuf":
        raise DatasetError(f"{found.where} {_described(found)}; expected numbers")
    return found


def _images(one: Demonstration, demo: Hdf5Group, key: str) -> Hdf5Table:
    found = demo.table(_VIEWS[key])
    expected = f"({one.rows}, height, width, 3) uint8"
    if found is None:
        raise DatasetError(f"{demo.where}/{_VIEWS[key]} is missing; expected {expected}")
    shape = found.shape or ()
    if found.dtype != np.uint8 or shape[:1] + shape[3:] != (one.rows, 3) or 0 in shape:
        head = found.head()
        if kind := next((kind for begin, kind in _ENCODINGS.items() if head.startswith(begin)), ""):
            raise DatasetError(
                f"{found.where} holds images encoded as {kind}, which are not read; decode them "
                f"first: expected {expected}"
            )
        raise DatasetError(f"{found.where} {_described(found)}; expected {expected}")
    return found


_ENCODINGS = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"RIFF": "WebP", b"BM": "BMP"}


def _check_continues(
    root: Path, episodes: int, demonstrations: Sequence[Demonstration],
    drop_idle: bool, skip_damaged: bool,
) -> dict[int, int]:  # fmt: skip
    """Return which of ``demonstrations`` are written, and how many rows each lost to the filter.

    Raises:
        DatasetError: they are not the first of ``demonstrations``, or were filtered otherwise.
    """
    facts = episode_facts(root)
    lost: dict[int, int] = {}
    at = 0
    for number in range(episodes):
        extra = facts[number].model_extra or {} if number in facts else {}
        later = [one.source for one in demonstrations[at:]]
        if skip_damaged and (source := str(extra.get("source"))) in later:
            at += later.index(source)
        wanted = demonstrations[at].source if at < len(demonstrations) else "nothing"
        dropped = extra.get("idle_rows_dropped")
        if extra.get("source") != wanted or (dropped is not None) != drop_idle:
            how = "" if dropped is None else ", without idle rows"
            raise DatasetError(
                f"{root} has as episode {number} {shorten(extra.get('source'))}{how}, this import "
                f"{shorten(wanted)}{', without idle rows' if drop_idle else ''}: give another "
                "--output"
            )
        lost[at] = int(dropped or 0)
        at += 1
    return lost


def _write(
    writer: EpisodeWriter, one: Demonstration, *, drop_idle: bool
) -> tuple[int, bool | None, list[str]]:
    """Add the rows of one demonstration.

    Returns:
        How many rows were left out, whether it succeeded, and what stood in its scene.

    Images are read a few rows at a time. Damage may be found after some rows were added.

    Raises:
        DatasetError: it is damaged, or holds something else than demonstrations do.
    """
    with _opened(one.path) as data:
        demo, layout = _demo(one.path, data, one.name), data.text(_CONVENTION, "opengl")
        if layout not in _LAYOUTS:
            raise DatasetError(
                f"{one.path}: {_CONVENTION} is {shorten(layout)}; known are {', '.join(_LAYOUTS)}"
            )
        table = {name: _values(demo, name).finite() for name in _WIDTHS}
        if len({len(rows) for rows in table.values()}) > 1:
            raise DatasetError(f"{one.source}: its tables differ in length")
        success = _success(demo, one.rows)
        views = {key: _images(one, demo, key) for key in _VIEWS}
        actions = table["actions"]
        idle = idle_rows(actions) if drop_idle else np.zeros(len(actions), bool)
        states = np.concatenate([table["obs/ee_states"], table["obs/gripper_states"]], axis=1)
        size = max(view.row_bytes for view in views.values())
        step = max(1, min(_ROWS_AT_ONCE, LARGEST_BLOCK.value // 4 // size))
        for start in range(0, one.rows, step):
            seen = {key: view.numbers(start, start + step) for key, view in views.items()}
            for row in start + np.flatnonzero(~idle[start : start + step]):
                images = {
                    key: np.ascontiguousarray(block[row - start][_LAYOUTS[layout]])
                    for key, block in seen.items()
                }
                task = {writer.embodiment.language: one.task}
                writer.add_frame({**images, "state.state": states[row], **task}, actions[row])
        return int(idle.sum()), success, _scene_objects(demo)


_ROOT_BODY = re.compile(r'<body (?:[^<>]{0,200} )?name="([\w.-]{1,100})_main"')
"""The outermost body of an object, as robosuite names it, in MuJoCo's description of a scene."""


def _scene_objects(demo: Hdf5Group) -> list[str]:
    """Return the names of what stood in the scene beside the robot; empty: the file does not say.

    LIBERO's benchmark has renamed objects since some of its demonstrations were recorded.
    """
    return sorted(set(_ROOT_BODY.findall(demo.text("model_file", ""))))


def _success(demo: Hdf5Group, rows: int) -> bool | None:
    """Return whether the last of ``dones`` says so; None: the file does not say."""
    ended = demo.table("dones")
    if ended is None or ended.shape == (0,):
        return None
    if ended.shape != (rows,) or ended.dtype.kind not in "biuf":
        raise DatasetError(f"{ended.where} {_described(ended)}; expected ({rows},) numbers")
    return bool(ended.finite()[-1])
