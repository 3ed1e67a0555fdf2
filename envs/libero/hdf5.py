"""LIBERO's own demonstrations, HDF5 files in robomimic's layout, as a LeRobot dataset.

Layout of ``TASK_demo.hdf5``: group ``data`` with the attributes ``problem_info`` (JSON with the
instruction of the BDDL file), ``bddl_file_name`` and ``macros_image_convention``; below it one
group ``demo_N`` per episode with ``actions`` (T, 7), ``obs/ee_states`` (T, 6),
``obs/gripper_states`` (T, 2), ``obs/agentview_rgb`` and ``obs/eye_in_hand_rgb`` (T, H, W, 3).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dzrobot.documents import parse_json, shorten
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.libero.suites import language_of
from dzrobot.errors import DatasetError, preview
from dzrobot.importing import required
from dzrobot.progress import Show
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.catalog import episode_facts

Array = NDArray[np.float32]
Prompt = Literal["name", "bddl"]

IDLE = 1e-4
"""Length of an arm command, of 1 for full speed, below which the published conversion drops it."""

_VIEWS = {"video.image": "obs/agentview_rgb", "video.wrist_image": "obs/eye_in_hand_rgb"}
_WIDTHS = {"actions": 7, "obs/ee_states": 6, "obs/gripper_states": 2}
_LAYOUTS = {"opengl": (slice(None, None, -1),) * 2, "opencv": (slice(None), slice(None, None, -1))}
"""How the file's images were read -> rows and columns that make them robosuite's, half turned."""


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


def find_demonstrations(sources: Sequence[Path], prompt: Prompt) -> tuple[Demonstration, ...]:
    """Return all episodes of HDF5 files, or of those in folders, in a fixed order.

    Args:
        sources: Files and folders.
        prompt: ``name`` takes the instruction from the file's name, as the benchmark and the
            published datasets do; ``bddl`` from the task's definition.

    Raises:
        DatasetError: there is no file, or one is not of LIBERO's layout.
        MissingDependencyError: h5py is not installed.
    """
    required("reading HDF5", "libero", "h5py")
    paths = [path for source in sources for path in _files(source)]
    names = [path.name for path in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DatasetError(f"two files are called {twice[0]}: import them into datasets apart")
    return tuple(found for path in paths for found in _listed(path, prompt))


def import_demonstrations(  # noqa: PLR0913
    demonstrations: Sequence[Demonstration],
    root: Path,
    *,
    drop_idle: bool = False,
    version: str = "v2.1",
    video: bool = False,
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
        show: Takes how many episodes are written.

    Raises:
        DatasetError: a demonstration is damaged or of another size, or ``root`` holds other ones.
    """
    robot = _robot(demonstrations[0])
    rows = idle = 0
    with EpisodeWriter(
        root, robot, fps=robot.timing.control_hz, version=version, video=video
    ) as writer:
        done = _check_continues(root, writer.episodes, demonstrations, drop_idle=drop_idle)
        for number, one in enumerate(demonstrations):
            if number >= len(done):
                left, success = _write(writer, one, drop_idle=drop_idle)
                facts = {"idle_rows_dropped": left} if drop_idle else {}
                writer.save_episode(success=success, source=one.source, **facts)
            else:
                left = done[number]
            rows, idle = rows + one.rows - left, idle + left
            show(number + 1, len(demonstrations))
        return ImportCounts(writer.episodes, rows, idle)


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
def _opened(path: Path) -> Iterator[Any]:
    """Yield the group ``data`` of a file.

    Raises:
        DatasetError: it is damaged, or has no such group.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            if not isinstance(file.get("data"), h5py.Group):
                raise DatasetError(
                    f"{path} has no group 'data', but {preview(file)}: it is none of LIBERO's files"
                )
            yield file["data"]
    # h5py reports damage below the file's head as any of these.
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise DatasetError(f"{path} is not a whole HDF5 file of LIBERO: {error}") from error


def _listed(path: Path, prompt: Prompt) -> Iterator[Demonstration]:
    with _opened(path) as data:
        names = [name for name in data if name.startswith("demo_") and name[5:].isdecimal()]
        if not names:
            raise DatasetError(f"{path} has no group data/demo_N, but {preview(data)}")
        task = language_of(path.stem.removesuffix("_demo"))
        if prompt == "bddl":
            task = _instruction(path, data)
        for name in sorted(names, key=lambda name: int(name[5:])):
            yield Demonstration(path, name, task, len(_values(path, data[name], "actions")))


def _instruction(path: Path, data: Any) -> str:
    where = f"{path}: the attribute problem_info of 'data'"
    stated = data.attrs.get("problem_info", "")
    content = stated if isinstance(stated, bytes) else str(stated).encode()
    written = parse_json(content, _Problem, where, DatasetError).language_instruction
    return "".join(written).strip().strip('"')


def _robot(first: Demonstration) -> Embodiment:
    with _opened(first.path) as data:
        shape = _images(first, data, "video.image").shape
    return load_embodiment("libero_sim").at_resolution(shape[1], shape[2])


def _values(path: Path, group: Any, name: str) -> Any:
    """Return a table of a demonstration; its shape is checked, its numbers are not read."""
    found = group.get(name)
    width = _WIDTHS[name]
    if found is None or found.shape[1:] != (width,) or not found.shape[0]:
        given = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
        raise DatasetError(f"{path}: {group.name}/{name} {given}; expected (rows, {width})")
    return found


def _images(one: Demonstration, data: Any, key: str) -> Any:
    found = data[one.name].get(_VIEWS[key])
    expected = f"({one.rows}, height, width, 3) uint8"
    if found is None or found.dtype != np.uint8 or found.shape[:1] + found.shape[3:] != (
        one.rows, 3,
    ):  # fmt: skip
        given = "is missing" if found is None else f"is {found.dtype} {tuple(found.shape)}"
        raise DatasetError(f"{one.source}: {_VIEWS[key]} {given}; expected {expected}")
    return found


def _check_continues(
    root: Path, episodes: int, demonstrations: Sequence[Demonstration], *, drop_idle: bool
) -> list[int]:
    """Return how many rows each episode of ``root`` lost to the filter.

    Raises:
        DatasetError: they are not the first of ``demonstrations``, or were filtered otherwise.
    """
    facts = episode_facts(root)
    lost = []
    for number in range(episodes):
        extra = facts[number].model_extra or {} if number in facts else {}
        wanted = demonstrations[number].source if number < len(demonstrations) else "nothing"
        dropped = extra.get("idle_rows_dropped")
        if extra.get("source") != wanted or (dropped is not None) != drop_idle:
            how = "" if dropped is None else ", without idle rows"
            raise DatasetError(
                f"{root} has as episode {number} {shorten(extra.get('source'))}{how}, this import "
                f"{shorten(wanted)}{', without idle rows' if drop_idle else ''}: give another "
                "--output"
            )
        lost.append(int(dropped or 0))
    return lost


def _write(
    writer: EpisodeWriter, one: Demonstration, *, drop_idle: bool
) -> tuple[int, bool | None]:
    """Add the rows of one demonstration; return how many were left out, and its success."""
    with _opened(one.path) as data:
        group, layout = data[one.name], data.attrs.get("macros_image_convention", "opengl")
        if layout not in _LAYOUTS:
            raise DatasetError(
                f"{one.path}: macros_image_convention is {shorten(layout)}; "
                f"known are {', '.join(_LAYOUTS)}"
            )
        table = {name: np.asarray(_values(one.path, group, name), np.float32) for name in _WIDTHS}
        if len({len(rows) for rows in table.values()}) > 1:
            raise DatasetError(f"{one.source}: its tables differ in length")
        views = {key: _images(one, data, key) for key in _VIEWS}
        actions = table["actions"]
        idle = idle_rows(actions) if drop_idle else np.zeros(len(actions), bool)
        states = np.concatenate([table["obs/ee_states"], table["obs/gripper_states"]], axis=1)
        language = writer.embodiment.language
        for row in np.flatnonzero(~idle):
            images = {
                key: np.ascontiguousarray(view[row][_LAYOUTS[layout]])
                for key, view in views.items()
            }
            seen = {**images, "state.state": states[row], language: one.task}
            writer.add_frame(seen, actions[row])
        ended = group.get("dones")
        success = None if ended is None or not len(ended) else bool(ended[-1])
        return int(idle.sum()), success
