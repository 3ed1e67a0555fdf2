"""LIBERO's problem files, read as LIBERO reads them, without importing it.

And the same task with another object of its scene asked for: the instruction, and a goal for it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dzrobot.envs.libero.goal_progress import JOINT_RANGES, PLACED
from dzrobot.errors import SimulatorError

PREDICATES: Mapping[str, int] = {**dict.fromkeys(PLACED, 2), **dict.fromkeys(JOINT_RANGES, 1)}
"""What a goal may ask for, and of how many things."""

_SURFACES = frozenset(
    {"table", "floor", "kitchen_table", "living_room_table", "study_table", "coffee_table"}
)
"""Fixtures that are part of the scene, and no objects of a class."""


@dataclass(frozen=True, kw_only=True)
class ProblemFile:
    """What a problem file says. As LIBERO has it, all of it is in lower case."""

    scene: str
    """Class of the scene."""

    language: str
    """The instruction."""

    classes: frozenset[str]
    """Classes of all objects and fixtures."""

    objects: Mapping[str, str]
    """Class of every object by its name; fixtures are not among them."""

    goal: tuple[tuple[str, ...], ...]
    """Predicates that have to hold together, each with the names it is about."""

    faults: tuple[str, ...]
    """Why the goal cannot be judged; empty where it can."""


def read_problem(text: str) -> ProblemFile:
    """Return what a problem file says.

    Raises:
        SimulatorError: it is not a problem file.
    """
    groups = {group[0]: group[1:] for group in _groups(text) if group and isinstance(group[0], str)}
    lists = {key: [word for word in groups.get(key, ()) if isinstance(word, str)] for key in _LISTS}
    if not lists["problem"] or not lists[":objects"]:
        raise SimulatorError("the problem file names no problem, or no objects")
    objects, fixtures = _declared(lists[":objects"]), _declared(lists[":fixtures"])
    names = {*objects, *fixtures, *_regions(groups.get(":regions", ()))}
    goal, faults = _goal(groups.get(":goal", ()))
    return ProblemFile(
        scene=lists["problem"][-1],
        language=" ".join(lists[":language"]),
        classes=frozenset({*objects.values(), *fixtures.values()} - _SURFACES),
        objects=objects,
        goal=goal,
        faults=(*faults, *_goal_faults(goal, names)),
    )


_LISTS = ("problem", ":language", ":objects", ":fixtures")


def _groups(text: str) -> list[list[Any]]:
    """Return the nested lists of words inside ``(define ...)``."""
    words = re.findall(r"[()]|[^\s()]+", re.sub(r";.*$", "", text, flags=re.MULTILINE).lower())
    stack: list[list[Any]] = [[]]
    for word in words:
        if word == "(":
            stack.append([])
        elif word != ")":
            stack[-1].append(word)
        elif len(stack) == 1:
            raise SimulatorError("the problem file closes a parenthesis that is not open")
        else:
            inner = stack.pop()
            stack[-1].append(inner)
    whole = stack[0][0] if len(stack) == 1 and len(stack[0]) == 1 else None
    if not isinstance(whole, list) or whole[:1] != ["define"]:
        raise SimulatorError(
            "the problem file is not a single (define ...), or a parenthesis is not closed"
        )
    return [group for group in whole[1:] if isinstance(group, list)]


def _declared(words: list[str]) -> dict[str, str]:
    """Return the class of every name in ``a b - class c - other``."""
    found: dict[str, str] = {}
    names: list[str] = []
    i = 0
    while i < len(words):
        if words[i] == "-" and i + 1 < len(words):
            found |= dict.fromkeys(names, words[i + 1])
            names, i = [], i + 1
        else:
            names.append(words[i])
        i += 1
    return found | dict.fromkeys(names, "object")


def _regions(groups: Any) -> Iterator[str]:
    """Yield every region as goals name it: by what it is a part of, then by its own name."""
    for region in groups:
        targets = [part[1] for part in region[1:] if part[:1] == [":target"] and len(part) == 2]
        yield from (f"{target}_{region[0]}" for target in targets)


def _goal(groups: Any) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    group = groups[0] if len(groups) == 1 and isinstance(groups[0], list) else None
    if not group:
        return (), ("no goal",)
    parts = group[1:] if group[0] == "and" else [group]
    plain = all(isinstance(part, list) and all(map(_is_word, part)) for part in parts)
    if not parts or not plain:
        return (), ("goal does not parse: it is not a list of predicates",)
    return tuple(tuple(part) for part in parts), ()


def _is_word(part: object) -> bool:
    return isinstance(part, str)


def _goal_faults(goal: tuple[tuple[str, ...], ...], names: set[str]) -> Iterator[str]:
    for part in goal:
        said = " ".join(part)
        if not part or PREDICATES.get(part[0]) != len(part) - 1:
            yield f"goal does not parse: ({said}) is none of LIBERO's predicates"
        elif unknown := [name for name in part[1:] if name not in names]:
            yield f"goal is about {', '.join(unknown)}, which the scene does not have"


@dataclass(frozen=True, kw_only=True)
class AskedGoal:
    """An instruction and what it asks for."""

    language: str
    predicate: tuple[str, ...]
    """As LIBERO judges it, such as ``("in", "milk_1", "basket_1_contain_region")``."""


def asked_goals(problem: ProblemFile, language: str) -> tuple[AskedGoal, ...]:
    """Return the task's own goal, then the same for every other object of its scene.

    Empty where the task does not put a single object, which the instruction names, somewhere.
    Objects of which the scene has several are left out: no instruction could tell them apart.

    Args:
        problem: Of the task.
        language: The instruction.
    """
    if len(problem.goal) != 1 or problem.goal[0][0] not in PLACED:
        return ()
    kind, own, place = problem.goal[0]
    words = _words(problem.objects.get(own, ""))
    if not words or language.lower().count(words) != 1:
        return ()
    at = language.lower().index(words)
    counts = Counter(problem.objects.values())
    others = [
        name
        for name, of_class in problem.objects.items()
        # The place is a part of an object: basket_1_contain_region.
        if name != own and counts[of_class] == 1 and name != place
        and not place.startswith(f"{name}_")
    ]  # fmt: skip
    return tuple(
        AskedGoal(
            language=language[:at] + _words(problem.objects[name]) + language[at + len(words) :],
            predicate=(kind, name, place),
        )
        for name in (own, *others)
    )


def another_goal(goals: Sequence[AskedGoal], level: int, seed: int) -> AskedGoal:
    """Return one of ``goals`` after the first: the ``level``-th from one that ``seed`` draws.

    So the levels of one seed ask for different objects, as far as there are so many.
    """
    others = goals[1:]
    drawn = int(np.random.default_rng(seed).integers(len(others)))
    return others[(drawn + level) % len(others)]


def _words(of_class: str) -> str:
    return of_class.replace("_", " ")
