"""Tokenizers, tensors, links and names in a checkpoint that are not what they should be."""

import json
import re
import shutil

import pytest
import torch
from checkpoint_layouts import tensors_of, write_pickled
from safetensors.torch import save_file
from test_checkpoint_commands import typed

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

NAME = "action_head.model.blocks.0.self_attn.q.weight"


@pytest.fixture
def folder(tiny_folders, tmp_path):
    return shutil.copytree(tiny_folders / "5b", tmp_path / "odd")


TOKENIZERS = {
    "empty": b"", "cut": b'{"version": "1.0"', "a list": b"[]", "no text": b"\xff\xfe",
    "no model": b"{}", "null": b"null",
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_corrupted_tokenizers(folder, libero, kind):
    (folder / "tokenizer/tokenizer.json").write_bytes(TOKENIZERS[kind])
    with pytest.raises(CheckpointError, match="tokenizer"):
        DreamZeroPolicy.from_pretrained(folder, embodiment=libero)


ODD = {
    "sparse": lambda t: t.to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "without data": lambda t: torch.empty(t.shape, device="meta"),
    "a view of one number": lambda t: torch.zeros(1).expand(10**6, 10**6),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_in_a_pickled_file(tiny_folders, tmp_path, kind):
    run = write_pickled(tiny_folders / "5b", tmp_path / "run", "flat")
    file = run / "actor/model_state_dict/full_weights.pt"
    state = tensors_of(tiny_folders / "5b")
    torch.save({**state, NAME: ODD[kind](state[NAME])}, file)
    with pytest.raises(CheckpointError, match=r"full_weights\.pt"):
        open_checkpoint(run)


@pytest.mark.parametrize("name", ["tokenizer/more.txt", "experiment_cfg/more", "wandb_config.json"])
def test_links_out_of_a_checkpoint_are_not_copied(folder, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        convert([folder], tmp_path / "copy", ConvertOptions())
    assert not (tmp_path / "copy").exists()


def test_links_within_a_checkpoint_are_files(folder, tmp_path):
    (folder / "tokenizer/more.json").symlink_to(folder / "config.json")
    copy = convert([folder], tmp_path / "copy", ConvertOptions()).path
    more = copy / "tokenizer/more.json"
    assert not more.is_symlink()
    assert more.read_bytes() == (folder / "config.json").read_bytes()


def test_markup_in_names_is_text(folder, capsys):
    """What looks like rich's markup in a file is printed as it is, and breaks nothing."""
    odd = "action_head.[bold red]x[/nothing]"
    save_file({**tensors_of(folder), odd: torch.ones(1)}, folder / "model.safetensors")
    metadata = folder / "experiment_cfg/metadata.json"
    content = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({**content, "[/x]": content["libero_sim"]}))
    code, out, err = typed(capsys, "inspect", folder)
    assert code == 1
    assert not err
    joined = re.sub(r"\s", "", out)
    assert re.sub(r"\s", "", odd) in joined
    assert "[/x],libero_sim" in joined
    assert "transformer│" in joined


def test_one_file_is_verified_beside_its_checksums(folder, tmp_path, capsys):
    whole = convert([folder], tmp_path / "whole", ConvertOptions()).path
    file = whole / "model.safetensors"
    (whole / "config.json").write_text((whole / "config.json").read_text() + " ")
    assert typed(capsys, "inspect", file, "--verify")[0] == 0
    code, _, err = typed(capsys, "inspect", whole, "--verify")
    assert code == 2
    assert "config.json is not what was written" in err
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    code, _, err = typed(capsys, "inspect", file, "--verify")
    assert code == 2
    assert "model.safetensors is not what was written" in err
    shutil.copy(file, whole / "other.safetensors")
    code, _, err = typed(capsys, "inspect", whole / "other.safetensors", "--verify")
    assert code == 2
    assert "no checksum of other.safetensors" in err
