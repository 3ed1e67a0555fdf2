"""The tasks of LIBERO, LIBERO-PRO and LIBERO-Plus, read without importing LIBERO or torch."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import numpy as np

from dzrobot.envs.libero.assets import libero_folder
from dzrobot.envs.libero.bddl import ProblemFile, read_problem
from dzrobot.envs.libero.plus_variants import PlusVariant, variant_of
from dzrobot.envs.libero.task_packages import PLUS, PRO, TaskPackage
from dzrobot.errors import ModalityError, SimulatorError, find
from dzrobot.registration import LIBERO_SUITES, PLUS_SUITES, PRO_SUITES, Suite
from dzrobot.untrusted import (
    LARGEST_STARTS,
    parsing,
    read_member,
    read_npy,
    read_pickled_array,
)  # fmt: skip

SUITES: Mapping[str, Suite] = {
    suite.name: suite for suite in (*LIBERO_SUITES, *PRO_SUITES, *PLUS_SUITES)
}
"""By name."""

PACKAGES: Mapping[str, TaskPackage | None] = {
    **{suite.name: None for suite in LIBERO_SUITES},
    **{suite.name: PRO for suite in PRO_SUITES},
    **{suite.name: PLUS for suite in PLUS_SUITES},
}
"""Wheel that holds the tasks of a suite; None: hf-libero, which is installed."""

BENCHMARKS = ("LIBERO", PRO.title, PLUS.title)


def benchmark_of(suite: str) -> str:
    """Return the benchmark that a suite is of, one of ``BENCHMARKS``."""
    package = PACKAGES[suite]
    return BENCHMARKS[0] if package is None else package.title


Prompt = Literal["name", "bddl"]
"""Where an instruction comes from: the name of the task, or the language of its problem file."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of one suite; its files may be missing."""

    suite: str
    task_id: int
    name: str
    bddl: Traversable
    """Problem file."""

    init_states: Traversable
    """File with its starts."""

    variant: PlusVariant | None = None
    """What LIBERO-Plus changes in it; None: a task of another benchmark."""

    @property
    def axis(self) -> str | None:
        """In what it is harder than LIBERO's own task; None: it is LIBERO's own."""
        if self.variant is not None:
            return self.variant.axis
        return axis_of(self.suite)

    def problem(self) -> ProblemFile:
        """Return what its problem file says.

        Raises:
            SimulatorError: there is none, or it is none.
        """
        if not self.bddl.is_file():
            raise SimulatorError("no problem file")
        return read_problem(self.bddl.read_text(encoding="utf-8"))

    def states(self) -> np.ndarray:
        """Return its starts, as :func:`load_init_states` does.

        Raises:
            SimulatorError: there are none.
        """
        single = self.variant is not None and self.variant.axis == "layout"
        return load_init_states(self.init_states, single=single)

    def language(self, prompt: Prompt) -> str:
        """Return the instruction.

        Raises:
            SimulatorError: as :meth:`problem`.
        """
        return language_of(self.name) if prompt == "name" else self.problem().language


def default_prompt(suite: str) -> Prompt:
    """Return where the instructions of ``suite`` come from, unless somebody says otherwise.

    LIBERO's published datasets have those of the names. The names of the other benchmarks are
    those of LIBERO's tasks, or hold numbers of files.
    """
    return "name" if PACKAGES[suite] is None else "bddl"


def axis_of(suite: str) -> str | None:
    """Return in what all tasks of a suite of LIBERO-PRO are harder; None for other suites."""
    if PACKAGES[suite] is not PRO:
        return None
    (base,) = (known.name for known in LIBERO_SUITES if suite.startswith(f"{known.name}_"))
    return suite.removeprefix(f"{base}_")


def check_task(suite: str, task_id: int) -> None:
    """Raise for a suite or task that does not exist; needs no LIBERO.

    Raises:
        UnknownNameError: no such suite.
        ModalityError: the suite has fewer tasks.
    """
    count = find(SUITES, "suite", suite).tasks
    if task_id not in range(count):
        raise ModalityError(
            f"task_id={task_id!r} does not exist; {suite} has the tasks 0 to {count - 1}."
        )


def suite_root(suite: str) -> Traversable:
    """Return the folder of the benchmark that ``suite`` is of.

    Raises:
        MissingDependencyError: hf-libero is not installed, or the wheel was not downloaded.
        SimulatorError: the wheel is another one.
    """
    package = PACKAGES[suite]
    return libero_folder() if package is None else package.files()


def load_task(suite: str, task_id: int, root: Traversable | None = None) -> Task:
    """Return task ``task_id`` of ``suite`` in the official order.

    Args:
        suite: Its name.
        task_id: Which task.
        root: What :func:`suite_root` returns, where it was asked before.

    Raises:
        UnknownNameError: no such suite.
        ModalityError: the suite has fewer tasks.
        MissingDependencyError: as :func:`suite_root`.
        SimulatorError: likewise, or the suite is not as published.
    """
    check_task(suite, task_id)
    root = suite_root(suite) if root is None else root
    package, folder = PACKAGES[suite], suite.replace("libero_plus_", "libero_")
    if isinstance(root, Path):
        name, end = _task_names(root)[folder][task_id], ".pruned_init"
    else:
        assert package is not None, "what is in a wheel is a package's"
        name, end = _packaged_names(package)[folder][task_id], ".pruned_init.npz"
    variant = variant_of(folder, name) if package is PLUS else None
    problem, states = name, f"{folder}/{name}{end}"
    if variant is not None:
        problem, states = variant.problem, variant.states
    return Task(
        suite=suite,
        task_id=task_id,
        name=name,
        bddl=root / "bddl_files" / folder / f"{problem}.bddl",
        init_states=root.joinpath("init_files", states),
        variant=variant,
    )


def language_of(name: str) -> str:
    """Return the instruction in a task's name; LIBERO-100 names begin with their scene."""
    words = name.split("_")
    scene = next((i for i, word in enumerate(words) if word.startswith("SCENE")), None)
    return " ".join(words if scene is None else words[scene + 1 :])


def load_init_states(path: Traversable, *, single: bool = False) -> np.ndarray:
    """Return the stored simulator states ``(N, 1 + nq + nv)`` float64.

    Each row holds the time, the joint positions and the joint velocities. LIBERO's files are
    pickles inside zips, of which only arrays are let through, so a foreign file runs no code;
    LIBERO-PRO's are plain arrays.

    Args:
        path: The file.
        single: Whether it holds one state, and no table of them.

    Raises:
        SimulatorError: the file is missing or holds anything but one array of numbers.
    """
    # What is in a wheel is as published; hf-libero is files that may be lost.
    files = isinstance(path, Path)
    remedy = "reinstall hf-libero with `dzrobot libero setup`" if files else "download it again"
    guard = parsing(str(path), SimulatorError, "holds no initial states", remedy)
    with guard, path.open("rb") as file:
        if path.name.endswith(".npz"):
            states = read_npy(read_member(file, "states.npy", LARGEST_STARTS))
        else:
            states = read_pickled_array(read_member(file, "/data.pkl", LARGEST_STARTS))
    if states.ndim != 2 - single or states.dtype.kind != "f" or not states.size:
        given = f"{states.dtype} {states.shape}"
        raise SimulatorError(f"{path} holds {given}, not one table of states; {remedy}.")
    if not np.isfinite(states).all():
        at = int(np.argmax(~np.isfinite(np.atleast_2d(states)).all(axis=1)))
        raise SimulatorError(f"{path}: start {at} holds a number that is not finite; {remedy}.")
    return np.atleast_2d(states).astype(np.float64)


@cache
def _packaged_names(package: TaskPackage) -> Mapping[str, list[str]]:
    """Return the tasks of a wheel; it is always the same wheel."""
    names: Mapping[str, list[str]] = package.module(
        "benchmark", "libero_suite_task_map"
    ).libero_task_map
    return names


def _task_names(root: Path) -> Mapping[str, list[str]]:
    # A file of plain lists; importing it by its package name would import torch and ask questions.
    path = root / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("dzrobot_libero_task_map", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SimulatorError(f"{path} is missing; reinstall hf-libero with `dzrobot libero setup`.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names: Mapping[str, list[str]] = module.libero_task_map
    return names
