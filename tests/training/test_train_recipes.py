"""Recipes and their mistakes: all at once, with names and remedies, before anything is loaded."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_worlds
import yaml

from dzrobot.cli import main
from dzrobot.configuration import load_config, read_config
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.timing import frame_grid
from dzrobot.errors import (
    ConfigError,
    DzrobotError,
    MissingDependencyError,
    UnknownNameError,
)
from dzrobot.training.recipes.architecture import run_embodiment
from dzrobot.training.recipes.check import find_faults
from dzrobot.training.recipes.read import RECIPES, find_recipe, load_recipe
from dzrobot.training.recipes.rlinf import DROPPED
from dzrobot.training.run.build import build
from dzrobot.training.run.export import export
from dzrobot.training.run.optimizer import schedule_factor
from dzrobot.training.sft_config import SFTConfig

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def faults(root, processes=1, **changes):
    found = find_faults(train_worlds.config(root, **changes), processes)
    return {fault.field: fault.message for fault in found}


def test_the_promised_recipes_are_there():
    assert {
        "libero_sft_dreamzero_5b", "libero_sft_dreamzero_14b", "droid_sft_dreamzero_14b",
        "franka_sft_dreamzero_5b", "libero_franka_mix_sft_dreamzero_5b", "tiny_cpu",
    } <= set(NAMES)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_recipes_lack_nothing_but_paths(name):
    """Given paths that are not there, that they are not there is all that is wrong."""
    written = read_config(RECIPES / f"{name}.yaml").values.get("data", {}).get("train_data_paths")
    given = ["model.model_path=/nowhere/checkpoint"]
    if written is None:
        absent = {"data.train_data_paths": "/nowhere/data", "model.metadata_json_path": "/no.json"}
    else:
        entries = [f"data.train_data_paths.{i}" for i in range(len(written))]
        absent = {f"{entry}.dataset_path": "/nowhere/data" for entry in entries}
        absent |= {f"{entry}.metadata_json_path": "/no.json" for entry in entries}
    overrides = [*given, *(f"{field}={path}" for field, path in absent.items())]
    config = load_config(SFTConfig, RECIPES / f"{name}.yaml", overrides)
    found = find_faults(config, 1 if name.endswith("_cpu") else 8)
    # A source is named as a whole.
    fields = {field.removesuffix(".dataset_path") for field in ("model.model_path", *absent)}
    assert {fault.field for fault in found} == fields
    paths = ("/nowhere/checkpoint", "/nowhere/data", "/no.json")
    assert all(any(path in fault.message for path in paths) for fault in found), found


def schedule(name):
    paths = ["data.train_data_paths=/nowhere"]
    config = load_config(SFTConfig, RECIPES / f"{name}.yaml", paths)
    steps = config.runner.max_steps
    return config, schedule_factor(torch.arange(steps), config.optim, steps)


def test_recipes_that_bear_a_published_name_have_its_schedule():
    libero, rates = schedule("libero_sft_dreamzero_5b")
    assert (libero.runner.global_batch_size, libero.runner.max_steps) == (256, 18_000)
    # Warm-up of 2,500 steps, then a cosine to 50,000: at 18,000 it is still at 76 %.
    assert rates[2499] == 1
    assert rates[2498] < 1
    assert rates[-1] == pytest.approx(0.76, abs=0.005)
    franka, rates = schedule("franka_sft_dreamzero_5b")
    assert (franka.runner.global_batch_size, franka.runner.max_steps) == (256, 20_000)
    assert rates[-1] == rates[10_000] == 1


def test_a_named_grid_brings_its_walk(train_root):
    robots = {}
    for grid in (None, "rlinf_libero_5b"):
        config = train_worlds.config(train_root, data__frame_grid=grid)
        robots[grid] = run_embodiment("libero_sim", config.model, config.data)
    assert robots[None].timing == load_embodiment("libero_sim").timing
    # The published sets say ten rows a second; the robot's actions keep their rate.
    walk = replace(frame_grid("rlinf_libero_5b"), control_hz=20)
    assert robots["rlinf_libero_5b"].timing == walk
    found = faults(train_root, data__frame_grid="rlinf_libero_5b", data__sampling_mode="aligned")
    assert "leave sampling_mode out" in found["data.frame_grid"]
    with pytest.raises(ConfigError, match=r"data\.frame_grid: unknown frame grid 'rlinf'\."):
        train_worlds.config(train_root, data__frame_grid="rlinf")


def test_views_that_may_be_black_are_views_of_the_robot(train_root):
    def found(**data):
        changes = {f"data__{name}": value for name, value in data.items()}
        return faults(train_root, **changes)

    first, second = (view.key for view in train_worlds.ROBOT.views)
    assert found(view_dropout=0.1, dropped_views=[first]) == {}
    assert found(view_dropout=0.1, dropped_views=[first, second]) == {}
    assert "give both" in found(view_dropout=0.1)["data.view_dropout"]
    asked = found(view_dropout=0.1, dropped_views=["video.imag"])["data.dropped_views"]
    assert "Did you mean 'video.image'" in asked
    unaugmented = found(view_dropout=0.1, dropped_views=[first], augment=False)
    assert "data.augment=true" in unaugmented["data.view_dropout"]


def test_a_good_recipe_has_no_fault(train_root):
    assert faults(train_root) == {}
    assert faults(train_root, 2) == {}


WRONG = {
    "runner.global_batch_size": (
        {"runner__global_batch_size": 5, "runner__micro_batch_size": 2},
        ("5 is not a multiple", "2 x 1", "nearest that is: 4"),
    ),
    "optim.lr_warmup_steps": (
        {"optim__lr_warmup_steps": 8}, ("8 warm-up steps", "runner.max_steps=8", "lower it"),
    ),
    "optim.total_training_steps": (
        {"optim__total_training_steps": 7}, ("ends at 7", "runner.max_steps=8", "raise it"),
    ),
    "optim.min_lr_ratio": (
        {"optim__lr_scheduler": "constant", "optim__min_lr_ratio": 0.1},
        ("'constant'", "leave it out or choose 'cosine'"),
    ),
    "parallel.shard_size": (
        {"parallel__shard_size": 2}, ("2 does not divide 1 processes",),
    ),
    "parallel.enable_gradient_accumulation": (
        {"parallel__enable_gradient_accumulation": "replicas"},
        ("'replicas' on strategy 'fsdp'", "choose auto, true or false"),
    ),
    "parallel.cuda_graphs": (
        {"parallel__cuda_graphs": "blocks"}, ("together with their recomputation", "'none'"),
    ),
    "parallel.kept_blocks": (
        {"parallel__kept_blocks": 1}, ("activation_checkpointing is 'none'",),
    ),
    "parallel.fill_memory": (
        {"parallel__fill_memory": True}, ("activation_checkpointing is 'none'",),
    ),
    "parallel.reduce_dtype": ({"parallel__reduce_dtype": "bf16"}, ("'bf16'", "choose fp32")),
    "model.model_path": (
        {"model__model_path": "/nowhere/checkpoint"},
        ("/nowhere/checkpoint does not exist", "owner/name"),
    ),
    "model.lora_rank": ({"model__lora_rank": 8}, ("is_lora is false", "choose one")),
    "model.relative_action": (
        {"model__relative_action": True}, ("is True", "libero_sim", "drop this field"),
    ),
    "model.relative_action_per_horizon": (
        {"model__relative_action_per_horizon": True},
        ("is True", "over all steps of a block together", "dzrobot stats --recipe"),
    ),
    "model.relative_action_keys": (
        {"model__relative_action_keys": ["actions"]}, ("actions", "libero_sim has"),
    ),
    "model.embodiment_tag": (
        {"model__embodiment_tag": "libero_simm"}, ("libero_simm", "libero_sim"),
    ),
    "model.metadata_json_path": (
        {"model__metadata_json_path": "/nowhere.json"}, ("/nowhere.json",),
    ),
    "model.target_video_height": (
        {"model__target_video_height": 176, "model__target_video_width": 320},
        ("176 x 320", "not a multiple of", "set target_video_height="),
    ),
    "model.action_only_video": (
        {"model__action_only_video": "once"}, ("has no meaning", "give a share"),
    ),
    "model.rtc_training_max_delay": (
        {"model__rtc_training_max_delay": 9}, ("9 of the 8 actions", "choose 0 to 4"),
    ),
    "model.tokenizer_path": (
        {"model__tokenizer_path": "/nowhere/tokenizer"},
        ("/nowhere/tokenizer does not exist", "owner/name"),
    ),
    "model.preset": (
        {"model__preset": "5b"}, ("is not a 5b network", "instead of", "model.preset=null"),
    ),
    "data.train_data_paths": (
        {"data__train_data_paths": ["/nowhere/data"]},
        ("/nowhere/data does not exist", "owner/name"),
    ),
    "data.pad_tail": (
        {"data__pad_tail": True, "data__sampling_mode": "multi_anchor"},
        ("sampling_mode='aligned'",),
    ),
    "data.start_rows": ({"data__start_rows": 9}, ("has no meaning", "give a share")),
    "data.frame_grid": (
        {"data__frame_grid": "official_droid", "data__sampling_mode": "aligned"},
        ("multi_anchor", "leave sampling_mode out"),
    ),
    "runner.eval_interval": (
        {"runner__eval_interval": 2}, ("set data.holdout_episodes",),
    ),
    "runner.resume_dir": (
        {"runner__resume_dir": "/nowhere/run"}, ("no folder /nowhere/run", "'auto'"),
    ),
}  # fmt: skip
"""By field: what makes it wrong, and what the message says was given, is allowed or is to do."""


@pytest.mark.sampled
@pytest.mark.parametrize("field", WRONG)
def test_pitfalls_are_named(train_root, field):
    changes, phrases = WRONG[field]
    found = faults(train_root, **changes)
    assert field in found, found
    assert [phrase for phrase in phrases if phrase not in found[field]] == [], found[field]


def _without_a_tensor(root, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(root / "tiny", tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("action_head.model.head.modulation")
    save_file(tensors, folder / "model.safetensors")
    return {"model__model_path": folder}


def _of_another_width(root, tmp_path):
    folder = shutil.copytree(root / "tiny", tmp_path / "wider")
    config = json.loads((folder / "config.json").read_text())
    config["action_head_cfg"]["config"]["diffusion_model_cfg"]["ffn_dim"] += 8
    (folder / "config.json").write_text(json.dumps(config))
    return {"model__model_path": folder}


def _other_recordings(root, tmp_path):
    train_worlds.record(tmp_path / "others", episodes=4)
    return {"data__train_data_paths": [str(tmp_path / "others")]}


def _no_such_column(root, tmp_path):
    folder = shutil.copytree(root / "dataset", tmp_path / "narrow")
    info = json.loads((folder / "meta/info.json").read_text())
    del info["features"][train_worlds.ROBOT.action[0].feature]
    (folder / "meta/info.json").write_text(json.dumps(info))
    return {"data__train_data_paths": [str(folder)]}


def _broken_tokenizer(root, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{")
    return {"model__tokenizer_path": tmp_path / "tokenizer"}


def _a_run_is_there(root, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    return {"runner__output_dir": tmp_path / "run"}


def _other_statistics(root, tmp_path):
    written = json.loads((root / "metadata.json").read_text())
    (tmp_path / "metadata.json").write_text(json.dumps({"my_arm": written["libero_sim"]}))
    return {"model__metadata_json_path": tmp_path / "metadata.json"}


OPENED = {
    "a tensor is missing": (_without_a_tensor, "missing action_head.model.head.modulation"),
    "weights of another width": (_of_another_width, "instead of"),
    "statistics of other recordings": (_other_recordings, "statistics"),
    "statistics of another robot": (_other_statistics, "It holds: my_arm"),
    "a column is missing": (_no_such_column, "actions"),
    "a broken tokenizer": (_broken_tokenizer, "tokenizer.json is damaged"),
    "the folder of another run": (_a_run_is_there, "holds a run"),
    "all episodes held out": (
        lambda *_: {"data__holdout_episodes": 3}, "holds out every episode",
    ),
    "windows longer than episodes": (lambda *_: {"model__max_chunk_size": 8}, "has 42 steps"),
    "a plug-in of another kind": (
        lambda *_: {"runner__plugins": ["train_worlds:ROBOT"]}, "train_worlds",
    ),
}  # fmt: skip
"""What is wrong with a run beyond its fields, and what the message says of it."""


def _of_field(field):
    return lambda root, tmp_path: WRONG[field][0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "make",
    [_of_field(field) for field in WRONG] + [make for make, _ in OPENED.values()],
    ids=[*WRONG, *OPENED],
)
def test_a_plan_refuses_what_a_run_refuses_in_the_same_words(
    train_root, solo, tmp_path, capsys, request, make
):
    """Nothing of the message is lost but the name of the command."""
    changes = make(train_root, tmp_path)
    recipe = tmp_path / "recipe.yaml"
    values = train_worlds.recipe(train_root, **{"runner__output_dir": tmp_path / "new", **changes})
    recipe.write_text(yaml.safe_dump(values))
    with pytest.raises(DzrobotError) as refused:
        build(load_recipe(str(recipe), [], 1), solo)
    if (name := request.node.callspec.id) in OPENED:
        assert OPENED[name][1] in str(refused.value)
    assert main(["plan", str(recipe)]) == 2
    assert capsys.readouterr().err.strip() == f"dzrobot plan: {refused.value}"


BROKEN = {
    "no FFmpeg": """
text = "Could not load libtorchcodec. Likely causes:\\n" + 90 * "  Traceback, line\\n"
raise RuntimeError(text + "OSError: libavutil.so.60: cannot open shared object file: No such file")
""",
    "no CUDA": """
try:
    raise OSError("libnvrtc.so.13: cannot open shared object file: No such file or directory")
except OSError as error:
    raise OSError("Could not load this library: libtorchcodec_image.so") from error
""",
    "another torch": "import torch; torch.an_operator_of_another_release",
    "no operators": """
class VideoDecoder:
    def __init__(self, *_, **__):
        raise RuntimeError("Could not find schema for torchcodec_ns::create_from_file")
""",
}
"""What the module torchcodec.decoders may do; REASONS are what the message holds of it."""

REASONS = ("libavutil.so.60", "libnvrtc.so.13", "an_operator", "torchcodec_ns")


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "reason"), list(zip(BROKEN, REASONS, strict=True)), ids=BROKEN)
def test_a_decoder_that_does_not_work_is_one_message_of_every_command(
    train_root, solo, tmp_path, capsys, monkeypatch, kind, reason
):
    """Before a weight is read; the same in `plan`, `train` and `inspect-data`."""
    package = tmp_path / "site" / "torchcodec"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "decoders.py").write_text(BROKEN[kind])
    monkeypatch.syspath_prepend(package.parent)
    for name in ("torchcodec", "torchcodec.decoders"):
        # Gone again after the test.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    films = train_worlds.record(tmp_path / "films", video=True, episodes=1)
    recipe = tmp_path / "recipe.yaml"
    changes = {
        "runner__output_dir": tmp_path / "new", "data__video_backend": "torchcodec",
        "data__train_data_paths": [str(films)],
    }  # fmt: skip
    recipe.write_text(yaml.safe_dump(train_worlds.recipe(train_root, **changes)))
    with pytest.raises(MissingDependencyError) as refused:
        build(load_recipe(str(recipe), [], 1), solo)
    said = str(refused.value)
    assert len(said.splitlines()) == 1
    assert len(said) < 400
    remedy = "torchcodec<0.14" if kind == "no CUDA" else "apt-get install ffmpeg"
    assert re.search(rf"and cannot .*{reason}.*{remedy}.*data.video_backend=pyav", said)
    looked = ["inspect-data", str(films), "--embodiment=train_worlds:ROBOT", "--decoder=torchcodec"]
    for words in (["plan", str(recipe)], looked):
        assert main(words) == 2
        assert capsys.readouterr().err.strip() == f"dzrobot {words[0]}: {said}"


def test_a_run_remembers_the_recipe_it_was_started_with(train_root, solo, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    changes = {"runner__output_dir": tmp_path / "run", "runner__max_steps": 3}
    recipe.write_text(yaml.safe_dump(train_worlds.recipe(train_root, **changes)))
    folder = export(build(load_recipe(str(recipe), [], 1), solo), 0)
    assert main(["inspect", str(folder)]) == 0
    # The table breaks long lines.
    assert f"recipe{recipe}" in re.sub(r"\s", "", capsys.readouterr().out)
    passport = json.loads((folder / "dzrobot_passport.json").read_text())
    assert passport["recipe"]["runner"]["recipe"] == str(recipe)


def test_a_plan_says_what_it_could_not_look_at(train_root, tmp_path, capsys):
    values = train_worlds.recipe(train_root, runner__output_dir=tmp_path / "new")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    assert main(["plan", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "as `dzrobot train` does: the recipe, weights, data" in said
    assert "not checked: " not in said

    config_path = shutil.copy(train_root / "tiny/config.json", tmp_path / "net.json")
    for word, field, opened in (
        ("model.model_path=owner/name", "model.model_path: owner/name is on the hub", "data"),
        ("data.train_data_paths=owner/name", "data.train_data_paths: owner/name is", "weights"),
    ):
        more = [f"model.config_path={config_path}"] if "model.model_path" in word else []
        assert main(["plan", str(recipe), word, *more]) == 0
        said = capsys.readouterr().out
        assert f"not checked: {field}" in said
        assert f"as `dzrobot train` does: the recipe, {opened}\n" in said
    del values["data"]["train_data_paths"]
    recipe.write_text(yaml.safe_dump(values))
    assert main(["plan", str(recipe)]) == 0
    assert "not checked: data.train_data_paths: is needed" in capsys.readouterr().out


def test_a_sample_longer_than_every_episode(train_root):
    found = faults(train_root, model__max_chunk_size=8)
    assert "longest of 3 episodes has 42 steps" in found["data.train_data_paths"]


def test_a_cold_start_needs_every_part(train_root):
    changes = {
        "model__model_path": None,
        "model__preset": "5b",
        "model__vae_pretrained_path": "/x.pth",
    }
    assert "needs all of" in faults(train_root, **changes)["model.diffusion_model_pretrained_path"]


def test_mixtures(train_root):
    entry = {
        "dataset_path": str(train_root / "dataset"), "embodiment_tag": "franka_pnp",
        "metadata_json_path": str(train_root / "metadata.json"),
    }  # fmt: skip
    found = faults(train_root, data__train_data_paths=[entry, str(train_root / "dataset")])
    assert "mixed" in found["data.train_data_paths"]
    assert "none of the mixture's" in found["model.embodiment_tag"]
    assert "franka_pnp" in found["data.train_data_paths.0.metadata_json_path"]


def test_everything_at_once_without_what_takes_seconds_to_load(train_root, tmp_path):
    recipe = tmp_path / "bad.yaml"
    changes = {"runner__global_batch_size": 3, "optim__lr_warmup_steps": 99}
    values = train_worlds.recipe(train_root, runner__output_dir=tmp_path / "run", **changes)
    recipe.write_text(json.dumps(values, indent=1))
    code = (
        "import sys;"
        "from dzrobot.training.run.launch import main;"
        f"code = main([{str(recipe)!r}, 'runner.micro_batch_size=2', 'model.lora_rank=4']);"
        "heavy = {'torch', 'transformers', 'diffusers', 'mujoco'};"
        "print(code, *heavy & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["2"], done.stderr
    lines = done.stderr.strip().splitlines()
    assert "3 faults" in lines[0]
    assert f"{recipe}:" in next(line for line in lines if "runner.global_batch_size" in line)
    assert "'model.lora_rank=4'" in next(line for line in lines if "is_lora is false" in line)


def test_unknown_fields_get_a_suggestion_and_retired_ones_a_reason(train_root, tmp_path):
    recipe = tmp_path / "old.yaml"
    recipe.write_text(json.dumps(train_worlds.recipe(train_root)))
    overrides = ["model.modelpath=x", "data.lazy_load=true", "optim.lr=fast"]
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(recipe), overrides, 1)
    text = str(caught.value)
    assert "model_path" in text.split("model.modelpath")[1]
    assert DROPPED["data.lazy_load"] in text
    assert "optim.lr" in text


def test_recipes_have_suggestions():
    with pytest.raises(UnknownNameError, match="libero_sft_dreamzero_5b"):
        find_recipe("libero_sft_dreamzero_5B")


def test_exponents_are_numbers():
    values = {"model": {"embodiment_tag": "x"}, "data": {"train_data_paths": ["y"]}}
    runner = {"output_dir": "z", "max_steps": 9, "micro_batch_size": 1, "global_batch_size": 1}
    config = load_config(SFTConfig, {**values, "runner": runner}, ["optim.lr=1e-4"])
    assert config.optim.lr == 1e-4
