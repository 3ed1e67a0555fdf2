"""Every published layout gives the same network; nothing is guessed, nothing half-loaded."""

import io
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_layouts import (
    NESTINGS,
    absent_from_components,
    tensors_of,
    write_components,
    write_dcp_run,
    write_pickled,
)
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dzrobot.errors import CheckpointError, UnknownNameError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.checkpoints import lora, sources
from dzrobot.policies.dreamzero.checkpoints.coldstart import new_names
from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.keymap import PREFIXES
from dzrobot.policies.dreamzero.checkpoints.load import (
    LoadOptions,
    build_network,
    expected_shapes,
    load_network,
    load_weights,
    official_state,
    slots,
)
from dzrobot.policies.dreamzero.checkpoints.lora import (
    AdapterConfig,
    MergedSource,
    inject_adapters,
)
from dzrobot.policies.dreamzero.checkpoints.names import DIT, canonical
from dzrobot.policies.dreamzero.checkpoints.shards import (
    ShardOptions,
    save_tensors,
    write_weights,
)
from dzrobot.policies.dreamzero.network.config import NetworkConfig, preset
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy


def test_a_policy_is_loaded_without_libraries_of_models_and_the_compiler():
    """To import them took most of the seconds that a command begins with."""
    program = """if True:
        import sys
        import numpy as np
        from dzrobot import DreamZeroPolicy, default_checkpoint
        policy = DreamZeroPolicy.from_pretrained(default_checkpoint())
        robot = policy.embodiment
        seen = {view.key: np.zeros((*view.resolution, 3), np.uint8) for view in robot.views}
        seen |= {part.key: np.zeros(part.dim, np.float32) for part in robot.state}
        policy.reset()
        policy.act(seen | {"annotation.task": "lift the cube"})
        print(sorted(sys.modules.keys() & {
            "transformers", "diffusers", "peft", "accelerate", "scipy", "sympy", "torchao",
            "requests", "huggingface_hub", "torch._dynamo", "torch._inductor",
            "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
        }))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def assert_equal(given, wanted):
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(given[name], tensor, rtol=0, atol=0, msg=name)


def loaded(path, **options):
    return official_state(load_network(open_checkpoint(path), LoadOptions(**options)))


@pytest.mark.parametrize("shards", ["single", "sharded"])
def test_official_directory(tiny, tmp_path, shards):
    folder = tiny
    if shards == "sharded":
        folder = tmp_path / "sharded"
        convert([tiny], folder, ConvertOptions(shard_bytes=400_000))
        assert len(list(folder.glob("*.safetensors"))) > 4
    assert_equal(loaded(folder), tensors_of(tiny))


@pytest.mark.sampled
@pytest.mark.parametrize("nesting", NESTINGS)
def test_full_weights(tiny, tmp_path, nesting):
    run = write_pickled(tiny, tmp_path / "global_step_9", nesting)
    assert_equal(loaded(run), tensors_of(tiny))


class Held:
    """A source that counts the bytes of what it has given out and is still held by anybody."""

    def __init__(self, source):
        self.source = source
        self.origin, self.layout, self.tensors = source.origin, source.layout, source.tensors
        self.most = self.mapped = 0
        self._given = []

    def stream(self, names):
        for number, (name, tensor) in enumerate(self.source.stream(names)):
            if number % 100 == 50 and not self.origin.endswith(".pt"):
                self.mapped = max(self.mapped, mapped_bytes(self.origin))
            self._given.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
            self._given = [(ref, size) for ref, size in self._given if not ref.expired()]
            self.most = max(self.most, sum(size for _, size in self._given))
            yield name, tensor
            del tensor


def mapped_bytes(folder):
    """Return the bytes of files below ``folder`` that this process holds mapped in memory."""
    pages, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            pages += inside * int(line.split()[1])
        elif not line.split()[0].endswith(":"):
            inside = folder in line
    return 1024 * pages


class Allocated(TorchDispatchMode):
    """Counts the bytes that operators have made and that are still held."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            ref = StorageWeakRef(made.untyped_storage())
            self._made[ref.cdata] = (ref, made.untyped_storage().nbytes())
        self._made = {key: kept for key, kept in self._made.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return made


@pytest.mark.parametrize("write", [
    lambda origin, target: origin,
    lambda origin, target: write_pickled(origin, target, "flat"),
    write_dcp_run,
], ids=["directory", "full_weights", "dcp"])  # fmt: skip
def test_weights_are_read_one_tensor_at_a_time(tiny, tmp_path, monkeypatch, write):
    """Beside those that stay, the largest one and a part of a file are held, whatever the size."""
    monkeypatch.setattr(sources, "PART_BYTES", 250_000)
    weights = Held(open_checkpoint(write(tiny, tmp_path / "written")).weights)
    sizes = [info.nbytes for info in weights.tensors.values()]
    bound = max(sizes) + max(250_000, sum(sizes) / 32)
    assert sum(sizes) > 5 * bound
    network = build_network(open_checkpoint(tiny).config).to_empty(device="cpu")
    load_weights(network, weights)
    assert max(sizes) <= weights.most <= bound
    # The system maps pages around those that are read.
    assert weights.mapped < sum(sizes) / 2
    weights.most = 0
    del network
    (tmp_path / "out").mkdir()
    write_weights(tmp_path / "out", weights)
    assert weights.most <= bound
    wanted = {name: tensor.clone() for name, tensor in weights.source.stream(weights.tensors)}
    assert_equal(load_file(tmp_path / "out/model.safetensors"), wanted)


def test_weights_are_written_one_tensor_at_a_time(tmp_path):
    values = {f"action_head.{i}": torch.randn(64, 64) for i in range(8)}
    source, options = sources.StateDictSource(values=values), ShardOptions(dtype=torch.bfloat16)
    with Allocated() as copies:
        (file,) = write_weights(tmp_path, source, options)
    assert copies.most == 2 * 64 * 64
    assert_equal(load_file(file), {name: value.bfloat16() for name, value in values.items()})


def test_adapters_are_merged_one_layer_at_a_time(monkeypatch):
    """Two matrices, and one product in float32; the bits are those of the sum written out."""
    generator = torch.Generator().manual_seed(3)
    names = [f"{DIT}blocks.{i}.self_attn.q" for i in range(12)]
    state = {}
    for name in names:
        for end, shape in (
            ("weight", (96, 80)), ("lora_A.default.weight", (4, 80)),
            ("lora_B.default.weight", (96, 4)),
        ):  # fmt: skip
            state[f"{name}.{end}"] = torch.randn(shape, generator=generator).bfloat16()
    adapters = AdapterConfig(r=4, lora_alpha=6.0, target_modules=["q"])
    wanted = {
        f"{name}.weight": state[f"{name}.weight"].float() + 1.5 * (
            state[f"{name}.lora_B.default.weight"].float()
            @ state[f"{name}.lora_A.default.weight"].float()
        )
        for name in names
    }  # fmt: skip
    pair = 2 * 4 * (96 + 80)
    monkeypatch.setattr(lora, "PART_BYTES", 3 * pair)
    held = Held(sources.StateDictSource(values=state))
    with Allocated() as made:
        merged = MergedSource(held, adapters)
        found = {}
        for name, tensor in merged.stream(merged.tensors):
            found[name] = tensor.numpy().copy()
            del tensor
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())
    # Three pairs as they are stored, one in float32, and one product.
    assert made.most <= 3 * pair + 2 * pair + 4 * 96 * 80


def test_files_have_the_bytes_of_the_library(tmp_path):
    """Order, header and padding are those of safetensors, for every dtype and odd shapes."""
    shapes = [(), (0, 3), (3, 5)]
    tensors = {
        f"{'é' if i else 'e'}{i}.{dtype}": torch.zeros(shape, dtype=torch.uint8).to(dtype)
        for dtype in sources.DTYPE_NAMES for i, shape in enumerate(shapes)
    }  # fmt: skip
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    save_tensors(tensors, tmp_path / "ours")
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    with pytest.raises(CheckpointError, match="uint16"):
        save_tensors({"odd": torch.zeros(2, dtype=torch.uint16)}, tmp_path / "odd")


def test_a_pickle_that_changes_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "weights.pt"
    torch.save({"action_head.a": torch.ones(3), "action_head.b": torch.ones(4)}, file)
    source = sources.open_pickled(file)
    torch.save({"action_head.a": torch.ones(3), "action_head.b": torch.ones(5)}, file)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        list(source.stream(source.tensors))


def test_distributed_checkpoint(tiny, tmp_path):
    run = write_dcp_run(tiny, tmp_path / "global_step_9")
    assert_equal(loaded(run), tensors_of(tiny))


def test_distributed_checkpoint_of_several_ranks(tiny, tmp_path):
    """Pieces of one tensor lie in different files: cut the way sharded training cuts them."""
    run = write_dcp_run(tiny, tmp_path / "run")
    name = "action_head.model.blocks.0.ffn.0.weight"
    source = open_checkpoint(run).weights
    whole = dict(source.stream([name]))[name]
    _split_first_axis(source.folder, name, whole)
    again = open_checkpoint(run).weights
    assert {piece.file.name for piece in again.stored[name].pieces} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }
    torch.testing.assert_close(dict(again.stream([name]))[name], whole, rtol=0, atol=0)


def _split_first_axis(folder, name, whole):
    """Leave rows 0..39 of a tensor in its file, under a size of their own, and move the rest."""
    description = pickle.loads((folder / ".metadata").read_bytes())
    (raw,) = (n for n in description.state_dict_metadata if n.endswith(name))
    first = description.storage_data[MetadataIndex(raw, torch.Size((0, 0)))]
    chunks, places = [], {}
    for file, start, piece in (
        (first.relative_path, 0, whole[:40]),
        ("__1_0.distcp", 40, whole[40:]),
    ):
        buffer = io.BytesIO()
        torch.save(piece.clone(), buffer)
        offsets = torch.Size((start, 0))
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=piece.shape))
        with (folder / file).open("ab") as held:
            place = _StorageInfo(file, held.tell(), len(buffer.getvalue()))
            held.write(buffer.getvalue())
        places[MetadataIndex(raw, offsets)] = place
    description.storage_data.update(places)
    description.state_dict_metadata[raw].chunks = chunks
    (folder / ".metadata").write_bytes(pickle.dumps(description))


def test_cold_start(tiny, tmp_path):
    """What the files hold is loaded; exactly the rest is drawn, as documented, and listed."""
    folder, wanted = write_components(tiny, tmp_path / "wan"), tensors_of(tiny)
    done = convert([folder], tmp_path / "start", ConvertOptions(config_from=tiny, seed=5))
    model_type = open_checkpoint(tiny).config.dit.model_type
    assert set(done.initialized) == absent_from_components(wanted, model_type)
    given = loaded(tmp_path / "start")
    fresh = {name: given.pop(name) for name in done.initialized}
    assert_equal(given, {name: wanted[name] for name in given})
    for name, tensor in fresh.items():
        match name.rpartition(".")[2], tensor.ndim:
            case ("bias" | "b", _):
                assert not tensor.any()
            case ("weight", 1):
                assert (tensor == 1).all()
            case ("weight", 2):
                bound = (6 / sum(tensor.shape)) ** 0.5
                assert bound * 0.9 < tensor.abs().max() <= bound
            case ("W", _):
                assert tensor.std() == pytest.approx(0.02, rel=0.1)
    again = convert([folder], tmp_path / "again", ConvertOptions(config_from=tiny, seed=5))
    assert_equal(tensors_of(again.path), tensors_of(done.path))


def test_cold_start_from_two_downloads(tiny, tmp_path):
    """The 5B's repository lacks the image encoder: it comes from another folder."""
    folder, other = write_components(tiny, tmp_path / "wan"), tmp_path / "other"
    other.mkdir()
    image = next(folder.glob("models_clip*"))
    image.rename(other / image.name)
    done = convert([folder, other], tmp_path / "start", ConvertOptions(config_from=tiny))
    assert done.tensors == len(tensors_of(tiny))


@pytest.mark.parametrize("size", ["5b", "14b"])
class TestRealSizes:
    """The networks of the published sizes, without memory."""

    @pytest.mark.sampled
    def test_names_and_shapes(self, contract, size):
        listing = json.loads((contract / f"dreamzero_{size}_state_dict.json").read_text())
        wanted = {name: tuple(entry["shape"]) for name, entry in listing["tensors"].items()}
        config = json.loads((contract / f"rlinf_config_{size}.json").read_text())
        assert expected_shapes(NetworkConfig.from_dict(config)) == wanted
        assert expected_shapes(preset(size)) == wanted
        sizes = {
            part: sum(math.prod(shape) for name, shape in wanted.items() if name.startswith(part))
            for part in PREFIXES.values()
        }
        assert sizes == listing["param_counts"]

    def test_fresh_tensors_of_a_cold_start(self, contract, size):
        listing = contract / f"cold_start_{size}_newly_initialised.json"
        fresh = json.loads(listing.read_text())["newly_initialised"]
        fresh = {f"action_head.model.{name}" for name in fresh}
        wanted = expected_shapes(preset(size)).keys()
        assert new_names(wanted, wanted - fresh, preset(size)) == fresh
        assert absent_from_components(wanted, preset(size).dit.model_type) == fresh

    @pytest.mark.sampled
    def test_lora(self, size):
        network = build_network(preset(size))
        inject_adapters(network.model, AdapterConfig.of_head(preset(size).head))
        trained = ("lora_", "state_encoder.", "action_encoder.", "action_decoder.")
        table = slots(network).items()
        counts = [math.prod(s.shape) for name, s in table if any(part in name for part in trained)]
        assert len(counts) == {"5b": 614, "14b": 814}[size]
        if size == "14b":
            assert sum(counts) == 108_582_944


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_wrappers_leave_no_trace_in_names(prefix):
    plain = "action_head.model.blocks.0.self_attn.q.weight"
    assert canonical(prefix + plain) == plain
    assert canonical(prefix + plain.replace(".0.", ".0._orig_mod.")) == plain
    peft = "action_head.model.base_model.model.blocks.0.self_attn.q"
    assert canonical(f"{prefix}{peft}.base_layer.weight") == plain
    adapter = "action_head.model.blocks.0.self_attn.q.lora_A.default.weight"
    assert canonical(f"{prefix}{peft}.lora_A.default.weight") == adapter
    assert canonical(f"{prefix}{peft}.lora_A.weight") == adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_dtype_asked_for(tiny, dtype):
    network = load_network(open_checkpoint(tiny), LoadOptions(dtype=dtype))
    state = network.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert not any(p.requires_grad for p in network.parameters())
    assert not network.training
    assert_equal(official_state(network), {n: t.to(dtype) for n, t in tensors_of(tiny).items()})


def test_without_the_prompt_encoder(tiny):
    """Training may leave the prompt encoder out; its weights are then not asked for."""
    network = build_network(open_checkpoint(tiny).config, text_encoder=False)
    source = open_checkpoint(tiny).weights
    load_weights(network.to_empty(device="cpu"), source)
    wanted = {n: t for n, t in tensors_of(tiny).items() if ".text_encoder." not in n}
    assert_equal(official_state(network), wanted)


def test_a_checkpoint_of_one_robot_says_which():
    policy = DreamZeroPolicy.from_pretrained(default_checkpoint())
    assert policy.embodiment.tag == "libero_mini"
    with pytest.raises(UnknownNameError, match="libero_min"):
        DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment="libero_min")
