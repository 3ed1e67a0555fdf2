"""What is known of tasks before a simulator is opened: instruction, goal, starts, objects."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources.abc import Traversable
from typing import Any

from dzrobot.envs.libero.assets import (
    assets_folder,
    libero_folder,
    manifest,
    needed,
    pro_manifest,
    verify,
)
from dzrobot.envs.libero.bddl import ProblemFile
from dzrobot.envs.libero.suites import (
    PACKAGES,
    SUITES,
    Task,
    check_task,
    language_of,
    load_task,
    suite_root,
)
from dzrobot.envs.libero.task_packages import (
    PLUS,
    PRO,
    TaskPackage,
    object_models,
    scene_classes,
)
from dzrobot.envs.mujoco.simulator import (
    MUJOCO,
    ROBOSUITE,
    check_rendering,
    check_versions,
    choose_backend,
    import_robosuite,
    installed,
)
from dzrobot.errors import SimulatorError, find, preview

_FEW = 2
"""Reasons that a row of the list shows with the names in them."""


@dataclass(frozen=True, kw_only=True)
class ListedTask:
    """One task, as far as its files tell."""

    task: Task
    language: str
    """The instruction in its problem file; empty where that does not parse."""

    starts: int
    """Stored initial states."""

    faults: tuple[str, ...]
    """Why it cannot be run; empty where it can."""

    @property
    def has_own_language(self) -> bool:
        """Whether the problem file asks for something else than the task's name."""
        return bool(self.language) and self.language != language_of(self.task.name)


def list_tasks(suite: str, tasks: Iterable[int] | None = None) -> Iterator[ListedTask]:
    """Yield tasks of ``suite`` in order.

    Args:
        suite: Its name.
        tasks: Which; None: all.

    Raises:
        UnknownNameError: no such suite.
        ModalityError: no such task.
        MissingDependencyError: hf-libero is not installed, or the suite's wheel was not downloaded.
        SimulatorError: the wheel is not the published one.
    """
    numbers = range(find(SUITES, "suite", suite).tasks) if tasks is None else tuple(tasks)
    for number in numbers:
        check_task(suite, number)
    root = suite_root(suite)
    classes = _Classes(root if PACKAGES[suite] is PRO else None)
    read = _Files()
    for number in numbers:
        yield _listed(load_task(suite, number, root), classes, read)


def describe(suite: str, tasks: Sequence[int]) -> dict[str, Any]:
    """Return what a card says of ``tasks``: which of them are harder in what.

    Raises:
        SimulatorError: some cannot be run.
        MissingDependencyError: as :func:`list_tasks`.
    """
    listed = list(list_tasks(suite, tasks))
    if broken := [one for one in listed if one.faults]:
        named = preview((f"task {one.task.task_id}: {one.faults[0]}" for one in broken), 3)
        raise SimulatorError(
            f"{len(broken)} of {len(listed)} tasks of {suite} cannot be run ({named}). "
            f"`dzrobot libero list --suite {suite}` shows them all, and which --tasks can."
        )
    axes: dict[str, list[int]] = {}
    for one in listed:
        if one.task.axis is not None:
            axes.setdefault(one.task.axis, []).append(one.task.task_id)
    return {"axes": axes} if axes else {}


def refuse_unrunnable(suite: str, task_id: int) -> None:
    """Raise for a task that cannot be run.

    Raises:
        SimulatorError: it cannot; says why.
        MissingDependencyError: as :func:`list_tasks`.
    """
    (listed,) = list_tasks(suite, [task_id])
    if listed.faults:
        raise SimulatorError(
            f"task {task_id} of {suite} cannot be run: {'; '.join(listed.faults)}. "
            f"`dzrobot libero list --suite {suite}` shows which can."
        )


def check_models(task: Task) -> None:
    """Raise where the assets lack a model of an object that only LIBERO-PRO has.

    Raises:
        SimulatorError: they do.
    """
    if PACKAGES[task.suite] is not PRO:
        return
    models = object_models(PRO.files())
    folder = assets_folder()
    paths = [models[name] for name in sorted(task.problem().classes)]
    if missing := [path for path in paths if not (folder / path).is_file()]:
        raise SimulatorError(
            f"{folder} lacks {preview(missing)}, of {PRO.title}: run `dzrobot libero setup "
            f"{PRO.flag}`."
        )


class _Classes:
    """Which classes of scenes and objects there are, and which of those have models.

    Args:
        pro: Folder of LIBERO-PRO, where its classes count.
    """

    def __init__(self, pro: Traversable | None) -> None:
        official = libero_folder()
        self.scenes = scene_classes(official)
        self.models = object_models(official)
        self.files = {asset.path for asset in manifest()}
        if pro is not None:
            self.models = {**object_models(pro), **self.models}
            self.files |= {asset.path for asset in pro_manifest()}

    def faults(self, problem: ProblemFile) -> Iterator[str]:
        """Yield what of ``problem`` there is not."""
        if problem.scene not in self.scenes:
            yield f"scene {problem.scene} is none of LIBERO's, and no package has its files"
        if unknown := sorted(problem.classes - self.models.keys()):
            yield f"objects {', '.join(unknown)} are of no known class"
        known = problem.classes & self.models.keys()
        if bare := sorted(name for name in known if self.models[name] not in self.files):
            yield f"objects {', '.join(bare)} have no models in any package"


class _Files:
    """Reads every file once: most tasks of LIBERO-Plus share theirs."""

    def __init__(self) -> None:
        self._problems: dict[str, ProblemFile | SimulatorError] = {}
        self._starts: dict[str, int] = {}

    def problem(self, task: Task) -> ProblemFile | SimulatorError:
        """Return what the problem file says, or why it says nothing."""
        key = task.bddl.name
        if key not in self._problems:
            try:
                self._problems[key] = task.problem()
            except SimulatorError as error:
                self._problems[key] = error
        return self._problems[key]

    def starts(self, task: Task) -> int:
        """Return how many starts there are."""
        key = task.init_states.name
        if key not in self._starts:
            try:
                self._starts[key] = len(task.states())
            except SimulatorError:
                self._starts[key] = 0
        return self._starts[key]


def _listed(task: Task, classes: _Classes, read: _Files) -> ListedTask:
    problem, starts = read.problem(task), read.starts(task)
    language, faults = "", []
    if isinstance(problem, SimulatorError):
        faults.append(str(problem))
    else:
        language = problem.language
        faults += ["no instruction"] if not language else []
        faults += [*problem.faults, *classes.faults(problem)]
    if not starts:
        faults.append("no starts")
    if task.variant is not None and task.variant.noise:
        faults.append(f"sensor noise of {PLUS.title} is not implemented")
    return ListedTask(task=task, language=language, starts=starts, faults=tuple(faults))


def suite_rows(suite: str, tasks: Sequence[ListedTask]) -> Iterator[tuple[str, ...]]:
    """Yield a row for every axis of a suite."""
    for axis in dict.fromkeys(task.task.axis for task in tasks):
        own = [task for task in tasks if task.task.axis == axis]
        faults = Counter(fault for task in own for fault in task.faults)
        if len(faults) > _FEW:
            faults = Counter(_kind(fault) for task in own for fault in task.faults)
        yield (
            suite,
            axis or "",
            f"{len(own)}",
            f"{sum(not task.faults for task in own)}",
            f"{sum(task.has_own_language for task in own)}",
            _span([task.starts for task in own]),
            "; ".join(f"{count} x {fault}" for fault, count in faults.items()),
        )


def runnable(tasks: Sequence[ListedTask]) -> Iterator[str]:
    """Yield the tasks of every axis that can be run, as ``--tasks`` takes them."""
    for axis in dict.fromkeys(task.task.axis for task in tasks):
        spans: list[list[int]] = []
        for task in tasks:
            number = task.task.task_id
            if task.faults or task.task.axis != axis:
                continue
            if spans and spans[-1][1] == number - 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        if spans:
            told = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
            yield f"{axis or 'all'}: --tasks {told}"


def _kind(fault: str) -> str:
    """Return a fault without the names in it, to be counted."""
    return re.sub(r"(scene|objects|about) \S.*?(?= are| have| is none|, which|$)", r"\1", fault)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def checks(suites: Sequence[str]) -> dict[str, Callable[[], str]]:
    """Return by its name what is looked at before LIBERO runs; each says what it found, or raises.

    Args:
        suites: Whose assets are needed; none named: all files.
    """
    return {
        "versions": _versions,
        "hf-libero": lambda: f"{installed('hf-libero') or 'of another package'} in "
        f"{libero_folder()}",
        "OpenGL": _opengl,
        "assets": partial(_assets, suites),
        **{p.title: partial(_tasks, p) for p in (PRO, PLUS) if p.wheel.is_file()},
    }  # fmt: skip


def _versions() -> str:
    check_versions()
    return (
        f"mujoco {installed('mujoco')} (results are reported with {MUJOCO}), robosuite {ROBOSUITE}"
    )


def _opengl() -> str:
    origin = "asked for by MUJOCO_GL" if os.environ.get("MUJOCO_GL") else "the default"
    backend = choose_backend()
    import_robosuite()
    check_rendering()
    return f"{backend} draws ({origin})"


def _assets(suites: Sequence[str]) -> str:
    folder = assets_folder()
    verdict = verify(folder, needed(suites))
    if verdict.missing:
        raise SimulatorError(f"{folder}: {verdict.summary}; run `dzrobot libero setup`.")
    text = f"{folder}: {verdict.summary}"
    if verdict.altered:
        text += ". Scores obtained with it are not LIBERO scores."
    return text


def _tasks(package: TaskPackage) -> str:
    package.files()
    text = f"{package.requirement} in {package.wheel.parent}"
    if package is not PRO:
        return text
    verdict = verify(assets_folder(), pro_manifest())
    if verdict.missing or verdict.altered:
        raise SimulatorError(f"{verdict.summary}; run `dzrobot libero setup {package.flag}`.")
    return f"{text}; {verdict.summary}"
