"""Another object of the scene asked for: the instruction, and a goal made for that object."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dzrobot.envs.libero.bddl import ProblemFile
from dzrobot.envs.libero.goal_progress import PLACED


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
