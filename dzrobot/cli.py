"""``dzrobot COMMAND ...``: finds the command, runs it, and puts errors into one message."""

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from dzrobot import __version__
from dzrobot.commands import say_next
from dzrobot.documents import shorten
from dzrobot.errors import DzrobotError, StoppedError, printable, suggest
from dzrobot.importing import current_folder_importable, raised_at
from dzrobot.process import (
    Terminated,
    end_with_launcher,
    exit_code,
    is_first_to_report,
    log_escaped,
)

GROUPS = {
    "evaluate": {
        "eval": ("eval", "evaluate a policy in an environment"),
        "sweep": ("sweep", "find the best of several checkpoints, measured on other episodes"),
        "curve": ("curve", "what fewer steps and other options cost in success, save in time"),
        "compare": ("compare", "compare evaluations of the same episodes"),
        "report": ("report", "write evaluations as a page with every episode's video"),
        "merge": ("merge", "put shards of one evaluation together"),
        "bench": ("bench", "measure the speed of training, acting and simulating"),
        "libero": ("libero", "set LIBERO up and check its assets"),
        "example": ("example", "list the example programs, or write one into a file to change"),
    },
    "data": {
        "collect": ("collect", "record episodes of a policy in a simulator as a dataset"),
        "import-hdf5": ("import_hdf5", "write LIBERO's demonstrations as a LeRobot dataset"),
        "init-robot": ("init_robot", "draft the file of your own robot from a dataset of it"),
        "inspect-data": ("inspect_data", "show what a dataset holds"),
        "stats": ("stats", "measure normalization statistics of datasets"),
        "relabel": ("relabel", "mark recorded episodes as failures or successes, or drop some"),
        "credit": ("credit", "show what is learned from each row of a policy's runs"),
        "consolidate": ("consolidate", "pack the files of a recording"),
    },
    "train": {
        "train": ("train", "fine-tune a checkpoint"),
        "improve": ("improve", "improve a policy from its own runs, in rounds"),
        "plan": ("plan", "check a training run and estimate what it needs"),
        "plot": ("plot", "draw losses and success of runs against the training step"),
        "init": ("init", "write a small untrained checkpoint to train from"),
        "import-rlinf": ("import_rlinf", "convert a recipe of RLinf's"),
    },
    "checkpoints": {
        "inspect": ("inspect", "show what a checkpoint holds"),
        "download": ("download", "fetch a published checkpoint or dataset"),
        "convert": ("convert", "write a checkpoint in another layout"),
        "export": ("export", "write a checkpoint of a training run as a policy's"),
        "push": ("push", "upload an exported checkpoint or a dataset to the hub"),
    },
    "serve": {
        "serve": ("serve", "let robots and simulators elsewhere use a policy of this machine"),
        "serve-env": ("serve_env", "let evaluations elsewhere use an environment of this machine"),
    },
    "arm": {
        "doctor": ("doctor", "check a workcell, a dataset, or a teleoperation device"),
        "init-workcell": ("init_workcell", "write a workcell file, taught on the arm"),
        "record": ("record", "record demonstrations on the robot"),
        "replay": ("replay", "replay recorded actions"),
        "acknowledge": ("acknowledge", "let a stopped arm move again"),
        "emulate": ("emulate", "start an emulated robot and cameras"),
    },
}
"""Job -> commands: name -> (module below ``dzrobot.commands``, what it does)."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
"""Every command; its module is imported only when it is chosen."""

INTERRUPTED = exit_code(signal.SIGINT)
TERMINATED = exit_code(signal.SIGTERM)

FAULT = 2
"""Exit code of an error that is the user's to fix."""

_LONGEST_LINE = 4000
"""Characters; a message may list many names in one line."""

STOPPED = 3
"""Exit code of a run that ended because the arm was stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        _complete(available())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        # Not at the top: every command imports this module.
        from dzrobot.code_identity import package_code

        print(f"dzrobot {package_code().text}")
        return 0
    known = available()
    name, *rest = arguments
    for word in arguments:
        # Bytes of the shell that are not UTF-8 arrive as half characters, which nothing can print.
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            encoding = sys.getfilesystemencoding()
            advice = "type it again" if encoding == "utf-8" else "set LC_ALL=C.UTF-8"
            print(f"dzrobot: {word!a} is not {encoding.upper()} text; {advice}", file=sys.stderr)
            return FAULT
    if name not in known:
        print(
            f"dzrobot: unknown command {name!r}.{suggest(name, known)} "
            f"Known: {', '.join(known)}. `dzrobot --help` explains them.",
            file=sys.stderr,
        )
        return FAULT
    return guarded(f"dzrobot {name}", rest, known[name])


def available() -> dict[str, str]:
    """Return the commands, each with the full name of its module."""
    return {name: f"dzrobot.commands.{module}" for name, (module, _) in COMMANDS.items()}


def guarded(program: str, argv: Sequence[str], module: str) -> int:
    """Run the command in ``module``; an error that is the user's becomes one message and code 2.

    Processes share out a machine's cores, so each computes in one thread unless the user set
    ``OMP_NUM_THREADS``. A small network is faster so, and its last bits do not depend on the cores.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # As soon as possible: a rank that has not met the others yet waits for a dead launcher.
    end_with_launcher()
    try:
        # What a user writes as module:name, and what that imports, may lie in the current folder.
        with current_folder_importable():
            with _loading(program):
                command = importlib.import_module(module)
            return _run(program, argv, command)
    except DzrobotError as error:
        _report(f"{program}: {error}")
        return STOPPED if isinstance(error, StoppedError) else FAULT
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        _report(
            f"{program}: the package {error.name!r} is not installed, which {raised_at(error)} "
            "imports: install it with pip, into the environment of this Python"
        )
        return FAULT
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does: there is nothing to report.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except OSError as error:
        # No room, no permission, a folder in the place of a file, a name too long.
        place = f"{shorten(str(error.filename), 200)}: " if error.filename else ""
        _report(f"{program}: {place}{error.strerror or error}")
        return FAULT
    except SystemExit as stop:
        # No command of ours ends in this way; a script without an `if __name__` guard does, when
        # it is imported.
        _report(
            f"{program}: code of yours called sys.exit({'' if stop.code is None else stop.code!r}) "
            f"({raised_at(stop)}), which would end the command; raise an error there instead"
        )
        return FAULT
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        _report(f"{program}: {'terminated' if terminated else 'interrupted'}")
        return TERMINATED if terminated else INTERRUPTED


@contextlib.contextmanager
def _loading(program: str) -> Iterator[None]:
    """Say at a terminal that a command is being loaded: seconds on a busy machine."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    # Not at the top: a log needs none of it.
    from dzrobot.progress import waiting

    with waiting(f"loading {program}"):
        yield


def _report(message: str) -> None:
    """Print ``message`` to stderr; of the processes that torchrun started, one does."""
    if not is_first_to_report(message):
        return
    lines = [printable(line, _LONGEST_LINE) for line in message.split("\n")]
    try:
        print("\n".join(lines), file=sys.stderr, flush=True)
    except OSError:
        # The terminal was closed; what is left to be written is lost, without another error.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(program: str, argv: Sequence[str], command: ModuleType) -> int:
    parser, captured = build_parser(program, command), io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            # argparse of Python 3.11 takes the "--" of `--seed=--` for its own and leaves a list.
            if bare := next((word for word in argv if word.endswith("=--")), None):
                parser.error(f"{bare!r}: -- is not a value")
            # Intermixed: values may follow options, as in `plan RECIPE --gpus 8 max_steps=10`.
            nested = parser._subparsers is not None
            parse = parser.parse_known_args if nested else parser.parse_known_intermixed_args
            arguments, unknown = parse(argv)
            if unknown:
                _refuse(parser, unknown, vars(command).get("INSTEAD", {}))
    except SystemExit as stop:
        # argparse has explained the error; the caller of main() gets an exit code.
        if message := captured.getvalue().rstrip("\n"):
            _report(message)
        return int(stop.code or 0)
    sys.stderr.write(captured.getvalue())
    log_escaped()
    code: int = command.run(arguments)
    if code == 0:
        say_next(command.NEXT, arguments)
    return code


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        value = action.default
        plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        shown = plain and value not in ("", argparse.SUPPRESS) and bool(action.option_strings)
        if not action.help or not shown or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


class _ShowHelp(argparse.Action):
    """Prints the help and ends; options outside ``const``, if that is given, are left out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        if self.const is not None:
            for action in parser._actions:
                if action.option_strings and not set(self.const) & {*action.option_strings}:
                    action.help = argparse.SUPPRESS
            parser.epilog = "--help-all shows every option."
            # Intermixed parsing has written down the whole usage beforehand.
            parser.usage = None
        parser.print_help()
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Takes ``--help-all`` wherever it takes ``--help``, in subcommands too."""

    def __init__(self, *, common: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options, "add_help": False})
        shown = None if common is None else (*common, "--help", "--help-all")
        what = "this help message and exit" if common is None else "the common options"
        self.add_argument(
            "-h", "--help", nargs=0, action=_ShowHelp, const=shown, help=f"show {what}"
        )
        self.add_argument(
            "--help-all", nargs=0, action=_ShowHelp,
            help=argparse.SUPPRESS if common is None else "show every option",
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """End; what is missing is explained as in the help, without the whole usage before it."""
        start, _, names = message.partition(_REQUIRED)
        if start or not names:
            super().error(message)
        lines = [f"{self.prog}: {_REQUIRED.strip()}"]
        for action in self._actions:
            name = "/".join(action.option_strings) or str(action.metavar or action.dest)
            if name in names.split(", "):
                about = (
                    f"one of {', '.join(action.choices)}" if action.choices else action.help or ""
                )
                lines.append(f"  {name}: {about.partition(' (default')[0]}")
        self.exit(FAULT, "\n".join([*lines, "See --help"]) + "\n")


_REQUIRED = "the following arguments are required: "
"""How argparse begins to say that something was left out."""


def build_parser(program: str, command: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of one command's module, which says what the command does.

    With ``COMMON`` in the module, ``--help`` shows those options alone and ``--help-all`` the rest.
    """
    parser = _Parser(prog=program, allow_abbrev=False, common=vars(command).get("COMMON"))
    command.add_arguments(parser)
    if parser.description is None:
        summary = str(command.SUMMARY)
        parser.description = f"{summary[:1].upper()}{summary[1:]}."
    return parser


def _complete(known: Mapping[str, str]) -> None:
    """Answer a shell that asks how its line may continue, and end."""
    import argcomplete

    whole = argparse.ArgumentParser(prog="dzrobot")
    commands = whole.add_subparsers()
    begun = os.environ.get("COMP_LINE", "").split()[1:2]
    for name, module in known.items():
        # One command's options: to import all of them would take seconds.
        inner = commands.add_parser(name)
        if begun == [name]:
            importlib.import_module(module).add_arguments(inner)
    argcomplete.autocomplete(whole)


def _refuse(
    parser: argparse.ArgumentParser, unknown: Sequence[str], instead: Mapping[str, str]
) -> NoReturn:
    name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    if name in instead:
        parser.error(f"no option {name!r}: {instead[name]}")
    parser.error(f"unknown option {name!r}.{suggest(name, _options(parser))} See --help")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = []
    for job, group in GROUPS.items():
        lines += ["", f"{job}:"]
        lines += [f"  {name:<{width}}  {group[name][1]}" for name in group]
    return "\n".join(
        [
            f"dzrobot {__version__}: DreamZero policies on LIBERO and on a real Franka",
            "",
            "usage: dzrobot COMMAND [options]     (dzrobot COMMAND --help shows the options)",
            *lines,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
