"""The runner of the tests: in processes they have the outcomes that they have in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OUTCOMES = """
import os, warnings, pytest

@pytest.fixture(scope="module")
def made():
    with open("made", "a") as file:
        file.write(f"{__name__} {os.getpid()}\\n")
    return os.getpid()

def test_passes(made):
    assert made == os.getpid()
    warnings.warn("worn out")

def test_fails(made, capfd):
    os.system("echo heard")
    assert capfd.readouterr().out == "heard\\n"
    print("said before", flush=True)
    assert made != os.getpid(), "the same process"

def test_skips():
    pytest.skip("for a reason")

class TestClass:
    @pytest.mark.parametrize("number", range(3))
    def test_again(self, made, number):
        assert made == os.getpid()
"""

DEATH = """
import os

def test_before():
    pass

def test_dies():
    os._exit(7)

def test_after():
    pass
"""

LOOKS = """
import os, sys

changed = []

def look(connection):
    print("heard", flush=True)
    connection.send((os.environ["TOLD"], changed, "shlex" in sys.modules))
    sys.exit(3)
"""

SPAWNS = """
import multiprocessing, shlex, pytest
import looks

@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.copies), False])
def test_spawns(copied, monkeypatch, capfd):
    monkeypatch.setenv("TOLD", "now")
    looks.changed.append("by a test")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=looks.look, args=(theirs,))
    process.start()
    assert ours.recv() == ("now", [], copied)
    process.join()
    assert process.exitcode == 3
    assert capfd.readouterr().out == "heard\\n"
    process = context.Process(target=looks.look, args=(None,))
    process.start()
    process.kill()
    process.join()
    assert process.exitcode == -9
"""


def _run(folder: Path, *arguments: str) -> str:
    """Return what a run of the files of ``folder`` prints."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -rA -p forked -p no:cacheprovider\n")
    plain = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    # Starts in half the time.
    plain["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=os.environ | plain,
        text=True,
        capture_output=True,
        timeout=60,
    )
    return done.stdout + done.stderr


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("test_a", "test_b", "test_c"):
        (tmp_path / f"{name}.py").write_text(OUTCOMES)
    return tmp_path


def _outcomes(printed: str) -> list[str]:
    kinds = ("PASSED ", "FAILED ", "SKIPPED ", "ERROR ")
    return sorted(line for line in printed.splitlines() if line.startswith(kinds))


def test_outcomes_are_those_of_one_process(files):
    alone, beside = _run(files), _run(files, "--processes", "2")
    assert _outcomes(beside) == _outcomes(alone)
    assert "3 failed, 12 passed, 3 skipped, 3 warnings" in beside
    assert beside.count("said before") == alone.count("said before") > 0
    assert "UserWarning: worn out" in beside
    made = [line.split() for line in (files / "made").read_text().splitlines()]
    # Once a file in each of the two runs, the second in two other processes.
    assert sorted(name for name, _ in made) == sorted(["test_a", "test_b", "test_c"] * 2)
    assert len({process for _, process in made}) == 3


def test_a_process_that_dies_fails_its_test_and_no_other(files):
    (files / "test_b.py").write_text(DEATH)
    printed = _run(files, "--processes", "2")
    assert (
        "FAILED test_b.py::test_dies - the process of this test ended with exit code 7" in printed
    )
    assert {"PASSED test_b.py::test_before", "PASSED test_b.py::test_after"} <= set(
        _outcomes(printed)
    )
    assert "3 failed, 10 passed, 2 skipped" in printed


def test_the_first_failure_ends_a_run_that_asks_for_it(files):
    (files / "test_0.py").write_text("import time\ndef test_waits(): time.sleep(50)\n")
    assert "stopping after 1 failures" in _run(files, "--processes", "2", "-x")


def test_a_copy_is_a_fresh_interpreter_with_modules(tmp_path):
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "test_spawns.py").write_text(SPAWNS)
    assert "3 passed" in _run(tmp_path, "--processes", "1")
