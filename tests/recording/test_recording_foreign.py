"""What LeRobot's tools need to find in a recording; with LeRobot itself where it is installed.

``make lerobot`` installs its versions, each in an environment of its own, and runs the second half.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_worlds import ROBOT, record, step

from dzrobot import cli
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import DatasetError
from dzrobot.recording import EpisodeWriter
from dzrobot.training.data import DatasetReader, ReaderOptions

TOOLS = ("open", "delete", "split", "merge", "edit", "resume", "create")
EPISODES = {"delete": 2, "merge": 6, "edit": 3, "resume": 4, "create": 3, "join": 6, "convert": 3}
"""What has a result of its own -> how many episodes it then has."""

TRIED = {
    ("0.3.3", "v2.1"): ("open", "resume", "create"),
    ("0.4.4", "v2.1"): ("convert",),
    ("0.4.4", "v3.0"): TOOLS,
    ("0.6.1", "v2.1"): ("convert",),
    # 0.4.4 cannot join: it keeps the smallest and largest of a bool column as bool, and wants the
    # same of every part.
    ("0.6.1", "v3.0"): (*TOOLS, "join"),
}
"""Version of LeRobot and of the format -> what is tried: all that it offers for it offline."""

FACTS_OF_SENSORS = {
    "timestamp.time_s", "timestamp.state_time_s", "sensor.late_steps",
    "timestamp.video.camera", "timestamp.video.wrist_camera",
    "sensor.frame_number.video.camera", "sensor.frame_number.video.wrist_camera",
}  # fmt: skip
PNP = load_embodiment("franka_pnp")
SCRIPT = Path(__file__).parents[1] / "lerobot" / "in_lerobot.py"


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """Return a function: recording of the fake arm, as ``dzrobot record`` makes it."""
    folder = tmp_path_factory.mktemp("arm")

    def recorded(version, video=False):
        made = folder / f"{version}-{video}"
        words = ["record", "--env", "dzrobot/Franka-PnP-v0", "--workcell", "fake"]
        words += ["--policy", "hold", "--attempts", "3", "--keep-failures", "--max-steps", "10"]
        words += ["--noise", "0.05"]
        words += ["--video"] if video else []
        if not made.exists():
            assert cli.main([*words, "--version", version, "--output", str(made)]) in (0, 1)
        return made

    return recorded


def test_what_others_read(arm):
    made = arm("v3.0")
    info = json.loads((made / "meta/info.json").read_text())
    for name, feature in info["features"].items():
        assert ("image" in name) == (feature["dtype"] in ("image", "video")), name
    beside = {name for name in info["features"] if name.startswith(("timestamp.", "sensor."))}
    assert beside == FACTS_OF_SENSORS
    # What was done beside what was chosen: LeRobot's policies take it for neither of theirs.
    assert info["features"]["executed_action"]["shape"] == info["features"]["action"]["shape"]
    theirs = {name for name in info["features"] if name.startswith(("action", "observation"))}
    assert theirs == {view.feature for view in PNP.views} | {"observation.state", "action"}
    assert type(info["fps"]) is int
    names = pq.read_schema(made / "meta/episodes/chunk-000/file-000.parquet").names
    known = ("episode_index", "tasks", "length", "dataset_", "data/", "videos/", "meta/", "stats/")
    assert all(name.startswith(known) for name in names)
    total = json.loads((made / "meta/stats.json").read_text())
    measures = {"min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"}
    assert all(set(column) == measures for column in total.values())


def test_quantiles_are_those_of_the_rows(tmp_path):
    path = record(tmp_path / "set", lengths=(40,), version="v3.0")
    total = json.loads((path / "meta/stats.json").read_text())
    states = np.stack([step(ROBOT, 0, 0, i)[0]["state.state"] for i in range(40)])
    for name, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
        expected = np.quantile(states, share, axis=0)
        np.testing.assert_allclose(total["observation.state"][name], expected, atol=1e-6)
    images = np.stack([step(ROBOT, 0, 0, i)[0]["video.image"] for i in range(0, 40, 10)])
    middle = np.quantile(images[:, ::4, ::4], 0.5, axis=(0, 1, 2)) / 255
    shown = total["observation.images.image"]["q50"]
    np.testing.assert_allclose(np.ravel(shown), middle, atol=1.01 / 255)


@pytest.mark.parametrize("name", ["timestamp.video.image", "image", "a/b"])
def test_names_that_lerobot_misreads_are_refused(tmp_path, name):
    with (
        EpisodeWriter(tmp_path / "set", ROBOT, fps=10) as writer,
        pytest.raises(DatasetError, match="choose another name"),
    ):
        writer.add_frame(*step(ROBOT, 0, 0, 0), {name: 1.0})


def test_a_rate_that_is_not_the_robots_is_said(tmp_path, caplog):
    path = record(tmp_path / "set", lengths=(20,))
    info = json.loads((path / "meta/info.json").read_text())
    for fps, said in ((10, 1), (20, 0)):
        (path / "meta/info.json").write_text(json.dumps({**info, "fps": fps}))
        caplog.clear()
        DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache", images=False))
        assert sum("acts at 20 Hz" in record.message for record in caplog.records) == said


@pytest.mark.lerobot
@pytest.mark.parametrize("video", [False, True], ids=["images", "video"])
@pytest.mark.parametrize(("version", "recorded"), TRIED)
def test_lerobot_reads_edits_and_goes_on_with_a_recording(arm, tmp_path, version, recorded, video):
    environments = os.environ.get("DZROBOT_LEROBOT")
    if environments is None:
        pytest.skip("no environments of LeRobot: run `make lerobot`")
    python = Path(environments) / version / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is missing: LeRobot {version} needs another Python")
    made, results = arm(recorded, video), tmp_path / "results"
    results.mkdir()
    # LeRobot joins no videos of unlike codecs: it writes AV1 where we wrote H.264.
    actions = [name for name in TRIED[version, recorded] if not (video and name == "join")]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, SCRIPT, made, results, *actions],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.split(" ")[0] in actions]
    sys.stdout.write("".join(f"{version} {recorded} {line}\n" for line in lines))
    assert lines == [f"{action} held" for action in actions], done.stderr[-4000:]
    if "open" in actions:
        same_items(made, results / "items.npz", exact=not video)
    for action in EPISODES.keys() & set(actions):
        read_here(results / action, made, EPISODES[action], tmp_path / "cache")


def read_here(path, made, episodes, cache):
    """What LeRobot wrote is read here: the first episode is the recording's."""
    written, ours = reader(path, cache), reader(made, cache)
    assert len(written.catalog.episodes.length) == episodes
    for key, rows in ours.states(0).items():
        np.testing.assert_array_equal(written.states(0)[key], rows)
    for key, source in ours.resolution.views.items():
        images = [
            one.frames(0, where, [0]).astype(float)
            for one, where in ((ours, source), (written, written.resolution.views[key]))
        ]
        assert np.abs(images[0] - images[1]).mean() < 3


def reader(path, cache):
    known = load_embodiment("franka_pnp")
    short = Timing(control_hz=known.timing.control_hz, action_horizon=8, blocks=1)
    options = ReaderOptions(cache=cache, episodes="all")
    return DatasetReader(path, dataclasses.replace(known, timing=short), options)


def same_items(made, kept, *, exact):
    """What LeRobot read is what is read here: numbers to the bit, images too if they are PNG."""
    items, ours = np.load(kept), reader(made, kept.parent / "cache")
    lengths = ours.catalog.episodes.length
    np.testing.assert_array_equal(items["episode"], np.repeat(range(len(lengths)), lengths))
    states = [ours.states(number) for number in range(len(lengths))]
    parts = [part.key for part in ours.embodiment.state]
    joined = [np.concatenate([one[key] for key in parts], axis=1) for one in states]
    np.testing.assert_array_equal(items["observation.state"], np.concatenate(joined))
    for source in ours.resolution.views.values():
        theirs = items[source.column].transpose(0, 2, 3, 1) * 255
        for number, length in enumerate(lengths):
            frames = ours.frames(number, source, range(length)).astype(float)
            apart = np.abs(frames - theirs[items["episode"] == number])
            assert apart.max() < (0.01 if exact else 8)
