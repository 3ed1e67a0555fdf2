"""Checkpoint folders: complete or not there, the last few kept, foreign ones refused."""

import json
import subprocess

import pytest
import torch
import train_worker

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints import checksums
from dzrobot.policies.dreamzero.checkpoints.hub import local_path
from dzrobot.training.run.checkpoint import (
    LATEST,
    CheckpointWriter,
    complete_checkpoints,
    find_checkpoint,
    load_state,
)
from dzrobot.training.sft_config import CheckpointConfig


def state(value):
    return {"model": {"w": torch.full((4, 3), float(value))}, "updates": torch.tensor(float(value))}


@pytest.mark.parametrize("background", [True, False])
def test_the_last_few_are_kept(tmp_path, solo, background):
    writer = CheckpointWriter(
        tmp_path, CheckpointConfig(keep_last_k=2, async_save=background), solo
    )
    for step in (1, 2, 3):
        tensors = state(step)
        writer.save(step, tensors, {"skips": 0})
        # The copy was taken at the call.
        tensors["model"]["w"].zero_()
    writer.finish()
    assert [saved.step for saved in complete_checkpoints(tmp_path)] == [2, 3]
    assert (tmp_path / LATEST).read_text() == "step_00000003"
    found = state(0)
    load_state(find_checkpoint(tmp_path), found)
    assert torch.equal(found["model"]["w"], torch.full((4, 3), 3.0))


def test_sealing_reads_no_tensor_again(tmp_path, solo, monkeypatch):
    read = []
    digest = checksums._file_digest

    def spied(file):
        read.append(file.name)
        return digest(file)

    monkeypatch.setattr(checksums, "_file_digest", spied)
    CheckpointWriter(tmp_path, CheckpointConfig(), solo).save(3, state(3), {}, wait=True)
    assert read
    assert not any(name.endswith(".distcp") for name in read)
    folder = tmp_path / "step_00000003"
    listed = (folder / checksums.CHECKSUMS_FILE).read_text()
    assert "state/__0_0.distcp" in listed
    # By another program.
    subprocess.run(["sha256sum", "--check", "--strict", checksums.CHECKSUMS_FILE], cwd=folder,
                   check=True, capture_output=True)  # fmt: skip


def test_damage_is_in_one_share(tmp_path):
    for number, size in enumerate((5, 40, 7, 20, 1)):
        (tmp_path / f"file{number}").write_bytes(b"x" * size)
    checksums.write_checksums(tmp_path)
    names = [f"file{number}" for number in range(5)]
    shares = [checksums._share(tmp_path, names, index, 3) for index in range(3)]
    assert sorted(name for share in shares for name in share) == names
    # The largest file alone is more than a third.
    assert max(sum((tmp_path / name).stat().st_size for name in share) for share in shares) == 40
    for number in range(5):
        file = tmp_path / f"file{number}"
        whole = file.read_bytes()
        file.write_bytes(b"y" + whole[1:])
        refused = []
        for index in range(3):
            try:
                checksums.check_checksums(tmp_path, share=(index, 3))
            except CheckpointError as error:
                refused.append(str(error))
        assert len(refused) == 1
        assert file.name in refused[0]
        file.write_bytes(whole)


def test_a_step_is_named_with_or_without_its_zeros(tmp_path, solo):
    writer = CheckpointWriter(tmp_path, CheckpointConfig(keep_last_k=9), solo)
    for step in (2, 8, 30, 900):
        writer.save(step, state(step), {"skips": 0}, wait=True)
    short = tmp_path / "step_30"
    assert find_checkpoint(short).path == tmp_path / "step_00000030"
    assert local_path(str(short)) == tmp_path / "step_00000030"
    nearest = "nearest there: step_00000008, step_00000002, step_00000030"
    with pytest.raises(CheckpointError, match=nearest):
        find_checkpoint(tmp_path / "step_9")
    with pytest.raises(CheckpointError, match=nearest):
        local_path(str(tmp_path / "step_00000009"))


def test_torn_folders_are_ignored_and_cleared(tmp_path, solo):
    config = CheckpointConfig(keep_last_k=2)
    writer = CheckpointWriter(tmp_path, config, solo)
    writer.save(5, state(5), {"skips": 0}, wait=True)
    torn = tmp_path / "step_00000006.writing"
    torn.mkdir()
    bare = tmp_path / "step_00000007"
    (bare / "state").mkdir(parents=True)
    (bare / "meta.json").write_text(json.dumps({"step": 7}))
    assert find_checkpoint(tmp_path).step == 5
    CheckpointWriter(tmp_path, config, solo)
    assert not torn.exists()
    with pytest.raises(CheckpointError, match="no complete"):
        find_checkpoint(tmp_path / "elsewhere")


def test_other_shapes_are_refused(tmp_path, solo):
    CheckpointWriter(tmp_path, CheckpointConfig(), solo).save(1, state(1), {"skips": 0}, wait=True)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        load_state(
            find_checkpoint(tmp_path), {"model": {"w": torch.zeros(4, 3), "v": torch.ones(1)}}
        )


def test_a_checkpoint_of_another_run_is_refused(train_root, solo, tmp_path):
    run = train_worker.trainer(solo, train_root, runner__output_dir=tmp_path / "a")
    run.step = 2
    run.save(wait=True)
    changes = {"model__is_lora": True, "runner__resume_dir": tmp_path / "a"}
    other = train_worker.trainer(solo, train_root, **changes)
    with pytest.raises(CheckpointError, match="is_lora"):
        other.resume()
    short = train_worker.trainer(
        solo, train_root, runner__max_steps=2, optim__lr_warmup_steps=0,
        runner__resume_dir=tmp_path / "a",
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="nothing left to train"):
        short.resume()
