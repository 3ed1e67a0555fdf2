"""The examples run as they stand, from the folder they are in."""

import contextlib
import importlib
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from dzrobot.cli import available, build_parser, main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.bundled import default_checkpoint

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs an example in this process and returns what it printed."""
    monkeypatch.chdir(EXAMPLES)

    def start(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield start
    for name in ("add_a_policy", "add_an_environment", "add_an_embodiment"):
        sys.modules.pop(name, None)
    gym.registry.pop("Reach-v0", None)


def test_the_command_lists_every_example_and_writes_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["example"]) == 0
    listed = capsys.readouterr().out
    for file in EXAMPLES.iterdir():
        if file.is_file():
            (line,) = (line for line in listed.splitlines() if line.startswith(f"{file.name} "))
            assert line.removeprefix(file.name).strip()
    assert main(["example", "add_a_policy.py"]) == 0
    written = (tmp_path / "add_a_policy.py").read_text()
    own = (EXAMPLES / "add_a_policy.py").read_text()
    assert written == own.replace("examples/add_a_policy.py", "add_a_policy.py")
    assert main(["example", "add_a_policy.py"]) == 2
    assert "add_a_policy.py exists: name another file with --output" in capsys.readouterr().err
    assert main(["example", "add_a_polic.py", "--output", "mine.py"]) == 2
    assert "Did you mean 'add_a_policy.py'?" in capsys.readouterr().err
    assert not (tmp_path / "mine.py").exists()


def test_adding_an_embodiment(run):
    said = run("add_an_embodiment.py")
    assert "ur5_tabletop: state 7, action 7, (256, 512) pixels" in said
    assert "a robot put the red cup on the plate The video" in said
    assert "commands: (16, 7)" in said


def test_the_examples_robot_is_found_by_name(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    assert load_embodiment("add_an_embodiment:UR5").tag == "ur5_tabletop"


def test_adding_a_policy(run):
    assert run("add_a_policy.py").count(": success after ") == 3


def test_adding_an_environment(run, tmp_path, capsys):
    assert run("add_an_environment.py").count(": success after ") == 10
    gym.registry.pop("Reach-v0")
    words = ["eval", "--env", "add_an_environment:Reach-v0", "--episodes", "2", "--workers", "0"]
    words += ["--policy", "add_an_environment:Reacher", "--videos", "none"]
    assert main([*words, "--output", str(tmp_path / "results")]) == 0
    assert "2/2" in capsys.readouterr().out


def test_comparing_policies_from_python(run, tmp_path):
    words = ("--episodes", 3, "--output", tmp_path)
    said = run("compare_policies.py", *words)
    assert "hold: 0 of 3 succeeded" in said
    assert "add_a_policy:Approach: 3 of 3 succeeded" in said
    assert "difference +100 points" in said
    # Stopped and started again, nothing is run twice.
    assert run("compare_policies.py", *words).count("of 3\n") == 2


def test_observations_of_ones_own(run):
    said = run("own_observations.py")
    assert "state.state: 8 numbers, float32" in said
    assert "annotation.task: text" in said
    assert said.count("step ") == 10


def test_many_environments(run):
    said = run("many_environments.py", "--steps", 7, "--episode", 3)
    assert "move the point to the red mark: 2 environments" in said
    assert said.count(": over after 3 steps") == 4


@pytest.mark.long
def test_imagining(run, tmp_path):
    run("imagine.py", "--max-steps", 16, "--output", tmp_path / "imagined.webp")
    assert (tmp_path / "imagined.webp").read_bytes()[8:12] == b"WEBP"


def test_the_loop(run):
    said = run("loop.py", "--env", "dzrobot/point-v0", "--max-steps", 9)
    assert "move the point to the red mark: 8 actions are planned at a time" in said
    assert "no success after 9 steps" in said


@pytest.mark.long
def test_fine_tuning_from_python(tmp_path):
    # A process of its own: it ends as torchrun's processes do.
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune.py"), "--steps", "2", "--output", "run"],
        capture_output=True, text=True, cwd=tmp_path, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DZROBOT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the trained policy acted for 8 steps" in done.stdout
    assert (tmp_path / "run" / "export" / "step_00000002" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--curve", "5"),
        ("--suite", "libero_object", "--tasks", "0,3"),
        ("--suite", "libero_spatial"),
        ("--suite", "libero_spatial", "--start", str(default_checkpoint("libero_object"))),
        ("--suite", "arm"),
        ("--suite", "droid"),
    ],
)
def test_every_stage_of_the_tiny_policy_is_a_command_as_it_stands(words, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", *words])
    module = runpy.run_path(str(EXAMPLES / "train_tiny.py"))
    known, names = available(), []
    for stage in module["stages"](module["_arguments"]()):
        if stage.command[1:3] == ("-m", "dzrobot.cli"):
            name, *rest = stage.command[3:]
            parser = build_parser(name, importlib.import_module(known[name]))
            _, unknown = parser.parse_known_intermixed_args(rest)
            assert unknown == [], name
            names.append(name)
    assert "stats" in names
    assert ("init" in names) == ("--start" not in words)
    last = {"--curve": "plot", "libero_object": "compare", "libero_spatial": "compare"}
    assert names[-1] == next((last[word] for word in words if word in last), "eval")


def test_demonstrations_of_libero_start_where_no_evaluation_does(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--suite", "libero_object"])
    module = runpy.run_path(str(EXAMPLES / "train_tiny.py"))
    collected = [
        stage.command
        for stage in module["stages"](module["_arguments"]())
        if "collect" in stage.command
    ]
    seeds = [int(command[command.index("--seed") + 1]) for command in collected]
    assert len(seeds) == 10
    # Far apart, so that no two tasks share a draw, and each may take hundreds of attempts.
    assert min(later - seed for seed, later in itertools.pairwise(seeds)) >= 10_000
    for number, command in enumerate(collected):
        assert {"placement=sampled", "goal=any", f"task_id={number}"} <= set(command)


@pytest.mark.parametrize(
    ("suite", "reads"), [("libero_object", True), ("libero_spatial", True), ("lift", False)]
)
def test_policies_of_libero_have_to_read_their_instruction(suite, reads, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--suite", suite])
    module = runpy.run_path(str(EXAMPLES / "train_tiny.py"))
    commands = {stage.name: stage.command for stage in module["stages"](module["_arguments"]())}
    assert any(word.startswith("data.start_share=") for word in commands["train"]) == reads
    assert ("--history" in commands["results"]) == reads


def test_until_ends_after_a_stage_and_the_times_are_kept(monkeypatch, tmp_path):
    words = ["train_tiny.py", "--output", str(tmp_path), "--until", "second"]
    monkeypatch.setattr(sys, "argv", words)
    module = runpy.run_path(str(EXAMPLES / "train_tiny.py"))
    stage = module["Stage"]
    listed = [
        stage(name, ("touch", str(tmp_path / f"{name}-ran")), tmp_path / name, stamps=True)
        for name in ("first", "second", "third")
    ]
    monkeypatch.setitem(module["main"].__globals__, "stages", lambda _: listed)
    (tmp_path / "first").write_text(listed[0].words)
    # Done with other words, such as fewer demonstrations: it is run again.
    (tmp_path / "second").write_text("fewer")
    assert module["main"]() == 0
    assert sorted(path.name for path in tmp_path.glob("*-ran")) == ["second-ran"]
    (line,) = (tmp_path / "times.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert (kept["stage"], kept["code"]) == ("second", 0)
    assert 0 <= kept["cpu_seconds"] <= kept["seconds"] + 1
    monkeypatch.setattr(sys, "argv", [*words[:-1], "fourth"])
    with pytest.raises(SystemExit, match="the stages are first, second, third"):
        module["main"]()


def test_what_was_made_from_fewer_demonstrations_is_not_used_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--output", str(tmp_path)])
    module = runpy.run_path(str(EXAMPLES / "train_tiny.py"))
    listed = module["stages"](module["_arguments"]())[:4]
    results = {stage.name: stage.result for stage in listed}
    assert list(results) == ["collect", "stats", "init", "train"]
    monkeypatch.setitem(module["main"].__globals__, "stages", lambda _: listed)
    for age, stage in enumerate(listed):
        stage.result.parent.mkdir(parents=True, exist_ok=True)
        stage.result.write_text(stage.words)
        os.utime(stage.result, (1e9 + age, 1e9 + age))
    assert module["main"]() == 0
    for newer, name in (("collect", "stats"), ("stats", "init"), ("init", "train")):
        # All up to this one are as if they had been made again.
        for age, stage in enumerate(listed[: list(results).index(newer) + 1]):
            os.utime(stage.result, (2e9 + age, 2e9 + age))
        assert module["main"]() == 2
        assert f"{name}: {results[name]} is of fewer" in capsys.readouterr().err


# 3: an emulated arm stopped, which alone would start the stage again.
@pytest.mark.parametrize("code", [130, 3, 0])
def test_an_interrupted_stage_tidies_up_and_its_time_is_kept(code, heed_ctrl_c, tmp_path):
    tidied, times = tmp_path / "tidied", tmp_path / "times.jsonl"
    program = f"""
import runpy
module = runpy.run_path({str(EXAMPLES / "train_tiny.py")!r})
stage = module["Stage"]("first", ("sh", "-c", "sleep 0.5; kill -INT $PPID; sleep 0.5; "
                        "touch {tidied}; exit {code}"), None)
module["main"].__globals__["stages"] = lambda _: [stage, stage]
raise SystemExit(module["main"]())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--output", str(tmp_path)], capture_output=True, text=True,
        preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    assert "first ended with 130; the same command resumes" in done.stdout
    assert tidied.exists()
    (line,) = times.read_text().splitlines()
    assert json.loads(line)["code"] == 130


@pytest.mark.parametrize(
    ("codes", "ends", "runs"), [([3, 3, 0], 0, 3), ([3, 2], 2, 2), ([1], 1, 1)]
)
def test_a_stage_goes_on_after_a_stop_of_its_emulated_arm(codes, ends, runs, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train_tiny.py"])
    module = runpy.run_path(str(EXAMPLES / "train_tiny.py"))
    left, count = tmp_path / "codes", tmp_path / "runs"
    left.write_text("".join(f"{code}\n" for code in codes))
    one = f"echo >> {count}; code=$(head -n1 {left}); sed -i 1d {left}; exit $code"
    stage = module["Stage"]("record", ("sh", "-c", one), None)
    assert module["_run"](stage, os.environ) == ends
    assert len(count.read_text()) == runs
