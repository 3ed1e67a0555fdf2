"""Measurements of speed: what is written, what is compared with what, and what is refused."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import train_worlds
from rich.console import Console

import dzrobot
from dzrobot import cli
from dzrobot.commands import bench
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.rollout.protocol import plan_episodes
from dzrobot.training.bench import pace
from dzrobot.training.bench.acting import _shares, chunk_times, measure_eval, measure_policy
from dzrobot.training.bench.document import (
    EPISODES,
    OPENING,
    PARTS,
    BenchResult,
    BenchSettings,
    Machine,
    Measurement,
    PartResult,
    read_result,
)
from dzrobot.training.bench.episode_cost import (
    EPISODE_PARTS,
    PAGE_PARTS,
    Account,
    FormCost,
    asked_episodes,
)
from dzrobot.training.bench.learning import (
    _of_records,
    asked_recipe,
    beside_films,
    beside_lerobot,
)
from dzrobot.training.bench.processes import (
    other_build,
    own_build,
    paired_ratios,
    run_part,
    unpaired_ratios,
)
from dzrobot.training.bench.stepping import measure_env
from dzrobot.training.bench.worker import MODULES, machine_of
from dzrobot.training.run.initial_weights import open_initial_weights
from dzrobot.training.run.metrics import LogRecord
from dzrobot.training.run.opening import open_datasets

ROOT = Path(__file__).parents[2]
QUICK = BenchSettings(parts=("env",), repeats=3, env="dzrobot/point-v0")


def part(machine=None, **values):
    """Return a result that holds ``values``, milliseconds by name."""
    machine = machine or Machine(
        processor="p", cores=2, system="s", device="cpu", threads=1, python="3.11", torch="2"
    )
    found = [
        Measurement(name=name, unit="ms", values=given, better="less")
        for name, given in values.items()
    ]
    return PartResult(machine=machine, version="1", tree="/", measurements=found)


def test_every_part_is_measured_by_something():
    assert set(MODULES) == set(PARTS)


def test_a_simulator_is_timed_in_both_forms(tmp_path):
    found, notes = measure_env(QUICK, tmp_path)
    by_name = {one.name: one for one in found}
    assert len(by_name["steps, every image"].values) == QUICK.repeats
    assert len(by_name["reset, first"].values) == 1
    assert all(value > 0 for one in found for value in one.values)
    assert ("steps, one image in 8" in by_name) != bool(notes)


@pytest.mark.parametrize("measure", [measure_env, measure_eval])
def test_no_arm_is_moved(tmp_path, measure):
    settings = QUICK.model_copy(update={"env": "dzrobot/Franka-PnP-fake-v0"})
    with pytest.raises(ConfigError, match="a benchmark moves none"):
        measure(settings, tmp_path)


def test_a_window_is_timed_place_by_place_and_the_policy_knows_its_planning_time(train_root):
    policy = DreamZeroPolicy.from_pretrained(
        train_root / "tiny", embodiment=train_worlds.ROBOT, options=PolicyOptions(history="recent")
    )
    times = chunk_times(policy, 2)
    places = sorted(times)
    assert places[0] == 0
    assert len(places) > 1
    assert {len(values) for values in times.values()} == {2}
    # One window came before.
    counted = sum(map(sum, times.values())) / 1000
    assert counted < policy.planning.seconds
    assert policy.sessions == ()


def test_a_device_is_busy_in_a_share_of_the_planning():
    # Two episodes of 10 and 20 s, of which 4 and 5 s are plans; two end at the same moment.
    marks = [(0.0, 1.0), (10.0, 5.0), (10.0, 5.0), (30.0, 10.0)]
    found, notes = _shares(marks, busy=0.5)
    values = {one.name: one.values for one in found}
    assert values["episodes"] == (6.0, 3.0)
    assert values["policy plans"] == (40.0, 25.0)
    assert values["device busy"] == (20.0, 12.5)
    assert notes == []
    found, notes = _shares(marks, busy=None)
    assert [one.name for one in found] == ["episodes", "policy plans"]
    assert "no device beside it" in notes[0]


def test_utilization_is_there_where_the_peak_is_known():
    record = LogRecord(
        step=2, loss=1.0, dynamics_loss=0.5, action_loss=0.5, grad_norm=1.0, lr=0.1,
        samples_per_s=3.0, samples_per_s_per_gpu=3.0, mfu=0.25, utilisation=0.5, data_wait_pct=7.0,
        memory_gib=1.0, skips=0, unreadable=0, seconds=1.0, seconds_per_step=0.5,
    )  # fmt: skip
    values = {one.name: one.values for one in _of_records([record, record])}
    assert values["MFU"] == (25.0, 25.0)
    assert values["executed share of the peak"] == (50.0, 50.0)
    assert values["data wait"] == (7.0, 7.0)
    unknown = replace(record, mfu=None, utilisation=None)
    assert [one.name for one in _of_records([unknown])] == ["training", "data wait"]


def test_a_ratio_of_pairs_has_the_interval_of_pairs():
    base = [{"policy": part(a=(10.0,), b=(1.0,))}, {"policy": part(a=(20.0,), b=(1.0,))}]
    own = [{"policy": part(a=(5.0,), b=(1.1,))}, {"policy": part(a=(10.0,), b=(0.9,))}]
    halved, same = paired_ratios(base, own)
    # Machines may be slower in one round: what counts is the ratio within each.
    assert (halved.ratio, halved.low, halved.high) == pytest.approx((0.5, 0.5, 0.5))
    assert halved.pairs == 2
    assert same.low < 1 < same.high
    assert bench._verdict(halved) == "better"
    assert bench._verdict(same) == "no difference shown"


def test_a_zero_has_no_ratio_and_one_value_no_interval():
    base, own = {"data": part(wait=(0.0,), a=(4.0,))}, {"data": part(wait=(1.0,), a=(2.0,))}
    wait, a = unpaired_ratios(base, own)
    assert (wait.ratio, wait.low) == (None, None)
    assert (a.ratio, a.low) == (pytest.approx(0.5), None)
    assert bench._verdict(wait) == "-"


def test_repeats_of_two_processes_have_welchs_interval():
    base, own = {"env": part(a=(10.0, 11.0, 9.0))}, {"env": part(a=(20.0, 22.0, 18.0))}
    (found,) = unpaired_ratios(base, own)
    assert found.ratio == pytest.approx(2, rel=1e-6)
    # By hand: both logarithms have the variance s2 and three values, so four degrees of freedom.
    logs = [math.log(value / 10) for value in (10.0, 11.0, 9.0)]
    mean = sum(logs) / 3
    error = math.sqrt(2 * sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert math.log(found.high / found.ratio) == pytest.approx(2.776445 * error, rel=1e-5)


SEEN = load_embodiment("libero_mini")
"""Plans of 8 actions, of which 3 are executed."""


def rows_of(ms, rate=20.0, trained=0):
    """Return what ways that take so long come to, and what is advised."""
    robot = pace.PacedRobot(embodiment=SEEN, rate=rate, trained_delay=trained)
    rows = [
        pace.pace_of(way, taken / 1000, robot) for way, taken in zip(pace.WAYS, ms, strict=True)
    ]
    return rows, pace.advice(rows, robot)


def test_what_keeps_up_with_a_robot_follows_from_steps_and_the_length_of_plans():
    (first, second, third, fourth, fifth, sixth), text = rows_of((10, 50, 51, 200, 201, 1000))
    assert [row.delay for row in (first, second, third, fourth, fifth, sixth)] == [
        1,
        1,
        2,
        4,
        5,
        20,
    ]
    # d to H - d; three, as the robot does, where that is possible.
    assert first.moves == second.moves == (1, 7, 3)
    assert third.moves == (2, 6, 3)
    assert fourth.moves == (4, 4, 4)
    assert fifth.moves is sixth.moves is None
    # It waits after three executed actions.
    assert first.still == pytest.approx(1 / 4)
    assert sixth.still == pytest.approx(20 / 23)
    assert text == (
        "At 20 steps per second and 8 actions a plan, choose --video full --dit-steps 8 "
        "--execution rtc --execute 3 (1 to 7): a plan takes 10 ms, 1 step. Where the robot may "
        "wait, --execution sync --execute 3 is the safe choice, and stands still 25% of the time."
    )


def test_less_video_is_advised_only_where_the_published_way_does_not_keep_up():
    _, text = rows_of((400, 300, 210, 190, 150, 100))
    assert "choose --video once --dit-steps 5 --execution rtc --execute 4 (4 to 4)" in text
    assert "--video full --dit-steps 8, as published, takes 400 ms, 8 steps and does not" in text
    assert "measure its success" in text


def test_a_network_that_was_trained_to_continue_is_asked_to():
    rows, text = rows_of((60, 50, 50, 50, 50, 50), trained=1)
    assert [row.is_trained for row in rows] == [False, True, True, True, True, True]
    assert "--execution rtc --execute 3" in text
    rows, text = rows_of((60, 50, 50, 50, 50, 50), trained=2)
    assert "--execution trained --execute 3" in text


def test_where_nothing_keeps_up_it_says_which_rate_would():
    _, text = rows_of((900, 800, 700, 600, 500, 400))
    assert "nothing keeps up: even --video skip --dit-steps 5 takes 400 ms, 8 steps" in text
    assert "--execution sync --execute 3, which stands still 73% of the time" in text
    assert "at most 10 steps per second" in text


def test_a_policy_is_timed_by_every_way(train_root):
    settings = BenchSettings(
        checkpoint=str(train_root / "tiny"), embodiment="train_worlds:ROBOT", repeats=1
    )
    parts, robot = pace.opened(settings, 20)
    assert robot.embodiment.timing == train_worlds.ROBOT.timing
    seen = []
    found = pace.measured_seconds(parts, settings, lambda *shown: seen.append(shown))
    assert tuple(found) == pace.WAYS
    assert all(seconds > 0 for seconds in found.values())
    assert [done for done, *_ in seen] == list(range(len(pace.WAYS)))


def result_of_now():
    """Return a result that could be of this machine."""
    machine = machine_of(QUICK)
    return BenchResult(settings=QUICK, parts={"env": part(machine, a=(1.0, 2.0))})


def written(path, **changes):
    document = result_of_now().model_dump(mode="json")
    for name, value in changes.items():
        target = document
        *above, last = name.split("__")
        for step in above:
            target = target[step]
        target[last] = value
    path.write_text(json.dumps(document))
    return path


COMMAND = ["bench", "--parts", "env", "--repeats", "3", "--env", "dzrobot/point-v0"]


def test_a_result_is_read_as_it_was_written(tmp_path):
    assert read_result(written(tmp_path / "x.json")) == result_of_now()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts__env__machine__device": "H200"}, "device: 'H200' there, 'cpu' here"),
        ({"parts__env__machine__cores": 512}, "cores: 512 there"),
        ({"settings__repeats": 4}, "repeats: 4 there, 3 here"),
        ({"settings__env": "dzrobot/lift-v0"}, "env: 'dzrobot/lift-v0' there"),
        ({"kind": "dzrobot bench comparison"}, "kind"),
        ({"format": 2}, "format"),
        ({"parts__env__measurements": [{"name": "a"}]}, "unit: is missing"),
    ],
)
def test_a_result_of_something_else_is_refused(tmp_path, capsys, changes, said):
    path = written(tmp_path / "x.json", **changes)
    assert cli.main([*COMMAND, "--device", "cpu", "--against", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "env,sleep"], "sleep"),
        (["--against", "nowhere.json"], "there is no file nowhere.json"),
        (["--against", "."], "is the build that is running"),
        (["--pairs", "3"], "--pairs needs --against TREE"),
        (["--rate", "20", "--env", "e", "--json", "x"], "leave env, json out"),
        (["--rate", "0"], "a number from 0.1"),
        (["--graphs"], "give --rate"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, monkeypatch, words, said):
    monkeypatch.chdir(ROOT)
    assert cli.main(["bench", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(capsys):
    assert cli.main(["bench", "--rate", "20", "--device", "cuda:99"]) == 2
    assert "cuda:99" in capsys.readouterr().err


def test_a_tree_that_cannot_measure_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a tree of dzrobot"):
        other_build(tmp_path)
    (tmp_path / "dzrobot").mkdir()
    (tmp_path / "dzrobot/__init__.py").touch()
    with pytest.raises(ConfigError, match="too old to be measured"):
        other_build(tmp_path)


def test_a_process_that_measures_says_how_far_it_is(tmp_path, monkeypatch):
    """A build in another tree: its own process reads the settings, and writes what it found."""
    package = tmp_path / "dzrobot/training/bench"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    found = part(chunk=(1.0,)).model_copy(update={"tree": str(tmp_path)})
    (tmp_path / "found.json").write_text(found.model_dump_json())
    (package / "worker.py").write_text(
        "import os, shutil, sys\n"
        "assert sys.stdin.read()\n"
        "assert os.environ['DZROBOT_CACHE'] == 'of the user', 'assets of simulators are there'\n"
        "print('a warning', file=sys.stderr)\n"
        f"print('{EPISODES}: 3 of 9, 0:01:00 left', file=sys.stderr)\n"
        f"shutil.copy({str(tmp_path / 'found.json')!r}, sys.argv[3])\n"
    )
    monkeypatch.setenv("DZROBOT_CACHE", "of the user")
    said = []
    result = run_part(other_build(tmp_path), "eval", QUICK, said.append, "measuring")
    assert result == found
    assert said == ["measuring", f"measuring, {EPISODES}: 3 of 9, 0:01:00 left"]
    (package / "worker.py").write_text("import sys\nsys.exit('no such thing')\n")
    with pytest.raises(ConfigError, match=r"ended with code 1:\nno such thing"):
        run_part(other_build(tmp_path), "eval", QUICK, said.append, "measuring")


def test_the_table_shows_percentiles_and_what_was_left_out(capsys):
    found = part(chunk=tuple(map(float, range(1, 102))))
    found = found.model_copy(update={"notes": ("MFU: left out",)})
    for line in bench.tables(BenchResult(settings=QUICK, parts={"policy": found})):
        Console(width=130).print(line)
    text = capsys.readouterr().out
    assert "MFU: left out" in text
    (row,) = [line for line in text.splitlines() if "chunk" in line]
    assert [cell.strip() for cell in row.split("│")[3:7]] == ["51", "96", "ms", "101"]


@pytest.mark.long
def test_two_builds_are_measured_in_turns_each_from_its_own_tree(tmp_path, capsys):
    other = tmp_path / "other"
    for name in ("dzrobot", "envs", "policies", "training"):
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / name, other / name, symlinks=True, ignore=ignored)
    fakes = other / "envs/fakes.py"
    slow = "import time\n\n        time.sleep(0.02)\n        return self.inner(action)"
    begin = "    def step(self"
    slowed = f"{begin}, action):\n        {slow}\n\n    def inner(self"
    fakes.write_text(fakes.read_text().replace(begin, slowed))
    path = tmp_path / "x.json"
    words = ["--device", "cpu", "--against", str(other), "--pairs", "2", "--json", str(path)]
    assert cli.main([*COMMAND, *words]) == 0
    document = json.loads(path.read_text())
    assert {entry["env"]["tree"] for entry in document["base"]} == {str(other)}
    assert {entry["env"]["tree"] for entry in document["own"]} == {str(own_build().tree)}
    (steps,) = [ratio for ratio in document["ratios"] if ratio["name"] == "steps, every image"]
    assert steps["pairs"] == 2
    # 20 ms more of a step of well under one.
    assert steps["ratio"] > 3
    assert "in turns" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_bundled_policy_is_measured_and_compared_with_its_own_result(tmp_path, capsys):
    first = tmp_path / "first.json"
    command = ["bench", "--device", "cpu", "--repeats", "1", "--parts", "policy,train,data,eval"]
    assert cli.main([*command, "--json", str(first)]) == 0
    result = read_result(first)
    names = {one.name for found in result.parts.values() for one in found.measurements}
    assert {"training", "data wait", "decode, one sample", "policy plans", "episodes"} <= names
    assert "MFU" not in names
    assert sum("chunk, " in name for name in names) == 3
    assert all(found.version == dzrobot.__version__ for found in result.parts.values())
    assert "the peak of this device (cpu) is unknown" in capsys.readouterr().out
    second = ["bench", "--device", "cpu", "--repeats", "1", "--parts", "data"]
    assert cli.main([*second, "--against", str(first)]) == 2
    assert "parts" in capsys.readouterr().err


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Return recordings of noise as the part of data opens them beside LeRobot."""
    folder = tmp_path_factory.mktemp("noise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DZROBOT_CACHE", str(folder / "cache"))
        config, _ = asked_recipe(BenchSettings(lerobot="python"), folder)
        return open_datasets(config, open_initial_weights(config.model, 0).metadata).train


def python_that(folder, script):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_lerobot_reads_the_rows_that_are_read_here(noise, tmp_path):
    asked = tmp_path / "asked.json"
    python = python_that(tmp_path, f"cat > {asked}; echo '[4000.0, 8000.0]'")
    own, theirs, ratio = beside_lerobot(noise, python, 2)
    assert theirs.values == (4000.0, 8000.0)
    assert ratio.values == tuple(b / a for a, b in zip(own.values, theirs.values, strict=True))

    given = json.loads(asked.read_text())
    info = json.loads((Path(given["root"]) / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    # As many frames of every camera as a sample of ours holds, at the same rows.
    key = noise.sample_keys(0, range(20), 20)[0]
    _, reader, window = noise.locate(key.sample_id)
    sample, robot = reader.window(window), reader.embodiment
    views = {view.feature: len(sample[view.key]) for view in robot.views}
    assert {name: len(given["deltas"][name]) for name in views} == views
    episode, start = reader.windows.locate(window)
    assert given["rows"][0] == reader.catalog.episodes.offset[episode] + start


def test_what_cannot_run_lerobot_is_said(noise, tmp_path):
    python = python_that(tmp_path, "cat > /dev/null; echo No module named lerobot >&2; exit 1")
    for name, said in ((python, "No module named lerobot"), ("/no/such/python", "No such file")):
        with pytest.raises(ConfigError, match=said):
            beside_lerobot(noise, name, 2)


@pytest.mark.long
@pytest.mark.parametrize("films", ["exact", "small"])
def test_films_of_key_frames_are_measured_beside_the_others(tmp_path, films):
    found = beside_films(load_embodiment("libero_sim"), tmp_path, 2, films)
    assert len(found) == 3 * 3
    for kept, other, ratio in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert ratio.values == tuple(b / a for a, b in zip(kept.values, other.values, strict=True))
        assert other.name == f"{kept.name}, {films}"


def test_films_without_the_part_that_reads_them_are_refused(capsys):
    assert cli.main(["bench", "--parts", "env", "--films", "exact"]) == 2
    assert "--films belongs to the part data" in capsys.readouterr().err


@pytest.mark.long
def test_compiled_blocks_are_compared_with_eager_ones(train_root, tmp_path):
    settings = BenchSettings(
        parts=("policy",), repeats=2, checkpoint=str(train_root / "tiny"), compile=True,
        embodiment="train_worlds:ROBOT",
    )  # fmt: skip
    found = {one.name: one for one in measure_policy(settings, tmp_path)[0]}
    assert len(found["window, compiled over eager"].values) == settings.repeats
    assert any(name.startswith("chunk, first") for name in found)


def test_time_is_counted_for_the_innermost_part_and_a_resets_is_its_own():
    now = [0.0]
    account = Account(clock=lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    spend(1)
    with account.part("physics"):
        spend(2)
        with account.part("images"):
            spend(4)
        spend(8)
    with account.part("reset"), account.part("images"):
        spend(16)
    account.of("films", spend)(32)
    assert account.settle() == {
        "bookkeeping": 1, "physics": 10, "images": 4, "reset": 16, "films": 32,
    }  # fmt: skip
    spend(64)
    assert account.settle() == {"bookkeeping": 64}


def test_a_task_is_opened_once_and_the_page_is_shared_by_all_episodes():
    episodes = ({OPENING: 5.0, "plans": 1.0}, {"reset": 2.0, "plans": 3.0}, {"reset": 4.0})
    cost = FormCost(episodes, {PAGE_PARTS[0]: 6.0, PAGE_PARTS[1]: 3.0}, 3, ("a", "b", "c"))
    assert cost.values(OPENING) == (5.0,)
    assert cost.values("reset") == (2.0, 4.0)
    assert cost.values("plans") == (1.0, 3.0, 0.0)
    assert cost.seconds == pytest.approx(3 + 4 / 3 + 2 + 1)


@pytest.mark.parametrize(
    ("env", "repeats", "tasks", "each", "whole"),
    [
        ("dzrobot/libero_object-v0", 20, 10, 2, 500),
        ("dzrobot/libero_object-v0", 4, 2, 2, 500),
        ("dzrobot/point-v0", 3, 1, 3, 10),
    ],
)
def test_what_is_measured_is_spread_over_tasks(env, repeats, tasks, each, whole):
    settings = BenchSettings(parts=("eval",), repeats=repeats, env=env, profile=True)
    all_of_it, measured = asked_episodes(settings)
    cases = plan_episodes(measured)
    assert len(plan_episodes(all_of_it)) == whole
    assert len(cases) == tasks * each
    assert len({case.task_id for case in cases}) == tasks


def test_shares_are_of_an_episode_in_an_open_task():
    found = [
        Measurement(name=f"{form}: {name}", unit="s", values=values, better="less")
        for form, name, values in (
            ("a", OPENING, (8.0,)), ("a", "plans", (1.0, 2.0)), ("a", "page", (0.5,)),
            ("a", "an episode", (2.0,)), ("b", "plans", (1.0,)), ("b", "an episode", (1.0,)),
        )
    ]  # fmt: skip
    result = BenchResult(
        settings=BenchSettings(parts=("eval",), profile=True),
        parts={"eval": part().model_copy(update={"measurements": tuple(found)})},
    )
    console = Console(width=100)
    with console.capture() as shown:
        for line in bench.tables(result):
            console.print(line)
    rows = [" ".join(line.replace("│", " ").split()) for line in shown.get().splitlines()]
    assert "plans 1.5 75 1 100" in rows
    assert "page 0.5 25 0 0" in rows
    assert "opening a task 8 - 0 -" in rows


@pytest.mark.long
def test_the_parts_of_an_episode_are_counted_in_both_forms(tmp_path):
    pytest.importorskip("plotly", reason="no plotly: pip install -e '.[report]'")
    pytest.importorskip("mujoco", reason="no simulator: pip install -e '.[libero]'")
    settings = BenchSettings(
        parts=("eval",), repeats=2, env="dzrobot/point-v0", profile=True,
        checkpoint=str(default_checkpoint()), embodiment="libero_mini",
    )  # fmt: skip
    measured, notes = measure_eval(settings, tmp_path)
    found = {one.name: one for one in measured}
    for part in ("plans", "physics", "predictions", "films", "page: decoding"):
        assert min(found[f"--videos all: {part}"].values) > 0, part
    for part in ("predictions", "films", "page: decoding"):
        assert max(found[f"--videos none: {part}"].values) < 0.1, part
    for form in ("all", "none"):
        parts = [*EPISODE_PARTS, *PAGE_PARTS]
        values = [found[f"--videos {form}: {part}"].values for part in parts
                  if f"--videos {form}: {part}" in found]  # fmt: skip
        whole = found[f"--videos {form}: an episode"].values[0]
        assert sum(sum(one) / len(one) for one in values) == pytest.approx(whole)
        assert found[f"--videos {form}: custom, 10 episodes"].unit == "h"
    assert "same in all forms" in notes[0]
