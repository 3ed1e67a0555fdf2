"""Adapters in the format of the library peft: written for it, and read from it."""

import json
import shutil

import pytest
import torch
from checkpoint_layouts import tensors_of
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_checkpoint_commands import typed
from test_checkpoint_lora import trained  # noqa: F401 - a fixture

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.load import LoadOptions, load_network
from dzrobot.policies.dreamzero.options import WeightOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy


def transformer(path, **options):
    return load_network(
        open_checkpoint(path, base=options.get("base")), LoadOptions(**options)
    ).model


def same(given, wanted):
    given, wanted = given.state_dict(), wanted.state_dict()
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in wanted.items())


@pytest.fixture
def written(trained, tmp_path, capsys):  # noqa: F811
    """Return the trained adapters in peft's format, as the command writes them."""
    folder = tmp_path / "peft"
    assert typed(capsys, "convert", trained[1], folder, "--to", "peft")[0] == 0
    return folder


def test_peft_opens_ours(trained, written, tiny, recwarn):  # noqa: F811
    """Merged by peft, they are our merged weights to the bit."""
    given = PeftModel.from_pretrained(transformer(tiny), written).merge_and_unload()
    assert not [w for w in recwarn if "adapter keys" in str(w.message)]
    same(given, transformer(trained[1], base=tiny))
    assert not torch.equal(
        given.state_dict()["blocks.0.self_attn.q.weight"],
        transformer(tiny).state_dict()["blocks.0.self_attn.q.weight"],
    )


def test_names_and_description(trained, written, tiny):  # noqa: F811
    names = load_file(written / "adapter_model.safetensors").keys()
    assert len(names) == len(tensors_of(trained[1]))
    assert "base_model.model.blocks.0.ffn.2.lora_B.weight" in names
    config = json.loads((written / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6)
    assert config["modules_to_save"] == ["state_encoder", "action_encoder", "action_decoder"]
    assert not (written / "model.safetensors").exists()


def test_ours_open_again(trained, written, tiny, tmp_path, libero):  # noqa: F811
    """By the loader, the policy, and back in the published layout: nothing is lost on the way."""
    same(transformer(written, base=tiny), transformer(trained[1], base=tiny))
    weights = WeightOptions(base=tiny)
    DreamZeroPolicy.from_pretrained(written, embodiment=libero, weights=weights)
    back = convert([written], tmp_path / "back", ConvertOptions()).path
    given, wanted = tensors_of(back), tensors_of(trained[1])
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in wanted.items())
    assert open_checkpoint(back).config == open_checkpoint(trained[1]).config


def test_inspect(written, capsys):
    code, out, _ = typed(capsys, "inspect", written, "--verify")
    assert code == 0
    assert "adapters in peft's format" in out
    assert "are to come from the base" in out


FOREIGN = {
    "endings": {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 5},
    "pattern": {"target_modules": r"blocks\.1\..*\.(k|ffn\.0)", "r": 2, "lora_alpha": 1},
    "some layers": {"target_modules": ["o"], "layers_to_transform": 1, "layers_pattern": "blocks"},
    "a module": {"target_modules": ["q"], "modules_to_save": ["action_decoder"]},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_ours_opens_theirs(tiny_folders, tmp_path, libero, kind, capsys):
    """Adapters that peft made, with nothing beside them: the base says what network it is."""
    tiny = tiny_folders / "5b"
    torch.manual_seed(0)
    model = get_peft_model(transformer(tiny), LoraConfig(**FOREIGN[kind]))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "theirs")
    kept = transformer(tmp_path / "theirs", base=tiny, adapters="keep")
    given = transformer(tmp_path / "theirs", base=tiny)
    same(given, model.merge_and_unload())
    assert sum(".lora_A." in name for name in kept.state_dict()) == sum(
        ".lora_A." in name for name in load_file(tmp_path / "theirs/adapter_model.safetensors")
    )
    policy = DreamZeroPolicy.from_pretrained(
        tmp_path / "theirs", embodiment=libero, weights=WeightOptions(base=tiny)
    )
    assert policy.embodiment == libero
    merged = tmp_path / "merged"
    code, *_ = typed(capsys, "convert", tmp_path / "theirs", merged, "--merge", "--base", tiny)
    assert code == 0
    same(transformer(merged), given)
    assert typed(capsys, "inspect", tmp_path / "theirs", "--config-from", tiny)[0] == 0


def changed(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


ODD = (
    {"peft_type": "IA3"}, {"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q": 8}},
    {"alpha_pattern": {"q": 8}}, {"bias": "all"}, {"r": 0}, {"r": "4"}, {"lora_alpha": None},
    {"target_modules": 5}, {"fan_in_fan_out": True},
)  # fmt: skip


@pytest.mark.parametrize("tiny", ["5b"], indirect=True)
@pytest.mark.parametrize("values", ODD, ids=str)
def test_other_kinds_are_refused(written, values):
    changed(written, **values)
    with pytest.raises(CheckpointError, match=r"(?s)adapter_config\.json.*" + next(iter(values))):
        open_checkpoint(written)


def test_a_rank_that_is_not_theirs(written, tiny):
    changed(written, r=8)
    with pytest.raises(CheckpointError, match="rank 4"):
        transformer(written, base=tiny)


@pytest.mark.parametrize("tiny", ["5b"], indirect=True)
def test_no_weights_and_two_kinds(written, tiny):
    shutil.copy(tiny / "model.safetensors", written)
    with pytest.raises(CheckpointError, match="a folder of their own"):
        open_checkpoint(written)
    (written / "model.safetensors").unlink()
    (written / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        open_checkpoint(written)


@pytest.mark.parametrize("tiny", ["5b"], indirect=True)
def test_one_tensor_under_two_names(written):
    file = written / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.blocks.0.self_attn.q.lora_A.weight"
    other = name.replace("model.blocks", "model.action_head.model.blocks")
    save_file({**tensors, other: tensors[name].clone()}, file)
    with pytest.raises(CheckpointError, match="twice"):
        open_checkpoint(written)


def test_only_adapters_are_written(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="holds no adapters"):
        convert([tiny], tmp_path / "x", ConvertOptions(to="peft"))
    assert not (tmp_path / "x").exists()
