"""Adapters in the format of the library peft: written for it, and read from it."""

import json
import re
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
    "ranks": {
        "target_modules": ["q", "k", "ffn.0"], "r": 4, "lora_alpha": 6,
        "rank_pattern": {r"blocks\.0\..*\.q": 7, "k": 2, "ffn": 3}, "alpha_pattern": {"q": 5},
    },
    "stabilized": {"target_modules": ["o", "v"], "r": 6, "lora_alpha": 4, "use_rslora": True},
    "exceptions": {"target_modules": ["q", "o"], "exclude_modules": ["cross_attn.q"]},
    "an exception by pattern": {"target_modules": r".*\.(k|v)", "exclude_modules": r".*cross.*"},
    "any layer of a number": {"target_modules": ["v"], "layers_to_transform": [0], "whole": True},
    "every layer": {"target_modules": "every", "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["ffn.2"], "init_lora_weights": "orthogonal"},
}  # fmt: skip


def within(transformer):
    """Return a module that has the transformer where a whole network has it."""
    network = torch.nn.Module()
    network.action_head = torch.nn.Module()
    network.action_head.model = transformer
    return network


@pytest.mark.sampled
@pytest.mark.parametrize("kind", FOREIGN)
def test_ours_opens_theirs(tiny_folders, tmp_path, libero, kind, capsys):
    """Adapters that peft made, with nothing beside them: the base says what network it is."""
    tiny = tiny_folders / "5b"
    torch.manual_seed(0)
    bare, settings = transformer(tiny), dict(FOREIGN[kind])
    if settings["target_modules"] == "every":
        linear = (n for n, module in bare.named_modules() if isinstance(module, torch.nn.Linear))
        settings["target_modules"] = list(linear)
    whole = settings.pop("whole", False)
    model = get_peft_model(within(bare) if whole else bare, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "theirs")
    kept = transformer(tmp_path / "theirs", base=tiny, adapters="keep")
    given = transformer(tmp_path / "theirs", base=tiny)
    model.merge_and_unload()
    same(given, bare)
    theirs = load_file(tmp_path / "theirs/adapter_model.safetensors")
    root = "base_model.model." + ("action_head.model." if whole else "")
    for name, tensor in kept.state_dict().items():
        if ".lora_" in name:
            assert torch.equal(tensor, theirs.pop(root + name.replace(".default", "")))
    assert not any(".lora_" in name for name in theirs)
    if kind == "every layer":
        changed(tmp_path / "theirs", target_modules="All-Linear")
        same(transformer(tmp_path / "theirs", base=tiny), given)
    policy = DreamZeroPolicy.from_pretrained(
        tmp_path / "theirs", embodiment=libero, weights=WeightOptions(base=tiny)
    )
    assert policy.embodiment == libero
    merged = tmp_path / "merged"
    code, *_ = typed(capsys, "convert", tmp_path / "theirs", merged, "--merge", "--base", tiny)
    assert code == 0
    same(transformer(merged), given)
    assert typed(capsys, "inspect", tmp_path / "theirs", "--config-from", tiny)[0] == 0
    again = tmp_path / "again"
    code, *_ = typed(
        capsys, "convert", tmp_path / "theirs", again, "--to", "peft", "--config-from", tiny
    )
    assert code == 0
    same(transformer(again, base=tiny), given)
    same(PeftModel.from_pretrained(transformer(tiny), again).merge_and_unload(), given)


def changed(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


ODD = (
    {"peft_type": "IA3"}, {"peft_type": None}, {"use_dora": True}, {"bias": "all"}, {"r": 0},
    {"r": "4"}, {"lora_alpha": None}, {"target_modules": 5}, {"target_modules": None},
    {"target_modules": "(("}, {"rank_pattern": {"q": "8"}}, {"rank_pattern": {"*": 8}},
    {"fan_in_fan_out": True}, {"lora_bias": True}, {"layers_pattern": "blocks"},
    *({"init_lora_weights": way} for way in (
        "pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "of_2027", {"a": 1}
    )),
    {"target_parameters": ["blocks.0.ffn.0.weight"]}, {"use_qalora": True},
    {"alora_invocation_tokens": [1]}, {"trainable_token_indices": [0]},
    {"layer_replication": [[0, 2]]}, {"megatron_config": {"a": 1}}, {"arrow_config": {"top_k": 2}},
    {"use_bdlora": {"x": 1}}, {"monteclora_config": {"a": 1}}, {"velora_config": {"a": 1}},
    {"kasa_config": {"a": 1}}, {"corda_config": {"a": 1}}, {"loftq_config": {"loftq_bits": 4}},
    {"some_future_field": True}, {"some_future_number": 1},
)  # fmt: skip
HARMLESS = {
    "task_type": "FEATURE_EXTRACTION", "inference_mode": False, "revision": "main",
    "base_model_name_or_path": "a/b", "auto_mapping": {"base_model_class": "M"},
    "peft_version": "9.9.9", "lora_dropout": 0.5, "eva_config": {"rho": 2.0},
    "runtime_config": {"ephemeral_gpu_offload": True}, "qalora_group_size": 64,
    "megatron_core": "megatron.core2", "init_lora_weights": "eva", "some_future_field": None,
    "some_future_switch": False, "some_future_table": {},
}  # fmt: skip


@pytest.mark.parametrize("tiny", ["5b"], indirect=True)
def test_what_says_nothing_of_trained_weights_passes(written, tiny):
    plain = transformer(written, base=tiny)
    changed(written, **HARMLESS)
    same(transformer(written, base=tiny), plain)


@pytest.mark.parametrize("tiny", ["5b"], indirect=True)
def test_every_odd_setting_is_named_at_once(written):
    changed(written, use_dora=True, init_lora_weights="pissa", unheard_of=[1])
    with pytest.raises(CheckpointError, match=r"init_lora_weights='pissa', unheard.*use_dora"):
        open_checkpoint(written)


@pytest.mark.parametrize("tiny", ["5b"], indirect=True)
def test_other_kinds_are_refused(written):
    settings, taken = written / "adapter_config.json", []
    whole = settings.read_bytes()
    for values in ODD:
        changed(written, **values)
        try:
            open_checkpoint(written)
        except CheckpointError as error:
            if re.search(rf"(?s)adapter_config\.json.*{next(iter(values))}", str(error)):
                values = None
        settings.write_bytes(whole)
        taken += [values] if values else []
    assert taken == []


READ = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform",
}  # fmt: skip
"""Settings that are carried out, as the tests against peft's own adapters show."""


def other(default):
    """Return a setting of the kind of ``default`` that is not the default."""
    match default:
        case bool():
            return not default
        case int() | float():
            return default + 1
        case str():
            return f"{default}_other"
        case _:
            return {"other": 1}


@pytest.mark.parametrize("tiny", ["5b"], indirect=True)
def test_every_setting_that_peft_has_is_read_harmless_or_refused_by_name(written):
    """Whatever version is installed: one that is new there is refused where it is not off."""
    settings, said = written / "adapter_config.json", {}
    whole = settings.read_bytes()
    defaults = json.loads(json.dumps(LoraConfig().to_dict()))
    assert len(defaults) > 35
    for name in defaults.keys() - READ:
        changed(written, **{name: other(defaults[name])})
        said[name] = ""
        try:
            open_checkpoint(written)
        except CheckpointError as error:
            said[name] = str(error)
        settings.write_bytes(whole)
    assert {name for name in said if not said[name]} == HARMLESS.keys() & defaults.keys()
    assert all(name in message for name, message in said.items() if message)
    # At its default, none is refused.
    changed(written, **{name: defaults[name] for name in defaults.keys() - READ})
    open_checkpoint(written)


def test_a_rank_that_is_not_theirs(written, tiny):
    changed(written, r=8)
    with pytest.raises(CheckpointError, match="rank 4"):
        transformer(written, base=tiny)


def in_file(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file)


Q = "base_model.model.blocks.0.self_attn.q.lora_"
SPOILED = {
    "no matrices for action_head.model.blocks.0.self_attn.q.weight": lambda held: {
        name: tensor for name, tensor in held.items() if not name.startswith(Q)
    },
    "without action_head.model.blocks.0.self_attn.q.lora_B": lambda held: {
        name: tensor for name, tensor in held.items() if name != f"{Q}B.weight"
    },
    "matrices for .*blocks.0.cross_attn.k_img.weight.*does not target": lambda held: {
        **held, **{
            f"base_model.model.blocks.0.cross_attn.k_img.lora_{x}.weight": held[f"{Q}{x}.weight"]
            for x in "AB"
        },
    },
    "q.lora_A.default.weight of shape": lambda held: {
        **held, f"{Q}A.weight": held[f"{Q}A.weight"][:, :-1]
    },
    "naming of kohya": lambda held: {
        "lora_unet_" + name.removeprefix("base_model.model.").replace(".lora_A.", ".lora_down.")
        .replace(".lora_B.", ".lora_up."): tensor for name, tensor in held.items()
    },
    "naming of diffusers": lambda held: {
        name.replace("base_model.model.", "diffusion_model."): t for name, t in held.items()
    },
    "(?s)naming of diffusers": lambda held: {
        name.replace("base_model.model.", "transformer."): t for name, t in held.items()
    },
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", ["14b"], indirect=True)
@pytest.mark.parametrize("said", SPOILED)
def test_matrices_that_do_not_fit_are_named(written, tiny, said):
    in_file(written, SPOILED[said])
    with pytest.raises(CheckpointError, match=said):
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
