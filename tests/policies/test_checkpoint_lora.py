"""Adapters: the published names, merged or kept, on the right base only."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from checkpoint_layouts import tensors_of, write_components, write_pickled
from safetensors import safe_open
from torch import nn

from dzrobot.errors import CheckpointError
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import (
    Sidecars,
    open_checkpoint,
    write_directory,
)
from dzrobot.policies.dreamzero.checkpoints.load import (
    LoadOptions,
    base_fingerprint,
    load_network,
    official_state,
)
from dzrobot.policies.dreamzero.checkpoints.lora import (
    AdapterConfig,
    inject_adapters,
    trained_with_adapters,
)
from dzrobot.policies.dreamzero.checkpoints.names import (
    DIT,
    adapted_names,
    is_adapter,
    peft_name,
)
from dzrobot.policies.dreamzero.checkpoints.passport import PASSPORT_FILE, passport_for
from dzrobot.policies.dreamzero.checkpoints.shards import ShardOptions, write_json
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource


def lora_config(folder):
    """Return the config of ``folder`` as one of a LoRA training, with a scale that is not 1."""
    config = json.loads((folder / "config.json").read_text())
    config["action_head_cfg"]["config"] |= {
        "train_architecture": "lora", "lora_rank": 4, "lora_alpha": 6.0,
    }  # fmt: skip
    return config


@pytest.fixture
def trained(tiny, tmp_path, libero):
    """Return a trained network with adapters, and a folder with its trained tensors alone."""
    checkpoint = open_checkpoint(tiny)
    config = lora_config(tiny)
    (tmp_path / "config").mkdir()
    write_json(tmp_path / "config/config.json", config)
    network = load_network(checkpoint, LoadOptions())
    head = replace(checkpoint.config.head, train_architecture="lora", lora_alpha=6.0)
    inject_adapters(network.model, AdapterConfig.of_head(head))
    generator = torch.Generator().manual_seed(1)
    state = official_state(network)
    names = {name for name in state if trained_with_adapters(name)}
    with torch.no_grad():
        for name in sorted(names):
            if is_adapter(name):
                state[name].zero_()
            state[name].add_(0.1 * torch.randn(state[name].shape, generator=generator))
    statistics = Statistics.from_metadata(checkpoint.metadata, libero)
    base = base_fingerprint(checkpoint.weights, names)
    sidecars = Sidecars(
        config_json=config, copy_from=tiny, complete=False,
        passport=passport_for(libero, statistics, checkpoint.config, base=base),
    )  # fmt: skip
    own = {name: state[name] for name in names}
    rename = partial(peft_name, adapted=adapted_names(own))
    source, options = StateDictSource(values=own), ShardOptions(rename=rename)
    return network, write_directory(tmp_path / "trained", source, sidecars, options)


def probe(network):
    """Return what the transformer makes of fixed tokens in its first block."""
    block = network.model.blocks[0]
    x = torch.linspace(-1, 1, 5 * 64).reshape(1, 5, 64)
    with torch.no_grad():
        attention = block.self_attn
        return torch.cat([layer(x) for layer in (attention.q, attention.o, block.cross_attn.v)])


def test_published_names(trained, tiny):
    """14 tensors of the action modules, and a pair for each of ten layers per block."""
    with safe_open(trained[1] / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    blocks = open_checkpoint(tiny).config.dit.num_layers
    assert len(names) == 14 + 2 * 10 * blocks
    infix = "action_head.model.base_model.model."
    assert all(name.startswith(infix) for name in names)
    assert f"{infix}blocks.1.cross_attn.v.lora_B.default.weight" in names
    assert f"{infix}blocks.0.ffn.2.lora_A.default.weight" in names
    assert not any("k_img" in name for name in names)


def test_kept_apart(trained, tiny):
    network, folder = trained
    options = LoadOptions(adapters="keep", base=tiny)
    given = official_state(load_network(open_checkpoint(folder), options))
    wanted = official_state(network)
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(given[name], tensor, rtol=0, atol=0, msg=name)


def test_merged(trained, tiny):
    network, folder = trained
    merged = load_network(open_checkpoint(folder), LoadOptions(base=tiny))
    kept, base = official_state(network), tensors_of(tiny)
    name = "action_head.model.blocks.0.self_attn.q"
    a, b = (kept[f"{name}.lora_{x}.default.weight"] for x in "AB")
    wanted = base[f"{name}.weight"] + 1.5 * (b @ a)
    torch.testing.assert_close(official_state(merged)[f"{name}.weight"], wanted)
    torch.testing.assert_close(probe(merged), probe(network), rtol=1e-5, atol=1e-5)
    assert not any(is_adapter(name) for name in official_state(merged))


def test_whole_checkpoint_with_adapters(trained, tiny, tmp_path):
    """Weights and adapters in one folder: no base is needed, and none may be given."""
    network, folder = trained
    state = StateDictSource(values=official_state(network))
    whole = tmp_path / "whole"
    config = json.loads((folder / "config.json").read_text())
    rename = partial(peft_name, adapted=adapted_names(state.tensors))
    sidecars = Sidecars(config_json=config, copy_from=tiny)
    write_directory(whole, state, sidecars, ShardOptions(rename=rename))
    with safe_open(whole / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    infix = "action_head.model.base_model.model.blocks.0.self_attn"
    assert {f"{infix}.q.base_layer.weight", f"{infix}.q.base_layer.bias"} <= names
    assert f"{infix}.norm_q.weight" in names
    merged = load_network(open_checkpoint(whole), LoadOptions())
    torch.testing.assert_close(probe(merged), probe(network), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="is complete and needs no base"):
        load_network(open_checkpoint(whole), LoadOptions(base=tiny))
    done = convert([whole], tmp_path / "again", ConvertOptions())
    assert tensors_of(done.path).keys() == tensors_of(whole).keys()


def test_published_adapters_have_no_passport(trained, tiny, caplog):
    _, folder = trained
    (folder / "dzrobot_passport.json").unlink()
    load_network(open_checkpoint(folder), LoadOptions(base=tiny))
    assert "names no base" in caplog.text


def test_base_from_component_files(trained, tiny, tmp_path):
    """What the components lack must then be among the trained tensors: it is, for the 14B."""
    network, folder = trained
    wan = write_components(tiny, tmp_path / "wan")
    config = open_checkpoint(tiny).config
    if config.dit.model_type == "ti2v":
        with pytest.raises(CheckpointError, match="is not the base"):
            load_network(open_checkpoint(folder), LoadOptions(base=wan))
        return
    merged = load_network(open_checkpoint(folder), LoadOptions(base=wan))
    torch.testing.assert_close(probe(merged), probe(network), rtol=1e-5, atol=1e-5)


def test_no_base(trained):
    said = (
        r"without the weights they change, on a base whose fingerprint begins with \w{12}; .*--base"
    )
    with pytest.raises(CheckpointError, match=said):
        load_network(open_checkpoint(trained[1]), LoadOptions())


def test_a_base_that_was_moved_is_named_by_the_path_that_training_knew(
    trained, tmp_path, monkeypatch
):
    folder = tmp_path / "copy"
    shutil.copytree(trained[1], folder)
    passport = json.loads((folder / PASSPORT_FILE).read_text())
    passport["recipe"] = {"model": {"model_path": "start"}}
    (folder / PASSPORT_FILE).write_text(json.dumps(passport))
    monkeypatch.chdir(tmp_path)
    said = f"the base 'start', which is not found from {tmp_path}; say where the base is .*--base"
    with pytest.raises(CheckpointError, match=said):
        load_network(open_checkpoint(folder), LoadOptions())


def test_wrong_base(trained, tiny, tmp_path):
    """One other frozen weight makes another base; weights that are trained anyway do not count."""
    state = tensors_of(tiny)
    config = json.loads((tiny / "config.json").read_text())

    def base(name, **changed):
        source = StateDictSource(values={**state, **changed})
        return write_directory(tmp_path / name, source, Sidecars(config_json=config))

    frozen, replaced = f"{DIT}blocks.1.ffn.0.weight", f"{DIT}action_decoder.layer1.b"
    wrong = base("wrong", **{frozen: state[frozen] * 1.01})
    with pytest.raises(
        CheckpointError, match=r"is not the base of .* give the base it was trained"
    ):
        load_network(open_checkpoint(trained[1]), LoadOptions(base=wrong))
    right = base("right", **{replaced: state[replaced] + 1})
    load_network(open_checkpoint(trained[1]), LoadOptions(base=right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_is_the_same_in_every_layout_and_precision(tiny, tmp_path, dtype):
    run = write_pickled(tiny, tmp_path / "run", "model")
    convert([tiny], tmp_path / "other", ConvertOptions(dtype=dtype, shard_bytes=300_000))
    wanted = base_fingerprint(open_checkpoint(tiny).weights, set())
    assert base_fingerprint(open_checkpoint(run).weights, set()) == wanted
    assert base_fingerprint(open_checkpoint(tmp_path / "other").weights, set()) == wanted


def test_rank_of_another_config(trained, tiny):
    _, folder = trained
    config = json.loads((folder / "config.json").read_text())
    config["action_head_cfg"]["config"]["lora_rank"] = 8
    write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match=r"of rank 4, where config.json says 8"):
        load_network(open_checkpoint(folder), LoadOptions(base=tiny))


def test_half_a_pair(trained, tiny, tmp_path):
    _, folder = trained
    state = tensors_of(folder)
    state.pop(next(name for name in state if ".lora_B." in name))
    config = json.loads((folder / "config.json").read_text())
    half = write_directory(
        tmp_path / "half", StateDictSource(values=state),
        Sidecars(config_json=config, complete=False),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"lora_A.* without .*lora_B"):
        load_network(open_checkpoint(half), LoadOptions(base=tiny))


def test_convert_merges(trained, tiny, tmp_path):
    network, folder = trained
    options = ConvertOptions(merge=True, base=(str(tiny),))
    done = convert([folder], tmp_path / "merged", options)
    assert tensors_of(done.path).keys() == tensors_of(tiny).keys()
    config = open_checkpoint(done.path).config
    assert config.head.train_architecture == "full"
    plain = load_network(open_checkpoint(done.path), LoadOptions())
    torch.testing.assert_close(probe(plain), probe(network), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="holds no adapters"):
        convert([tiny], tmp_path / "nothing", ConvertOptions(merge=True))


def test_convert_carries_adapters_over(trained, tmp_path):
    """Names and bits survive a tour through the other layouts."""
    _, folder = trained
    wanted = tensors_of(folder)
    for layout, name in (("full_weights", "all.pt"), ("dcp", "dcp"), ("directory", "folder")):
        convert([folder], tmp_path / name, ConvertOptions(to=layout))
        back = convert(
            [tmp_path / name], tmp_path / f"{name} back", ConvertOptions(config_from=folder)
        )
        given = tensors_of(back.path)
        assert given.keys() == wanted.keys()
        assert all(torch.equal(given[n], tensor) for n, tensor in wanted.items())


def test_only_the_transformer_is_adapted(tiny):
    network = load_network(open_checkpoint(tiny), LoadOptions())
    inject_adapters(network.model, open_checkpoint(tiny).adapters)
    adapted = {name.split(".lora_")[0] for name in network.state_dict() if ".lora_" in name}
    assert len(adapted) == 10 * len(network.model.blocks)
    assert all(name.startswith("model.blocks.") for name in adapted)
    assert isinstance(network.model.blocks[0].cross_attn.k_img, nn.Linear)
