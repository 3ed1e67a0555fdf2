"""Two processes against one: gradients, norms, dtypes, skips, resume, reshard, kills."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import train_worker
import train_worlds

from dzrobot.errors import CheckpointError

pytestmark = pytest.mark.copies
ROOT = Path(__file__).parents[2]

WEIGHTS_DIFFER = 1e-5
"""Largest relative difference of what six steps change, between orders of sums."""

MORE_LAYOUTS = ("w2-ddp", "w2-selective", "w2-mbs2", "w2-full", "w2-offload", "w2-graphs")


@pytest.fixture(scope="module")
def alone(train_root, solo):
    """Return loss and gradients of the same global batch in one process."""
    run = train_worker.trainer(solo, train_root)
    return train_worker.gradients(run)


def close(found, alone, tolerance):
    losses, gradients = alone
    torch.testing.assert_close(found["losses"], losses, rtol=0, atol=tolerance)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=tolerance)


def test_sharded_gradients_are_those_of_one_process(pair, alone):
    close(torch.load(pair.output / "w2-fsdp.pt"), alone, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_layouts_give_the_gradients_of_one_process(long_pair, alone, name):
    close(torch.load(long_pair.output / f"{name}.pt"), alone, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["selective", "full", "graphs"])
def test_recompute_changes_no_bit(long_pair, mode):
    plain = torch.load(long_pair.output / "w2-plain.pt")
    recomputed = torch.load(long_pair.output / f"w2-{mode}.pt")
    for name, gradient in plain["gradients"].items():
        assert torch.equal(recomputed["gradients"][name], gradient), name


@pytest.mark.long
def test_hybrid_sharding_on_four_processes(launches, alone):
    launches.run(4, "hybrid_gradients")
    close(torch.load(launches.output / "w4-hsdp.pt"), alone, 1e-6)


def test_micro_batches_before_the_last_reduce_nothing(pair):
    """Three units (two blocks and the rest), two micro-batches."""
    found = pair.result("collectives", 2)
    counts = {
        name: [way["counts"][kind] for kind in ("reduce_scatter_base", "allgather_base")]
        for name, way in found.items()
        if name in train_worker.PUT_OFF
    }
    assert counts == {"each": [6, 10], "last": [3, 10], "last, weights kept": [3, 7]}
    each = found["each"]
    for name in ("last", "last, weights kept"):
        assert found[name]["losses"] == each["losses"], "weights have not moved yet"
        assert found[name]["error"] <= 1e-6


@pytest.mark.long
def test_weights_hardly_depend_on_when_gradients_are_summed(launches):
    """Six steps of twelve samples on four processes; only the order of sums differs."""
    launches.run(4, "six_steps")
    runs = launches.result("six_steps", 4)["runs"]
    assert len({losses[0] for *_, losses, _, _ in runs}) == 1, "of the first step, to the bit"
    for layout, put_off, losses, error, _ in runs:
        assert len(losses) == 6
        assert error <= WEIGHTS_DIFFER, (layout, put_off)
    again = [digest for layout, put_off, *_, digest in runs if (layout, put_off) == ("fsdp", True)]
    assert len(again) == 2
    assert again[0] == again[1]


@pytest.mark.long
def test_every_rank_sees_the_norm_of_one_process(long_pair, alone):
    _, gradients = alone
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    found = long_pair.result("clipping", 2)
    assert found["norms"] == pytest.approx([norm, norm], rel=1e-6)
    assert norm > 0.01
    assert found["clipped"] == pytest.approx(0.01, rel=1e-5)


@pytest.mark.long
def test_dtypes_of_mixed_precision(long_pair):
    found = long_pair.result("precision", 2)
    low, high = "torch.bfloat16", "torch.float32"
    assert {found[key] for key in ("input", "weight")} == {low}
    assert {found[k] for k in ("master", "gradient", "moment", "reduce", "timestep")} == {high}


@pytest.mark.long
def test_a_poisoned_rank_makes_all_skip(long_pair):
    found = long_pair.result("poisoned", 2)
    first, second, third, fourth = found["digests"]
    assert second == first
    assert len({first, third, fourth}) == 3
    assert (found["skips"], found["updates"]) == (1, 3.0)
    assert found["loss"] == found["loss"]


@pytest.mark.long
def test_gives_up_naming_the_samples(long_pair):
    found = long_pair.result("gives_up", 2)
    assert found["kind"] == "TooManySkipsError"
    assert found["same"]
    assert "2 steps in a row" in found["error"]
    assert "8 samples" in found["error"]
    assert "episode" in found["error"]


def test_resume_is_bit_exact(pair):
    straight = pair.result("straight", 2)["digest"]
    half, rest = pair.result("first_half", 2), pair.result("second_half", 2)
    # The snapshot is of the moment of the call: what was done to the weights later is not in it.
    assert rest["restored"] == half["digest"]
    assert rest["digest"] == straight
    assert rest["step"] == train_worker.STEPS


def test_a_checkpoint_fits_one_process(pair, train_root, solo):
    found = train_worker.second_half(solo, train_root, pair.output)
    assert found["restored"] == pair.result("first_half", 2)["digest"]
    # Another number of processes sums in another order: equal to rounding, not to the bit.
    lines = [
        json.loads((pair.output / f"halves-{n}" / "metrics.jsonl").read_text().splitlines()[-1])
        for n in (1, 2)
    ]
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], abs=1e-5)


@pytest.mark.long
def test_damage_is_found_whichever_process_reads_it(long_pair):
    found = long_pair.result("damaged", 2)
    assert len(found["found"]) == 2, "a file of each process"
    assert all(steps == [1, 1] for steps in found["found"].values())
    assert found["intact"] == 2


@pytest.mark.long
def test_rollouts_are_shared(long_pair):
    folder = long_pair.output / "rolled_out-2"
    whole = rows(folder / "rollouts/step_00000001")
    parts = [rows(folder / f"rollouts/step_00000001/rank_{rank}") for rank in (0, 1)]
    assert [len(part) for part in parts] == [2, 1]
    assert sorted(whole) == sorted({**parts[0], **parts[1]})
    logged = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert logged["rollout/episodes"] == 3
    alone = rows(long_pair.output / "alone")
    assert {name: row["action_sha256"] for name, row in alone.items()} == {
        name: row["action_sha256"] for name, row in whole.items()
    }


@pytest.mark.long
def test_a_process_that_is_late_for_its_rollouts_ends_the_run(launches):
    launches.run(2, "late")
    message = launches.result("late", 2)["message"]
    assert "runner.rollout_timeout_min" in message
    assert "anks 1 failed" in message


def rows(folder):
    lines = (folder / "records.jsonl").read_text().splitlines()
    return {row["case"]: row for row in map(json.loads, lines)}


@pytest.mark.long
def test_a_checkpoint_fits_three_processes(pair, launches):
    launches.run(3, "three")
    assert launches.result("three", 3)["restored"] == pair.result("first_half", 2)["digest"]


@pytest.mark.long
def test_an_average_is_kept_and_exported(long_pair):
    assert long_pair.result("averaged", 2)["error"] <= 1e-6


@pytest.mark.long
@pytest.mark.parametrize("base", ["full", "nf4"])
def test_gradients_of_adapters(long_pair, train_root, solo, base):
    changes = {"model__is_lora": True, "model__lora_base": base}
    alone = train_worker.gradients(train_worker.trainer(solo, train_root, **changes))
    close(torch.load(long_pair.output / f"w2-lora-{base}.pt"), alone, 1e-6)


@pytest.mark.long
def test_adapters_alone_are_saved_and_exported(long_pair, train_root):
    """Merged into the weights as the files hold them, not into those in four bits."""
    from safetensors import safe_open

    from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
    from dzrobot.policies.dreamzero.checkpoints.load import LoadOptions, load_network

    found = long_pair.result("adapters", 2)
    modules = ("action_decoder", "action_encoder", "state_encoder")
    assert all(".lora_" in name or name.startswith(modules) for name in found["names"])
    merged = Path(found["export"])
    only = merged.with_name(merged.name + "_adapters")
    with safe_open(only / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == len(found["names"])

    checkpoint = open_checkpoint(only)
    base = LoadOptions(base=train_root / "tiny", adapters="merge")
    joined = load_network(checkpoint, base).state_dict()
    exported = load_network(open_checkpoint(merged), LoadOptions()).state_dict()
    for name, tensor in joined.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6)

    other = train_worlds.checkpoint(merged.parent / "other-base", variant="5b")
    spoil_weights(other)
    with pytest.raises(CheckpointError, match="not the base"):
        load_network(checkpoint, LoadOptions(base=other))


def spoil_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = {name: t * 1.5 for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.long
def test_open_loop_errors_are_logged(long_pair):
    found = long_pair.result("evaluated", 2)
    assert (found["held_out"], found["trained"]) == (1, 2)
    lines = (long_pair.output / "eval-2" / "metrics.jsonl").read_text().splitlines()
    numbers = next(json.loads(line) for line in lines if "open_loop" in line)
    steps = [
        v for k, v in numbers.items() if k.startswith("open_loop/libero_sim/action.actions/st")
    ]
    assert len(steps) == train_worlds.ROBOT.timing.action_horizon
    dims = [v for k, v in numbers.items() if k.startswith("open_loop/libero_sim/action.actions/di")]
    mean = numbers["open_loop/libero_sim/action.actions/mean"]
    assert [sum(steps) / len(steps), sum(dims) / len(dims)] == pytest.approx([mean, mean])
    # Five samples over two processes: what fills the last batch up is not counted.
    own = next(json.loads(line) for line in lines if "held_out_rows" in line)
    shares = [value for name, value in own.items() if "/dim_" in name and value is not None]
    assert own["held_out_rows/libero_sim/share"] == pytest.approx(np.median(shares))


@pytest.mark.long
def test_two_processes_train_with_plugins_as_one_does(long_pair, solo, touched, lab):
    """Here, and not beside the other tests of plugins: files share no launch."""
    alone = train_worker.plugged_run(solo, touched, long_pair.output / "plugged-1")
    both = long_pair.result("plugged", 2)
    np.testing.assert_allclose(both["terms"], alone["terms"], rtol=1e-4)
    assert both["samples"] == alone["samples"]
    # Resumed half way in the same number of processes: to the bit.
    assert both["resumed"] == both["straight"]


@pytest.mark.long
def test_a_killed_rank_costs_nothing(pair, launches):
    launches.run(2, "killed", arguments=("--max-restarts", "1"))
    found = launches.result("killed", 2)
    assert found["started"] == train_worker.STEPS // 2
    assert found["digest"] == pair.result("straight", 2)["digest"]


def test_a_run_that_fails_gives_the_signal_back(train_root, solo, tmp_path):
    def mine(*_):
        raise AssertionError("never sent")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        run = train_worker.trainer(
            solo, train_root, runner__output_dir=tmp_path / "run", runner__resume_dir=tmp_path
        )
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            run.run()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_rank_outlives_a_launcher_that_is_killed(train_environment, tmp_path):
    (tmp_path / "rank.py").write_text(
        "import os, pathlib, time\n"
        "from dzrobot.training.run.parallel import init_distributed\n"
        "held = init_distributed()\n"
        "pathlib.Path(f'{os.getpid()}.pid').touch(); time.sleep(600)\n"
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "rank.py",
    ]  # fmt: skip
    launcher = subprocess.Popen(command, cwd=tmp_path, env=train_environment)
    try:
        pids = sought(lambda: [int(p.stem) for p in tmp_path.glob("*.pid")], 2)
    finally:
        launcher.kill()
        launcher.wait()
    assert sought(lambda: [pid for pid in pids if not is_running(pid)], 2)


def sought(look, count, patience_s=120.0):
    """Return what ``look`` finds, once there are ``count``."""
    deadline = time.monotonic() + patience_s
    while len(found := look()) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def is_running(pid):
    """Return whether a process is there and not merely waiting to be collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_launches_leave_no_partial_checkpoint(pair):
    # One is left alone by readers and removed by the next writer.
    assert not any(Path(pair.output).rglob("step_*.writing"))
