"""Tokenizers, tensors, links and names in a checkpoint that are not what they should be."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_layouts import tensors_of, write_pickled
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_checkpoint_commands import typed
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.dcp import write_dcp
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.names import canonical
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

NAME = "action_head.model.blocks.0.self_attn.q.weight"

WRAPPERS = (
    "_orig_mod", "module", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module",
    "_forward_module",
)  # fmt: skip
"""What programs around a network, or a part of it, put into names."""

HOLDERS = ("model", "policy")
"""What programs put in front of the names of a network that they hold."""


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


def wrapped(name, draw):
    """Return ``name`` with what ``draw(choices)`` lists in front and before each of its parts."""
    parts = [*draw(WRAPPERS + HOLDERS)]
    for part in name.split("."):
        parts += [*draw(WRAPPERS), part]
    return ".".join(parts)


@pytest.fixture(scope="module")
def plain(tiny_folders, libero):
    """Return the tensors of a checkpoint by name, and what it does."""
    return tensors_of(tiny_folders / "5b"), acted(tiny_folders / "5b", libero)


def acted(folder, robot):
    """Return the bits of the first action of the weights in ``folder``."""
    policy = DreamZeroPolicy.from_pretrained(folder, embodiment=robot)
    draw = np.random.default_rng(5)
    seen = {v.key: draw.integers(0, 256, (*v.resolution, 3), np.uint8) for v in robot.views}
    seen |= {part.key: draw.normal(size=part.dim).astype(np.float32) for part in robot.state}
    policy.reset()
    return policy.act(seen | {robot.language: "lift the cube"}).tobytes()


@settings(derandomize=True, deadline=None)
@given(data=st.data())
def test_wrappers_in_any_order_are_no_part_of_a_name(plain, data):
    name = data.draw(st.sampled_from(sorted(plain[0])))
    adapter = name.removesuffix(".weight") + ".lora_A.default.weight"
    for one in (name, adapter):
        lists = lambda known: data.draw(st.lists(st.sampled_from(known), max_size=3))  # noqa: E731
        assert canonical(wrapped(one, lists)) == one


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["safetensors", "pt", "dcp", "dcp of FSDP1"])
def test_wrappers_leave_the_actions_what_they_are(plain, folder, libero, layout):
    """To the bit. Each tensor is wrapped in another way, as no program would."""
    draw = np.random.default_rng(7)
    lists = lambda known: draw.choice(known, draw.integers(0, 3))  # noqa: E731
    state = {wrapped(name, lists): tensor for name, tensor in plain[0].items()}
    (folder / "model.safetensors").unlink()
    match layout:
        case "safetensors":
            save_file(state, folder / "model.safetensors")
        case "pt":
            torch.save(state, folder / "full_weights.pt")
        case "dcp":
            shapes = {name: value.to("meta") for name, value in state.items()}
            write_dcp(folder / "state", shapes, state.__getitem__)
        case _:
            write_sharded(folder / "state", state)
    for file in (folder / "state").glob("*"):
        file.rename(folder / file.name)
    assert tensors_of(folder).keys() == plain[0].keys()
    assert acted(folder, libero) == plain[1]


def write_sharded(folder, state):
    """Write ``state`` as FSDP1 does: as ShardedTensors, here of two shards of one process."""
    # Other tests of this process may have left a group, which may not be destroyed under them.
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = {name: as_sharded(tensor) for name, tensor in state.items()}
        writer = dcp.FileSystemWriter(folder)
        dcp.save({"model": sharded}, storage_writer=writer)
    finally:
        if ours:
            dist.destroy_process_group()


def as_sharded(tensor):
    if not tensor.ndim:
        return tensor
    shards, begin = [], 0
    for piece in tensor.tensor_split(2):
        if len(piece):
            where = [begin, *(0 for _ in tensor.shape[1:])]
            shards.append(Shard.from_tensor_and_offsets(piece.contiguous(), where, rank=0))
        begin += len(piece)
    return init_from_local_shards(shards, *tensor.shape)
