"""``dzrobot improve``: the next step from a policy to a better one."""

import argparse
import shlex
import sys
import time
from importlib import import_module
from typing import NoReturn

from dzrobot.commands.options import flags
from dzrobot.commands.options.evaluation import check_flags, read_request
from dzrobot.documents import read_json
from dzrobot.errors import ConfigError
from dzrobot.files import locked
from dzrobot.process import run_command
from dzrobot.progress import span
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.rollout.evaluation.studies.series import UNPERTURBED
from dzrobot.training.improve.improve_settings import ImproveSettings, settle, write_settings
from dzrobot.training.improve.page import write_rounds
from dzrobot.training.improve.steps import DECIDE, Improvement, ImproveStep, done_file, has_waited
from dzrobot.training.recipes.architecture import source_plans
from dzrobot.training.recipes.read import load_recipe
from dzrobot.training.sft_config import SFTConfig

LOCK_FILE = "improve.lock"

COMMON = (
    "--checkpoint", "--demos", "--recipe", "--env", "--flags", "--record-flags", "--eval-flags",
    "--attempts", "--episodes", "--rounds", "--perturb", "--also", "--all", "--show",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""


def _next(arguments: argparse.Namespace) -> str:
    return "dzrobot report {last}" if arguments.over else "dzrobot improve {folder}"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot improve``."""
    parser.description = (
        "Say what the next step from a policy to a better one is, and do it: evaluate, record, "
        "credit, train, choose a step, test, keep or refuse. The flags are given once, with the "
        "first command; the same command again, or DIR alone, goes on where the folder is."
    )
    parser.add_argument("folder", type=flags.output, metavar="DIR", help="holds all of it")
    overrides = parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="over the recipe, every round",
    )  # fmt: skip
    vars(overrides)["default"] = []
    flags.declare(parser, ImproveSettings)
    parser.add_argument(
        "--all", action="store_true", help="go on until the round is decided, not one step alone"
    )
    parser.add_argument(
        "--show", action="store_true", help="say which step is next, and do nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do the next step; return its exit code, 0 where a person is waited for."""
    folder = arguments.folder
    said = flags.said(arguments, ImproveSettings)
    if arguments.overrides:
        said["overrides"] = tuple(arguments.overrides)
    settings = settle(folder, said)
    improvement = Improvement(folder, settings)
    _check(improvement)
    arguments.over = arguments.last = None
    if arguments.show:
        _say(improvement, improvement.next_step())
        return 0
    write_settings(folder, settings)
    taken = ConfigError(f"another process improves in {folder}: wait until it ends")
    with locked(folder / LOCK_FILE, taken):
        return _go_on(improvement, arguments)


def _go_on(improvement: Improvement, arguments: argparse.Namespace) -> int:
    """Do a step, or all until the round is decided; return the exit code."""
    settings, folder = improvement.settings, improvement.folder
    while (step := improvement.next_step()) is not None:
        _say(improvement, step)
        if step.recording is not None and not has_waited(step, settings.attempts):
            print("waiting for these episodes: then give this command again")
            return 0
        code = _done(improvement, step)
        # What is decided is read once.
        improvement = Improvement(folder, settings)
        print(write_rounds(improvement))
        if code or not arguments.all or step.name == DECIDE:
            break
    else:
        _say(improvement, None)
        code = 0
    arguments.over = improvement.next_step() is None
    arguments.last = improvement.place(improvement.kept(settings.rounds + 1)) / UNPERTURBED
    return code


def _done(improvement: Improvement, step: ImproveStep) -> int:
    """Do a step and note that it is done; return its exit code."""
    if step.name == DECIDE:
        found = improvement.decide(step)
        print(f"round {found.number}: {'kept' if found.kept else 'refused'}, {found.why}")
        return 0
    began = time.monotonic()
    code = 0 if step.recording is not None else run_command(step.words)
    if code == 0:
        step.finish(time.monotonic() - began)
    else:
        print(
            f"{step.name} ended with {code}: see above; this command goes on from here",
            file=sys.stderr,
        )
    return code


def _say(improvement: Improvement, step: ImproveStep | None) -> None:
    """Say which step is next, and how long it took before."""
    if step is None:
        print(f"there is no further step: {improvement.why_over}")
        return
    names = improvement.names(step.round)
    where = "before round 1" if step.round == 0 else f"round {step.round}"
    line = f"{where}, step {names.index(step.name) + 1} of {len(names)}: {step.about}"
    if (before := _took(improvement, step)) is not None:
        line += f" (took {span(before)} before)"
    print(line)
    if step.words:
        print(f"  dzrobot {shlex.join(step.words)}", flush=True)


def _took(improvement: Improvement, step: ImproveStep) -> float | None:
    """Return the seconds that the step of this name took in an earlier round; None: not known."""
    for number in range(step.round - 1, -1, -1):
        mark = done_file(improvement.place(number), step.name)
        if mark.is_file() and mark != step.result:
            seconds = read_json(mark, dict[str, object], ConfigError).get("seconds")
            return float(seconds) if isinstance(seconds, int | float) else None
    return None


def _check(improvement: Improvement) -> None:
    """Refuse now what would otherwise be refused after hours of recording.

    Raises:
        DzrobotError: what says so is named.
    """
    settings = improvement.settings
    if not settings.statistics.is_file():
        raise ConfigError(
            f"--checkpoint {settings.checkpoint}: there is no {settings.statistics}; give a folder "
            "of this machine that holds a checkpoint with its statistics, such as "
            "`dzrobot download` or `dzrobot export` writes"
        )
    overrides = improvement.recipe_words(0, 0)
    _check_anchor(settings, load_recipe(settings.recipe, overrides, settings.processes))
    for words in improvement.commands():
        parsed = _parsed(words)
        if words[0] == "eval":
            check_flags(parsed)
            read_request(parsed)


def _check_anchor(settings: ImproveSettings, config: SFTConfig) -> None:
    """Refuse demonstrations that no run of the checkpoint can be trained beside."""
    robot = source_plans(config)[0].embodiment
    if robot.action_frame is None:
        return
    # They import torch, for which `--help` does not wait.
    from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
    from dzrobot.policies.dreamzero.parts import as_trained
    from dzrobot.training.run.opening import recorded_anchor

    demos = [DatasetCatalog.open(path) for path in settings.demos]
    recorded = recorded_anchor(demos, robot, config.data.action_anchor)
    acts = as_trained(open_checkpoint(settings.checkpoint), robot).action_anchor
    if acts not in (None, recorded):
        raise ConfigError(
            f"--demos measure actions from {recorded}, --checkpoint acts from {acts}, and so would "
            "its runs, which are trained on together: give demonstrations of its anchor, or a "
            "checkpoint that was trained on these"
        )


class _Checked(argparse.ArgumentParser):
    """Explains what a command would refuse without ending this one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog} of a round would be refused: {message}")


def _parsed(words: tuple[str, ...]) -> argparse.Namespace:
    parser = _Checked(prog=f"dzrobot {words[0]}", allow_abbrev=False, add_help=False)
    import_module(f"dzrobot.commands.{words[0]}").add_arguments(parser)
    return parser.parse_args(words[1:])
