"""What an evaluation shows on a page of Weights & Biases, and of Trackio."""

import json
import os
import subprocess
import sys

import pytest

from dzrobot.cli import main
from dzrobot.training.run.loggers import ID_FILE, TRACKIO_FILE

EVAL = ("eval", "--env", "dzrobot/point-v0", "--policy", "hold", "--episodes", "2")
SMALL = ("--max-steps", "3", "--workers", "0", "--videos", "none")


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_without_the_package_nothing_begins(package, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    # Whatever comes later would be refused too, and is not looked at.
    words = [*EVAL, *SMALL, "--output", str(tmp_path / "results"), "--embodiment", "nobody"]
    assert main([*words, f"--{package}", "mine"]) == 2
    needed = f"--{package} needs {package}: pip install -e '.[{package}]'"
    assert needed in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_results_are_logged_to_one_of_both(tmp_path, capsys):
    words = [*EVAL, *SMALL, "--output", str(tmp_path / "results")]
    assert main([*words, "--wandb", "mine", "--trackio", "mine"]) == 2
    assert "leave one out" in capsys.readouterr().err


def pieces(data):
    """Yield the records of a page's file: blocks of 32 KiB, each record with 7 bytes before it."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if at % 2**15 > 2**15 - 7:
            at += 2**15 - at % 2**15
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        # Whole, or the last part of one.
        if kind in (1, 4):
            yield record
            record = b""


def written(file):
    """Return the last value of every number that an offline page keeps."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for data in pieces(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


@pytest.mark.long
def test_an_evaluation_is_shown_and_gone_on_with(monkeypatch, tmp_path, capfd):
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = [*EVAL, *SMALL, "--output", str(tmp_path / "results"), "--wandb", "mine"]
    assert main(words) == 0, capfd.readouterr()
    page = (tmp_path / "results" / ID_FILE).read_text()
    assert main(words) == 0, capfd.readouterr()
    shown = sorted((tmp_path / "results/wandb").glob(f"offline-run-*-{page}/run-{page}.wandb"))
    assert shown
    summary = json.loads((tmp_path / "results/summary.json").read_text())
    assert summary["results"]["total"][0]["rate"] == 0.0
    assert written(shown[0])["eval/success"] == 0.0


@pytest.mark.long
def test_trackio_keeps_an_evaluation_and_goes_on_with_it(monkeypatch, tmp_path, capfd):
    """Trackio reads its folder when it is imported, so it is asked in processes of their own."""
    pytest.importorskip("trackio", reason="trackio is an extra")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    words = [*EVAL, *SMALL, "--output", str(tmp_path / "results"), "--trackio", "mine"]
    for _ in range(2):
        command = [sys.executable, "-m", "dzrobot", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Trackio" not in done.stdout
    name = f"results-{(tmp_path / 'results' / TRACKIO_FILE).read_text()}"
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; "
        "print(json.dumps([[r['name'] for r in s.get_run_records('mine')], "
        f"s.get_logs('mine', {name!r})], default=str))"
    )
    read = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    runs, lines = json.loads(read.stdout.splitlines()[-1])
    assert runs == [name]
    assert lines[-1]["eval/success"] == 0.0
