"""The plug-in ``plugins/lerobot_policy_dreamzero``, run by LeRobot's own code in its own Python."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as parquet
import pytest
from data_worlds import ROBOT, step

import dzrobot
from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.checkpoints.checksums import check_checksums, fingerprint
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.passport import PASSPORT_FILE
from dzrobot.policies.dreamzero.lerobot_folder import columns_of, input_features
from dzrobot.recording import EpisodeWriter

FOLDER = os.environ.get("DZROBOT_LEROBOT")
SCRIPT = Path(__file__).parents[1] / "lerobot" / "dreamzero_plugin.py"
DAGGER = SCRIPT.with_name("dagger.py")
needs_lerobot = [
    pytest.mark.lerobot,
    pytest.mark.skipif(FOLDER is None, reason="no environments of LeRobot: run `make lerobot`"),
]
EPISODES, STEPS = 2, 40


@pytest.fixture(scope="module")
def bin_folder():
    found = Path(FOLDER) / "0.6.1" / "bin"
    if not found.exists():
        pytest.skip("no environment of LeRobot 0.6.1")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("lerobot") / "policy"
    assert main(["convert", str(default_checkpoint()), str(target), "--to", "lerobot"]) == 0
    return target


def run(*words, cwd):
    variables = {
        **os.environ, "PYTHONPATH": str(Path(dzrobot.__file__).parents[1]), "HF_HUB_OFFLINE": "1"
    }  # fmt: skip
    return subprocess.run(
        [str(word) for word in words], env=variables, cwd=cwd, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def said(bin_folder, tmp_path, *words):
    done = run(bin_folder / "python", SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def same_values(one, other):
    """Return whether two sources hold the same numbers, whatever their dtypes."""
    names = sorted(one.tensors)
    pairs = zip(one.stream(names), other.stream(names), strict=True)
    same = all(bool((a[1].float() == b[1].float()).all()) for a, b in pairs)
    return same and names == sorted(other.tensors)


@needs_lerobot[0]
@needs_lerobot[1]
def test_lerobot_finds_it_by_itself(bin_folder, tmp_path):
    found = said(bin_folder, tmp_path, "listed")
    assert "dreamzero" in found["policies"]
    assert "dzrobot" in found["environments"]


@needs_lerobot[0]
@needs_lerobot[1]
def test_what_convert_writes_is_what_lerobot_would_write(bin_folder, folder, tmp_path):
    target = tmp_path / "again"
    said(bin_folder, tmp_path, "again", folder, target)
    for name in ("policy_preprocessor", "policy_postprocessor"):
        ours, theirs = (json.loads((f / f"{name}.json").read_text()) for f in (folder, target))
        assert ours == theirs
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (folder, target))
    assert {name: theirs[name] for name in ours} == ours
    before, after = (open_checkpoint(f / "dreamzero") for f in (folder, target))
    assert same_values(before.weights, after.weights)
    assert before.config == after.config
    assert before.metadata == after.metadata
    assert check_checksums(target / "dreamzero") > 0


@needs_lerobot[0]
@needs_lerobot[1]
def test_what_it_was_distilled_for_is_saved_with_it(bin_folder, folder, tmp_path):
    student = shutil.copytree(folder, tmp_path / "student")
    path = student / "dreamzero" / PASSPORT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "distilled_steps": 4}))
    (student / "dreamzero" / "SHA256SUMS").unlink(missing_ok=True)
    said(bin_folder, tmp_path, "again", student, tmp_path / "again")
    assert open_checkpoint(tmp_path / "again" / "dreamzero").passport.distilled_steps == 4


@needs_lerobot[0]
@needs_lerobot[1]
def test_less_video_is_an_option_without_a_video_to_save(bin_folder, folder, tmp_path):
    once = evaluated(bin_folder, tmp_path, folder, tmp_path / "once", "--policy.video=once")
    assert once["overall"]["n_episodes"] == EPISODES
    done = run(
        bin_folder / "python", SCRIPT, "again", folder, tmp_path / "none", "--video=skip",
        "--save_predicted_video=true", cwd=tmp_path,
    )  # fmt: skip
    assert "--policy.video=skip predicts no video that" in done.stderr


@needs_lerobot[0]
@needs_lerobot[1]
def test_actions_plans_and_imagined_video_are_the_policys_own(bin_folder, folder, tmp_path):
    found = said(bin_folder, tmp_path, "play", folder, default_checkpoint())
    plans_per_episode = 5
    for name, (actions, videos, plans) in found.items():
        assert actions == [True] * 30, name
        assert videos == [True] * 2 * plans_per_episode, name
        assert plans == [True] * 3, name


def trained(bin_folder, tmp_path, data, output, *words, first=0):
    return said(
        bin_folder, tmp_path, "train", data, first, f"--output_dir={output}",
        "--dataset.repo_id=local/plug", f"--dataset.root={data}", "--policy.push_to_hub=false",
        "--policy.device=cpu",
        "--batch_size=2", "--num_workers=0", "--save_freq=2", "--log_freq=1", "--env_eval_freq=0",
        "--policy.optimizer_lr=1e-4", *words,
    )  # fmt: skip


@needs_lerobot[0]
@needs_lerobot[1]
def test_lerobot_trains_with_the_trainers_own_loss_and_resumes(bin_folder, folder, tmp_path):
    data = tmp_path / "data"
    run(bin_folder / "python", SCRIPT, "record", data, cwd=tmp_path).check_returncode()
    whole = trained(
        bin_folder, tmp_path, data, tmp_path / "whole", f"--policy.path={folder}", "--steps=4"
    )
    losses = [loss for _, loss, _ in whole["steps"]]
    assert losses == [own for _, _, own in whole["steps"]]
    assert len({*losses}) == 4
    # Two episodes of 21 and 24 rows, and a sample of 17.
    assert whole["windows"] == 5 + 8

    # As if it had been interrupted after the checkpoint of step 2.
    half = shutil.copytree(tmp_path / "whole", tmp_path / "half", symlinks=True)
    shutil.rmtree(half / "checkpoints" / "000004")
    saved = half / "checkpoints" / "000002" / "pretrained_model" / "train_config.json"
    words = [f"--config_path={saved}", "--resume=true"]
    rest = trained(bin_folder, tmp_path, data, half, *words, first=2)
    assert rest["steps"] == whole["steps"][2:]
    ends = [
        open_checkpoint(tmp_path / name / "checkpoints/000004/pretrained_model/dreamzero").weights
        for name in ("whole", "half")
    ]
    first, second = (fingerprint(weights, weights.tensors) for weights in ends)
    assert first == second
    start = open_checkpoint(folder / "dreamzero").weights
    assert first != fingerprint(start, start.tensors)


@needs_lerobot[0]
@needs_lerobot[1]
def test_a_new_policy_starts_from_any_checkpoint(bin_folder, tmp_path):
    data = tmp_path / "data"
    run(bin_folder / "python", SCRIPT, "record", data, cwd=tmp_path).check_returncode()
    words = ["--policy.type=dreamzero", f"--policy.checkpoint={default_checkpoint()}"]
    steps = trained(
        bin_folder, tmp_path, data, tmp_path / "run", *words, "--policy.embodiment=libero_mini",
        "--steps=1",
    )["steps"]  # fmt: skip
    assert steps[0][1] == steps[0][2]


def evaluated(bin_folder, tmp_path, folder, output, *words):
    arguments = json.dumps({"resolution": 128, "max_episode_steps": STEPS})
    done = run(
        bin_folder / "lerobot-eval", f"--policy.path={folder}", "--env.type=dzrobot",
        f"--env.arguments={arguments}", f"--eval.n_episodes={EPISODES}", "--seed=0",
        "--policy.device=cpu", f"--output_dir={output}", *words, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((output / "eval_info.json").read_text())


@needs_lerobot[0]
@needs_lerobot[1]
def test_lerobot_eval_gives_the_action_hashes_of_dzrobot_eval(bin_folder, folder, tmp_path):
    output, results = tmp_path / "evaluated", tmp_path / "results"
    # LeRobot 0.6.1 records one batch of episodes and no second one.
    words = ["--eval.recording=true", f"--eval.batch_size={EPISODES}", "--policy.independent=true"]
    info = evaluated(bin_folder, tmp_path, folder, output, *words)
    hashes = []
    for number in range(EPISODES):
        recording = output / "recordings" / "dzrobot_0" / f"env_{number}" / "data"
        (file,) = recording.rglob("*.parquet")
        rows = parquet.read_table(file, columns=["action"])["action"].to_pylist()
        hashes.append(hashlib.sha256(np.array(rows, np.float32).tobytes()).hexdigest())
    done = run(
        bin_folder / "python", "-m", "dzrobot", "eval", "--env", "dzrobot/lift-v0", "--noise",
        "fixed", "--episodes", EPISODES, "--max-steps", STEPS, "--workers", "1", "--videos",
        "none", "--output", results, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (results / "records.jsonl").read_text().splitlines()]
    assert hashes == [row["action_sha256"] for row in rows]
    assert info["overall"]["n_episodes"] == EPISODES


@needs_lerobot[0]
@needs_lerobot[1]
def test_lerobots_switch_saves_the_imagined_video(bin_folder, folder, tmp_path):
    output = tmp_path / "evaluated"
    info = evaluated(
        bin_folder, tmp_path, folder, output, "--policy.save_predicted_video=true",
        "--eval.batch_size=1",
    )  # fmt: skip
    paths = info["overall"]["predicted_video_paths"]
    assert len(paths) == EPISODES
    for path in paths:
        with av.open(path) as video:
            assert sum(1 for _ in video.decode(video=0)) > STEPS


@needs_lerobot[0]
@needs_lerobot[1]
def test_takeovers_that_lerobots_dagger_recorded_are_credited(bin_folder, folder, tmp_path):
    recording = tmp_path / "recording"
    done = run(bin_folder / "python", DAGGER, folder, recording, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = (recording / "data").rglob("*.parquet")
    rows = parquet.read_table(file)
    marks = np.array(rows["intervention"].to_pylist())
    # A number that the leader alone gives.
    by_person = np.array([row[0] == 0.625 for row in rows["action"].to_pylist()])
    assert (marks == by_person).all()
    assert marks.any()
    assert not marks.all()
    assert np.count_nonzero(np.diff(marks.astype(int)) == 1) == 2
    words = ["credit", str(recording), "--embodiment", "libero_mini"]
    assert main([*words, "--json", str(tmp_path / "credit.json")]) == 0
    counted = json.loads((tmp_path / "credit.json").read_text())
    others = len(marks) - marks.sum()
    assert counted["rows"] == {"person": marks.sum(), "before_takeover": others}
    assert 0 < counted["imitating"] < counted["samples"]


@needs_lerobot[0]
@needs_lerobot[1]
def test_lerobot_reads_our_takeovers(bin_folder, tmp_path):
    given = [number % 7 > 3 for number in range(20)]
    with EpisodeWriter(tmp_path / "set", ROBOT, fps=20, version="v3.0") as writer:
        for number, mark in enumerate(given):
            writer.add_frame(*step(ROBOT, 0, 0, number), {"intervention": np.bool_(mark)})
        writer.save_episode(success=True)
    assert said(bin_folder, tmp_path, "marks", tmp_path / "set")["marks"] == given


def test_the_columns_are_declared_whole():
    robot = load_embodiment("libero_mini")
    columns = columns_of(robot)
    assert {name: feature["shape"] for name, feature in input_features(robot, columns).items()} == {
        "observation.images.image": [3, 128, 128],
        "observation.images.wrist_image": [3, 128, 128],
        "observation.state": [8],
    }
    for wrong in (
        {"observation.state": ["state.state"]},
        {**columns, "observation.images.third": ["video.image"]},
        {"observation.images.image": ["video.image", "video.wrist_image"],
         "observation.state": ["state.state"]},
        {**columns, "observation.empty": []},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"declare them all"):
            input_features(robot, wrong)


def test_parts_of_one_column_stay_in_its_order():
    robot = load_embodiment("franka_pnp")
    columns = columns_of(robot)
    parts = [part for part in robot.state if part.feature == "observation.state"]
    assert columns["observation.state"] == [p.key for p in sorted(parts, key=lambda p: p.start)]
    features = input_features(robot, columns)
    assert features["observation.state"]["shape"] == [robot.state_dim]


def test_a_robot_for_another_layout_is_refused(tmp_path, capsys):
    words = ["convert", str(default_checkpoint()), str(tmp_path / "new"), "--embodiment", "x"]
    assert main(words) == 2
    assert "--embodiment belongs to --to lerobot" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
