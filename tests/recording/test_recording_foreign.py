"""What LeRobot's tools need to find in a recording; with LeRobot itself where it is installed.

``make lerobot`` installs its versions, each in an environment of its own, and runs the second half.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_worlds import ROBOT, record, step

from dzrobot import cli
from dzrobot.errors import DatasetError
from dzrobot.recording import EpisodeWriter
from dzrobot.training.data import DatasetReader, ReaderOptions

VERSIONS = {"0.3.3": "v2.1", "0.4.4": "v3.0", "0.6.1": "v3.0"}
SCRIPT = Path(__file__).parents[1] / "lerobot" / "in_lerobot.py"


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """Return recordings of the fake arm by format version, as ``dzrobot record`` makes them."""
    folder = tmp_path_factory.mktemp("arm")
    made = {}
    for version in ("v2.1", "v3.0"):
        made[version] = folder / version
        words = ["record", "--env", "dzrobot/Franka-PnP-v0", "--workcell", "fake"]
        words += ["--policy", "hold", "--episodes", "3", "--max-steps", "6"]
        assert cli.main([*words, "--version", version, "--output", str(made[version])]) in (0, 1)
    return made


def test_what_others_read(arm):
    info = json.loads((arm["v3.0"] / "meta/info.json").read_text())
    for name, feature in info["features"].items():
        assert ("image" in name) == (feature["dtype"] in ("image", "video")), name
    assert "timestamp.video.wrist_camera" in info["features"] or any(
        name.startswith("timestamp.video.") for name in info["features"]
    )
    assert type(info["fps"]) is int
    names = pq.read_schema(arm["v3.0"] / "meta/episodes/chunk-000/file-000.parquet").names
    known = ("episode_index", "tasks", "length", "dataset_", "data/", "videos/", "meta/", "stats/")
    assert all(name.startswith(known) for name in names)
    total = json.loads((arm["v3.0"] / "meta/stats.json").read_text())
    measures = {"min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"}
    assert all(set(column) == measures for column in total.values())


def test_quantiles_are_those_of_the_rows(tmp_path):
    path = record(tmp_path / "set", lengths=(40,), version="v3.0")
    total = json.loads((path / "meta/stats.json").read_text())
    states = np.stack([step(ROBOT, 0, 0, i)[0]["state.state"] for i in range(40)])
    for name, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
        expected = np.quantile(states, share, axis=0)
        np.testing.assert_allclose(total["observation.state"][name], expected, atol=1e-6)
    pictures = np.stack([step(ROBOT, 0, 0, i)[0]["video.image"] for i in range(0, 40, 10)])
    middle = np.quantile(pictures[:, ::4, ::4], 0.5, axis=(0, 1, 2)) / 255
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
@pytest.mark.parametrize("version", VERSIONS)
def test_lerobot_reads_edits_and_goes_on_with_a_recording(arm, tmp_path, version):
    environments = os.environ.get("DZROBOT_LEROBOT")
    if environments is None:
        pytest.skip("no environments of LeRobot: run `make lerobot`")
    python = Path(environments) / version / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is missing: LeRobot {version} needs another Python")
    root = tmp_path / "set"
    subprocess.run(["cp", "-r", arm[VERSIONS[version]], root], check=True)
    for action in ("open", "tools", "resume") if version == "0.6.1" else ("open",):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [python, SCRIPT, action, root],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (action, done.stdout[-2000:], done.stderr[-2000:])
    assert cli.main(["inspect-data", str(root), "--embodiment", "franka_pnp", "--quick"]) in (0, 2)
