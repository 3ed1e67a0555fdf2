"""Damaged and hostile training checkpoints: passed over, or one clear error; no code is run."""

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_worker
import train_worlds
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dzrobot.cli import main
from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.checksums import write_checksums
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.load import LoadOptions, load_network
from dzrobot.training.run.checkpoint import (
    CheckpointWriter,
    choose_checkpoint,
    find_checkpoint,
    load_state,
)
from dzrobot.training.sft_config import CheckpointConfig

ROOT = Path(__file__).parents[2]


def state(value):
    return {"model": {"w": torch.full((64, 3), float(value))}, "updates": torch.tensor(value)}


@pytest.fixture(scope="module")
def written(tmp_path_factory, solo):
    """Return a folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    writer = CheckpointWriter(folder, CheckpointConfig(async_save=False), solo)
    for step in (1, 2):
        writer.save(step, state(step), {"skips": 0}, wait=True)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


FILES = ("meta.json", "SHA256SUMS", "state/.metadata", "state/__0_0.distcp")


def flip(file):
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    for place in range(max(0, middle - 32), min(len(content), middle + 32)):
        content[place] ^= 0xFF
    file.write_bytes(content)


def change_one_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "flipped": flip,
    "one bit": change_one_bit,
    "half": cut,
    "empty": lambda file: file.write_bytes(b""),
    "removed": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a loop": lambda file: (file.unlink(), file.symlink_to(file.name)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_is_passed_over(folder, solo, caplog, name, damage):
    newest = folder / "step_00000002"
    DAMAGE[damage](newest / name)
    with pytest.raises(CheckpointError, match="step_00000002"):
        find_checkpoint(newest)
    found = choose_checkpoint("auto", folder, solo)
    assert found.step == 1
    assert "skipping" in caplog.text
    tensors = state(0)
    load_state(found, tensors)
    assert torch.equal(tensors["model"]["w"], state(1)["model"]["w"])


METAS = {
    "a list": "[]",
    "null": "null",
    "null step": '{"step": null, "skips": 0, "format": 2}',
    "text step": '{"step": "x", "skips": 0, "format": 2}',
    "no skips": '{"step": 2, "format": 2}',
    "true step": '{"step": true, "skips": 0, "format": 2}',
    "huge step": '{"step": 1' + "0" * 400 + ', "skips": 0, "format": 2}',
    "other step": '{"step": 3, "skips": 0, "format": 2}',
    "format of the future": '{"step": 2, "skips": 0, "format": 3}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "latin-1": '{"step": 2, "skips": 0, "é": 1}',
}


@pytest.mark.parametrize("kind", METAS)
def test_a_meta_of_another_type(folder, solo, kind):
    newest = folder / "step_00000002"
    (newest / "meta.json").write_bytes(METAS[kind].encode("latin-1"))
    write_checksums(newest)
    with pytest.raises(CheckpointError, match=r"step_00000002/meta\.json"):
        find_checkpoint(newest)
    assert choose_checkpoint("auto", folder, solo).step == 1


def test_one_bit_in_a_tensor_is_seen(folder):
    """The value would be read as a weight: only its checksum tells."""
    newest = folder / "step_00000002"
    piece = newest / "state/__0_0.distcp"
    content = bytearray(piece.read_bytes())
    place = content.index(struct.pack("<f", 2.0) * 64) + 66
    content[place] ^= 1
    piece.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged: state/__0_0\.distcp"):
        find_checkpoint(newest)


def test_all_damaged_is_no_fresh_start(folder, solo):
    for path in folder.glob("step_*"):
        flip(path / "meta.json")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        choose_checkpoint("auto", folder, solo)


def test_nothing_yet_is_a_fresh_start(tmp_path, solo):
    assert choose_checkpoint("auto", tmp_path / "checkpoints", solo) is None


def test_a_file_in_the_place_of_the_folder(tmp_path, solo):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoints"):
        CheckpointWriter(tmp_path / "checkpoints", CheckpointConfig(), solo)


def test_from_before_checksums(folder, solo, caplog):
    newest = folder / "step_00000002"
    (newest / "meta.json").write_text(json.dumps({"step": 2, "skips": 0}))
    (newest / "SHA256SUMS").unlink()
    assert choose_checkpoint("auto", folder, solo).step == 2
    assert "has no checksums" in caplog.text


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


def hostile_description(newest, owned):
    """The pickle that torch's own reader would run."""
    file = newest / "state/.metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Payload(owned)
    file.write_bytes(pickle.dumps(metadata))


def hostile_value(newest, owned):
    """A tensor that is declared as any other value, which torch's own reader unpickles freely."""
    shutil.rmtree(newest / "state")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = {**state(2), "model": {"w": Payload(owned)}}
        dcp.save(content, checkpoint_id=newest / "state", no_dist=True)


def hostile_piece(newest, owned):
    """A piece that holds an object in the place of a tensor."""
    buffer = io.BytesIO()
    torch.save(Payload(owned), buffer)
    file = newest / "state/__0_0.distcp"
    place = len(file.read_bytes())
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    described = newest / "state/.metadata"
    metadata = pickle.loads(described.read_bytes())
    for index, stored in metadata.storage_data.items():
        if index.fqn == "model.w":
            stored.offset, stored.length = place, len(buffer.getvalue())
    described.write_bytes(pickle.dumps(metadata))


HOSTILE = (hostile_description, hostile_value, hostile_piece)


@pytest.mark.parametrize("corrupt", HOSTILE)
@pytest.mark.parametrize("resume", ["auto", "explicit", "run folder"])
def test_no_code_is_run(folder, solo, tmp_path, corrupt, resume):
    owned = tmp_path / "owned"
    shutil.rmtree(folder / "step_00000001")
    newest = folder / "step_00000002"
    corrupt(newest, owned)
    # Whoever can write the pickle can write the checksums.
    write_checksums(newest)
    given = {"auto": "auto", "explicit": newest, "run folder": tmp_path}[resume]
    with pytest.raises(CheckpointError):
        load_state(choose_checkpoint(given, folder, solo), state(0))
    assert not owned.exists()


def test_the_payloads_work(folder, tmp_path):
    """Opened without care, each runs."""
    newest = folder / "step_00000002"
    hostile_description(newest, tmp_path / "owned")
    pickle.loads((newest / "state/.metadata").read_bytes())
    assert (tmp_path / "owned").exists()
    (tmp_path / "owned").unlink()
    hostile_value(newest, tmp_path / "owned")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": {"w": None}}, checkpoint_id=newest / "state", no_dist=True)
    assert (tmp_path / "owned").exists()


def test_a_value_that_is_no_tensor_is_not_read(folder):
    described = folder / "step_00000002/state/.metadata"
    metadata = pickle.loads(described.read_bytes())
    metadata.state_dict_metadata["model.w"] = BytesStorageMetadata()
    described.write_bytes(pickle.dumps(metadata))
    write_checksums(folder / "step_00000002")
    with pytest.raises(CheckpointError, match="does not fit this run"):
        load_state(find_checkpoint(folder / "step_00000002"), state(0))


def test_a_trainer_runs_no_code(train_root, solo, tmp_path):
    """From the recipe down: the newest is hostile, the run resumes from the one before."""
    changes = {"runner__output_dir": tmp_path / "run", "runner__resume_dir": "auto"}
    run = train_worker.trainer(solo, train_root, **changes)
    for step in (1, 2):
        run.step = step
        run.save(wait=True)
    newest = tmp_path / "run/checkpoints/step_00000002"
    hostile_description(newest, tmp_path / "owned")
    write_checksums(newest)
    again = train_worker.trainer(solo, train_root, **changes)
    again.resume()
    assert again.step == 1
    assert not (tmp_path / "owned").exists()


@pytest.mark.long
def test_two_ranks_run_no_code(train_root, train_environment, solo, tmp_path):
    """Under torchrun itself, with the checkpoint named: one message of one rank, and code 2."""
    run = train_worker.trainer(solo, train_root, runner__output_dir=tmp_path / "run")
    run.step = 1
    run.save(wait=True)
    step = tmp_path / "run/checkpoints/step_00000001"
    hostile_description(step, tmp_path / "owned")
    write_checksums(step)
    values = train_worlds.recipe(train_root, runner__output_dir=tmp_path / "again")
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--redirects", "0"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "training/sft.py"), "recipe.yaml", f"runner.resume_dir={step}"],
        cwd=tmp_path, env=train_environment, timeout=600, capture_output=True, text=True,
    )  # fmt: skip
    assert not (tmp_path / "owned").exists()
    assert done.stderr.count(".metadata") == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, "torchrun's own"
    assert done.stderr.index(".metadata") < done.stderr.index("Traceback")
    assert "exitcode  : 2" in done.stderr, done.stderr
    assert done.returncode == 1, "torchrun's own code where a process failed"


def test_an_own_training_checkpoint_opens(train_root, solo, tmp_path):
    """With the base it names, found where training found it, its weights are those in memory."""
    run = train_worker.trainer(solo, train_root, runner__output_dir=tmp_path / "run")
    run.step = 1
    run.save(wait=True)
    step = tmp_path / "run/checkpoints/step_00000001"
    for path in (step, step / "state"):
        assert main(["inspect", str(path), "--verify"]) == 0
        loaded = load_network(open_checkpoint(path), LoadOptions()).state_dict()
        name = "blocks.0.ffn.0.weight"
        weight = train_worker.whole(run.components.optimizer.named[name])
        assert torch.equal(loaded[f"model.{name}"], weight)
