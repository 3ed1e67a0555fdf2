"""The tasks of LIBERO and their stored initial states, read without importing LIBERO or torch."""

import importlib.util
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.envs.libero.install import libero_folder
from dzrobot.errors import ModalityError, SimulatorError, find
from dzrobot.registration import LIBERO_SUITES

SUITES: Mapping[str, int] = {suite.name: suite.tasks for suite in LIBERO_SUITES}
"""Tasks per suite."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of one suite."""

    suite: str
    task_id: int
    name: str
    language: str
    """The instruction, as datasets and policies use it: from the name, not from the BDDL file."""

    bddl: Path
    init_states: Path


def check_task(suite: str, task_id: int) -> None:
    """Raise for a suite or task that does not exist; needs no LIBERO.

    Raises:
        UnknownNameError: no such suite.
        ModalityError: the suite has fewer tasks.
    """
    count = find(SUITES, "suite", suite)
    if task_id not in range(count):
        raise ModalityError(
            f"task_id={task_id!r} does not exist; {suite} has the tasks 0 to {count - 1}."
        )


def load_task(suite: str, task_id: int) -> Task:
    """Return task ``task_id`` of ``suite`` in the official order.

    Raises:
        MissingDependencyError: hf-libero is not installed.
    """
    check_task(suite, task_id)
    root = libero_folder()
    name = _task_names(root)[suite][task_id]
    return Task(
        suite=suite,
        task_id=task_id,
        name=name,
        language=language_of(name),
        bddl=root / "bddl_files" / suite / f"{name}.bddl",
        init_states=root / "init_files" / suite / f"{name}.pruned_init",
    )


def language_of(name: str) -> str:
    """Return the instruction in a task's name; LIBERO-100 names begin with their scene."""
    words = name.split("_")
    scene = next((i for i, word in enumerate(words) if word.startswith("SCENE")), None)
    return " ".join(words if scene is None else words[scene + 1 :])


def load_init_states(path: Path) -> np.ndarray:
    """Return the stored simulator states ``(50, 1 + nq + nv)`` float64.

    Each row holds the time, the joint positions and the joint velocities. The file is a pickle
    inside a zip; only arrays are let through, so a foreign file runs no code.

    Raises:
        SimulatorError: the file is missing or holds anything but one array of numbers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(pickled) as stream:
                states = _ArraysOnly(stream).load()
    except (OSError, zipfile.BadZipFile, StopIteration, pickle.UnpicklingError) as error:
        raise SimulatorError(
            f"{path} holds no initial states ({error}); reinstall hf-libero with "
            "`dzrobot libero setup`."
        ) from error
    if not isinstance(states, np.ndarray) or states.ndim != 2:
        raise SimulatorError(f"{path} holds {type(states).__name__}, not one table of states.")
    return states.astype(np.float64)


class _ArraysOnly(pickle.Unpickler):
    """Loads NumPy arrays and nothing else."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of an array")
        # NumPy 2 moved the module; the old name warns.
        return super().find_class(module_name.replace(".core.", "._core."), global_name)


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
