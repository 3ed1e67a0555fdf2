import json
import shutil

import numpy as np
import pytest
from data_worlds import RELATIVE, ROBOT, record, robot, step

from dzrobot.cli import main
from dzrobot.cluster import ClusterOptions, connected
from dzrobot.errors import StatisticsError
from dzrobot.modality.stats import Statistics
from dzrobot.training.data import (
    DatasetReader,
    ReaderOptions,
    SourceSpec,
    TrainingData,
    reading_pool,
)
from dzrobot.training.data import normalization as module
from dzrobot.training.data.normalization import BINS, QuantileHistogram, measure, merge
from dzrobot.training.recipes.architecture import run_embodiment
from dzrobot.training.sft_config import DataConfig, ModelConfig
from dzrobot.training.tiny.autoencoder import CLIP, clip_source

LENGTHS = (30, 25, 12, 33)
MEASURES = ("min", "max", "mean", "std", "q01", "q99")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("stats")
    for tag, embodiment in (("libero", ROBOT), ("droid", RELATIVE)):
        record(root / tag, embodiment, lengths=LENGTHS, version="v3.0")
        record(root / f"{tag}_one", embodiment, lengths=LENGTHS[:2], version="v2.1")
        record(
            root / f"{tag}_two", embodiment, lengths=(40, 20), seed=3, version="v2.1", video=True
        )
    return root


def readers(world, embodiment, *names):
    options = ReaderOptions(cache=world / "cache", images=False)
    return [DatasetReader(world / name, embodiment, options) for name in names]


def plain(rows):
    """What NumPy says."""
    table = np.concatenate(rows).astype(np.float64)
    return {
        "min": table.min(0),
        "max": table.max(0),
        "mean": table.mean(0),
        "std": table.std(0),
        "q01": np.quantile(table, 0.01, axis=0),
        "q99": np.quantile(table, 0.99, axis=0),
    }


def steps(embodiment, key, episode, length, seed=0):
    which = 0 if key.startswith("state") else 1
    return np.stack([step(embodiment, seed, episode, i)[which][key] for i in range(length)])


def relative(embodiment, part, episode, length):
    """Action minus state at the block's start, for every row that starts a block of a window."""
    timing = embodiment.timing
    action = steps(embodiment, part.key, episode, length).astype(np.float64)
    state = steps(embodiment, part.reference, episode, length).astype(np.float64)
    starts = range(max(0, length - timing.span))
    anchors = sorted({t + b * timing.anchor_stride for t in starts for b in range(timing.blocks)})
    horizon = timing.action_horizon
    return [action[a : a + horizon] - state[a] for a in anchors]


@pytest.mark.sampled
@pytest.mark.parametrize("embodiment", [ROBOT, RELATIVE], ids=lambda robot: robot.tag)
def test_statistics_equal_numpy(world, embodiment):
    """A14: absolute on all rows of usable episodes, relative on relative actions."""
    name = "libero" if embodiment is ROBOT else "droid"
    entry = measure(readers(world, embodiment, name), embodiment)
    usable = [(e, length) for e, length in enumerate(LENGTHS) if length > 16]
    for part in (*embodiment.state, *embodiment.action):
        if part.reference is None:
            rows = [steps(embodiment, part.key, e, length) for e, length in usable]
        else:
            rows = [r for e, length in usable for r in relative(embodiment, part, e, length)]
        expected = plain(rows)
        found = entry["statistics"][part.key.partition(".")[0]][part.name]
        for measure_ in MEASURES:
            np.testing.assert_allclose(found[measure_], expected[measure_], rtol=0, atol=1e-9)
    for view in embodiment.views:
        height, width = view.resolution
        assert entry["modalities"]["video"][view.name]["resolution"] == [width, height]
    Statistics.from_metadata({embodiment.tag: entry}, embodiment)


def test_relative_actions_step_by_step_equal_numpy(world):
    entry = measure(readers(world, RELATIVE, "droid"), RELATIVE, per_step=True)
    usable = [(e, length) for e, length in enumerate(LENGTHS) if length > 16]
    (part,) = (part for part in RELATIVE.action if part.reference is not None)
    blocks = np.stack(
        [block for e, length in usable for block in relative(RELATIVE, part, e, length)]
    )
    expected = plain([blocks.reshape(len(blocks), -1)])
    found = entry["statistics"]["action"][part.name]
    for measure_ in MEASURES:
        assert np.shape(found[measure_]) == blocks.shape[1:]
        np.testing.assert_allclose(np.ravel(found[measure_]), expected[measure_], atol=1e-9)
    assert np.ptp(found["q99"], axis=0).min() > 0
    absolute = measure(readers(world, RELATIVE, "droid"), RELATIVE)
    for other in (*RELATIVE.state, *RELATIVE.action):
        if other is not part:
            kind = other.key.partition(".")[0]
            assert entry["statistics"][kind][other.name] == absolute["statistics"][kind][other.name]
    assert Statistics.from_metadata({RELATIVE.tag: entry}, RELATIVE).per_step
    with pytest.raises(StatisticsError, match=r"measured with .* write to a new file"):
        merge(entry, absolute)
    with pytest.raises(StatisticsError, match="no action that is measured from the state"):
        measure(readers(world, ROBOT, "libero"), ROBOT, per_step=True)


def test_two_processes_measure_what_one_does(world, monkeypatch):
    opened = readers(world, RELATIVE, "droid_one", "droid_two")
    alone = measure(opened, RELATIVE)
    monkeypatch.setattr(reading_pool, "EPISODES_AT_ONCE", 2)
    assert measure(opened, RELATIVE, processes=2) == alone


@pytest.mark.long
def test_a_cluster_measures_what_one_process_does(world, monkeypatch):
    pytest.importorskip("ray", reason="no Ray: pip install -e '.[cluster]'")
    opened = readers(world, RELATIVE, "droid_one", "droid_two")
    alone = measure(opened, RELATIVE)
    monkeypatch.setattr(reading_pool, "EPISODES_AT_ONCE", 2)
    with connected(ClusterOptions(actors=2), reading_pool.READER) as cluster:
        assert measure(opened, RELATIVE, processes=cluster) == alone


@pytest.mark.parametrize(
    ("embodiment", "per_step"), [(ROBOT, False), (RELATIVE, False), (RELATIVE, True)]
)
def test_merged_halves_equal_the_whole(world, embodiment, per_step):
    """A14: moments to 1e-12, quantiles to one bin."""
    name = "libero" if embodiment is ROBOT else "droid"
    halves = [f"{name}_one", f"{name}_two"]
    whole = measure(readers(world, embodiment, *halves), embodiment, per_step=per_step)
    parts = [
        measure(readers(world, embodiment, half), embodiment, per_step=per_step) for half in halves
    ]
    # Through text, as in a file.
    merged = merge(*json.loads(json.dumps(parts)))
    assert merged["provenance"] == whole["provenance"]
    for kind, tables in whole["statistics"].items():
        for part, table in tables.items():
            found = merged["statistics"][kind][part]
            for measure_ in ("min", "max", "mean", "std"):
                np.testing.assert_allclose(found[measure_], table[measure_], rtol=0, atol=1e-12)
            spread = np.subtract(table["max"], table["min"])
            for measure_ in ("q01", "q99"):
                apart = np.abs(np.subtract(found[measure_], table[measure_]))
                assert (apart <= 2 * spread / BINS).all(), (part, measure_)


def test_more_rows_than_memory_give_quantiles_to_one_bin(world, monkeypatch):
    opened = readers(world, ROBOT, "libero")
    exact = measure(opened, ROBOT)["statistics"]["action"]["actions"]
    monkeypatch.setattr(module, "EXACT_ROWS", 10)
    rough = measure(opened, ROBOT)["statistics"]["action"]["actions"]
    spread = np.subtract(exact["max"], exact["min"])
    for name in ("q01", "q99"):
        apart = np.abs(np.subtract(exact[name], rough[name]))
        assert (apart <= 2 * spread / BINS).all()
    assert {k: exact[k] for k in MEASURES[:4]} == {k: rough[k] for k in MEASURES[:4]}


def test_constant_and_large_numbers_are_measured():
    for low, high in ((0.0, 0.0), (1e12, 1e12), (-3e-9, 4e-9), (-1e6, 2e6)):
        values = np.linspace(low, high, 1001)
        histogram = QuantileHistogram.between(low, high)
        histogram.add(values)
        assert len(histogram.counts) <= BINS + 1
        assert histogram.counts.sum() == 1001
        for share in (0.0, 0.01, 0.5, 0.99, 1.0):
            assert (
                abs(histogram.quantile(share) - np.quantile(values, share))
                <= histogram.width * 1.001
            )
        assert (
            QuantileHistogram.from_json(histogram.to_json()).counts.tolist()
            == histogram.counts.tolist()
        )


def test_stale_statistics_are_refused(world, tmp_path):
    path = tmp_path / "droid"
    shutil.copytree(world / "droid", path)
    options = ReaderOptions(cache=tmp_path / "cache")
    entry = measure(readers(world, RELATIVE, "droid"), RELATIVE)

    def open_with(metadata, embodiment=RELATIVE, **given):
        content = {"oxe_droid": metadata}
        spec = SourceSpec(paths=[path], embodiment=embodiment, metadata=content, **given)
        return TrainingData.open([spec], seed=0, options=options)

    open_with(entry)  # A copy of the measured folder is the measured data.
    without = {key: value for key, value in entry.items() if key != "provenance"}
    open_with(without)  # Statistics of a checkpoint do not say.
    with pytest.raises(StatisticsError, match="measured relative actions over 8 steps"):
        open_with(entry, robot("oxe_droid", horizon=12))
    record(path, RELATIVE, lengths=(20,), version="v3.0")
    with pytest.raises(StatisticsError, match="changed since, or were never measured"):
        open_with(entry)
    open_with(entry, inherited=True)  # A checkpoint's own, from its earlier recordings.
    with pytest.raises(StatisticsError, match="measured relative actions over 8 steps"):
        open_with(entry, robot("oxe_droid", horizon=12), inherited=True)


def test_the_command_writes_adds_and_refuses(world, tmp_path, monkeypatch, capsys):
    """Both commands as a user types them, with a robot from the user's own module."""
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "metadata.json"
    base = ["stats", "data_worlds:ROBOT", "--output", str(output), "--dataset"]
    assert main([*base, str(world / "libero_one")]) == 0
    first = json.loads(output.read_text())["libero_sim"]
    assert main([*base, str(world / "libero_two")]) == 2
    assert "--merge adds to it" in capsys.readouterr().err
    assert main([*base, str(world / "libero_two"), "--merge"]) == 0
    merged = json.loads(output.read_text())["libero_sim"]
    assert len(merged["provenance"]["datasets"]) == 2
    assert merged["statistics"] != first["statistics"]
    assert main([*base, str(world / "libero_two"), "--merge"]) == 2
    assert "already counted" in capsys.readouterr().err
    droid = ["stats", "data_worlds:RELATIVE", "--output", str(output), "--merge", "--dataset"]
    assert main([*droid, str(world / "droid")]) == 0
    assert set(json.loads(output.read_text())) == {"libero_sim", "oxe_droid"}
    capsys.readouterr()

    assert (
        main(["inspect-data", str(world / "droid_two"), "--embodiment", "data_worlds:RELATIVE"])
        == 0
    )
    text = capsys.readouterr().out
    for expected in (
        "action.joint_position",
        "action[1:8]",
        "windows 28",
        "first frame   video.wrist_image_left",
        "faults: 0",
    ):
        assert expected in text
    broken = tmp_path / "broken"
    shutil.copytree(world / "libero_two", broken)
    (broken / "videos/chunk-000/observation.images.image/episode_000001.mp4").unlink()
    assert main(["inspect-data", str(broken), "--embodiment", "data_worlds:ROBOT"]) == 1
    video = "videos/chunk-000/observation.images.image/episode_000001.mp4"
    assert f"FAULT episode 1: {video} missing" in capsys.readouterr().out
    refused = ["stats", "data_worlds:ROBOT", "--output", str(tmp_path / "no.json")]
    assert main([*refused, "--dataset", str(broken)]) == 2
    assert "1 of 2 episodes cannot be used" in capsys.readouterr().err
    assert main([*refused, "--dataset", str(broken), "--damaged", "count"]) == 0
    assert "usable 1, " in capsys.readouterr().out
    next((broken / "data").rglob("episode_000001.parquet")).write_bytes(b"no data")
    quick = ["inspect-data", str(broken), "--embodiment", "data_worlds:ROBOT", "--quick"]
    assert main(quick) == 1
    assert "FAULT episode 1: data/chunk-000/episode_000001.parquet" in capsys.readouterr().out
    assert main(["inspect-data", str(tmp_path), "--embodiment", "data_worlds:ROBOT"]) == 2
    assert "holds no meta/info.json" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["flags", "recipe"])
def test_relative_actions_are_measured_as_the_run_will_cut_them(world, tmp_path, capsys, by):
    """Statistics of one walk are refused by a run of the other, which says what to type."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {sampling_mode: multi_anchor, video_in_chunk_offsets: [0, 3, 6, 9]}\n"
        "model: {action_horizon: 12, relative_action_per_horizon: true}\n"
    )
    given = {
        "flags": [
            "--sampling-mode", "multi_anchor", "--action-horizon", "12", "--per-step",
            "--video-in-chunk-offsets", "0,3,6,9",
        ],
        "recipe": ["--recipe", str(recipe)],
    }  # fmt: skip
    # Under RLinf's names, as the guide types them.
    typed = ["stats", "--preset", "data_worlds:RELATIVE", "--dataset-root", str(world / "droid")]
    output = tmp_path / "metadata.json"
    assert main([*typed, "--output-metadata", str(output), *given[by]]) == 0
    model = ModelConfig(embodiment_tag="data_worlds:RELATIVE", action_horizon=12)
    walks = {
        mode: run_embodiment(
            model.embodiment_tag,
            model,
            DataConfig(train_data_paths=["x"], sampling_mode=mode, video_in_chunk_offsets=offsets),
        )
        for mode, offsets in (("multi_anchor", (0, 3, 6, 9)), ("aligned", None))
    }

    def opened(embodiment):
        spec = SourceSpec(paths=[world / "droid"], embodiment=embodiment, metadata=output)
        return TrainingData.open([spec], seed=0)

    (source,) = opened(walks["multi_anchor"]).sources
    assert source.pipeline.statistics.per_step
    assert "from first to last step" in capsys.readouterr().out
    with pytest.raises(StatisticsError, match="--recipe RECIPE`, or with --sampling-mode"):
        opened(walks["aligned"])
    with pytest.raises(StatisticsError, match="stats --action-horizon 8"):
        opened(RELATIVE)
    # Images alone are read by an autoencoder, whatever actions were measured over.
    clips = clip_source([world / "droid"], RELATIVE, output, CLIP)
    assert TrainingData.open([clips], seed=0).sources
    assert main(["stats", "--dataset", "x", "--output", str(output)]) == 2
    assert "name one robot" in capsys.readouterr().err


def test_statistics_without_code(world, tmp_path, capsys):
    """Columns by their names give the numbers that a described robot's columns give."""
    folder = tmp_path / "data"
    shutil.copytree(world / "libero_one", folder)
    state, action = (part[0].feature for part in (ROBOT.state, ROBOT.action))
    videos = [view.feature for view in ROBOT.views]
    output = tmp_path / "metadata.json"
    typed = [
        "stats", "--embodiment-tag", "arm", "--state-key", state, "--action-key", action,
        "--dataset-root", str(folder), "--output-metadata", str(output), "--video-keys",
    ]  # fmt: skip
    assert main([*typed, *videos]) == 0
    found = json.loads(output.read_text())["arm"]["statistics"]
    wanted = measure(readers(world, ROBOT, "libero_one"), ROBOT)["statistics"]
    column = state.rpartition(".")[2]
    (part,) = (part for part in ROBOT.state if part.feature == state and not part.start)
    assert found["state"][column]["q99"][: part.dim] == wanted["state"][part.name]["q99"]
    assert main([*typed, "nothing", "--merge"]) == 2
    assert "no column 'nothing'" in capsys.readouterr().err
    assert main([*typed, state, "--merge"]) == 2
    assert "holds no images" in capsys.readouterr().err

    assert main(typed[:-1]) == 2
    said = capsys.readouterr().err
    assert "give --video-keys" in said
    assert all(name in said for name in videos)

    known = ["stats", "libero_sim", *typed[3:], *videos]
    assert main(known) == 2
    assert "--state-key describes a robot without code: write --embodiment-tag" in (
        capsys.readouterr().err
    )

    cut = {"state": {"first": {"start": 0, "end": 1, "original_key": state}},
           "action": {"all": {"original_key": action}}}  # fmt: skip
    (folder / "meta/modality.json").write_text(json.dumps(cut))
    typed[2], typed[typed.index(str(output))] = "cut", str(tmp_path / "cut.json")
    assert main([*typed, *videos, "--use-modality-json"]) == 0
    parts = json.loads((tmp_path / "cut.json").read_text())["cut"]["statistics"]
    assert parts["state"]["first"]["mean"] == found["state"][column]["mean"][:1]
    assert list(parts["action"]) == ["all"]


def test_pictures_of_another_size_are_read_by_a_robot_named_so(world, tmp_path, capsys):
    output = tmp_path / "metadata.json"
    few = ["--action-horizon", "8", "--max-chunk-size", "2", "--output", str(output)]
    data = ["--dataset", str(world / "libero_one")]
    assert main(["stats", "libero_sim", *data, *few]) == 2
    assert "write @48x64 behind the robot's name" in capsys.readouterr().err
    assert main(["stats", "libero_sim@48x64", *data, *few]) == 0
    (view, *_) = json.loads(output.read_text())["libero_sim"]["modalities"]["video"].values()
    assert view["resolution"] == [64, 48]
    model = ModelConfig(embodiment_tag="libero_sim@48x64", action_horizon=8, max_chunk_size=2)
    robot = run_embodiment(model.embodiment_tag, model, DataConfig(train_data_paths=["x"]))
    spec = SourceSpec(paths=[world / "libero_one"], embodiment=robot, metadata=output)
    assert TrainingData.open([spec], seed=0).sources
