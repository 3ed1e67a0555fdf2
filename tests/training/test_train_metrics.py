"""Log lines against closed forms, a fake clock and a counter of device reads."""

import json
import math
import shutil

import pytest
import torch
import train_worker

from dzrobot.training.cost.flops import SampleCost
from dzrobot.training.run.checkpoint import step_folder
from dzrobot.training.run.metrics import LogRecord, Rates, TrainMetrics
from dzrobot.training.run.optimizer import StepOutcome
from dzrobot.training.run.run_log import METRICS_FILE, RunLog
from dzrobot.training.sft_config import LoggingConfig

COST = SampleCost(model_forward=4e12, executed_forward=3e12, encoders=1e12, recomputed_share=0.5)
CPU = torch.device("cpu")


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def outcome(skipped=0.0, norm=2.0):
    return StepOutcome(
        grad_norm=torch.tensor(norm), skipped=torch.tensor(skipped), lr=torch.tensor(0.5)
    )


def metrics(clock):
    return TrainMetrics(Rates(cost=COST, devices=1, peak_tflops=100.0), CPU, clock)


def test_numbers_follow_from_the_clock(solo):
    clock = Clock()
    found = metrics(clock)
    for i in range(4):
        with found.waiting():
            clock.now += 0.25
        clock.now += 1.0
        found.add(torch.tensor([1.0 + i, 0.5]), outcome(), 8, [i])
    record = found.record(4)
    rate = 32 / 5.0
    assert record.samples_per_s == pytest.approx(rate, abs=1e-9)
    assert record.samples_per_s_per_gpu == pytest.approx(rate, abs=1e-9)
    assert record.mfu == pytest.approx(rate * 12e12 / 100e12, abs=1e-9)
    assert record.utilisation == pytest.approx(rate * (3.5 * 3e12 + 1e12) / 100e12, abs=1e-9)
    assert record.data_wait_pct == pytest.approx(20.0, abs=1e-5)
    assert (record.dynamics_loss, record.action_loss, record.loss) == (2.5, 0.5, 3.0)
    assert (record.grad_norm, record.lr, record.skips) == (2.0, 0.5, 0)


def test_an_evaluation_is_no_time_of_a_step(solo):
    clock = Clock()
    found = metrics(clock)
    for i in range(2):
        with found.excluded():
            clock.now += 50.0
        clock.now += 2.0
        found.add(torch.tensor([1.0, 0.5]), outcome(), 8, [i])
    record = found.record(2)
    assert record.seconds_per_step == pytest.approx(2.0, abs=1e-9)
    assert record.samples_per_s == pytest.approx(4.0, abs=1e-9)
    assert record.seconds == pytest.approx(104.0, abs=1e-9)


def test_skipped_steps_are_counted_and_left_out_of_the_mean(solo):
    found = metrics(Clock())
    found.add(torch.tensor([1.0, 1.0]), outcome(), 2, [5, 6])
    found.add(torch.tensor([math.nan, 1.0]), outcome(skipped=1.0, norm=math.nan), 2, [7, 8])
    record = found.record(2)
    assert (record.loss, record.skips, found.skips_in_row) == (2.0, 1, 1)
    assert [skip.sample_ids for skip in found.recent_skips] == [(7, 8)]
    found.add(torch.tensor([1.0, 1.0]), outcome(), 2, [9, 10])
    found.record(3)
    assert found.skips_in_row == 0


def test_the_device_is_read_once_per_log_record(solo, monkeypatch):
    reads = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name,
            lambda self, *a, _o=original, _n=name, **k: (reads.append(_n), _o(self, *a, **k))[1],
        )  # fmt: skip
    found = metrics(Clock())
    for i in range(5):
        found.add(torch.tensor([1.0, 1.0]), outcome(), 2, [i])
    assert reads == []
    found.record(5)
    assert reads == ["tolist"]


def test_log_records_have_a_fixed_schema(tmp_path, solo):
    columns = [name for name in LogRecord.__dataclass_fields__ if name != "terms"]
    found = metrics(Clock())
    with RunLog.open(LoggingConfig(tensorboard=True), tmp_path, {}, is_main=True) as log:
        for step in (1, 2):
            found.add(torch.tensor([1.0, math.nan]), outcome(), 2, [step])
            log.write(found.record(step))
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(list(line) == columns for line in lines)
    # JSON has no NaN.
    assert lines[0]["loss"] is None
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.long
def test_each_step_of_a_resumed_run_stands_once(tmp_path, train_root, solo):
    folder = tmp_path / "run"
    changes = {
        "runner__output_dir": folder, "runner__max_steps": 3, "runner__resume_dir": "auto",
        "checkpoint__save_interval": 2, "logging__log_interval": 1,
    }  # fmt: skip
    train_worker.trainer(solo, train_root, **changes).run()
    # As if killed after step 3, while a line was written: the newest checkpoint is of step 2.
    shutil.rmtree(step_folder(folder, 3))
    with (folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    train_worker.trainer(solo, train_root, **changes).run()
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
