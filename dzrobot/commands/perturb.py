"""``dzrobot eval --perturb``: what is left of a score when the episodes become harder."""

import argparse
from typing import Any

from rich.console import Console

from dzrobot.commands.candidates import One
from dzrobot.commands.compare import show_comparison
from dzrobot.commands.variants import Variant
from dzrobot.errors import ConfigError
from dzrobot.rollout.evaluation.comparison import compare, read_results
from dzrobot.rollout.perturbation import Perturbation

UNPERTURBED = "unperturbed"
"""Folder of the arm that is compared with."""


def add_perturbation(group: Any) -> None:
    """Declare ``--perturb``."""
    group.add_argument(
        "--perturb", action="append", default=[], metavar="AXIS[:LEVEL]",
        help="make the same episodes harder, beside unperturbed ones, and compare the pairs; "
        "axes: camera, light, texture, robot_init, language, noise, layout; levels 1 to 5 "
        "(default: 3); may be repeated",
    )  # fmt: skip


def evaluate_perturbed(
    console: Console,
    arguments: argparse.Namespace,
    one: One,
) -> int:
    """Evaluate the same episodes unperturbed and perturbed; print the pairs; return the exit code.

    Args:
        console: Where to.
        arguments: Those of `dzrobot eval`.
        one: Runs one evaluation; returns what it found, its folder and the title of its table.

    Raises:
        ConfigError: a perturbation is none or given twice, or there is no folder for the arms.
    """
    asked = [Perturbation.read(text) for text in arguments.perturb]
    if len(set(asked)) < len(asked):
        raise ConfigError("--perturb names one axis and level twice; keep one")
    if arguments.output is None:
        raise ConfigError("--perturb writes several folders: say below which with --output DIR")
    folders, complete = [], True
    for perturbation in (None, *asked):
        text = None if perturbation is None else perturbation.text
        name = UNPERTURBED if text is None else text.replace(":", "-")
        console.print(name, markup=False)
        summary, folder, _ = one(Variant(output=arguments.output / name, perturbation=text))
        folders.append(folder)
        complete = complete and summary.complete
    found = compare([read_results(folder) for folder in folders], any_perturbation=True)
    show_comparison(console, found)
    console.print(
        f"`dzrobot report {folders[0]} {folders[-1]}` shows a pair; results in {arguments.output}",
        markup=False,
        soft_wrap=True,
    )
    return 0 if complete else 1
