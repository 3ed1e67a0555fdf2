"""What a GPU machine runs first, on a processor: all of the code but NCCL and a GPU drawing."""

import argparse
import importlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rehearsal.operators import HostReadError
from rehearsal.runs import rehearse
from scripts import printed_elsewhere
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from dzrobot.training.bench.measuring import release
from dzrobot.training.run import parallel as distributed

ROOT = Path(__file__).parents[2]
PARTS = {
    "devices": "skipped", "goldens-fp32": "passed", "goldens-bf16": "passed", "packed": "passed",
    "offload": "passed", "quantized": "skipped", "cfg-devices": "skipped", "graph": "skipped",
    "fsdp": "skipped", "recorded-blocks": "skipped", "resume": "passed", "kernels": "skipped",
    "loader": "measured", "chunks-5b": "measured", "chunks-14b": "measured",
    "train-5b": "measured", "train-14b-lora": "measured", "train-graphs-5b": "measured",
    "train-graphs-14b": "measured", "render": "skipped",
}  # fmt: skip
"""What a processor can show; `compiled` takes it minutes, and other tests compile blocks."""


@pytest.fixture
def benchmarks(monkeypatch):
    """Return a function that imports a module of the benchmarks; they are no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_an_error_above_the_limit_or_no_number_fails(benchmarks):
    parts = benchmarks("gpu_parts")
    assert parts.judged({"a": 1e-5, "b": 0.0}, 1e-4, "x").status == "passed"
    for error in (2e-4, math.inf, math.nan):
        found = parts.judged({"a": 1e-5, "b": error}, 1e-4, "x")
        assert found.status == "failed"
        assert "b above 1e-04" in found.reason
    assert parts.judged({}, 1e-4, "x").status == "failed"


def test_errors_are_relative(benchmarks):
    parts = benchmarks("gpu_parts")
    ones = torch.ones(4)
    assert parts.relative(1.5 * ones, ones) == pytest.approx(0.5)
    assert math.isnan(parts.relative(torch.full((4,), math.nan), ones))
    assert parts.limit(torch.float32) < parts.limit(torch.bfloat16)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_device_without_a_number_is_counted_on_and_read_from_too(name):
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:0")
        assert rehearse(lambda _: x + 1, torch.device(name)).calls.total() == 1
        with pytest.raises(HostReadError):
            rehearse(lambda _: x.cpu(), torch.device(name))


def test_no_operator_is_a_fault(benchmarks):
    checks = benchmarks("gpu_checks")
    assert checks.faults(rehearse(lambda _: None)) == ["no operator ran on the device"]
    meta = torch.empty(3, device="meta")
    assert checks.faults(rehearse(lambda _: meta + 1)) == []


def test_settings_of_cuda_are_there_before_it_starts(monkeypatch):
    seen = {}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: seen.update(os.environ))

    class StopHereError(Exception):
        pass

    def stop(*_, **__):
        raise StopHereError

    monkeypatch.setattr(dist, "init_process_group", stop)
    with pytest.raises(StopHereError):
        distributed.init_distributed("cuda")
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_sharded_network_is_gone_before_the_next_one_is_made(solo):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for unit in (*model, model):
        fully_shard(unit)
    model(torch.ones(1, 8)).sum().backward()
    alive = weakref.ref(model[0])
    del model, unit
    release(torch.device("cpu"))
    assert alive() is None


@pytest.mark.long
def test_what_computes_needs_no_video_library_and_no_simulator():
    lacking = ("av", "mujoco", "robosuite", "torchao", "OpenGL")
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in lacking)
    needed = "dzrobot.training.bench.measuring, dzrobot.training.run.build, dzrobot.recording"
    code = f"import sys\n{blocked}import {needed}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def options(output, **changed):
    known = {
        "device": "cpu", "size": "tiny", "output": output, "goldens": None, "parts": None,
        "again": None, "limit": 60.0, "total": 600.0, "child": None,
    }  # fmt: skip
    return argparse.Namespace(**{**known, **changed})


@pytest.mark.parametrize(
    ("missing", "status"), [("not_on_this_machine", "skipped"), ("gpu_speed_typo", "raised")]
)
def test_a_missing_library_skips_a_part_by_its_name(
    benchmarks, monkeypatch, tmp_path, missing, status
):
    gpu = benchmarks("gpu")
    (tmp_path / "some_part.py").write_text(f"import {missing}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gpu, "PARTS", {"some": "some_part:run"})
    if status == "raised":
        # A module of our own that is not found is a fault of ours.
        monkeypatch.setattr(gpu, "_OWN", (missing,))
        with pytest.raises(ModuleNotFoundError):
            gpu._child(options(tmp_path / "x.jsonl", child="some"))
        return
    assert gpu._child(options(tmp_path / "x.jsonl", child="some")) == 0
    (line,) = read(tmp_path / "x.jsonl")
    assert line["status"] == "skipped"
    assert missing in line["reason"]


def test_a_figure_is_kept_with_its_peak_before_the_part_ends(
    benchmarks, monkeypatch, tmp_path, capsys
):
    gpu = benchmarks("gpu")
    (tmp_path / "own_part.py").write_text(
        "def run(request):\n"
        "    request.record('speed', 3.0)\n"
        "    request.record('other', 1.0, 2.0)\n"
        "    raise RuntimeError('out of memory')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gpu, "PARTS", {"own": "own_part:run"})
    output = tmp_path / "deep/x.jsonl"
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu._child(options(output, child="own", size="true"))
    found = {line["name"]: (line["value"], line.get("peak")) for line in read(output)}
    assert found == {"speed": (3.0, None), "other": (1.0, 2.0)}
    said = capsys.readouterr().out
    assert "speed: 3\n" in said
    assert "other: 1, 50% of the peak of 2\n" in said


def read(output):
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def script(output, *words):
    command = [str(ROOT / "benchmarks/gpu.sh"), "--size", "tiny", "--output", str(output), *words]
    return command, {**os.environ, "PYTHON": sys.executable}


def run(output, *words):
    """Run the script; return exit code, what it printed, and the lines of its output."""
    command, environment = script(output, *words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, read(output)


@pytest.mark.long
def test_what_is_killed_in_its_middle_leaves_its_figures(tmp_path):
    output = tmp_path / "gpu.jsonl"
    command, environment = script(output, "--device", "cpu", "--parts", "kernels")
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while not (before := read(output)):
        assert running.poll() is None
        time.sleep(0.02)
    (child,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    # The one that measures and the one that started it: neither can write another word.
    os.kill(running.pid, signal.SIGKILL)
    os.kill(int(child), signal.SIGKILL)
    running.wait()
    kept = read(output)
    assert kept[: len(before)] == before
    assert all(line["name"] and line["value"] > 0 for line in kept)

    # It has not ended, so the same command runs it again.
    code, said, lines = run(output, "--device", "cpu", "--parts", "kernels", "--limit", "0.01")
    assert code == 1
    assert lines[len(kept) :] == [lines[-1]]
    assert (lines[-1]["status"], lines[-1]["reason"]) == ("failed", "not done after 0 s")
    assert kept[0]["name"] in said


def test_a_card_decides_what_is_trained(benchmarks):
    setup = benchmarks("gpu_training")
    world = argparse.Namespace(device=torch.device("cuda"), size=1)
    bench = setup.make_bench("5b", world, 1)
    cases, refused = setup.planned_cases(bench, 141e9)
    assert [case.mbs for case in cases] == [1, 8, 32, 32]
    assert refused == []
    assert not any(case.lora for case in cases)
    assert [case.kept > 0 for case in cases] == [False, False, False, True]
    fuller = setup.replace(cases[-1], kept=cases[-1].kept + 1)
    assert setup.planned_bytes(bench, cases[-1]) <= 141e9 < setup.planned_bytes(bench, fuller)
    cases, refused = setup.planned_cases(bench, 80e9)
    assert all(case.lora for case in cases)
    assert len(refused) == 3
    assert "106 of 75 GiB" in refused[-1]


@pytest.mark.copies
@pytest.mark.parametrize(
    "commands",
    [
        ("kernels", "chunks 5b"),
        pytest.param(
            ("chunks 14b", "train 14b --steps 1", "train 5b --mbs 2 --recompute full --steps 1"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["few", "all"],
)
def test_what_is_run_first_on_a_gpu_runs_on_a_processor(commands, tmp_path):
    calls = [f"--tiny {words}" for words in commands]
    printed = printed_elsewhere(ROOT / "benchmarks/gpu_first.py", calls, tmp_path)
    for words, said in itertools.pairwise([*calls, None]):
        part = printed.partition(f"{words}\n")[2].partition(f"{said}\n")[0]
        figures = [float(value) for value in re.findall(r": ([0-9.e+-]+)$", part, re.M)]
        assert len(figures) > 3
        assert all(math.isfinite(value) and value >= 0 for value in figures)


def test_what_is_packed_has_a_limit(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\nfor word; do folder="$last"; last="$word"; done\n'
        'head -c "$BYTES" /dev/zero > .gpu/wheels/"$3$#".whl\n'
    )
    fake.chmod(0o755)
    tree = tmp_path / "tree"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "benchmarks/pack_gpu.sh").write_bytes((ROOT / "benchmarks/pack_gpu.sh").read_bytes())
    (tree / "benchmarks/pack_gpu.sh").chmod(0o755)
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    subprocess.run(["git", "-C", str(tree), "add", "."], check=True)
    for mebibytes, code in ((29, 0), (31, 2)):
        environment = {
            **os.environ, "PYTHON": str(fake), "BYTES": str(mebibytes * 2**20),
            "DZROBOT_GOLDENS": "",
        }  # fmt: skip
        done = subprocess.run(
            [str(tree / "benchmarks/pack_gpu.sh")], env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert f"{2 * mebibytes}.0 MiB" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_all_parts_on_a_processor(goldens, tmp_path):
    output = tmp_path / "gpu.jsonl"
    words = ["--device", "cpu", "--goldens", str(goldens)]
    code, said, lines = run(output, *words, "--parts", ",".join(PARTS))
    assert code == 0, said
    ends = {line["part"]: line for line in lines if "status" in line}
    assert {part: line["status"] for part, line in ends.items()} == PARTS, said
    assert all(line["reason"] for line in ends.values())
    assert "compiled        not run" in said
    figures = {(line["part"], line["name"]): line["value"] for line in lines if "name" in line}
    assert figures["train-5b", "mbs 2, AC full, keep 1, eager, samples_s"] > 0
    assert figures["chunks-14b", "graphs, frame 7, p95 ms"] > 0
    for part in ("fsdp", "recorded-blocks"):
        assert figures[part, "all gradients"] <= 1e-4
    for form in ("eager", "eager, graphs"):
        assert figures["train-graphs-5b", f"mbs 1, AC full, {form}, samples_s"] > 0

    # The same command again runs nothing that is done; --again does.
    _, said, same = run(output, *words, "--parts", "packed,goldens-bf16")
    assert same == lines
    assert "packed          passed" in said
    _, _, more = run(output, *words, "--again", "packed")
    assert {line["part"] for line in more[len(lines) :]} == {"packed"}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_said_to_be_of_one(tmp_path):
    code, said, lines = run(tmp_path / "gpu.jsonl")
    assert code == 2
    assert "torch sees no GPU" in said
    assert lines == []
    code, said, _ = run(tmp_path / "gpu.jsonl", "--device", "cpu", "--parts", "pakced")
    assert code == 2
    assert "packed" in said
