"""Damaged, foreign and hostile checkpoints: one clear sentence, nothing loaded, no code run."""

import io
import json
import os
import pickle
import resource
import shutil

import pytest
import torch
from checkpoint_layouts import (
    NESTINGS,
    tensors_of,
    write_components,
    write_dcp_run,
    write_pickled,
)
from safetensors.torch import save_file

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.hub import locate
from dzrobot.policies.dreamzero.checkpoints.load import LoadOptions, is_finite, load_network
from dzrobot.policies.dreamzero.options import WeightOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

QUERY = "action_head.model.blocks.0.self_attn.q.weight"


def load(path, **options):
    return load_network(open_checkpoint(path), LoadOptions(**options))


@pytest.fixture
def sharded(tiny_folders, tmp_path):
    target = tmp_path / "sharded"
    convert([tiny_folders / "5b"], target, ConvertOptions(shard_bytes=500_000))
    return target


@pytest.fixture
def single(tiny_folders, tmp_path):
    return shutil.copytree(tiny_folders / "5b", tmp_path / "single")


def rewritten(folder, change):
    """Rewrite the weights of ``folder`` after ``change`` of its state dict."""
    state = tensors_of(folder)
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


def test_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {shard.name} .* download it again"):
        load(sharded)


@pytest.mark.sampled
@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_truncated_shard(sharded, kept):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{shard.name} is (damaged or cut short|empty)"):
        load(sharded)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 10886082\n"
PLACES = (
    "model.safetensors", "model.safetensors.index.json", "model-00002-of-*.safetensors",
    "config.json", "experiment_cfg/metadata.json", "tokenizer/tokenizer.json", "full_weights.pt",
    ".metadata", "__0_0.distcp",
)  # fmt: skip


def laid_out(origin, folder, place):
    """Write the checkpoint ``origin`` in the layout that has a file ``place``, and return that."""
    if place.endswith((".metadata", ".distcp")):
        write_dcp_run(origin, folder)
        return next((folder / "actor/dcp_checkpoint").glob(place))
    if place == "full_weights.pt":
        write_pickled(origin, folder, "flat")
        return folder / "actor/model_state_dict" / place
    size = 1 << 40 if place == "model.safetensors" else 500_000
    convert([origin], folder, ConvertOptions(shard_bytes=size))
    return next(folder.glob(place))


@pytest.mark.sampled
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["git lfs pull", "was not finished"])
def test_a_stand_in_is_named_wherever_it_lies(tiny_folders, tmp_path, libero, place, kind):
    """A Git LFS pointer, or a link of the hub's cache whose file was not fetched."""
    path = laid_out(tiny_folders / "5b", tmp_path / "given", place)
    path.unlink()
    if kind == "git lfs pull":
        path.write_bytes(LFS)
    else:
        path.symlink_to("../blobs/nowhere")
    with pytest.raises(CheckpointError, match=kind) as caught:
        DreamZeroPolicy.from_pretrained(tmp_path / "given", embodiment=libero)
    assert path.name in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_all_faults_of_the_shards_are_named_together(sharded):
    index, shards = sharded / "model.safetensors.index.json", sorted(sharded.glob("*.safetensors"))
    shards[0].write_bytes(LFS)
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    shards[2].unlink()
    shards[3].write_bytes(LFS)
    table = json.loads(index.read_text())
    table["weight_map"]["extra.name"] = shards[4].name
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError) as caught:
        load(sharded)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "2 files in" in lines[0]
    assert shards[2].name in lines[1]
    assert f"{shards[1].name} is damaged or cut short" in lines[2]
    assert "extra.name" in lines[3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(single, value):
    def change(state):
        for name in (QUERY, QUERY.replace("blocks.0", "blocks.1")):
            state[name][0, 0] = value

    rewritten(single, change)
    with pytest.raises(CheckpointError, match=r"in 2 tensors, .*blocks.0.self_attn.q.weight"):
        load(single)


def test_large_weights_are_not_infinity(single):
    """Their sum overflows float32; they do not."""
    largest = torch.finfo(torch.float32).max

    def change(state):
        state[QUERY].fill_(largest)

    rewritten(single, change)
    assert load(single).state_dict()


FLOATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_number_that_is_not_finite_is_found_in_every_dtype(dtype):
    limits = torch.finfo(dtype)
    values = torch.linspace(-1, 1, 3 * 67).to(dtype).reshape(3, 67)
    values[0, 0], values[2, 66] = limits.max, limits.min
    assert is_finite(values)
    assert is_finite(values.T)
    assert is_finite(values[:0])
    # What a dtype has no infinity for becomes NaN.
    bad = torch.tensor([float("nan"), float("inf"), float("-inf")]).to(dtype)
    bad = torch.cat([bad, bad[:1].view(torch.uint8).bitwise_or(128).view(dtype)])
    for number in range(0, values.numel(), 7):
        for one in bad[~torch.isfinite(bad.float())]:
            wrong = values.clone()
            wrong.view(-1)[number] = one
            assert not is_finite(wrong)
            assert not is_finite(wrong.T)
    assert not is_finite(bad[0])


def test_flat_parameters_are_refused_by_name(single):
    flat = {"_fsdp_wrapped_module._flat_param": torch.zeros(9)}
    save_file(flat, single / "model.safetensors")
    with pytest.raises(CheckpointError, match="FULL_STATE_DICT"):
        open_checkpoint(single)


def test_a_file_that_may_not_be_opened_is_not_damaged(sharded):
    found = open_checkpoint(sharded)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(CheckpointError, match=r"Too many open files; allow .* \(ulimit -n"):
            load_network(found, LoadOptions())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("layout", "why"),
    [("directory", "File too large; choose"), ("full_weights", "half way"), ("dcp", "half way")],
)
def test_what_cannot_be_written_is_one_message_and_leaves_nothing(single, tmp_path, layout, why):
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What a full disk does, with another number.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=f"cannot write .*out.*: .*{why}"):
            convert([single], tmp_path / "out", ConvertOptions(to=layout))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before


def test_missing_index_entry(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    del data["weight_map"][QUERY]
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"has no entry for .*self_attn.q.weight"):
        load(sharded)


def test_index_entry_without_tensor(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["action_head.model.more"] = sorted(data["weight_map"].values())[0]
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"lists action_head.model.more .* not in that shard"):
        load(sharded)


def test_index_and_single_file(sharded, tiny_folders):
    shutil.copy(tiny_folders / "5b/model.safetensors", sharded)
    with pytest.raises(CheckpointError, match="remove the stale one"):
        load(sharded)


def test_no_weights(single):
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights .* expected model.safetensors"):
        load(single)


def test_the_folder_of_a_run_names_its_newest_checkpoint(tmp_path):
    for step in ("checkpoints/step_00000900", "checkpoints/step_00001000"):
        (tmp_path / step).mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"training run.*checkpoints/step_00001000$"):
            load(folder)
    for step in ("step_00000900", "step_00000020", "step_00001000_adapters", "card"):
        (tmp_path / "export" / step).mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "export"):
        with pytest.raises(CheckpointError, match=r"training run.*export/step_00000900$"):
            load(folder)


def test_missing_tensor(single):
    rewritten(single, lambda state: state.pop(QUERY))
    with pytest.raises(CheckpointError, match=r"missing .*self_attn.q.weight; unexpected none"):
        load(single)


def test_unexpected_tensor(single):
    rewritten(single, lambda state: state.update({"action_head.more": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"missing none; unexpected action_head.more"):
        load(single)


def test_foreign_checkpoint(single):
    save_file({"model.embed_tokens.weight": torch.ones(2)}, single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor named action_head.\* .*embed_tokens"):
        load(single)


def test_wrong_shape(single):
    rewritten(single, lambda state: state.update({QUERY: torch.ones(64, 63)}))
    with pytest.raises(CheckpointError, match=r"self_attn.q.weight of shape \(64, 63\) instead of"):
        load(single)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_wrong_dtype(single, dtype):
    rewritten(single, lambda state: state.update({QUERY: state[QUERY].to(dtype)}))
    with pytest.raises(CheckpointError, match="must be float32, bfloat16 or float16"):
        load(single)


def test_the_same_tensor_twice(single):
    rewritten(single, lambda state: state.update({f"module.{QUERY}": state[QUERY].clone()}))
    with pytest.raises(CheckpointError, match=r"holds the tensor .* twice"):
        load(single)


def test_other_variant(tiny_folders, single):
    shutil.copy(tiny_folders / "14b/config.json", single)
    with pytest.raises(CheckpointError, match=r"use the config.json published with these weights"):
        load(single)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"action_head_cfg": {"config": 3}}'])
def test_bad_config(single, text):
    (single / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(single)


def test_no_config(single):
    (single / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json, .*--preset 5b .*--config-from"):
        load(single)


def test_no_metadata(single):
    shutil.rmtree(single / "experiment_cfg")
    checkpoint = open_checkpoint(single)
    with pytest.raises(CheckpointError, match=r"metadata.json, .* `dzrobot stats`"):
        _ = checkpoint.metadata_file


def test_nothing_is_half_loaded(single, monkeypatch):
    """No weight is read before everything is known to fit."""
    rewritten(single, lambda state: state.pop(QUERY))
    checkpoint = open_checkpoint(single)
    read = []
    monkeypatch.setattr(type(checkpoint.weights), "stream", lambda *_: read.append(1) or iter(()))
    with pytest.raises(CheckpointError):
        load_network(checkpoint, LoadOptions())
    assert not read


@pytest.mark.parametrize("name", ["nowhere/at/all", "no such folder", "/nowhere"])
def test_no_such_path(name):
    with pytest.raises(CheckpointError, match="give a folder, a file, or a Hugging Face id"):
        locate(name)


def test_hub_out_of_reach(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="give the folder"):
        locate("someone/some-checkpoint")


def test_hub_cache_is_used_offline(monkeypatch, tmp_path, tiny_folders):
    import huggingface_hub.constants

    commit = "0123456789012345678901234567890123456789"
    repo = tmp_path / "models--someone--some-checkpoint"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(commit)
    shutil.copytree(tiny_folders / "5b", repo / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    load("someone/some-checkpoint")
    assert locate("someone/some-checkpoint", commit).name == commit
    with pytest.raises(CheckpointError, match="at revision v2"):
        locate("someone/some-checkpoint", "v2")
    # One file of a repository, as component files of a cold start are named.
    (repo / "snapshots" / commit / "Wan2.2_VAE.pth").write_bytes(b"weights")
    assert locate("someone/some-checkpoint/Wan2.2_VAE.pth").read_bytes() == b"weights"
    with pytest.raises(CheckpointError, match=r"has no file Wan2\.1_VAE\.pth"):
        locate("someone/some-checkpoint/Wan2.1_VAE.pth")


def test_revision_of_a_local_path(single):
    with pytest.raises(CheckpointError, match="leave the revision out"):
        locate(single, "main")


def test_target_exists(single, tmp_path):
    with pytest.raises(CheckpointError, match="exists already"):
        convert([single], single, ConvertOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["single"]


def test_failed_write_leaves_nothing(single, tmp_path, monkeypatch):
    from dzrobot.policies.dreamzero.checkpoints import directory

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(directory, "write_json", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*disk full"):
        convert([single], tmp_path / "target", ConvertOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["single"]


class TestTrainingRuns:
    def test_not_a_state_dict(self, tiny_folders, tmp_path):
        run = write_pickled(tiny_folders / "5b", tmp_path / "run", "flat")
        file = run / "actor/model_state_dict/full_weights.pt"
        torch.save({"model": {"lr": 3, "action_head.model.x": torch.ones(1)}}, file)
        with pytest.raises(CheckpointError, match="entries that are not tensors: lr"):
            open_checkpoint(run)

    @pytest.mark.parametrize("kept", [0, 100, -100])
    def test_truncated_file(self, tiny_folders, tmp_path, kept):
        run = write_pickled(tiny_folders / "5b", tmp_path / "run", "flat")
        file = run / "actor/model_state_dict/full_weights.pt"
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(CheckpointError, match=r"full_weights\.pt"):
            open_checkpoint(run)

    def test_truncated_piece(self, tiny_folders, tmp_path):
        run = write_dcp_run(tiny_folders / "5b", tmp_path / "run")
        piece = next(run.rglob("*.distcp"))
        piece.write_bytes(piece.read_bytes()[: 4 * 100_000])
        with pytest.raises(CheckpointError, match="is cut short"):
            open_checkpoint(run)

    def test_missing_piece(self, tiny_folders, tmp_path):
        run = write_dcp_run(tiny_folders / "5b", tmp_path / "run")
        next(run.rglob("*.distcp")).unlink()
        with pytest.raises(CheckpointError, match="lacks the file"):
            open_checkpoint(run)

    def test_missing_description(self, tiny_folders, tmp_path):
        run = write_dcp_run(tiny_folders / "5b", tmp_path / "run")
        next(run.rglob(".metadata")).unlink()
        with pytest.raises(CheckpointError, match=r"no \.metadata file; copy the whole"):
            open_checkpoint(run)


class TestComponents:
    @pytest.mark.parametrize("pattern", ["models_t5*", "models_clip*", "Wan2*", "diffusion*index*"])
    def test_missing_file(self, tiny, tmp_path, pattern):
        folder = write_components(tiny, tmp_path / "wan")
        next(folder.glob(pattern)).unlink()
        # Without its transformer the folder is no set of component files at all.
        with pytest.raises(CheckpointError, match=r"download it from Wan-AI|holds no weights"):
            convert([folder], tmp_path / "start", ConvertOptions(config_from=tiny))

    def test_lost_tensor(self, tiny, tmp_path):
        folder = write_components(tiny, tmp_path / "wan")
        file = next(folder.glob("Wan2*"))
        state = torch.load(file, weights_only=True)
        state.pop(next(iter(state)))
        torch.save(state, file)
        with pytest.raises(CheckpointError, match=r"lack action_head\.vae"):
            convert([folder], tmp_path / "start", ConvertOptions(config_from=tiny))

    def test_no_config(self, tiny, tmp_path):
        folder = write_components(tiny, tmp_path / "wan")
        with pytest.raises(CheckpointError, match="--config-from"):
            convert([folder], tmp_path / "start", ConvertOptions())


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


def saved(value):
    """Return ``value`` as torch saves it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class TestHostile:
    """Real payloads: opened without care, each would create the file."""

    def test_the_payload_works(self, tmp_path):
        pickle.loads(pickle.dumps(Payload(tmp_path / "owned")))
        assert (tmp_path / "owned").exists()

    @pytest.mark.sampled
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("write", [pickle.dumps, saved], ids=["pickle", "torch"])
    def test_a_pickle_under_any_name(self, tiny_folders, tmp_path, libero, place, write):
        """What a file is decides, not what it is called."""
        path = laid_out(tiny_folders / "5b", tmp_path / "given", place)
        path.write_bytes(write({"x": Payload(tmp_path / "owned")}))
        with pytest.raises(CheckpointError) as caught:
            DreamZeroPolicy.from_pretrained(tmp_path / "given", embodiment=libero)
        assert path.name in str(caught.value)
        assert not (tmp_path / "owned").exists()

    @pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
    @pytest.mark.parametrize("write", [pickle.dumps, saved], ids=["pickle", "torch"])
    def test_adapters(self, tiny_folders, tmp_path, libero, name, write):
        (tmp_path / "adapters").mkdir()
        settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q"]}
        (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(settings))
        (tmp_path / "adapters" / name).write_bytes(write({"x": Payload(tmp_path / "owned")}))
        with pytest.raises(CheckpointError, match=name):
            DreamZeroPolicy.from_pretrained(
                tmp_path / "adapters", embodiment=libero,
                weights=WeightOptions(base=tiny_folders / "5b"),
            )  # fmt: skip
        assert not (tmp_path / "owned").exists()

    @pytest.mark.parametrize("nesting", NESTINGS)
    def test_state_dict(self, tiny_folders, tmp_path, nesting):
        run = write_pickled(tiny_folders / "5b", tmp_path / "run", "flat")
        file = run / "actor/model_state_dict/full_weights.pt"
        payload = {"action_head.x": torch.ones(2), "bad": Payload(tmp_path / "owned")}
        torch.save(NESTINGS[nesting](payload), file)
        with pytest.raises(CheckpointError, match="could run code"):
            open_checkpoint(run)
        file.write_bytes(pickle.dumps(payload))
        with pytest.raises(CheckpointError, match=r"full_weights\.pt"):
            open_checkpoint(run)
        assert not (tmp_path / "owned").exists()

    def test_component(self, tiny_folders, tmp_path):
        folder = write_components(tiny_folders / "5b", tmp_path / "wan")
        torch.save({"x": Payload(tmp_path / "owned")}, next(folder.glob("models_t5*")))
        options = ConvertOptions(config_from=tiny_folders / "5b")
        with pytest.raises(CheckpointError, match="could run code"):
            convert([folder], tmp_path / "start", options)
        assert not (tmp_path / "owned").exists()

    def test_description(self, tiny_folders, tmp_path):
        run = write_dcp_run(tiny_folders / "5b", tmp_path / "run")
        file = next(run.rglob(".metadata"))
        metadata = pickle.loads(file.read_bytes())
        metadata.planner_data = Payload(tmp_path / "owned")
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="could run code"):
            open_checkpoint(run)
        assert not (tmp_path / "owned").exists()

    def test_piece(self, tiny_folders, tmp_path):
        run = write_dcp_run(tiny_folders / "5b", tmp_path / "run")
        buffer = io.BytesIO()
        torch.save(Payload(tmp_path / "owned"), buffer)
        piece = next(run.rglob("*.distcp"))
        size = len(piece.read_bytes())
        bad = buffer.getvalue()
        piece.write_bytes((bad * (size // len(bad) + 1))[: size + len(bad)])
        with pytest.raises(CheckpointError, match="is damaged or holds no tensor"):
            load(run)
        assert not (tmp_path / "owned").exists()

    def test_file_outside_the_folder(self, tiny_folders, tmp_path):
        run = write_dcp_run(tiny_folders / "5b", tmp_path / "run")
        file = next(run.rglob(".metadata"))
        metadata = pickle.loads(file.read_bytes())
        for place in metadata.storage_data.values():
            place.relative_path = f"../{place.relative_path}"
        piece = next(run.rglob("*.distcp"))
        piece.rename(piece.parent.parent / piece.name)
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="lacks the file"):
            open_checkpoint(run)
