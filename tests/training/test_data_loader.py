import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_worlds import RELATIVE, ROBOT, TASKS, record, robot
from rehearsal.runs import META, rehearse
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.errors import ConfigError, DatasetError
from dzrobot.modality.pipeline import Pipeline
from dzrobot.modality.stats import Statistics
from dzrobot.modality.video import PUBLISHED, draw_augmentation, draw_dropped_view
from dzrobot.training.data import (
    DatasetReader,
    LoaderOptions,
    LoaderPlan,
    ReaderOptions,
    SampleKey,
    SourceSpec,
    TrainingData,
    build_loader,
    encode_views,
    loader,
)
from dzrobot.training.data.normalization import measure

HERE = Path(__file__).parent
MIXED = robot("franka_pnp", horizon=12)
"""Another robot with a longer horizon and the same size of the joint image."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Recordings of two robots in two forms, and statistics for all."""
    root = tmp_path_factory.mktemp("loader")
    folders = {
        "libero": record(root / "libero", lengths=(30, 25, 33), version="v2.1", video=True),
        "second": record(root / "second", lengths=(22, 19), seed=4, version="v3.0"),
        "franka": record(
            root / "franka", MIXED, lengths=(30, 33), seed=5, version="v3.0", video=True
        ),
    }
    options = ReaderOptions(cache=root / "cache")
    metadata = {
        "libero_sim": measure(
            [DatasetReader(folders[name], ROBOT, options) for name in ("libero", "second")], ROBOT
        ),
        "franka_pnp": measure([DatasetReader(folders["franka"], MIXED, options)], MIXED),
    }
    (root / "metadata.json").write_text(json.dumps(metadata))
    return root


def options(world, **more):
    return ReaderOptions(cache=world / "cache", **more)


def single(world, seed=0, **more):
    spec = SourceSpec(
        paths=[world / "libero", world / "second"],
        embodiment=ROBOT,
        metadata=world / "metadata.json",
    )
    return TrainingData.open([spec], seed=seed, options=options(world, **more))


def mixture(world):
    specs = [
        SourceSpec(
            paths=[world / "libero", world / "second"],
            embodiment=ROBOT,
            metadata=world / "metadata.json",
            weight=3,
        ),
        SourceSpec(paths=[world / "franka"], embodiment=MIXED, metadata=world / "metadata.json"),
    ]
    return TrainingData.open(specs, seed=1, options=options(world))


def equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            equal(value, other[key])
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(other[key], value, rtol=0, atol=0)
        else:
            assert other[key] == value, key


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_are_the_same_for_any_number_of_workers_and_after_resume(world):
    """A20."""
    data = mixture(world)
    plan = LoaderPlan(global_batch=6, micro_batch=3, stop_step=3)
    plain = list(build_loader(data, plan))
    assert [(batch["step"], batch["slot"].tolist()) for batch in plain] == [
        (step, [first, first + 1, first + 2]) for step in range(3) for first in (0, 3)
    ]
    for workers in (2, 4):
        found = list(build_loader(data, plan, LoaderOptions(num_workers=workers)))
        for one, other in zip(plain, found, strict=True):
            equal(one, other)
    resumed = dataclasses.replace(plan, start_step=1)
    for one, other in zip(plain[2:], build_loader(mixture(world), resumed), strict=True):
        equal(one, other)


def test_shared_memory_is_looked_at_before_workers_start(world, monkeypatch):
    data = mixture(world)
    sample = next(iter(build_loader(data, LoaderPlan(global_batch=1, micro_batch=1, stop_step=1))))
    images = sum(x.nbytes for views in sample["views"].values() for x in views.values())
    assert images <= data.image_bytes
    assert data.without_images().image_bytes == 0
    plan = LoaderPlan(global_batch=4, micro_batch=4, stop_step=1)
    # Two workers with three micro-batches of four samples each.
    needed = 2 * 3 * 4 * data.image_bytes
    for free, refused in ((needed - 1, True), (needed, False)):
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(loader.shutil, "disk_usage", lambda _, usage=usage: usage)
        options = LoaderOptions(num_workers=2, prefetch_factor=3)
        if refused:
            with pytest.raises(ConfigError, match=r"2 workers.*--shm-size.*data.num_workers=0"):
                build_loader(data, plan, options)
            build_loader(data, plan, LoaderOptions())
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        else:
            build_loader(data, plan, options)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
            with pytest.raises(ConfigError, match="of 2 processes"):
                build_loader(data, plan, options)


def test_ranks_share_the_global_batch(world):
    data = single(world)
    whole = next(iter(build_loader(data, LoaderPlan(global_batch=4, micro_batch=4, stop_step=1))))
    for size, micro in ((2, 1), (2, 2), (4, 1)):
        rows = {}
        for rank in range(size):
            plan = LoaderPlan(
                global_batch=4, micro_batch=micro, rank=rank, world_size=size, stop_step=1
            )
            for batch in build_loader(data, plan):
                for slot, number, action in zip(
                    batch["slot"].tolist(), batch["sample_id"], batch["action"], strict=True
                ):
                    rows[slot] = (number, action)
        for slot in range(4):
            assert rows[slot][0] == whole["sample_id"][slot]
            torch.testing.assert_close(rows[slot][1], whole["action"][slot], rtol=0, atol=0)


def assert_encoded_as_windows(data, embodiment, metadata):
    """Compare five samples, as the trainer gets them, with Pipeline.encode of their windows."""
    batch = next(iter(build_loader(data, LoaderPlan(global_batch=5, micro_batch=5, stop_step=1))))
    images = encode_views(batch, data, augment=None)
    pipeline = Pipeline(embodiment, Statistics.from_metadata(metadata, embodiment))
    for row, number in enumerate(batch["sample_id"].tolist()):
        _, reader, window = data.locate(number)
        encoded = pipeline.encode(reader.window(window))
        torch.testing.assert_close(images[row], encoded["images"], rtol=0, atol=0)
        for key in ("state", "state_mask", "action", "action_mask", "has_real_action"):
            torch.testing.assert_close(batch[key][row], encoded[key], rtol=0, atol=0)
        assert batch["prompt"][row] == encoded["prompt"]
        assert any(task in encoded["prompt"] for task in TASKS)
    assert batch["state"].shape == (5, 2, 64)
    assert batch["action"].shape == (5, 16, 32)
    assert images.shape == (5, 17, *embodiment.image_size, 3)


def test_a_sample_is_what_the_pipeline_makes_of_its_window(world):
    """One path: the loader adds nothing to Pipeline.encode, which policies use."""
    assert_encoded_as_windows(single(world), ROBOT, world / "metadata.json")


@pytest.mark.sampled
@pytest.mark.parametrize("tag", EMBODIMENTS)
def test_samples_of_every_robot_are_encoded_as_windows(tag, tmp_path):
    known = robot(tag)
    options = ReaderOptions(cache=tmp_path / "cache")
    folder = record(tmp_path / "data", known, lengths=(26, 24))
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps({tag: measure([DatasetReader(folder, known, options)], known)}))
    spec = SourceSpec(paths=[folder], embodiment=known, metadata=metadata)
    data = TrainingData.open([spec], seed=0, options=options)
    assert_encoded_as_windows(data, known, metadata)


def test_augmentation_depends_on_seed_and_sample_alone(world):
    data = mixture(world)
    plan = LoaderPlan(global_batch=4, micro_batch=4, stop_step=1)
    batch = next(iter(build_loader(data, plan)))
    whole = encode_views(batch, data, augment=PUBLISHED)
    again = [
        image
        for part in build_loader(data, dataclasses.replace(plan, micro_batch=1))
        for image in encode_views(part, data, augment=PUBLISHED)
    ]
    torch.testing.assert_close(torch.stack(again), whole, rtol=0, atol=0)
    assert not torch.equal(whole, encode_views(batch, data, augment=None))
    assert draw_augmentation(1, 5) == draw_augmentation(1, 5) != draw_augmentation(2, 5)


def test_images_are_sent_without_waiting_for_the_device(world):
    plan = LoaderPlan(global_batch=4, micro_batch=4, stop_step=1)
    for data in (single(world), mixture(world)):
        (batch,) = build_loader(data, plan)
        found = rehearse(
            lambda _, batch=batch, data=data: encode_views(batch, data, augment=None, device=META)
        )
        assert len(found.uploads) > 0
        assert [upload.place for upload in found.uploads if upload.is_blocking] == []


def test_a_dropped_view_is_black_in_its_share_of_samples(world):
    data = single(world)
    view = ROBOT.views[0].key
    augment = dataclasses.replace(PUBLISHED, view_dropout=0.5, dropped_views=(view,))
    (batch,) = build_loader(data, LoaderPlan(global_batch=16, micro_batch=16, stop_step=1))
    plain, thinned = (encode_views(batch, data, augment=how) for how in (PUBLISHED, augment))
    dropped = [
        draw_dropped_view(data.seed, number, augment) == view
        for number in batch["sample_id"].tolist()
    ]
    assert 2 < sum(dropped) < 14
    # Exterior left, wrist right: the left half is black, and nothing else has changed.
    half = plain.shape[3] // 2
    for image, without, gone in zip(plain, thinned, dropped, strict=True):
        expected = image.clone()
        if gone:
            expected[:, :, :half] = 0
        assert torch.equal(without, expected)
    shares = [draw_dropped_view(3, number, augment) for number in range(2000)]
    assert 0.45 < shares.count(view) / 2000 < 0.55
    assert all(draw_dropped_view(3, number, PUBLISHED) is None for number in range(20))


def test_padded_tails_repeat_the_last_frame_and_count_no_action_twice(world):
    robot = dataclasses.replace(ROBOT, timing=dataclasses.replace(ROBOT.timing, pad_tail=True))
    spec = SourceSpec(paths=[world / "libero"], embodiment=robot, metadata=world / "metadata.json")
    data = TrainingData.open([spec], seed=0, options=options(world))
    (reader,) = data.sources[0].readers
    assert len(data) == int(reader.catalog.episodes.length.sum())
    first_length = int(reader.catalog.episodes.length[0])
    for number in (0, first_length - 5, first_length - 1):
        sample = data[SampleKey(0, 0, number)]
        own = min(robot.timing.actions, first_length - number)
        assert sample.vectors["action_mask"][:own, :7].all()
        assert not sample.vectors["action_mask"][own:].any()
        frames = sample.views["video.image"]
        last = [t for t in reader._rows(0, number).video if t == first_length - 1]
        assert len(last) >= 1 or number == 0
        assert all(torch.equal(frame, frames[-1]) for frame in frames[len(frames) - len(last) :])


def test_mixtures_fill_shorter_blocks_with_masked_rows(world):
    data = mixture(world)
    found = set()
    for batch in build_loader(data, LoaderPlan(global_batch=8, micro_batch=8, stop_step=3)):
        assert batch["action"].shape == (8, 24, 32)
        for row, source in enumerate(batch["source"].tolist()):
            found.add(source)
            mask = batch["action_mask"][row].reshape(2, 12, 32)
            steps = (8, 12)[source]
            assert mask[:, :steps, :7].all()
            assert not mask[:, steps:].any()
            assert not batch["action"][row].reshape(2, 12, 32)[:, steps:].any()
        for source, views in batch["views"].items():
            count = int((batch["source"] == source).sum())
            assert all(len(frames) == count for frames in views.values())
    assert found == {0, 1}
    assert "share 75.0%" not in data.report()
    assert "share 25.0%" in data.report()


def test_weights_are_split_or_given_to_each_path(world):
    def shares(**more):
        spec = SourceSpec(
            paths=[world / "libero", world / "second"],
            embodiment=ROBOT,
            metadata=world / "metadata.json",
            **more,
        )
        data = TrainingData.open([spec], seed=0, options=options(world))
        draws = data.stream.at(range(4096))
        return np.bincount(draws.part) / 4096, [len(reader) for reader in data.sources[0].readers]

    found, sizes = shares()
    np.testing.assert_allclose(found, np.array(sizes) / sum(sizes), atol=1e-3)
    found, _ = shares(distribute_weights=False)
    np.testing.assert_allclose(found, 0.5, atol=1e-3)


def rows_of(data, steps):
    """Return the folder and the first row of the samples of ``steps`` steps of 64."""
    keys = [key for step in range(steps) for key in data.sample_keys(step, range(64), 64)]
    located = [data.locate(key.sample_id)[1:] for key in keys]
    return [(reader.catalog.root.name, reader.windows.locate(at)[1]) for reader, at in located]


def test_a_share_of_the_samples_begins_where_episodes_do(world):
    plain, more = (
        rows_of(single(world, start_share=share, start_rows=3), 64) for share in (0, 0.4)
    )
    for folder in ("libero", "second"):
        before, after = ([row for name, row in rows if name == folder] for rows in (plain, more))
        assert len(before) == pytest.approx(len(after), abs=4), "folders keep their weights"
        rows, others = (np.bincount(drawn, minlength=9) / len(drawn) for drawn in (after, before))
        assert rows[:3].sum() == pytest.approx(0.4 + 0.6 * others[:3].sum(), abs=0.03)
        np.testing.assert_allclose(rows[:3], rows[:3].mean(), atol=0.03)
        np.testing.assert_allclose(rows[3:9], 0.6 * others[3:9], atol=0.03)
    assert max(row for _, row in more) == max(row for _, row in plain)
    assert rows_of(single(world, start_rows=3), 2) == plain[:128], "a share of 0 changes nothing"


def test_no_sample_begins_where_episodes_do(world):
    with pytest.raises(DatasetError, match=r"raise data\.start_rows, or set data\.start_share=0"):
        single(world, start_share=0.1, start_rows=0)


def test_sources_that_cannot_share_a_batch_are_refused(world):
    metadata = world / "metadata.json"
    specs = [
        SourceSpec(paths=[world / "libero"], embodiment=ROBOT, metadata=metadata),
        SourceSpec(paths=[world / "franka"], embodiment=RELATIVE, metadata=metadata),
    ]
    with pytest.raises(ConfigError, match="same size of the tiled image in all sources"):
        TrainingData.open(specs, seed=0, options=options(world))
    with pytest.raises(ConfigError, match="at least one path"):
        TrainingData.open([], seed=0)


@pytest.fixture
def damaged(world, tmp_path):
    """The first dataset with one video that stops decoding halfway."""
    path = tmp_path / "libero"
    shutil.copytree(world / "libero", path)
    video = path / "videos/chunk-000/observation.images.image/episode_000000.mp4"
    content = bytearray(video.read_bytes())
    start = content.index(b"mdat") + 2000
    content[start : start + 4000] = bytes(4000)
    video.write_bytes(bytes(content))
    return path, video


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_video_is_named(world, damaged, workers):
    path, video = damaged
    spec = SourceSpec(paths=[path], embodiment=ROBOT, metadata=world / "metadata.json")
    data = TrainingData.open([spec], seed=0, options=options(world))
    plan = LoaderPlan(global_batch=4, micro_batch=4, stop_step=12)
    with pytest.raises(DatasetError, match=r"sample \d+: .*, episode 0, frame \d+: ") as error:
        list(build_loader(data, plan, LoaderOptions(num_workers=workers)))
    assert str(video) in str(error.value)


def test_a_corrupt_video_is_counted(world, damaged, caplog):
    path, video = damaged
    spec = SourceSpec(paths=[path], embodiment=ROBOT, metadata=world / "metadata.json")
    counts = {}
    for workers in (0, 2):
        data = TrainingData.open([spec], seed=0, options=options(world, damaged="count"))
        plan = LoaderPlan(global_batch=4, micro_batch=4, stop_step=6)
        batches = list(build_loader(data, plan, LoaderOptions(num_workers=workers)))
        counts[workers] = [batch["skipped"] for batch in batches]
        assert all(len(batch["sample_id"]) == 4 for batch in batches)
    assert counts[0] == counts[2]
    assert sum(counts[0]) > 0
    assert str(video) in caplog.text


LAUNCH = """
import sys
sys.path[:0] = [{here!r}, {above!r}]
from test_data_loader import *
data = mixture(Path({world!r}))
# Opened in this process first, then inherited by the workers.
data[data.sample_keys(0, [0], 2)[0]]
plan = LoaderPlan(global_batch=2, micro_batch=2, stop_step=4)
whole = list(build_loader(data, plan, LoaderOptions(num_workers=2)))
# Left early, and still open when the process ends.
early = iter(build_loader(data, plan, LoaderOptions(num_workers=2)))
next(early)
print(len(whole))
"""


def test_torchs_loader_has_shutdown_workers():
    """A name that is not public; see `Batches`."""
    loader = DataLoader(range(9), num_workers=1, multiprocessing_context="fork")
    iterator = iter(loader)
    assert isinstance(iterator, _MultiProcessingDataLoaderIter)
    next(iterator)
    (worker,) = iterator._workers
    assert worker.is_alive()
    iterator._shutdown_workers()
    assert not worker.is_alive()


@pytest.mark.long
def test_processes_with_workers_exit_cleanly(world):
    """A20: also where the loop is left early, and where the parent had files open."""
    script = LAUNCH.format(here=str(HERE), above=str(HERE.parent), world=str(world))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")
