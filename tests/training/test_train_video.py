"""Recordings without actions: they train the video, and nothing counts them as actions."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import train_worlds
from train_worker import gradients

from dzrobot.cli import main
from dzrobot.configuration import load_config
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, DatasetError, UnknownNameError
from dzrobot.policies.dreamzero.network.diffusion import velocity
from dzrobot.policies.dreamzero.network.world_action import training_schedule
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.recording import EpisodeWriter
from dzrobot.training.data import DatasetReader, ReaderOptions, SourceSpec, TrainingData
from dzrobot.training.recipes.check import find_faults
from dzrobot.training.run.build import build
from dzrobot.training.run.export import export
from dzrobot.training.run.inputs import sample_noise
from dzrobot.training.run.trainer import Trainer
from dzrobot.training.sft_config import SFTConfig

ROBOT = train_worlds.ROBOT
HUMAN = dataclasses.replace(ROBOT, tag="human", prompt="A person works: {task}")
"""What only films; recipes name it ``test_train_video:HUMAN``."""

NOTHING_TO_DO = HUMAN.holding("images")


def record(root, robot, recorded):
    """Write episodes that have no column of actions, or of states."""
    held = robot.holding(recorded)
    with EpisodeWriter(root, held, fps=20, version="v2.1", video=False) as writer:
        for episode in range(2):
            rng = np.random.default_rng([9, episode])
            for i in range(26):
                observation, _ = train_worlds.frame(episode, i, rng)
                keep = {*held.observation_keys}
                writer.add_frame({k: v for k, v in observation.items() if k in keep}, {})
            writer.save_episode(success=True)
    return root


@pytest.fixture(scope="module")
def world(train_root, tmp_path_factory):
    """Return a folder with recordings of three kinds, and statistics of those with actions."""
    root = tmp_path_factory.mktemp("video")
    (root / "tiny").symlink_to(train_root / "tiny")
    dataset = train_worlds.record(root / "dataset", episodes=2, length=26)
    train_worlds.statistics(dataset, root / "metadata.json")
    record(root / "played", ROBOT, "state")
    record(root / "human", HUMAN, "images")
    return root


def entry(world, name, **more):
    """Return an entry of a mixture."""
    robot = "test_train_video:HUMAN" if name == "human" else "train_worlds:ROBOT"
    return {"dataset_path": str(world / name), "embodiment_tag": robot} | more


def entries(world):
    """Return one entry of each kind."""
    metadata = str(world / "metadata.json")
    return [
        entry(world, "dataset", metadata_json_path=metadata),
        entry(world, "played", metadata_json_path=metadata, recorded="state"),
        entry(world, "human", recorded="images"),
    ]


def recipe(world, sources, **changes):
    values = train_worlds.recipe(
        world, runner__global_batch_size=6, runner__micro_batch_size=6, data__augment=False,
        optim__lr_warmup_steps=0,
        **changes,
    )  # fmt: skip
    values["data"]["train_data_paths"] = sources
    values["model"].pop("metadata_json_path")
    return load_config(SFTConfig, values)


def run_of(world, solo, sources, **changes):
    config = recipe(world, sources, **changes)
    assert find_faults(config, 1) == []
    return Trainer(build(config, solo))


def test_gradients_are_those_of_the_published_formula(world, solo, tmp_path):
    """Loss and gradient of docs/model.md, section 3.3, written out sample by sample."""
    run = run_of(world, solo, entries(world), runner__output_dir=tmp_path)
    batch = next(run.batches(1))
    kinds = sorted(set(batch["source"].tolist()))
    assert kinds == [0, 1, 2]
    assert batch["has_real_action"].tolist() == [s == 0 for s in batch["source"].tolist()]

    losses, found = gradients(run)
    for parameter in run.components.optimizer.named.values():
        parameter.grad = None
    prepared = run.prepare(batch)
    model, slots = run.components.model, batch["slot"].tolist()
    noise = sample_noise(run.components.network, prepared, 3, batch["step"], slots)
    schedule = training_schedule(torch.device("cpu"))
    video, action = model.model(model.train_inputs(prepared, noise, schedule))
    dynamics, actions = 0.0, 0.0
    for b, real in enumerate(batch["has_real_action"].tolist()):
        for frame, index in enumerate(noise.frame_index_BF[b].tolist()):
            error = video[b, :, frame] - velocity(
                prepared.latents_BCFYX[b, :, frame], noise.video_BCFYX[b, :, frame]
            )
            dynamics = dynamics + schedule.weights[index] * error.square().mean()
        if not real:
            continue
        for row, index in enumerate(noise.action_index_BA[b].tolist()):
            target = velocity(prepared.action_BAM[b, row], noise.action_BAM[b, row])
            own = (action[b, row] - target)[: ROBOT.action_dim]
            actions = actions + schedule.weights[index] * own.square().sum() / 32
    size, frames, rows = *noise.frame_index_BF.shape, noise.action_index_BA.shape[1]
    dynamics, actions = dynamics / (size * frames), actions / (size * rows)
    torch.testing.assert_close(losses, torch.stack([dynamics, actions]).detach())
    (dynamics + actions).backward()
    for name, parameter in run.components.optimizer.named.items():
        expected = parameter.grad.full_tensor()
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_mixture_counts_the_samples_with_actions(world, solo, tmp_path):
    """Divided by the samples with actions, the action loss is that of those samples alone."""
    run = run_of(
        world, solo, entries(world), runner__output_dir=tmp_path, model__action_loss_norm="masked"
    )
    batch = next(run.batches(1))
    real = batch["has_real_action"]
    counts = run._counts([batch])
    assert (counts.samples, float(counts.actions)) == (6, float(real.sum()))
    losses = run.forward_backward(run.prepare(batch), batch, counts)
    kept = torch.nonzero(real).flatten().tolist()
    alone = {
        key: [value[i] for i in kept] if isinstance(value, list) else value[kept]
        for key, value in batch.items()
        if isinstance(value, list | torch.Tensor)
    }
    alone = {**batch, **alone, "views": {0: batch["views"][0]}}
    counts = run._counts([alone])
    assert losses[1] == pytest.approx(
        float(run.forward_backward(run.prepare(alone), alone, counts)[1]), rel=1e-5
    )


def test_only_robots_with_actions_are_exported(world, solo, tmp_path):
    run = run_of(world, solo, entries(world), runner__output_dir=tmp_path, runner__max_steps=2)
    batches = run.batches(2)
    for run.step in (1, 2):
        run.train_step(batches)
    folder = export(run.components, 2)
    metadata = json.loads((folder / "experiment_cfg/metadata.json").read_text())
    recorded = json.loads((world / "metadata.json").read_text())
    assert metadata == {ROBOT.tag: recorded[ROBOT.tag]}
    policy = DreamZeroPolicy.from_pretrained(folder, embodiment=ROBOT)
    passport = json.loads((folder / "dzrobot_passport.json").read_text())
    assert list(passport["embodiments"]) == [ROBOT.tag]
    assert policy.embodiment.action_keys == ROBOT.action_keys


def test_a_run_without_any_action_trains_the_video_alone(world, solo, tmp_path):
    metadata = str(world / "metadata.json")
    sources = [entry(world, "played", metadata_json_path=metadata, recorded="state")]
    run = run_of(
        world, solo, sources, runner__output_dir=tmp_path, runner__max_steps=2,
        optim__weight_decay=0.0, data__holdout_episodes=1,
    )  # fmt: skip
    assert run.components.datasets.held_out is None
    assert run.components.datasets.train.sources[0].readers[0].windows.usable == 2
    losses, found = gradients(run)
    assert losses[0] > 0
    assert losses[1] == 0
    assert all(not g.any() for name, g in found.items() if name.startswith("action_decoder"))
    assert any(g.any() for name, g in found.items() if name.startswith("blocks"))
    folder = export(run.components, 2)
    assert DreamZeroPolicy.from_pretrained(folder, embodiment=ROBOT).embodiment == ROBOT


def test_what_is_not_recorded_is_zero_and_not_read(world):
    specs = [
        SourceSpec(
            paths=[world / "human"], embodiment=HUMAN.holding("images"), metadata={"human": {}}
        ),
        SourceSpec(
            paths=[world / "played"], embodiment=ROBOT.holding("state"),
            metadata=world / "metadata.json",
        ),
    ]  # fmt: skip
    data = TrainingData.open(specs, seed=0)
    for key in data.sample_keys(0, range(8), 8):
        sample = data[key]
        vectors = sample.vectors
        assert not vectors["action"].any()
        assert not vectors["action_mask"].any()
        assert vectors["action"].shape == (16, 32)
        assert vectors["state"].shape == (2, 64)
        assert bool(vectors["state_mask"].any()) is (sample.source == 1)
        assert vectors["prompt"].startswith("A person" if sample.source == 0 else "A multi")
        assert set(sample.views) == set(ROBOT.video_keys)


def test_missing_actions_are_never_guessed(world):
    with pytest.raises(
        DatasetError, match=r"(?s)action.actions: no column.*recorded: state"
    ) as caught:
        DatasetReader(world / "played", ROBOT, ReaderOptions(images=False))
    assert "--recorded" in str(caught.value)
    # One part is there, so the recordings have actions, and it is the other one that is missing.
    action, state = ROBOT.action[0], ROBOT.state[0].feature
    parts = (
        dataclasses.replace(action, key="action.a", feature="other", aliases=()),
        dataclasses.replace(action, key="action.b", feature=state, aliases=(), start=0),
    )
    robot = dataclasses.replace(ROBOT, action=parts)
    with pytest.raises(DatasetError, match=r"action\.a: no column other") as caught:
        DatasetReader(world / "played", robot, ReaderOptions(images=False))
    assert "recorded: state" not in str(caught.value)


def test_recipes_say_what_is_missing(world):
    def faults(sources, **changes):
        return {
            fault.field: fault.message
            for fault in find_faults(recipe(world, sources, **changes), 1)
        }

    metadata = str(world / "metadata.json")
    found = faults([entry(world, "dataset")])
    assert "is needed" in found["data.train_data_paths.0.metadata_json_path"]
    # Where no source has actions, the run's own robot needs the statistics of its actions.
    only_state = world / "state.json"
    content = json.loads((world / "metadata.json").read_text())
    del content[ROBOT.tag]["statistics"]["action"]
    only_state.write_text(json.dumps(content))
    played = entry(world, "played", metadata_json_path=str(only_state), recorded="state")
    assert "'action'" in faults([played])["data.train_data_paths.0.metadata_json_path"]
    dataset = entry(world, "dataset", metadata_json_path=metadata)
    assert faults([dataset, played]) == {}
    played["metadata_json_path"] = metadata
    found = faults([played], runner__eval_interval=2, data__holdout_episodes=1)
    assert "no source has any" in found["runner.eval_interval"]
    with pytest.raises(ConfigError, match="actions"):
        recipe(world, [entry(world, "human", recorded="nothing")])


def test_a_robot_without_actions_has_no_name():
    with pytest.raises(UnknownNameError, match="no action parts"):
        load_embodiment("test_train_video:NOTHING_TO_DO")
    assert load_embodiment("test_train_video:HUMAN").action


def test_commands_know_what_is_recorded(world, tmp_path, capsys):
    played, human = str(world / "played"), str(world / "human")
    robot, output = "train_worlds:ROBOT", str(tmp_path / "state.json")
    assert main(["inspect-data", played, "--embodiment", robot]) == 2
    assert "recorded: state" in capsys.readouterr().err
    assert main(["inspect-data", played, "--embodiment", robot, "--recorded", "state"]) == 0
    assert "trains the video alone" in capsys.readouterr().out
    images = ["--embodiment", "test_train_video:HUMAN", "--recorded", "images"]
    assert main(["inspect-data", human, *images]) == 0
    stats = ["stats", robot, "--dataset", played, "--output", output, "--recorded"]
    assert main([*stats, "images"]) == 2
    assert "no numbers to measure" in capsys.readouterr().err
    assert main([*stats, "state"]) == 0
    assert set(json.loads((tmp_path / "state.json").read_text())[ROBOT.tag]["statistics"]) == {
        "state", "action",
    }  # fmt: skip
