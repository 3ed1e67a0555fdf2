"""Checkpoint folders: complete or not there, the last few kept, foreign ones refused."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_worker
import train_worlds
from scripts import printed_elsewhere

from dzrobot.code_identity import CodeIdentity, package_code
from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.checkpoints import checksums
from dzrobot.policies.dreamzero.checkpoints.hub import local_path
from dzrobot.policies.dreamzero.checkpoints.passport import read_passport, write_passport
from dzrobot.policies.dreamzero.network.prompt import PromptTokenizer
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training.run.build import build
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


@pytest.mark.copies
@pytest.mark.kill_points
def test_a_kill_loses_no_complete_checkpoint(tmp_path):
    """Saving, replacing and expiring: at start, the newest complete checkpoint is there again."""
    # In a process that has not joined a run: what is forked off it joins one of its own.
    script = Path(__file__).parent / "kill_checkpoints.py"
    said = printed_elsewhere(script, [f"{tmp_path / 'kills'}"], tmp_path)
    tried, lost = json.loads(said.splitlines()[-1])
    assert tried >= 6
    assert not lost


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


def test_a_checkpoint_names_code_weights_and_tokenizer(tmp_path, train_root, solo):
    run = train_worker.trainer(solo, train_root, runner__output_dir=tmp_path)
    run.save(wait=True)
    folder = tmp_path / "checkpoints" / "step_00000000"
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["codes"] == [package_code().plain()]
    tiny = train_root / "tiny"
    done = subprocess.run(["sha256sum", tiny / "model.safetensors"], capture_output=True, text=True)
    assert meta["weights"] == done.stdout.split()[0]
    assert meta["tokenizer"] == PromptTokenizer(tiny / "tokenizer").fingerprint
    passport = read_passport(folder)
    assert (passport.weights, passport.tokenizer) == (meta["weights"], meta["tokenizer"])
    assert passport.code == (package_code(),)


def test_a_run_of_other_code_resumes_with_a_warning_and_a_record(
    tmp_path, train_root, solo, caplog
):
    run = train_worker.trainer(solo, train_root, runner__output_dir=tmp_path)
    other = CodeIdentity(version="0.0.9", commit="c0ffee", content="f" * 64)
    run.components.codes[:] = [other]
    run.save(wait=True)
    changes = {"runner__output_dir": tmp_path, "runner__resume_dir": "auto"}
    again = train_worker.trainer(solo, train_root, **changes)
    again.resume()
    assert "made by other code: dzrobot 0.0.9 (commit c0ffee, content ffffffffffff)" in caplog.text
    again.step = 1
    again.save(wait=True)
    assert find_checkpoint(tmp_path).meta.codes == [other, package_code()]
    assert read_passport(find_checkpoint(tmp_path).path).code == (other, package_code())
    # From there on it is one code.
    caplog.clear()
    train_worker.trainer(solo, train_root, **changes).resume()
    assert "other code" not in caplog.text


def test_processes_of_different_code_do_not_train_together(train_root, solo):
    class Two:
        """Two processes, the second of other code."""

        is_main, size = True, 2

        def gathered(self, value):
            return [value, CodeIdentity(version="0.1.0", content="f" * 64)]

    config = train_worlds.config(train_root)
    with pytest.raises(ConfigError, match=r"different code: rank 0 .*, rank 1 0\.1\.0"):
        build(config, Two())


def test_another_tokenizer_than_the_one_trained_with_is_refused(tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(default_checkpoint(), folder)
    passport = replace(read_passport(folder), tokenizer="ab" * 32)
    write_passport(folder, passport)
    with pytest.raises(CheckpointError, match="tokenizer: checkpoint abababababab, wanted"):
        DreamZeroPolicy.from_pretrained(folder)
