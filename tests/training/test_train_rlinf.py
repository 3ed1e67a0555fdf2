"""Names of RLinf's guide: each is reported under its name here; a whole recipe is translated."""

import re

import pytest
import train_worlds
import yaml

from dzrobot.cli import main
from dzrobot.configuration import field_notes, load_config, read_config
from dzrobot.envs.franka.make import load_workcell
from dzrobot.errors import ConfigError
from dzrobot.training.recipes.read import load_recipe, read_recipe
from dzrobot.training.recipes.rlinf import DROPPED, RENAMED, SECTIONS, VALUES, translate
from dzrobot.training.sft_config import SFTConfig

OURS = {note.name for note in field_notes(SFTConfig)}

GUIDE = {
    "actor.model.model_path=x": "model.model_path",
    "actor.model.embodiment_tag=oxe_droid": "model.embodiment_tag",
    "actor.micro_batch_size=1": "runner.micro_batch_size",
    "actor.global_batch_size=4": "runner.global_batch_size",
    "actor.optim.lr=1e-4": "optim.lr",
    "actor.fsdp_config.mixed_precision.param_dtype=bf16": "parallel.param_dtype",
    "actor.fsdp_config.mixed_precision.reduce_dtype=fp32": "parallel.reduce_dtype",
    "actor.fsdp_config.gradient_checkpointing=true": "parallel.activation_checkpointing",
    "actor.fsdp_config.sharding_strategy=full_shard": "parallel.strategy",
    "actor.model.action_head_cfg.config.diffusion_model_cfg.max_chunk_size=4": (
        "model.max_chunk_size"
    ),
    "runner.logger.log_path=logs": "runner.output_dir",
    "train_backend=fsdp2": "parallel.strategy",
    "defaults=model/dreamzero_14b@actor.model": "model.preset",
    "model.model_type=dreamzero": "drop it",
    "model.state_horizon=1": "one state per block",
    "model.droid_view_height=176": "View.size",
    "model.precision=fp32": "parallel.param_dtype",
    "actor.fsdp_config.mixed_precision.buffer_dtype=bf16": "parallel.param_dtype",
    "data.lazy_load=true": "every read is lazy",
    "runner.ckpt_path=full_weights.pt": "--checkpoint PATH --preset 5b --metadata FILE",
    "actor.model.num_action_chunks=8": "--execute",
    "cluster.num_nodes=2": "--nnodes",
    "robot_ip=172.16.0.2": "address",
}


@pytest.mark.sampled
@pytest.mark.parametrize("written", GUIDE)
def test_every_name_of_the_guide_is_told_by_its_name_here(train_root, tmp_path, written):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(train_worlds.recipe(train_root)))
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(recipe), [written], 1)
    name = written.partition("=")[0]
    line = next(line for line in str(caught.value).splitlines() if line.startswith(f"  {name}:"))
    assert GUIDE[written] in line
    assert "is set too" not in line, "by the recipe, not beside it"
    assert written[:60] in line, "the origin is the override"
    assert "Did you mean" not in str(caught.value)
    assert "import-rlinf" not in str(caught.value), "the file is one of ours"


def test_names_of_an_evaluation_on_a_robot_are_told_by_those_of_a_workcell(tmp_path):
    file = tmp_path / "cell.yaml"
    file.write_text("robot_ip: 172.16.0.2\ncamera_serials: ['1', '2']\n")
    with pytest.raises(ConfigError) as caught:
        load_workcell(str(file))
    assert "robot_ip: is called address here" in str(caught.value)
    assert "camera_serials: is called cameras" in str(caught.value)
    assert "Did you mean" not in str(caught.value)
    theirs = {"task_description": "pick", "is_dummy": True, "cameras": ["1", "2"]}
    with pytest.raises(ConfigError) as caught:
        load_workcell("fake", theirs)
    assert "task_description: is called task here" in str(caught.value)
    assert "is_dummy: is workcell='fake' here" in str(caught.value)
    assert re.search(
        r"cameras\.0: got '1', allowed: a map of .*\bkey\b.*\bserial\b", str(caught.value)
    )


def test_the_table_leads_to_fields_of_ours():
    assert set(RENAMED.values()) <= OURS
    assert {name for values in VALUES.values() for new in values.values() for name in new} <= OURS
    assert OURS.isdisjoint(DROPPED)
    assert OURS.isdisjoint(RENAMED)
    ours = {name.partition(".")[0] for name in OURS}
    assert {place for place in SECTIONS.values() if "." not in place} <= ours


ALIASES = {
    "full_shard": ("fsdp", True), "fsdp2": ("fsdp", True), "zero3": ("fsdp", True),
    "zero2": ("fsdp", False), "hybrid_shard": ("hsdp", True), "no_shard": ("ddp", True),
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES)
def test_strategies_have_aliases_and_it_is_said_what_they_mean(train_root, tmp_path, alias, caplog):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(train_worlds.recipe(train_root)))
    _, config = read_recipe(str(recipe), [f"parallel.strategy={alias}"])
    found = config.parallel.strategy, config.parallel.reshard_after_forward
    assert found == ALIASES[alias]
    assert f"parallel.strategy={alias} is parallel.strategy={found[0]}" in caplog.text


@pytest.mark.parametrize(
    ("written", "said"),
    {
        "parallel.cpu_ram_efficient_loading=true": "piece by piece",
        "actor.fsdp_config.wrap_policy=transformer_based_wrap": "each transformer block",
        "parallel.transformer_layer_cls_to_wrap=[CausalWanAttentionBlock]": "its class is Block",
        "parallel.root_only=false": "each transformer block",
    }.items(),
)
def test_what_is_done_anyway_is_accepted_and_told(train_root, tmp_path, written, said, caplog):
    recipe = tmp_path / "recipe.yaml"
    values = train_worlds.recipe(train_root, runner__output_dir=tmp_path / "new")
    recipe.write_text(yaml.safe_dump(values))
    assert load_recipe(str(recipe), [written], 1) == load_recipe(str(recipe), [], 1)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("written", "said"),
    {
        "parallel.cpu_ram_efficient_loading=false": "piece by piece",
        "parallel.wrap_policy=NO_WRAP": "no other layout",
        "parallel.root_only=true": "gathered on every device at once",
        "train_backend=deepspeed": "ZeRO stage 2 is parallel.strategy=zero2",
        "parallel.strategy=deepspeed": "ZeRO stage 2 is parallel.strategy=zero2",
        "data.video_backend=decord": "pip install",
    }.items(),
)
def test_what_cannot_be_had_is_refused_with_what_comes_nearest(train_root, tmp_path, written, said):
    recipe = tmp_path / "recipe.yaml"
    values = train_worlds.recipe(train_root, runner__output_dir=tmp_path / "new")
    recipe.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as refused:
        load_recipe(str(recipe), [written], 1)
    (line,) = [line for line in str(refused.value).splitlines() if said in line]
    assert line.startswith(f"  {written.partition('=')[0]}: ")


def test_what_is_written_under_our_name_stands():
    written = ["optim.lr=1e-5", "actor.optim.lr=1e-4"]
    done = translate(read_config({}, written))
    assert done.raw.values == {"optim": {"lr": 1e-5}}
    assert [name for name, _ in done.faults] == ["actor.optim.lr"]
    assert "is called optim.lr here, and optim.lr is set too" in done.faults[0][1]


RECIPE = """
defaults:
  - model/dreamzero_14b@actor.model
  - override hydra/job_logging: stdout
cluster: {num_nodes: 1}
runner:
  logger: {log_path: runs/droid, logger_backends: [tensorboard]}
  max_steps: 200
  save_interval: 100
  val_check_interval: -1
data: {train_data_paths: /path/to/droid, lazy_load: true, sampling_mode: multi_anchor}
actor:
  micro_batch_size: 1
  global_batch_size: 8
  seed: 42
  model:
    model_path: ./DreamZero-DROID
    embodiment_tag: oxe_droid
    metadata_json_path: ???
    action_head_cfg: {config: {diffusion_model_cfg: {max_chunk_size: 4, dim: 5120}}}
  optim: {lr: 1.0e-5, total_training_steps: "${runner.max_steps}"}
  fsdp_config: {strategy: fsdp2, gradient_checkpointing: true, wrap_policy: {x: 1}}
"""


def test_a_recipe_of_theirs_becomes_one_of_ours(tmp_path, capsys):
    source, target = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(RECIPE)
    assert main(["import-rlinf", str(source), "--output", str(target)]) == 0
    said = capsys.readouterr().out
    config = load_config(SFTConfig, target)
    assert config.model.preset == "14b"
    assert config.model.max_chunk_size == 4
    assert config.runner.global_batch_size == 8
    assert str(config.runner.output_dir) == "runs/droid"
    assert config.optim.total_training_steps == 200
    assert config.parallel.activation_checkpointing == "full"
    assert "Without effect here: " in said
    for dropped in ("cluster.num_nodes", "data.lazy_load", "wrap_policy", "val_check_interval"):
        assert dropped in target.read_text()
    assert main(["import-rlinf", str(source), "--output", str(target)]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_recipe_of_theirs_is_not_trained_but_sent_to_the_translation(tmp_path):
    source = tmp_path / "theirs.yaml"
    source.write_text("actor: {model: {embodiment_tag: libero_sim}}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(source), [], 1)
    assert f"dzrobot import-rlinf {source}" in str(caught.value)
    assert "embodiment_tag: is needed" not in str(caught.value)


def test_what_nothing_says_is_listed(tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text("data: {train_data_paths: /data}\nrunner: {max_steps: 5}\n")
    assert main(["import-rlinf", str(source), "--output", str(tmp_path / "ours.yaml")]) == 0
    said = capsys.readouterr().out
    assert "Still to be given" in said
    assert "runner.micro_batch_size=..." in said


def test_components_of_a_cold_start_may_lie_on_the_hub(train_root, tmp_path):
    """The values of the guide pass; a file that is neither here nor of that form is a fault."""
    recipe = tmp_path / "recipe.yaml"
    changes = {"model__model_path": None, "runner__output_dir": tmp_path / "run"}
    recipe.write_text(yaml.safe_dump(train_worlds.recipe(train_root, **changes)))
    wan = "Wan-AI/Wan2.2-TI2V-5B"
    clip = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    given = [
        "model.preset=5b",
        f"model.diffusion_model_pretrained_path={wan}",
        f"model.image_encoder_pretrained_path=Wan-AI/Wan2.1-I2V-14B-480P/{clip}",
        f"model.text_encoder_pretrained_path={wan}/models_t5_umt5-xxl-enc-bf16.pth",
    ]
    good = [*given, f"model.vae_pretrained_path={wan}/Wan2.2_VAE.pth"]
    assert load_recipe(str(recipe), good, 1).model.vae_pretrained_path == f"{wan}/Wan2.2_VAE.pth"
    with pytest.raises(ConfigError, match=r"owner/name/file\.pth"):
        load_recipe(str(recipe), [*given, "model.vae_pretrained_path=wan/Wan2.2_VAE.pth"], 1)
