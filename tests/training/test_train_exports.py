"""A run's own checkpoints, at the command line: exported, converted, inspected, evaluated."""

import json
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
import train_worker
import train_worlds
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from dzrobot.cli import main
from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.names import canonical
from dzrobot.policies.dreamzero.checkpoints.passport import read_passport
from dzrobot.policies.dreamzero.options import WeightOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training.recipes.check import find_faults
from dzrobot.training.run.export import ADAPTERS_SUFFIX, export
from dzrobot.training.run.initial_weights import open_initial_weights
from dzrobot.training.run.opening import network_config

KINDS = {
    "all weights": {},
    "adapters": {"model__is_lora": True},
    "average": {"optim__ema_decay": 0.5},
}


@pytest.fixture(
    scope="module",
    params=[
        "all weights",
        pytest.param("adapters", marks=pytest.mark.long),
        pytest.param("average", marks=pytest.mark.long),
    ],
)
def run(request, train_root, solo, tmp_path_factory):
    """Return kind, folder and export of a run of two steps, each of which left a checkpoint."""
    folder = tmp_path_factory.mktemp("run") / "run"
    changes = {
        **KINDS[request.param], "runner__output_dir": folder, "runner__max_steps": 2,
        "checkpoint__save_interval": 1, "optim__lr_warmup_steps": 0, "optim__lr": 0.01,
    }  # fmt: skip
    trainer = train_worker.trainer(solo, train_root, **changes)
    trainer.run()
    return request.param, folder, export(trainer.components, 2)


def typed(*words):
    return main([str(word) for word in words])


def weights(folder):
    return {canonical(n): t for file in folder.glob("*model*.safetensors")
            for n, t in load_file(file).items()}  # fmt: skip


def same(given, wanted):
    given, wanted = weights(given), weights(wanted)
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in wanted.items())


def step(folder, number=2):
    return folder / f"checkpoints/step_{number:08d}"


def test_a_checkpoint_knows_what_it_was_shown(run, caplog):
    _, folder, own = run
    for where in (own, step(folder)):
        trained = read_passport(where).embodiments[train_worlds.ROBOT.tag].inputs
        assert trained.instructions == tuple(sorted(train_worlds.TASKS))
        assert (trained.tasks, trained.fps, trained.execute) == (2, 20.0, 8)
        assert list(trained.images) == list(train_worlds.ROBOT.video_keys)
    first, _ = train_worlds.frame(0, 0, np.random.default_rng(0))
    policy = DreamZeroPolicy.from_pretrained(own, embodiment=train_worlds.ROBOT)
    policy.act(first)
    assert "unlike" not in caplog.text
    view = train_worlds.ROBOT.video_keys[0]
    policy = DreamZeroPolicy.from_pretrained(own, embodiment=train_worlds.ROBOT)
    policy.act({**first, view: first[view][..., ::-1].copy()})
    assert f"{view} is with red and blue exchanged" in caplog.text


def test_an_alpha_that_was_altered_is_refused(run, tmp_path):
    kind, folder, own = run
    if kind != "adapters":
        assert read_passport(own).lora_alpha is None
        return
    for given in (own.with_name(own.name + ADAPTERS_SUFFIX), step(folder)):
        held = open_checkpoint(given)
        assert held.lora_alpha == held.passport.lora_alpha
    target = tmp_path / "altered"
    shutil.copytree(own.with_name(own.name + ADAPTERS_SUFFIX), target)
    config = json.loads((target / "config.json").read_text())
    config["action_head_cfg"]["config"]["lora_alpha"] *= 2
    (target / "config.json").write_text(json.dumps(config))
    weights = WeightOptions(base=own)
    with pytest.raises(CheckpointError, match=r"lora_alpha: checkpoint .*, wanted"):
        DreamZeroPolicy.from_pretrained(target, embodiment=train_worlds.ROBOT, weights=weights)


def test_export_equals_the_runs_own(run, tmp_path, capsys):
    _, folder, own = run
    assert typed("export", folder, "--step", 2, "--output", tmp_path / "out") == 0
    assert "of step 2" in capsys.readouterr().out
    same(tmp_path / "out", own)
    for name in ("config.json", "dzrobot_passport.json", "README.md"):
        assert (tmp_path / "out" / name).read_text() == (own / name).read_text()
    # The other one, and the newest where none is named; where the run itself would export to.
    assert typed("export", folder, "--step", 1) == 0
    first = weights(own.with_name("step_00000001"))
    assert any(not torch.equal(t, first[n]) for n, t in weights(own).items())
    assert typed("export", folder) == 2
    assert "step_00000002 exists already" in capsys.readouterr().err


def test_export_of_what_is_not_there(run, tmp_path, capsys):
    assert typed("export", run[1], "--step", 7) == 2
    assert "step_00000007 is not a complete training checkpoint" in capsys.readouterr().err
    assert typed("export", tmp_path) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def test_export_with_another_base(run, train_root, tmp_path, capsys):
    other = train_worlds.checkpoint(tmp_path / "other", variant="14b")
    out = tmp_path / "out"
    assert typed("export", run[1], "--output", out, "--base", other) == 2
    assert "is not the base" in capsys.readouterr().err
    assert typed("export", run[1], "--output", out, "--base", train_root / "tiny") == 0


@pytest.mark.parametrize("layout", ["pt", pytest.param("dcp", marks=pytest.mark.long)])
def test_a_run_starts_from_loose_weights_as_from_their_folder(
    train_root, solo, tmp_path, capsys, layout
):
    """``full_weights.pt`` or a distributed checkpoint, which no config.json describes."""
    loose = tmp_path / "loose" / ("full_weights.pt" if layout == "pt" else "dcp_checkpoint")
    loose.parent.mkdir()
    ways = [] if layout == "pt" else ["--to", "dcp"]
    assert typed("convert", train_root / "tiny", loose, *ways) == 0
    ours = {
        "model__model_path": loose, "model__tokenizer_path": train_root / "tiny/tokenizer",
        "runner__output_dir": tmp_path / "ours",
    }  # fmt: skip
    found = find_faults(train_worlds.config(train_root, **ours), 1)
    (fault,) = [fault for fault in found if "config.json" in fault.message]
    assert f"dzrobot convert {loose} NEW_FOLDER --preset 5b --metadata" in fault.message
    assert "model.preset (5b, 14b) or model.config_path" in fault.message

    ours["model__config_path"] = shutil.copy(train_root / "tiny/config.json", tmp_path / "net.json")
    config = train_worlds.config(train_root, **ours)
    assert find_faults(config, 1) == []
    alone, whole = (
        open_initial_weights(one.model, 0) for one in (config, train_worlds.config(train_root))
    )
    assert alone.fingerprint == whole.fingerprint
    assert network_config(config, alone) == network_config(config, whole)
    short = {"runner__max_steps": 1, "optim__lr_warmup_steps": 0, "checkpoint__save_interval": 1}
    train_worker.trainer(solo, train_root, **short, **ours).run()
    # What training left out is found again: in the file that the recipe names.
    policy = DreamZeroPolicy.from_pretrained(
        step(tmp_path / "ours", 1), embodiment=train_worlds.ROBOT
    )
    assert policy.embodiment.tag == "libero_sim"
    capsys.readouterr()
    assert typed("convert", step(tmp_path / "ours", 1), tmp_path / "part.pt") == 0
    assert f"--base {loose}" in capsys.readouterr().out


def test_convert(run, train_root, tmp_path, capsys):
    """What was trained alone; with --merge or --base, all of it."""
    kind, folder, own = run
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    assert typed("convert", step(folder), alone) == 0
    written = len(weights(alone))
    absent = len(weights(own)) - (0 if kind == "adapters" else written)
    said = capsys.readouterr().out
    assert f"{'' if kind == 'adapters' else absent} more come from the base" in said
    assert f"add --base {train_root / 'tiny'}" in said
    assert "dzrobot export" in said
    assert weights(alone).keys() < weights(own).keys() or kind == "adapters"
    policy = DreamZeroPolicy.from_pretrained(
        alone, embodiment=train_worlds.ROBOT, weights=WeightOptions(base=train_root / "tiny")
    )
    assert policy.embodiment.tag == "libero_sim"
    more = ["--merge"] if kind == "adapters" else ["--base", train_root / "tiny"]
    assert typed("convert", step(folder), whole, *more, "--dtype", "float32") == 0
    assert "more come from" not in capsys.readouterr().out
    same(whole, own)
    assert typed("inspect", step(folder), "--verify") == 0
    assert "files as written" in capsys.readouterr().out


def test_adapters_for_peft(run, tmp_path, capsys):
    kind, folder, own = run
    code = typed("convert", step(folder), tmp_path / "peft", "--to", "peft")
    if kind != "adapters":
        assert code == 2
        assert "holds no adapters" in capsys.readouterr().err
        return
    assert code == 0
    given = load_file(tmp_path / "peft/adapter_model.safetensors")
    alone = weights(own.with_name(own.name + ADAPTERS_SUFFIX))
    shortened = {
        "base_model.model." + n.removeprefix("action_head.model.").replace(".default.", "."): t
        for n, t in alone.items()
    }
    assert given.keys() == shortened.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in shortened.items())
    whole = ["--merge", "--dtype", "float32"]
    assert typed("convert", tmp_path / "peft", tmp_path / "merged", *whole) == 0
    same(tmp_path / "merged", own)


def test_policies_of_both_are_one(run, capsys):
    """Opened where it lies, and exported: the same actions."""
    _, folder, own = run
    observation, _ = train_worlds.frame(0, 3, np.random.default_rng(0))
    actions = [
        DreamZeroPolicy.from_pretrained(path, embodiment=train_worlds.ROBOT).act(observation)
        for path in (step(folder), own)
    ]
    assert np.array_equal(*actions)


@pytest.fixture
def small():
    train_worlds.register_small()
    yield
    del gym.registry["small-v0"]


def test_evaluated(run, small, tmp_path, capsys):
    _, folder, _ = run
    output = tmp_path / "results"
    code = typed(
        "eval", "--env", "small-v0", "--checkpoint", step(folder), "--episodes", 1,
        "--max-steps", 3, "--embodiment", "train_worlds:ROBOT", "--workers", 0, "--videos", "none",
        "--output", output,
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said
    card = json.loads((output / "card.json").read_text())
    assert card["policy"]["checkpoint"] == step(folder).name
    assert len((output / "records.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("run", ["all weights"], indirect=True)
def test_success_by_training_step(run, small, tmp_path, capsys):
    """Every checkpoint acts in the same episodes; the table says what its best score is worth."""
    _, folder, _ = run
    command = (
        "eval", "--env", "small-v0", "--checkpoint", folder, "--episodes", 2,
        "--embodiment", "train_worlds:ROBOT", "--workers", 0, "--videos", "none",
    )  # fmt: skip
    assert typed(*command, "--steps", "all") == 0
    said = capsys.readouterr().out
    assert "selected on these episodes" in said
    assert "not LIBERO" not in said
    kept = json.loads((folder / "evaluations/small-v0/steps.json").read_text())
    assert [(row["step"], row["episodes"]) for row in kept] == [(1, 2), (2, 2)]
    for row in kept:
        records = folder / f"evaluations/small-v0/step_{row['step']:08d}/records.jsonl"
        found = [json.loads(line)["success"] for line in records.read_text().splitlines()]
        assert row["successes"] == sum(found)
    assert typed(*command, "--steps", "3", "--output", tmp_path / "other") == 2
    assert "no checkpoint of step 3; it has 1, 2" in capsys.readouterr().err
    assert typed("eval", "--steps", "all") == 2
    assert "--checkpoint RUN" in capsys.readouterr().err

    assert typed("plot", folder) == 0
    page = (folder / "plots/index.html").read_text()
    assert "Success by training step: run, small-v0" in page
    assert page.count("<svg") == page.count("<h2>") - 1
    for name in ("success", "loss", "action_loss"):
        assert (folder / f"plots/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert typed("plot", tmp_path) == 2
    assert "holds nothing to draw" in capsys.readouterr().err
    log = folder / "metrics.jsonl"
    # A trainer may be in the middle of a line: it is left out, and left alone.
    whole = log.read_bytes() + b'{"step": 3, "lo'
    log.write_bytes(whole)
    assert typed("plot", folder) == 0
    assert log.read_bytes() == whole
    for line in ('{"loss": 1.0}', '{"step": [1]}', "[" * 100_000, '{"step": 1, "loss": "x"}', "{",
                 '{"step": 1, "loss": 1e999}'):  # fmt: skip
        log.write_text(line + "\n")
        capsys.readouterr()
        assert typed("plot", folder) == 2
        said = capsys.readouterr().err
        assert f"{log}:1" in said
        assert len(said) < 700


def test_evaluated_in_the_loop(train_root, solo, small, tmp_path):
    folder = tmp_path / "run"
    trainer = train_worker.trainer(
        solo, train_root, runner__output_dir=folder, runner__max_steps=2,
        runner__rollout_interval=1, runner__rollout_env="small-v0", runner__rollout_episodes=1,
        optim__lr_warmup_steps=0,
    )  # fmt: skip
    assert trainer.run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row for row in rows if "rollout/success" in row}
    assert found.keys() == {1, 2}
    assert {row["rollout/episodes"] for row in found.values()} == {1}
    for number in found:
        record = folder / f"rollouts/step_{number:08d}/records.jsonl"
        assert json.loads(record.read_text())["success"] == bool(found[number]["rollout/success"])
        assert step(folder, number).is_dir()


def test_cards(run, train_root):
    kind, _, own = run
    folders = [own, own.with_name(own.name + ADAPTERS_SUFFIX)] if kind == "adapters" else [own]
    for folder in folders:
        data = ModelCard.load(folder / "README.md").data
        assert data.library_name == "dzrobot"
        assert data.pipeline_tag == "robotics"
        assert {"dreamzero", "libero_sim"} <= set(data.tags)
        # The dataset and the base of this run lie in folders: they have no name at the hub.
        assert data.datasets is None
        assert data.base_model is None
        assert ("lora" in data.tags) == (folder != own)
