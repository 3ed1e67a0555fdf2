"""The command line: clean messages, exit codes, nothing imported too early."""

import argparse
import importlib
import io
import logging
import multiprocessing.context
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dzrobot
from dzrobot import cli, importing
from dzrobot.errors import ConfigError
from dzrobot.process import EscapedFormatter, HourlyLimit, log_escaped, searching_here_last


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dzrobot.cli", *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_every_listed_command_has_its_parts(capsys):
    for name in cli.available():
        assert cli.main([name, "--help"]) == 0
        assert f"dzrobot {name}" in capsys.readouterr().out


def test_every_command_shows_all_of_its_options(capsys):
    for name, module in cli.available().items():
        parser = cli.build_parser(f"dzrobot {name}", importlib.import_module(module))
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for words in ([], *([choice] for choices in inner for choice in choices.choices)):
            assert cli.main([name, *words, "--help-all"]) == 0
            shown = capsys.readouterr().out
            of = inner[0].choices[words[0]] if words else parser
            missing = [
                option
                for action in of._actions
                for option in action.option_strings[-1:]
                if action.help is not argparse.SUPPRESS and option not in shown
            ]
            assert missing == [], (name, words)


def test_no_number_or_path_is_read_unchecked():
    """Python's own types take what nobody means: ``²`` raises in int(), nan is a float, '' a path.

    See dzrobot/commands/options/flags.py for those that say what is allowed.
    """
    unchecked = []
    for name, module in cli.available().items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        parsers = [parser]
        while parsers:
            for action in parsers.pop()._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
                elif action.type in (int, float, Path):
                    unchecked.append((name, action.dest))
    assert unchecked == []


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--env=dzrobot/point-v0", "--policy=random", "--output=results"],
        ["record", "--env=dzrobot/point-v0", "--policy=random", "--output=data"],
        ["serve", "nowhere"],
    ],
    ids=lambda words: words[0],
)
def test_a_device_that_is_not_there_is_refused_for_every_policy(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--device=cuda:99"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"dzrobot {words[0]}: device 'cuda:99': ")
    assert "give cpu" in said
    assert not list(tmp_path.iterdir())


def test_version_and_overview(capsys):
    assert cli.main(["--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"dzrobot {dzrobot.__version__}")
    head = subprocess.run(
        ["git", "-C", Path(dzrobot.__file__).parent, "rev-parse", "--short=12", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if head.returncode == 0:
        assert f"(commit {head.stdout.strip()}" in said
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    assert all(f"\n  {name} " in overview for name in cli.available())


def test_unknown_command_is_suggested():
    done = run("inspec")
    assert done.returncode == 2
    assert "Did you mean 'inspect'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_text_that_the_locale_has_not_names_the_locale(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "dzrobot.cli", "report", str(tmp_path / "\u00fcbung")],
        env={**os.environ, **ascii_only}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "is not ASCII text; set LC_ALL=C.UTF-8\n" in done.stderr


def test_unknown_option_is_suggested(capsys):
    assert cli.main(["inspect", "x", "--revison=3"]) == 2
    assert "unknown option '--revison'. Did you mean '--revision'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["collect"], ["--env: Gymnasium id, such as dzrobot/lift-v0",
                       "--output: folder of the dataset"]),
        (["collect", "--env", "dzrobot/lift-v0"], ["--output: folder of the dataset"]),
        (["convert", "there"], ["target: new folder, or new .pt file"]),
        (["libero"], ["action: one of setup, check, list"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_explained_without_the_whole_usage(words, lines, capsys):
    assert cli.main(words) == 2
    head, *body, end = capsys.readouterr().err.splitlines()
    assert head == f"dzrobot {words[0]}: the following arguments are required:"
    assert [line.strip() for line in body] == lines
    assert end == "See --help"


def test_options_may_stand_between_positionals(tmp_path, monkeypatch):
    body = (
        "SUMMARY = 'try options'\nNEXT = 'dzrobot example'\nseen = []\n"
        "def add_arguments(parser):\n"
        "    parser.add_argument('recipe'); parser.add_argument('rest', nargs='*')\n"
        "    parser.add_argument('--gpus', type=int)\n"
        "def run(args): seen.append(args); return 0\n"
    )
    (tmp_path / "b_command.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.guarded("dzrobot y", ["r", "--gpus", "8", "a=1", "b=2"], "b_command") == 0
    [given] = sys.modules.pop("b_command").seen
    assert (given.recipe, given.gpus, given.rest) == ("r", 8, ["a=1", "b=2"])


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (ConfigError("lower it"), 2, "dzrobot x: lower it\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_codes(raised, code, message, tmp_path, monkeypatch, capsys):
    body = f"from dzrobot.errors import ConfigError\ndef run(args): raise {raised!r}\n"
    (tmp_path / "a_command.py").write_text(
        f"SUMMARY = 'fail'\ndef add_arguments(parser): pass\n{body}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.guarded("dzrobot x", [], "a_command") == code
    sys.modules.pop("a_command")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ""),
        (
            ["record", "--env=dzrobot/point-v0", "--policy=nobody", "--output=data"],
            "dzrobot record: no checkpoint at nobody; give a folder, a file, or a Hugging Face id "
            "owner/name\n",
        ),
    ],
    ids=["overview", "a policy that is none"],
)
def test_nothing_heavy_is_imported(words, said, tmp_path):
    program = (
        "import sys; from dzrobot.cli import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'mujoco', 'transformers'} & sys.modules.keys()), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == f"{said}[]\n"


def test_help_of_no_command_imports_torch():
    program = """if True:
        import contextlib, io, sys
        from dzrobot import cli
        for name in cli.COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
                cli.main([name, "--help"])
            heavy = {"torch", "mujoco", "transformers", "tokenizers"} & sys.modules.keys()
            if heavy or not text.getvalue():
                sys.exit(f"{name}: {sorted(heavy)}")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_current_folder_hides_no_module_of_python_or_of_a_package(tmp_path):
    """It is looked in last, so that only what is found nowhere else comes from there."""
    for name in ("difflib", "numpy", "pydantic", "csv"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from here')")
    (tmp_path / "my_policy.py").write_text("Mine = 3\n")
    done = subprocess.run(
        [sys.executable, "-m", "dzrobot", "eval", "--env", "dzrobot/point-v0", "--policy",
         "my_policy:Mine"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(dzrobot.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 2
    assert "taken from here" not in done.stderr
    assert "my_policy:Mine is a int" in done.stderr


def test_a_module_that_is_imported_slowly_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importing, "SLOW_IMPORT_S", 0.05)
    (tmp_path / "slow_one.py").write_text("import time\ntime.sleep(0.5)\n")
    importing.load_module("slow_one", "policy 'slow_one:P'")
    assert "the module 'slow_one' is still being imported" in caplog.text


def test_an_output_stays_where_it_was_named(tmp_path, monkeypatch):
    """Simulators change the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wanders.py").write_text(
        "import os\n"
        "from dzrobot.envs.fakes import PointEnv\n"
        "def make(**words):\n    os.chdir('/')\n    return PointEnv(**words)\n"
    )
    words = ["eval", "--env", "wanders:make", "--policy", "hold", "--episodes", "1", "--workers",
             "0", "--max-steps", "2", "--videos", "none", "--output", "here"]  # fmt: skip
    assert cli.main(words) == 0
    assert (tmp_path / "here" / "records.jsonl").is_file()


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self):
        return True


def test_a_terminal_is_told_that_a_command_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert cli.main(["example"]) == 0
    assert "loading dzrobot example" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert cli.main(["example"]) == 0
    assert "loading" not in sys.stderr.getvalue()


def test_a_package_that_is_missing_is_named_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "lacking_command.py").write_text(
        "SUMMARY = NEXT = ''\ndef add_arguments(parser): pass\n"
        "def run(arguments): import not_installed_here.part\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.guarded("dzrobot x", [], "lacking_command") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the package 'not_installed_here' is not installed" in line
    assert f"{tmp_path / 'lacking_command.py'}:3" in line


def test_a_log_moves_no_cursor():
    record = logging.LogRecord("n", logging.ERROR, "f", 1, "said %s\nand", ("\x1b[2J\x07",), None)
    shown = EscapedFormatter("%(message)s").format(record)
    assert shown == "ERROR said \\x1b[2J\\x07\nand"


def test_a_command_may_give_its_log_another_form(monkeypatch, capsys):
    """`dzrobot train` follows the command line, which has set one up for warnings."""
    monkeypatch.setattr(logging.root, "handlers", [])
    log_escaped()
    log_escaped("%(asctime)s %(message)s", dates="now")
    logger = logging.getLogger("dzrobot.somewhere")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.info("a step")
    logger.warning("careful")
    assert capsys.readouterr().err == "now a step\nnow WARNING careful\n"


def test_a_log_has_so_many_lines_an_hour(capsys):
    now = [0.0]
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(HourlyLimit(5, clock=lambda: now[0]))
    log = logging.getLogger("limited")
    log.addHandler(handler)
    log.propagate = False
    for number in range(100):
        log.warning("client %d: gone", number)
    first = capsys.readouterr().out.splitlines()
    assert first == [*(f"client {n}: gone" for n in range(5)),
                     "more than 5 lines in an hour: the rest is left out"]  # fmt: skip
    now[0] = 3600.0
    log.warning("client 100: gone")
    log.warning("a\nb\nc\nd\ne")
    assert capsys.readouterr().out.splitlines() == [
        "client 100: gone (95 lines left out before)",
        "more than 5 lines in an hour: the rest is left out",
    ]
    log.removeHandler(handler)


def test_a_process_that_is_started_looks_in_the_current_folder_last(tmp_path, monkeypatch):
    """It begins before it has the search path of its parent: Python's own modules are Python's."""
    (tmp_path / "selectors.py").write_text("raise SystemExit('taken from here')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    context = multiprocessing.context.SpawnContext()
    with searching_here_last():
        process = context.Process(target=os.getpid)
        process.start()
    process.join(60)
    assert process.exitcode == 0
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_message_moves_no_cursor_whoever_wrote_it():
    said = ConfigError("a name \x1b[2J\rfrom\ufeff a\xa0file\nand a second line, é")
    assert str(said) == "a name \\x1b[2J\\rfrom\\ufeff a\\xa0file\nand a second line, é"
    assert str(ConfigError()) == ""
