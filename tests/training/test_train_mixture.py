"""Two robots in one run: each with its own statistics, keys and horizon, and both can act after."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import train_worlds
from train_worker import digest, gradients

from dzrobot.configuration import load_config
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import StatisticsError
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.data.normalization import measure
from dzrobot.training.run.build import build
from dzrobot.training.run.evaluation import ask_about_own_data
from dzrobot.training.run.export import export
from dzrobot.training.run.initial_weights import open_initial_weights
from dzrobot.training.run.opening import open_datasets
from dzrobot.training.run.trainer import Trainer
from dzrobot.training.sft_config import SFTConfig

ARM = dataclasses.replace(
    load_embodiment("franka_pnp"),
    views=train_worlds.ROBOT.views,
    timing=Timing(control_hz=10, action_horizon=12, blocks=2),
)
"""A Franka with small images; recipes name it ``test_train_mixture:ARM``."""

STEPS = 6


def arm_frame(episode, i):
    observation, _ = train_worlds.frame(episode, i, np.random.default_rng(0))
    state = np.cos(0.1 * i + np.arange(ARM.state_dim)).astype(np.float32)
    observation = {**observation, "state.state": state}
    return observation, {"action.actions": np.full(7, np.sin(0.2 * i), np.float32)}


@pytest.fixture(scope="module")
def world(train_root, tmp_path_factory):
    """Return a folder with recordings of both robots and their statistics."""
    root = tmp_path_factory.mktemp("mixture")
    (root / "tiny").symlink_to(train_root / "tiny")
    # Few samples: a test below encodes them all.
    dataset = train_worlds.record(root / "dataset", episodes=2, length=26)
    train_worlds.statistics(dataset, root / "metadata.json")
    with EpisodeWriter(root / "arm", ARM, fps=10, version="v2.1", video=False) as writer:
        for episode in range(2):
            for i in range(30):
                writer.add_frame(*arm_frame(episode, i))
            writer.save_episode(success=True, **{"action.anchor": "target"})
    reader = DatasetReader(root / "arm", ARM, ReaderOptions(images=False))
    (root / "arm.json").write_text(json.dumps({ARM.tag: measure([reader], ARM)}))
    return root


def mixture_run(world, folder, solo, **changes):
    values = train_worlds.recipe(
        world, runner__output_dir=folder, runner__max_steps=STEPS, runner__global_batch_size=8,
        runner__micro_batch_size=4, data__augment=False, **changes,
    )  # fmt: skip
    values["data"]["train_data_paths"] = [
        {
            "dataset_path": str(world / path), "embodiment_tag": tag, "weight": weight,
            "metadata_json_path": str(world / metadata),
        }
        for path, tag, weight, metadata in (
            ("dataset", "train_worlds:ROBOT", 3.0, "metadata.json"),
            ("arm", "test_train_mixture:ARM", 1.0, "arm.json"),
        )
    ]  # fmt: skip
    values["model"].pop("metadata_json_path")
    return Trainer(build(load_config(SFTConfig, values), solo))


def train(run):
    """Return the sources of all samples, and the loss of the first and the last step."""
    batches = run.batches(STEPS)
    sources, losses = [], []
    original = run.forward_backward

    def seen(prepared, batch, counts):
        sources.extend(batch["source"].tolist())
        part = original(prepared, batch, counts)
        losses.append(float(part.sum()))
        return part

    run.forward_backward = seen
    for _ in range(STEPS):
        run.train_step(batches)
        run.step += 1
    return sources, losses


def test_both_robots_train_and_both_can_act(world, solo, tmp_path):
    run = mixture_run(world, tmp_path / "run", solo)
    assert run.components.network.head.action_horizon == ARM.timing.action_horizon
    sources, losses = train(run)
    # Shares of 3 to 1 over 48 samples; the order is fixed by the seed.
    assert 0.6 < sources.count(0) / len(sources) < 0.9
    assert sum(losses[-2:]) < sum(losses[:2])
    folder = export(run.components, run.step)
    passport = json.loads((folder / "dzrobot_passport.json").read_text())
    assert set(passport["embodiments"]) == {train_worlds.ROBOT.tag, ARM.tag}
    # What the recordings say counts, not what the robot's published ones were made with.
    assert (ARM.action_anchor, passport["embodiments"][ARM.tag]["action_anchor"]) == (
        "measured", "target"
    )  # fmt: skip
    arm = DreamZeroPolicy.from_pretrained(folder, embodiment=ARM)
    assert arm.card["action_anchor"] == arm.embodiment.action_anchor == "target"
    assert np.isfinite(arm.act(arm_frame(0, 3)[0])).all()
    assert arm.infer(arm_frame(0, 3)[0])["actions"].shape == (12, 7)
    robot = DreamZeroPolicy.from_pretrained(folder, embodiment=train_worlds.ROBOT)
    observation, _ = train_worlds.frame(0, 3, np.random.default_rng(0))
    assert robot.infer(observation)["actions"].shape == (8, 7)


def policys_runs(folder):
    """Write runs of a policy that a person took over and did not save; return the folder."""
    with EpisodeWriter(folder, train_worlds.ROBOT, fps=20) as writer:
        for episode in range(2):
            for i in range(26):
                extras = {"intervention": np.bool_(i >= 20)}
                draws = np.random.default_rng([7, episode, i])
                writer.add_frame(*train_worlds.frame(episode, i, draws), extras)
            writer.save_episode(success=False)
    return folder


def credited_run(world, folder, solo, sources, **changes):
    """Return a run on folders, each with its credit."""
    values = train_worlds.recipe(
        world, runner__output_dir=folder, runner__global_batch_size=8, runner__max_steps=STEPS,
        data__augment=False, **changes,
    )  # fmt: skip
    values["data"]["train_data_paths"] = [
        {"dataset_path": str(path), "embodiment_tag": "train_worlds:ROBOT", "credit": credit,
         "metadata_json_path": str(world / "metadata.json")}
        for path, credit in sources
    ]  # fmt: skip
    values["model"].pop("metadata_json_path")
    return Trainer(build(load_config(SFTConfig, values), solo))


def test_a_policy_is_not_asked_about_rows_that_it_is_not_to_imitate(world, solo, tmp_path):
    runs = policys_runs(tmp_path / "runs")
    alone = credited_run(
        world, tmp_path / "one", solo, [(runs, {"share": None})], runner__own_rows=3
    )
    assert ask_about_own_data(alone.components) is None
    both = [(world / "dataset", None), (runs, {"share": None})]
    beside = credited_run(world, tmp_path / "two", solo, both, runner__own_rows=3)
    assert ask_about_own_data(beside.components).samples == 3


@pytest.mark.parametrize("delay", [0, 3])
def test_runs_of_a_policy_train_by_their_credit_whatever_shares_a_batch(
    world, solo, tmp_path, delay
):
    """With rows that are given by chance as well; samples without an action to predict included."""
    sources = ((world / "dataset", None), (policys_runs(tmp_path / "runs"), {"share": 0.5}))

    def gradients_of(micro_batch):
        run = credited_run(
            world, tmp_path / f"run{micro_batch}", solo, sources,
            runner__micro_batch_size=micro_batch, model__action_loss_norm="masked",
            model__rtc_training_max_delay=delay,
        )  # fmt: skip
        asked = [batch["has_real_action"] for batch in run.batches(1)]
        return torch.cat(asked), gradients(run)

    asked, (losses, found) = gradients_of(8)
    assert 0 < asked.sum() < len(asked)
    others, (again, expected) = gradients_of(2)
    assert torch.equal(asked, others)
    assert losses.isfinite().all()
    torch.testing.assert_close(losses, again, rtol=0, atol=1e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(expected[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("mixed", [False, True])
def test_kept_back_episodes_leave_the_mixture_as_it_is(world, tmp_path, monkeypatch, mixed):
    """Folders of 100 and 10 windows are drawn 10 : 1, with and without a hold-out."""
    folders = {tmp_path / "many": 10, tmp_path / "few": 2}
    for folder, episodes in folders.items():
        length = 26 if episodes == 10 else 21
        train_worlds.record(folder, episodes=episodes, length=length, growth=0)
    readers = [
        DatasetReader(folder, train_worlds.ROBOT, ReaderOptions(images=False)) for folder in folders
    ]
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps({train_worlds.ROBOT.tag: measure(readers, train_worlds.ROBOT)}))
    paths = [str(folder) for folder in folders]
    entry = {
        "dataset_path": paths, "embodiment_tag": "train_worlds:ROBOT", "distribute_weights": True,
        "metadata_json_path": str(metadata),
    }  # fmt: skip
    opened, read_lists = [], DatasetCatalog.open
    monkeypatch.setattr(DatasetCatalog, "open", lambda p: opened.append(p) or read_lists(p))
    for kept, windows in ((0, [100, 10]), (1, [90, 5])):
        config = train_worlds.config(
            world, data__train_data_paths=[entry] if mixed else paths,
            data__holdout_episodes=kept, model__metadata_json_path=metadata,
        )  # fmt: skip
        recordings = open_datasets(config, open_initial_weights(config.model, 0).metadata)
        assert opened == paths, "the lists of a folder are read once"
        opened.clear()
        stream = recordings.train.stream
        assert list(stream.sizes) == windows
        drawn = np.bincount(stream.at(range(11_000)).part)
        np.testing.assert_allclose(drawn, [10_000, 1_000], atol=2)
        if kept:
            assert [len(reader) for reader in recordings.held_out.sources[0].readers] == [10, 5]


@pytest.mark.long
def test_stored_features_know_which_robot_a_sample_is_of(world, solo, tmp_path):
    live, stored = (
        mixture_run(world, tmp_path / name, solo, data__cache_features=cached)
        for name, cached in (("live", False), ("stored", True))
    )
    assert train(live)[0] == train(stored)[0]
    assert digest(live) == digest(stored)


def test_statistics_of_the_other_robot_are_refused(world, solo, tmp_path):
    run = mixture_run(world, tmp_path / "run", solo)
    folder = export(run.components, 0)
    stranger = dataclasses.replace(ARM, tag="stranger")
    with pytest.raises(StatisticsError, match="holds: franka_pnp, libero_sim"):
        DreamZeroPolicy.from_pretrained(folder, embodiment=stranger)
