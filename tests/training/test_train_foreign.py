"""Files of RLinf: they draw its frames, on its schedule, with its own defaults where silent."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from dzrobot.cli import build_parser, main
from dzrobot.commands import eval as eval_command
from dzrobot.configuration import load_config, read_config
from dzrobot.embodiments.timing import Timing, multi_anchor_window, walk_offsets
from dzrobot.errors import ConfigError
from dzrobot.training.recipes.architecture import run_embodiment, source_plans
from dzrobot.training.recipes.read import RECIPES
from dzrobot.training.recipes.rlinf_files import ALIASES, FILES, compose
from dzrobot.training.recipes.rlinf_import import import_composed
from dzrobot.training.run.optimizer import schedule_factor
from dzrobot.training.sft_config import DataConfig, ModelConfig, SFTConfig

HERE = Path(__file__).parent
FRAMES = json.loads((HERE / "rlinf_frames.json").read_text())
ALL = pytest.mark.long
"""Every length, every file."""


# The sampler: rows that RLinf's own code draws, made by make_rlinf_frames.py from its wheel.


def instructions(kind, length):
    rows = np.arange(length)
    return {
        "one": np.zeros(length, np.int64),
        "changes": (rows >= length // 2).astype(np.int64),
        "and back": ((rows >= 2 * length // 5) & (rows < 2 * length // 5 + 7)).astype(np.int64),
    }[kind]


def timing_of(grid):
    return Timing(
        control_hz=10, action_horizon=grid["action_horizon"], anchor_stride=grid["macro_stride"],
        frame_offsets=tuple(grid["offsets"]), blocks=grid.get("blocks", 4), sampling="multi_anchor",
    )  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=ALL)])
@pytest.mark.parametrize("kind", ["one", "changes", "and back"])
@pytest.mark.parametrize("name", FRAMES["grids"])
def test_every_start_draws_the_rows_that_rlinf_draws(name, kind, every):
    grid = FRAMES["grids"][name]
    published = grid[kind]
    if grid["macro_stride"] < grid["action_horizon"]:
        assert published["runs"] == {}, "it draws nothing"
        with pytest.raises(ConfigError, match="blocks would share actions"):
            timing_of(grid)
        return
    timing, horizon = timing_of(grid), np.arange(grid["action_horizon"])
    for length in range(*FRAMES["lengths"], every):
        marks = instructions(kind, length)
        expected = {
            start: published["samples"][number]
            for first, end, number in published["runs"].get(str(length), [])
            for start in range(first, end)
        }
        for start in range(length):
            rows = multi_anchor_window(start, marks, timing)
            assert rows.is_complete(timing) == (start in expected), (length, start)
            if start in expected:
                video, state, action = (np.asarray(part) + start for part in expected[start])
                assert np.array_equal(rows.video, video), (length, start)
                assert np.array_equal(rows.state, state), (length, start)
                assert np.array_equal(rows.action, (action[:, None] + horizon).ravel())


def test_a_horizon_at_which_rlinf_draws_nothing_by_default_asks_for_frames():
    """Its default frames of blocks of 12 coincide, and no sample is whole."""
    assert all(FRAMES["grids"]["default_at_12"][kind]["runs"] == {} for kind in ("one", "changes"))
    with pytest.raises(ConfigError, match=r"data\.frame_grid: .*rlinf_franka.*\[0, 2, 3, 4, "):
        walk_offsets(12)


def run_timing(tag, **data):
    model = ModelConfig(embodiment_tag=tag)
    return run_embodiment(tag, model, DataConfig(train_data_paths=["x"], **data)).timing


def test_the_words_of_the_guide_give_the_published_frames_or_name_the_grids():
    for tag, grid in (("libero_sim", "libero"), ("oxe_droid", "droid")):
        typed = run_timing(tag, sampling_mode="multi_anchor")
        wanted = FRAMES["grids"][grid]
        assert list(typed.frame_offsets) == wanted["offsets"]
        assert typed.anchor_stride == wanted["macro_stride"]
        assert typed.sampling == "multi_anchor"
    with pytest.raises(ConfigError, match="rlinf_franka"):
        run_timing("franka_pnp", sampling_mode="multi_anchor")
    given = run_timing("franka_pnp", video_in_chunk_offsets=range(8), macro_stride=20)
    assert given.frame_offsets == tuple(range(8))
    assert (given.anchor_stride, given.sampling) == (20, "multi_anchor")
    assert given.control_hz == run_timing("franka_pnp").control_hz


@pytest.mark.parametrize(
    "data",
    [
        {"sampling_mode": "aligned", "macro_stride": 12},
        {"frame_grid": "rlinf_franka", "video_in_chunk_offsets": range(8)},
        {"video_in_chunk_offsets": (3, 6, 9, 12)},
        {"video_in_chunk_offsets": (0, 2, 1, 3)},
    ],
)
def test_frames_that_do_not_go_together_are_refused(data):
    with pytest.raises(ConfigError):
        run_timing("franka_pnp", **data)


# The five published recipes, as facts; RLinf's own files, where they are, must say the same.

NETWORK_5B = {"preset": "5b", "size": (160, 320)}
NETWORK_14B = {"preset": "14b", "size": (352, 640)}
COMMON = {
    "lr": 1e-5, "betas": (0.95, 0.999), "eps": 1e-8, "decay": 1e-5, "clip": 1.0, "floor": 0.0,
    "average": None, "adapters": False, "param_dtype": "bf16", "reduce_dtype": "bf16",
    "strategy": "fsdp", "recompute": "full", "offload": False, "seed": 42, "evaluations": None,
    "holdout": 0, "relative": False, "moments": "fp32", "augment": True,
    # Of its hybrid_engines/fsdp.yaml, which every one of them names.
    "accumulate": True,
}  # fmt: skip
PUBLISHED = {
    "libero_sft_dreamzero_5b": {
        **COMMON, **NETWORK_5B, "robot": "libero_sim", "sources": [("libero_sim", 1.0, True)],
        "frames": "libero", "schedule": ("cosine", 2500, 50_000), "steps": 50_000,
        "batch": (32, 256), "reshard": False, "save": 3000,
    },
    "libero_sft_dreamzero_14b": {
        **COMMON, **NETWORK_14B, "robot": "libero_sim", "sources": [("libero_sim", 1.0, True)],
        "frames": "libero", "schedule": ("cosine", 2500, 50_000), "steps": 2000,
        "batch": (1, 16), "reshard": True, "save": 2000,
    },
    "droid_sft_dreamzero_14b": {
        **COMMON, **NETWORK_14B, "robot": "oxe_droid", "sources": [("oxe_droid", 1.0, True)],
        "frames": "droid", "schedule": ("cosine", 20, 2000), "steps": 2000, "batch": (1, 8),
        "reshard": True, "save": 2000, "relative": True,
    },
    "franka_sft_dreamzero_5b": {
        **COMMON, **NETWORK_5B, "robot": "franka_pnp", "sources": [("franka_pnp", 1.0, True)],
        "frames": "franka", "schedule": ("constant", 1000, 20_000), "steps": 20_000,
        "batch": (32, 256), "reshard": False, "save": 2000,
    },
    "libero_franka_mix_sft_dreamzero_5b": {
        **COMMON, **NETWORK_5B, "robot": "franka_pnp",
        "sources": [
            ("libero_sim", 1.0, False), ("oxe_droid", 2.0, False), ("franka_pnp", 1.0, True),
        ],
        "frames": "franka", "schedule": ("constant", 1000, 20_000), "steps": 20_000,
        "batch": (32, 256), "reshard": False, "save": 2000,
    },
}  # fmt: skip


def meaning(config):
    """Return how a recipe trains; paths, logs and readers aside."""
    model, optim, parallel, runner = config.model, config.optim, config.parallel, config.runner
    plans = source_plans(config)
    frames = {plan.embodiment.timing for plan in plans}
    steps = runner.max_steps
    relative = model.relative_action
    if relative is None:
        relative = any(plan.embodiment.relative_keys for plan in plans)
    return {
        "preset": model.preset, "robot": model.embodiment_tag, "relative": relative,
        "size": (model.target_video_height, model.target_video_width), "adapters": model.is_lora,
        "sources": [(p.embodiment.tag, p.weight, p.distribute_weights) for p in plans],
        "frames": sorted({name_of_grid(timing) for timing in frames}),
        "schedule": (
            optim.lr_scheduler, optim.warmup_updates(steps), optim.schedule_updates(steps),
        ),
        "steps": steps, "batch": (runner.micro_batch_size, runner.global_batch_size),
        "lr": optim.lr, "betas": (optim.adam_beta1, optim.adam_beta2), "eps": optim.adam_eps,
        "decay": optim.weight_decay, "clip": optim.clip_grad, "floor": optim.min_lr_ratio,
        "average": optim.ema_decay, "moments": optim.moments,
        "param_dtype": parallel.param_dtype, "reduce_dtype": parallel.reduce_dtype,
        "strategy": parallel.strategy, "recompute": parallel.activation_checkpointing,
        "reshard": parallel.reshard_after_forward, "offload": parallel.cpu_offload,
        "accumulate": parallel.enable_gradient_accumulation,
        "save": config.checkpoint.save_interval, "seed": runner.seed,
        "evaluations": runner.eval_interval, "holdout": config.data.holdout_episodes,
        "augment": config.data.augment,
    }  # fmt: skip


def name_of_grid(timing):
    """Return the published grid that ``timing`` draws; its numbers, if it is none."""
    for name, grid in FRAMES["grids"].items():
        wanted = timing_of(grid) if grid["macro_stride"] >= grid["action_horizon"] else None
        if (
            wanted
            and timing.control_hz
            and timing == Timing(**{**vars(wanted), "control_hz": timing.control_hz})
        ):
            return name
    return str(timing)


def expected(name):
    return {**PUBLISHED[name], "frames": [PUBLISHED[name]["frames"]]}


def import_recipe(file, overrides=()):
    return import_composed(file, compose(file, overrides, FILES, ALIASES))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_trains_as_published(rlinf_files, name):
    done = import_recipe(rlinf_files / f"{name}.yaml")
    assert done.needed == []
    assert meaning(load_config(SFTConfig, done.values)) == expected(name)


MUTATIONS = {
    "data.sampling_mode": "aligned", "data.macro_stride": 40,
    "data.video_in_chunk_offsets": [0, 2, 4, 6, 8, 10, 12, 14], "actor.micro_batch_size": 2,
    "actor.global_batch_size": 512, "actor.seed": 7, "actor.model.action_horizon": 8,
    "actor.model.target_video_height": 128, "actor.model.target_video_width": 256,
    "actor.model.embodiment_tag": "agibot", "actor.model.is_lora": True,
    "actor.model.relative_action": True, "actor.optim.lr": 2e-5, "actor.optim.adam_beta1": 0.9,
    "actor.optim.adam_beta2": 0.99, "actor.optim.adam_eps": 1e-6, "actor.optim.weight_decay": 0.1,
    "actor.optim.clip_grad": 0.5, "actor.optim.lr_warmup_steps": 7,
    "actor.optim.lr_warmup_steps_ratio": 0.2, "actor.optim.min_lr_rate": 0.1,
    "actor.optim.lr_scheduler": "torch_cosine", "runner.max_steps": 1900,
    "runner.save_interval": 50, "actor.fsdp_config.gradient_checkpointing": False,
    "actor.fsdp_config.enable_gradient_accumulation": False,
    "actor.fsdp_config.cpu_offload": True, "actor.enable_offload": True,
    "actor.fsdp_config.sharding_strategy": "no_shard",
    "actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "actor.fsdp_config.mixed_precision.reduce_dtype": "fp32",
    "actor.model.precision": "bf16", "actor.model.num_action_per_block": 11,
    "actor.model.state_horizon": 2, "runner.max_epochs": 1, "runner.resume_dir": "/state",
    "actor.model.action_head_cfg.config.diffusion_model_cfg.max_chunk_size": 2,
    "actor.model.action_head_cfg.config.diffusion_model_cfg.dim": 1536,
    "actor.model.action_head_cfg.config.tune_projector": False,
    "actor.model.action_head_cfg.config.unheard_of": 1,
    "actor.model.action_head_cfg.config.vae_cfg.unheard_of": 1,
    "actor.model.action_head_cfg.config.text_encoder_cfg.num_layers": 3,
    "actor.model.action_head_cfg.config.decouple_video_action_noise": True,
    "actor.fsdp_config.amp_autocast.enabled": True, "actor.unheard_of": 1, "data.unheard_of": 1,
}  # fmt: skip


@pytest.mark.parametrize("field", MUTATIONS)
def test_no_changed_field_passes_as_the_published_recipe(rlinf_files, field):
    """Each change shows in how the recipe trains, is refused by its name, or said to be other."""
    name = "libero_sft_dreamzero_5b"
    change = f"{field}={json.dumps(MUTATIONS[field])}"
    done = outcome(rlinf_files / f"{name}.yaml", [change])
    if isinstance(done, ConfigError):
        assert field.removeprefix("actor.") in str(done)
    else:
        assert done.changed or meaning(load_config(SFTConfig, done.values)) != expected(name)


def outcome(file, overrides):
    """Return what an import gives: a recipe, or its refusal."""
    try:
        return import_recipe(file, overrides)
    except ConfigError as error:
        return error


@pytest.mark.parametrize(
    "name",
    [
        "libero_sft_dreamzero_14b",
        *(pytest.param(name, marks=ALL) for name in PUBLISHED if "libero_sft" not in name),
    ],
)
def test_every_field_of_a_published_file_is_taken_over_or_listed(rlinf_files, name):
    """Nothing is passed over in silence: with each leaf changed to nonsense, something is said."""
    source = rlinf_files / f"{name}.yaml"
    done = import_recipe(source)
    listed = {field for field, _ in done.unused}
    silent = []
    for place in leaf_names(yaml.safe_load(source.read_text())):
        if place in listed or place.startswith("defaults"):
            continue
        changed = outcome(source, [f"{place}=changed_by_the_test"])
        if not isinstance(changed, ConfigError) and changed.values == done.values:
            silent.append(place)
    assert silent == []


def leaf_names(value, above=()):
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from leaf_names(inner, (*above, key))
        else:
            yield ".".join((*above, key))


# Built-in recipes of a published name.


def header_overrides(name):
    """Return the overrides that the header of a built-in recipe says make it RLinf's."""
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    head = [line.removeprefix("#") for line in lines if line.startswith("#")]
    joined = " ".join(head)
    assert "RLinf's recipe of this name" in re.sub(r"\s+", " ", joined)
    start = next(i for i, line in enumerate(head) if "this one with" in line)
    first = next(i for i, line in enumerate(head) if i > start and line.startswith("   "))
    end = next(i for i, line in enumerate(head) if "Needs on the command line" in line)
    return shlex.split(" ".join(head[first:end]))


def built_in(name, overrides):
    written = read_config(RECIPES / f"{name}.yaml").values
    entries = written.get("data", {}).get("train_data_paths")
    places = [f"data.train_data_paths.{i}.dataset_path=x" for i in range(len(entries or ()))]
    given = ["model.model_path=/x", *(places or ["data.train_data_paths=/d"]), *overrides]
    return meaning(load_config(SFTConfig, RECIPES / f"{name}.yaml", given))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_of_a_published_name_says_in_what_it_differs(name):
    """The header's overrides make it the published one, and each of them is needed."""
    overrides = header_overrides(name)
    assert built_in(name, overrides) == expected(name)
    for i, override in enumerate(overrides):
        rest = [*overrides[:i], *overrides[i + 1 :]]
        try:
            left = built_in(name, rest)
        except ConfigError:
            continue
        assert left != expected(name), f"{override} changes nothing"


# Schedules, against the schedulers that RLinf takes from torch and transformers.


def rlinf_rates(section, steps):
    """Return the factors on the rate that RLinf's scheduler has at each update."""
    weight = torch.nn.Parameter(torch.zeros(1))
    # RLinf gives the rate to the group alone.
    optimizer = AdamW([{"params": [weight], "lr": section["lr"]}])
    total = section.get("total_training_steps", 0)
    warmup = section.get("lr_warmup_steps", -1)
    if warmup < 0:
        warmup = int(section.get("lr_warmup_steps_ratio", 0.0) * total)
    kind = section.get("lr_scheduler", "constant")
    if kind == "constant":
        scheduler = LambdaLR(optimizer, lambda n: n / max(1.0, warmup) if n < warmup else 1.0)
    elif kind == "cosine":
        rate = section.get("min_lr_rate")
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, total, min_lr_rate=rate,
            min_lr=section.get("min_lr", 0.0) if rate is None else None,
        )  # fmt: skip
    elif kind == "torch_constant":
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, eta_min=1e-6)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"] / section["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(factors), warmup if not kind.startswith("torch_") else 0


SCHEDULES = [
    {"lr_scheduler": "cosine", "lr_warmup_steps_ratio": 0.05, "total_training_steps": 333},
    {"lr_scheduler": "cosine", "lr_warmup_steps": 11, "total_training_steps": 200},
    {"lr_scheduler": "cosine", "total_training_steps": 500, "min_lr_rate": 0.1},
    {"lr_scheduler": "cosine", "total_training_steps": 250, "min_lr": 1e-6},
    {"lr_scheduler": "constant", "lr_warmup_steps_ratio": 0.07, "total_training_steps": 150},
    {"lr_scheduler": "constant", "lr_warmup_steps_ratio": 0.07},
    {"lr_warmup_steps": -1},
    {"lr_scheduler": "torch_constant", "lr_warmup_steps": 50},
    {"lr_scheduler": "torch_cosine", "total_training_steps": 220, "lr_warmup_steps": 50},
]


@pytest.mark.parametrize("section", SCHEDULES, ids=str)
def test_a_schedule_has_the_rates_that_rlinf_has(tmp_path, section):
    steps, section = 200, {"lr": 1e-5, "lr_warmup_steps": -1, **section}
    config = imported(tmp_path, optim=section)
    factors = schedule_factor(torch.arange(steps), config.optim, steps).numpy()
    theirs, warmup = rlinf_rates(section, steps)
    # Its first update has the rate 0; here the warm-up is one update ahead.
    assert np.allclose(factors[:warmup], np.append(theirs[1:warmup], 1.0)[:warmup], atol=1e-6)
    assert np.allclose(factors[warmup:], theirs[warmup:], atol=2e-6)


def test_a_cosine_that_would_rise_again_is_refused(tmp_path):
    for total in ({}, {"total_training_steps": 50}):
        with pytest.raises(ConfigError, match="rises again"):
            imported(tmp_path, optim={"lr": 1e-5, "lr_scheduler": "cosine", **total})


# What a file leaves out, and what it names.

LEAST = {
    "runner": {"max_steps": 200, "logger": {"log_path": "out", "experiment_name": "name"}},
    "data": {"train_data_paths": "/data"},
    "actor": {
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "model": {"embodiment_tag": "libero_sim", "model_path": "/x", "action_horizon": 16},
        "optim": {"lr": 1e-5, "clip_grad": 1.0},
    },
}


def source(folder, text=None, **sections):
    values = json.loads(json.dumps(LEAST))
    for name, section in sections.items():
        holder = values["actor"] if name in ("model", "optim", "fsdp_config") else values
        if isinstance(holder.get(name), dict) and name != "optim":
            holder[name].update(section)
        else:
            holder[name] = section
    file = folder / "theirs.yaml"
    file.write_text(text or yaml.safe_dump(values, sort_keys=False))
    return file


def imported(folder, overrides=(), **sections):
    done = import_recipe(source(folder, **sections), overrides)
    return load_config(SFTConfig, done.values)


def test_what_a_file_leaves_out_has_the_default_of_its_program(tmp_path):
    config = imported(tmp_path)
    assert config.optim.weight_decay == 1e-2
    assert config.optim.lr_scheduler == "constant"
    assert config.optim.warmup_updates(200) == 0
    assert config.parallel.param_dtype == config.parallel.reduce_dtype == "fp32"
    assert config.parallel.activation_checkpointing == "none"
    assert config.data.sampling_mode == "multi_anchor"
    assert config.model.relative_action is False
    assert str(config.runner.output_dir) == "out/name"


def test_files_of_defaults_are_read_where_they_lie_and_named_where_not(tmp_path, capsys):
    names = ["model/dreamzero_5b@actor.model", "hybrid_engines/fsdp@actor.fsdp_config"]
    file = source(tmp_path, defaults=names)
    target = tmp_path / "ours.yaml"
    assert main(["import-rlinf", str(file), "--output", str(target)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"model/dreamzero_5b\.yaml: .*model\.target_video_height=176", said)
    assert re.search(r"fsdp\.yaml: .*parallel\.activation_checkpointing=none", said)
    assert load_config(SFTConfig, target).model.preset == "5b"
    (tmp_path / "model").mkdir()
    (tmp_path / "model/dreamzero_5b.yaml").write_text(
        "target_video_height: 96\ntarget_video_width: ${actor.model.action_horizon}\n"
    )
    done = import_recipe(file)
    model = load_config(SFTConfig, done.values).model
    assert (model.target_video_height, model.target_video_width) == (96, 16)
    assert [name for name, _ in done.missing] == ["hybrid_engines/fsdp.yaml"]
    with pytest.raises(ConfigError, match=r"my/own\.yaml does not lie beside"):
        import_recipe(source(tmp_path, defaults=[*names, "my/own@data"]))


def test_a_mixture_takes_from_the_model_what_its_sources_leave_out(tmp_path):
    entries = [
        {"dataset_path": ["/a", "/b"], "weight": 3.0},
        {"data_path": "/c", "embodiment_tag": "franka_pnp", "metadata_json_path": "/m"},
    ]
    config = imported(
        tmp_path,
        data={"train_data_paths": entries, "video_in_chunk_offsets": list(range(8))},
        model={"metadata_json_path": "/own", "action_horizon": 12},
    )
    first, second = source_plans(config)
    assert (str(first.metadata), str(second.metadata)) == ("/own", "/m")
    assert first.weight * len(first.paths) == 3.0, "there the weight is shared out"
    assert first.embodiment.tag == "libero_sim"


def test_a_decoder_that_is_not_here_is_refused_with_what_to_install(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.video_backend: decord .*pip install"):
        imported(tmp_path, data={"video_backend": "decord"})


def test_relative_actions_without_names_are_none_there(tmp_path):
    assert imported(tmp_path, model={"relative_action": True}).model.relative_action is False


def test_robots_of_a_mixture_are_compared_one_by_one(rlinf_files):
    stopped = import_recipe(rlinf_files / "libero_franka_mix_sft_dreamzero_5b.yaml").stopped
    assert any("oxe_droid measures joint_position" in message for _, message in stopped)
    assert any("oxe_droid tiles to" in message for _, message in stopped)


def test_what_changes_training_stands_first_and_noise_is_folded(rlinf_files, tmp_path, capsys):
    target = tmp_path / "ours.yaml"
    file = rlinf_files / "libero_sft_dreamzero_14b.yaml"
    assert main(["import-rlinf", str(file), "--output", str(target)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) <= 16
    assert "num_action_per_block" in said[2]
    assert "25 fields" in said[-1]
    written = target.read_text()
    assert written.index("num_action_per_block") < written.index("data:")
    assert written.index("cluster.num_nodes") > written.index("runner:")


def test_the_recipe_of_a_loaded_file_is_loaded_again(rlinf_files, tmp_path):
    """What is written is read back equal, comments and all."""
    target = tmp_path / "ours.yaml"
    file = rlinf_files / "franka_sft_dreamzero_5b.yaml"
    assert main(["import-rlinf", str(file), "--output", str(target)]) == 0
    assert meaning(load_config(SFTConfig, target)) == expected("franka_sft_dreamzero_5b")


# Evaluations.


def evaluation(folder, **changes):
    values = {
        "defaults": ["env/libero_goal@env.eval", "model/dreamzero_5b@rollout.model"],
        "runner": {"task_type": "embodied_eval", "ckpt_path": "/w.pt"},
        "env": {
            "eval": {
                "total_num_envs": 100, "auto_reset": True, "max_episode_steps": 480,
                "max_steps_per_rollout_epoch": 2400, "is_eval": True, "group_size": 1,
                "use_fixed_reset_state_ids": True, "rollout_epoch": 1,
            }
        },
        "rollout": {
            "model": {
                "embodiment_tag": "libero_sim", "metadata_json_path": "/m.json",
                "action_horizon": 16, "target_video_height": 160, "target_video_width": 320,
            }
        },
    }  # fmt: skip
    values["env"]["eval"].update(changes)
    file = folder / "eval.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def command(capsys, file, *overrides):
    target = file.with_suffix(".sh")
    target.unlink(missing_ok=True)
    assert main(["import-rlinf", str(file), *overrides, "--output", str(target)]) == 0
    capsys.readouterr()
    line = next(line for line in target.read_text().splitlines() if line[0] != "#")
    words = shlex.split(line)
    assert words[:2] == ["dzrobot", "eval"]
    return vars(build_parser("dzrobot eval", eval_command).parse_args(words[2:]))


def test_an_evaluation_file_becomes_an_evaluation(rlinf_files, tmp_path, capsys):
    file = tmp_path / "libero_spatial_dreamzero_eval.yaml"
    file.write_text((rlinf_files / file.name).read_text())
    (tmp_path / "model").symlink_to(rlinf_files / "model")
    given = command(capsys, file)
    assert (given["protocol"], given["suite"]) == ("rlinf-500", ("libero_spatial",))
    assert (given["checkpoint"], given["embodiment"]) == ("/path/to/model.pt", "libero_sim")
    assert given["dtype"] == "bfloat16"
    assert given["max_steps"] is given["episodes"] is given["tasks"] is given["execute"] is None


def test_what_an_evaluation_file_changes_is_asked_for(tmp_path, capsys):
    assert command(capsys, evaluation(tmp_path))["suite"] == ("libero_goal",)
    shorter = evaluation(tmp_path, max_episode_steps=240, max_steps_per_rollout_epoch=240)
    given = command(capsys, shorter)
    assert (given["max_steps"], given["episodes"]) == (240, 10), "100 runs of 10 tasks"
    given = command(capsys, evaluation(tmp_path, task_id_filter=[3, 1]))
    assert given["tasks"] == (1, 3)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"is_eval": False}, "env.eval.is_eval"),
        ({"group_size": 2}, "env.eval.group_size"),
        ({"use_fixed_reset_state_ids": False}, "env.eval.use_fixed_reset_state_ids"),
        ({"specific_reset_id": 3}, "env.eval.specific_reset_id"),
        ({"total_num_envs": 64, "max_steps_per_rollout_epoch": 480}, "env.eval.total_num_envs"),
        ({"env_type": "maniskill"}, "env.eval.env_type"),
        ({"task_suite_name": "libero_nowhere"}, "env.eval.task_suite_name"),
        ({"max_episode_steps": None}, "env.eval.max_episode_steps"),
    ],
)
def test_an_evaluation_of_other_episodes_is_refused(tmp_path, capsys, changes, name):
    file = evaluation(tmp_path, **changes)
    assert main(["import-rlinf", str(file), "--output", str(tmp_path / "x.sh")]) == 2
    assert f"  {name}: " in capsys.readouterr().err
    assert not (tmp_path / "x.sh").exists()


def test_an_evaluation_with_frames_of_another_size_is_refused(tmp_path, capsys):
    """RLinf's model file says 176 rows, the published checkpoints 160."""
    file, size = evaluation(tmp_path), "rollout.model.target_video_height=176"
    assert main(["import-rlinf", str(file), size, "--output", str(tmp_path / "x.sh")]) == 2
    assert "rollout.model.target_video_height: 176 x 320" in capsys.readouterr().err
