"""What a GPU machine runs first, on a processor: all of the code but NCCL and a GPU drawing."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PARTS = {
    "devices": "skipped", "goldens-fp32": "passed", "goldens-bf16": "passed", "packed": "passed",
    "offload": "passed", "quantized": "skipped", "cfg-devices": "skipped", "graph": "skipped",
    "fsdp": "skipped", "resume": "passed",
    "speed-5b": "measured", "speed-14b-lora": "measured", "render": "skipped",
}  # fmt: skip
"""What a processor can show; `compiled` takes it minutes, and other tests compile blocks."""


@pytest.fixture(scope="module")
def parts():
    path = ROOT / "benchmarks/gpu_parts.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_error_above_the_limit_or_no_number_fails(parts):
    assert parts.judged({"a": 1e-5, "b": 0.0}, 1e-4, "x").status == "passed"
    for error in (2e-4, math.inf, math.nan):
        found = parts.judged({"a": 1e-5, "b": error}, 1e-4, "x")
        assert found.status == "failed"
        assert "b above 1e-04" in found.reason
    assert parts.judged({}, 1e-4, "x").status == "failed"


def test_errors_are_relative(parts):
    ones = torch.ones(4)
    assert parts.relative(1.5 * ones, ones) == pytest.approx(0.5)
    assert math.isnan(parts.relative(torch.full((4,), math.nan), ones))
    assert parts.limit(torch.float32) < parts.limit(torch.bfloat16)


def run(output, *words):
    """Run the script; return exit code, what it printed, and the lines of its output."""
    command = [str(ROOT / "benchmarks/gpu.sh"), "--size", "tiny", "--output", str(output), *words]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    lines = output.read_text().splitlines() if output.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_all_parts_on_a_processor(goldens, tmp_path):
    output = tmp_path / "gpu.jsonl"
    words = ["--device", "cpu", "--goldens", str(goldens)]
    code, said, lines = run(output, *words, "--parts", ",".join(PARTS))
    assert code == 0, said
    found = {line["part"]: line for line in lines}
    assert {part: line["status"] for part, line in found.items()} == PARTS, said
    assert all(line["reason"] for line in lines)
    assert "compiled        not run" in said
    assert found["speed-5b"]["numbers"]["training, samples/s"] > 0
    assert found["speed-14b-lora"]["numbers"]["training, forecast"] > 0
    assert found["fsdp"]["numbers"]["all gradients"] <= 1e-4

    # The same command again runs nothing that is done; --again does.
    _, said, same = run(output, *words, "--parts", "packed,goldens-bf16")
    assert same == lines
    assert "packed          passed" in said
    _, _, more = run(output, *words, "--again", "packed")
    assert [line["part"] for line in more[len(lines) :]] == ["packed"]


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
