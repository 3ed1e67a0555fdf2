"""A run that one can trust: nothing is overwritten, nothing lost, and all of it is written down."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import train_worker
import train_worlds
import yaml

from dzrobot.cli import main
from dzrobot.errors import ConfigError
from dzrobot.process import is_first_to_report
from dzrobot.training.recipes.read import load_recipe
from dzrobot.training.run.launch import LOG_FILE, run_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def written(train_root, tmp_path):
    """Return a recipe whose run goes to a folder of the test's own."""
    path = tmp_path / "recipe.yaml"
    values = train_worlds.recipe(train_root, runner__output_dir=tmp_path / "run")
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_a_second_run_does_not_overwrite_the_first(written, tmp_path, left):
    load_recipe(str(written), [], 1)
    (tmp_path / "run" / left).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run .*resume_dir=auto"):
        load_recipe(str(written), [], 1)
    load_recipe(str(written), ["runner.resume_dir=auto"], 1)
    load_recipe(str(written), [f"runner.output_dir={tmp_path / 'other'}"], 1)


@pytest.mark.parametrize(
    ("override", "package"),
    [("logging.wandb_project=mine", "wandb"), ("data.video_backend=torchcodec", "torchcodec")],
)
def test_an_optional_package_is_looked_for_before_anything_is_loaded(
    written, monkeypatch, override, package
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"package {package}, which is not installed.*pip"):
        load_recipe(str(written), [override], 1)


def test_a_fault_of_many_ranks_is_said_once(monkeypatch, tmp_path):
    """Whoever fails first speaks, whatever its rank: torchrun ends the others at once."""
    said = []
    for rank in (3, 0, 1):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        said += [(rank, text) for text in ("one fault", "another") if is_first_to_report(text)]
    assert said == [(3, "one fault"), (3, "another")]


def test_what_is_logged_is_kept_in_the_run_folder(tmp_path, solo):
    logger = logging.getLogger("dzrobot.training.somewhere")
    for text in ("first", "second"):
        with run_folder(tmp_path / "run", solo):
            logger.info("%s line", text)
    logger.info("not of a run")
    lines = (tmp_path / "run" / LOG_FILE).read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["first line", "second line"]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0])


def test_two_runs_do_not_share_a_folder(tmp_path, solo):
    """As a scheduler has it that starts a job again while the old one lives."""
    folder = tmp_path / "run"
    refused = pytest.raises(ConfigError, match="another process trains in")
    with run_folder(folder, solo), refused, run_folder(folder, solo):
        pass
    with run_folder(folder, solo):
        assert (folder / LOG_FILE).exists()


def test_ctrl_c_saves_as_sigterm_does_and_says_how_to_go_on(train_root, solo, tmp_path, caplog):
    run = train_worker.trainer(
        solo, train_root, runner__output_dir=tmp_path / "run", runner__max_steps=8
    )
    step = run.train_step

    def interrupted(batches):
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(batches)

    run.train_step = interrupted
    before = signal.getsignal(signal.SIGINT)
    with caplog.at_level(logging.INFO, "dzrobot"):
        assert run.run() is False
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "run/checkpoints/step_00000002").is_dir()
    assert "saved at step 2 of 8; runner.resume_dir=auto" in caplog.text
    said = next(line for line in caplog.messages if line.startswith("first batch"))
    assert re.search(r"images image \(1, \d+, .*uint8 .*state .* real.*action .* real", said)
    assert said.startswith("first batch: 1 of libero_sim; ")
    shown = re.search(r"text 1 x (\d+) tokens, (\d+)% real \((\d+) to (\d+)\)", said)
    length, share, least, most = map(int, shown.groups())
    assert 0 < least == most < length
    assert share == round(100 * least / length)


def test_fields_and_recipes_are_listed(capsys):
    assert main(["train", "--fields"]) == 0
    assert "runner.output_dir  (Path; default: needed)" in capsys.readouterr().out
    assert main(["train", "--list-recipes"]) == 0
    assert "libero_sft_dreamzero_5b\n    LIBERO" in capsys.readouterr().out
    assert main(["train"]) == 2
    assert "--list-recipes" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config-name", "--config-path", "--train-backend"])
def test_options_of_other_trainers_are_answered(capsys, option):
    assert main(["train", option, "x"]) == 2
    error = capsys.readouterr().err
    assert f"no option '{option}'" in error
    assert "Did you mean" not in error


def test_several_processes_say_a_fault_once_and_nothing_else(written, train_environment, tmp_path):
    command = [sys.executable, "-m", "dzrobot", "train", "--processes", "2", str(written)]
    done = subprocess.run(
        [*command, "runner.max_steps=0"], cwd=tmp_path, env=train_environment, timeout=240,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("runner.max_steps: got 0") == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 10, done.stderr
