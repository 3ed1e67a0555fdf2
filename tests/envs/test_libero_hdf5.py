"""LIBERO's demonstration files as datasets: written from runs of LIBERO's own environment."""

import json

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest

from dzrobot.cli import main
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.libero.assets import import_libero
from dzrobot.envs.libero.hdf5 import idle_rows
from dzrobot.envs.libero.libero_env import LiberoEnv
from dzrobot.envs.libero.suites import language_of, load_init_states, load_task
from dzrobot.errors import DatasetError
from dzrobot.rollout.environment import facts_of

h5py = pytest.importorskip("h5py", reason="h5py is not installed")

SUITE, TASK, START, SIDE = "libero_object", 7, 4, 64
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (6, 7)).astype(np.float32)
ACTIONS[2:4, :6], ACTIONS[:, 6] = 0, -1
NAMES = {
    "agentview_rgb": "agentview_image",
    "eye_in_hand_rgb": "robot0_eye_in_hand_image",
    "gripper_states": "robot0_gripper_qpos",
    "joint_states": "robot0_joint_pos",
    "ee_pos": "robot0_eef_pos",
}


def write(
    path, demonstrations, *, convention="opengl", instruction="an instruction", model_file=None
):
    """Write raw observations and actions as LIBERO's collection of demonstrations does."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": [f'"{instruction}"']})
        data.attrs["env_args"] = json.dumps({"env_name": "Libero_Floor_Manipulation"})
        data.attrs["macros_image_convention"] = convention
        for number, (seen, actions) in enumerate(demonstrations):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = len(actions)
            if model_file is not None:
                demo.attrs["model_file"] = model_file
            for name, raw in NAMES.items():
                demo[f"obs/{name}"] = np.stack([one[raw] for one in seen])
            turns = [one["turn"] for one in seen]
            demo["obs/ee_states"] = np.hstack([demo["obs/ee_pos"], turns])
            demo["actions"] = actions.astype(np.float64)
            demo["dones"] = np.eye(len(actions), dtype=np.uint8)[-1]


def invented(rows, side=8, seed=0):
    """Return observations that no simulator made."""
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 255, (2, rows, side, side, 3), np.uint8)
    vectors = draw.normal(size=(4, rows, 7))
    seen = [
        {
            "agentview_image": images[0, row],
            "robot0_eye_in_hand_image": images[1, row],
            "robot0_gripper_qpos": vectors[0, row, :2],
            "robot0_joint_pos": vectors[1, row],
            "robot0_eef_pos": vectors[2, row, :3],
            "turn": vectors[3, row, :3],
        }
        for row in range(rows)
    ]
    return seen, draw.uniform(-1, 1, (rows, 7))


@pytest.fixture(scope="module")
def played(libero_assets):
    """Return what LIBERO's own environment shows while it carries out ACTIONS."""
    from robosuite.utils.transform_utils import quat2axisangle

    task = load_task(SUITE, TASK)
    bare = import_libero().OffScreenRenderEnv(
        bddl_file_name=str(task.bddl), camera_heights=SIDE, camera_widths=SIDE
    )
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(gym.utils.seeding.np_random(54)[0].integers(2**32))  # noqa: NPY002
    bare.env.reset()
    np.random.set_state(before)  # noqa: NPY002
    bare.set_init_state(load_init_states(task.init_states)[START])
    for _ in range(10):
        raw, *_ = bare.step([0] * 6 + [-1])
    seen = []
    for action in ACTIONS:
        seen.append({**raw, "turn": quat2axisangle(raw["robot0_eef_quat"].copy())})
        raw, *_ = bare.step(action)
    bare.env.sim._render_context_offscreen.con.free()
    bare.env.sim._render_context_offscreen.gl_ctx.free()
    bare.close()
    return task, seen


@pytest.mark.libero
@pytest.mark.long
def test_the_dataset_shows_what_the_environment_shows(played, tmp_path, capsys):
    task, seen = played
    file = tmp_path / f"{task.name}_demo.hdf5"
    write(file, [(seen, ACTIONS)])
    import_libero()
    from libero.libero.utils.dataset_utils import get_dataset_info

    get_dataset_info(str(file))
    assert "total transitions: 6" in capsys.readouterr().out, "LIBERO's own reader takes the file"

    out = tmp_path / "dataset"
    assert main(["import-hdf5", str(file), "--output", str(out)]) == 0
    env = LiberoEnv(suite=SUITE, task_id=TASK, resolution=SIDE)
    shown = [env.reset(seed=54)[0], *(env.step(action)[0] for action in ACTIONS[:-1])]
    env.close()
    rows = pq.read_table(out / "data/chunk-000/episode_000000.parquet").to_pydict()
    states = np.array(rows["observation.state"], np.float32)
    np.testing.assert_array_equal(states, [one["state.state"] for one in shown])
    np.testing.assert_array_equal(np.array(rows["action"], np.float32), ACTIONS)
    for key in ("image", "wrist_image"):
        import cv2

        for row, one in zip(rows[f"observation.images.{key}"], shown, strict=True):
            image = cv2.imdecode(np.frombuffer(row["bytes"], np.uint8), cv2.IMREAD_COLOR_RGB)
            np.testing.assert_array_equal(image, one[f"video.{key}"], err_msg=key)
    tasks = (out / "meta/tasks.jsonl").read_text()
    assert json.loads(tasks)["task"] == language_of(task.name)


@pytest.mark.libero
@pytest.mark.long
def test_a_wrong_turn_is_named(played, tmp_path, capsys):
    task, seen = played
    file = tmp_path / f"{task.name}_demo.hdf5"
    # A file that says that its images begin with the top row, which they do not.
    write(file, [(seen * 8, np.tile(ACTIONS, (8, 1)))], convention="opencv")
    out = tmp_path / "dataset"
    assert main(["import-hdf5", str(file), "--output", str(out)]) == 0
    words = ["doctor", "data", str(out), "--env", f"dzrobot/{SUITE}-v0"]
    words += ["--env-arg", f"task_id={TASK}", "--env-arg", f"resolution={SIDE}"]
    assert main(words) == 1
    assert "image: video.image is upside down" in " ".join(capsys.readouterr().out.split())


def test_rows_at_rest_are_left_out_and_counted(tmp_path, capsys):
    file = tmp_path / "lift_it_demo.hdf5"
    seen, _ = invented(6)
    write(file, [(seen, ACTIONS)], instruction="raise it")
    out = tmp_path / "dataset"
    words = ["import-hdf5", str(file), "--drop-idle", "--prompt", "bddl", "--output", str(out)]
    assert main(words) == 0
    assert "2 idle rows left out, 33.3%" in capsys.readouterr().out
    rows = pq.read_table(out / "data/chunk-000/episode_000000.parquet").to_pydict()
    np.testing.assert_array_equal(np.array(rows["action"], np.float32), ACTIONS[[0, 1, 4, 5]])
    facts = json.loads((out / "meta/recording_facts.jsonl").read_text())
    assert facts == {
        "episode_index": 0,
        "success": True,
        "source": "lift_it_demo.hdf5:demo_0",
        "idle_rows_dropped": 2,
    }
    assert json.loads((out / "meta/tasks.jsonl").read_text())["task"] == "raise it"


def test_a_gripper_that_changes_is_no_rest():
    actions = np.zeros((5, 7), np.float32)
    actions[:, 6] = [-1, -1, 1, 1, -1]
    actions[1, 0] = 0.5
    assert idle_rows(actions).tolist() == [True, False, False, True, False]


def test_goes_on_where_it_was_interrupted(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, count in (("a_task", 3), ("b_task", 11)):
        write(folder / f"{name}_demo.hdf5", [invented(3, seed=k) for k in range(count)])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["import-hdf5", str(folder), "--output", str(whole)]) == 0
    words = ["import-hdf5", str(folder), "--output", str(parts)]
    with monkeypatch.context() as patch:
        from dzrobot.recording import EpisodeWriter

        saved = EpisodeWriter.save_episode

        def interrupted(writer, **facts):
            if writer.episodes == 5:
                raise KeyboardInterrupt
            return saved(writer, **facts)

        patch.setattr(EpisodeWriter, "save_episode", interrupted)
        assert main(words) == 130
    assert main(words) == 0
    names = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(parts) for p in parts.rglob("*") if p.is_file())
    for name in names:
        if name.suffix in (".parquet", ".jsonl"):
            assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    last = (whole / "meta/recording_facts.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["source"] == "b_task_demo.hdf5:demo_10", "in the order of numbers"
    assert main([*words, "--drop-idle"]) == 2
    assert "give another --output" in capsys.readouterr().err


def test_what_is_written_can_be_trained_on(tmp_path):
    write(tmp_path / "a_task_demo.hdf5", [invented(80, side=64)])
    out = tmp_path / "dataset"
    assert main(["import-hdf5", str(tmp_path), "--video", "--output", str(out)]) == 0
    assert main(["inspect-data", str(out), "--embodiment", "libero_sim@64x64"]) == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f.__delitem__("data"), "has no group 'data'"),
        (lambda f: f["data"].move("demo_0", "other"), "has no group data/demo_N, but other"),
        (lambda f: f["data/demo_0"].__delitem__("actions"), "demo_0/actions is missing"),
        (lambda f: f["data/demo_0/obs"].__delitem__("ee_states"), "obs/ee_states is missing"),
        (lambda f: f["data/demo_0/obs"].__delitem__("agentview_rgb"), "agentview_rgb is missing"),
        (lambda f: f["data"].attrs.__setitem__("macros_image_convention", "x"), "known are opengl"),
        (lambda f: f["data"].attrs.__setitem__("problem_info", "{"), "problem_info"),
    ],
)
def test_a_damaged_file_is_one_message(tmp_path, capsys, damage, said):
    file = tmp_path / "a_task_demo.hdf5"
    write(file, [invented(3)])
    with h5py.File(file, "r+") as opened:
        damage(opened)
    words = ["import-hdf5", str(file), "--prompt", "bddl", "--output", str(tmp_path / "out")]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_what_is_no_hdf5_is_said(tmp_path, capsys):
    for content, said in ((b"no", "not a whole HDF5 file"), (None, "holds no .hdf5 file")):
        folder = tmp_path / said.replace(" ", "_")
        folder.mkdir()
        if content:
            (folder / "a_demo.hdf5").write_bytes(content)
        assert main(["import-hdf5", str(folder), "--output", str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err


def spoil_by_length(path):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.7)])


def spoil_inside(path):
    """The length stays: what lists the tables of a demonstration is overwritten."""
    content = bytearray(path.read_bytes())
    at = content.rfind(b"TREE")
    content[at : at + 400] = b"\xff" * 400
    path.write_bytes(content)


def spoil_rows(path):
    """The length and all tables stay: packed images are overwritten, which only reading shows."""
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/obs/agentview_rgb"]
        packed = file["data/demo_0/obs"].create_dataset(
            "agentview_rgb", data=np.zeros((3, 8, 8, 3), np.uint8), chunks=(1, 8, 8, 3),
            compression="gzip",
        )  # fmt: skip
        at, size = packed.id.get_chunk_info(1)[2:]
    content = bytearray(path.read_bytes())
    content[at : at + size] = b"\xff" * size
    path.write_bytes(content)


def spoil_by_pointer(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n")


def without_images(path):
    with h5py.File(path, "w") as file:
        demo = file.create_group("data/demo1")
        demo["states"], demo["actions"] = np.zeros((3, 40)), np.zeros((3, 7))


def with_encoded(path):
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/obs/agentview_rgb"]
        images = file["data/demo_0/obs"].create_dataset(
            "agentview_rgb", (3,), dtype=h5py.vlen_dtype(np.uint8)
        )
        for row in range(3):
            images[row] = np.frombuffer(b"\xff\xd8\xff\xe0 a picture", np.uint8)


SPOILED = {
    spoil_by_length: "damaged or cut short", spoil_inside: "damaged",
    spoil_by_pointer: "git lfs pull", without_images: "no images",
    with_encoded: "encoded as JPEG", spoil_rows: "damaged",
}  # fmt: skip


def test_all_that_cannot_be_imported_is_named_and_the_rest_is(tmp_path, capsys):
    folder, out = tmp_path / "files", tmp_path / "out"
    folder.mkdir()
    for number in range(len(SPOILED) + 2):
        write(folder / f"{number}_task_demo.hdf5", [invented(3, seed=number)])
    paths = sorted(folder.iterdir())
    for path, spoil in zip(paths[1:], SPOILED, strict=False):
        spoil(path)
    words = ["import-hdf5", str(folder), "--output", str(out)]
    assert main(words) == 2
    shown = capsys.readouterr().err
    # What only reading shows is found when it is read.
    assert "5 of 8 files cannot be imported; --skip-damaged imports the others" in shown
    for path, said in zip(paths[1:6], SPOILED.values(), strict=False):
        assert any(path.name in line and said in line for line in shown.splitlines()), said
    assert "Traceback" not in shown
    assert not out.exists()

    for _ in range(2):
        # A second time it resumes, and finds all done.
        assert main([*words, "--skip-damaged"]) == 0
        shown = capsys.readouterr().out
        assert "2 episodes, 6 rows" in shown
        assert shown.count("left out: ") == 6
    facts = (out / "meta/recording_facts.jsonl").read_text().splitlines()
    sources = [json.loads(line)["source"] for line in facts]
    assert sources == ["0_task_demo.hdf5:demo_0", "7_task_demo.hdf5:demo_0"]


RENAMED = "LIVING_ROOM_SCENE4_pick_up_the_salad_dressing_and_put_it_in_the_tray"


def scene_of(names):
    """Return a scene as MuJoCo writes it, with the bodies of some objects."""
    bodies = "".join(
        f'<body name="{name}_main" pos="0 0 0"><body name="{name}_lid"/></body>' for name in names
    )
    return f'<mujoco><worldbody><body name="robot0_base"/>{bodies}</worldbody></mujoco>'


def test_a_scene_whose_objects_were_renamed_is_named(tmp_path):
    """LIBERO's files of this task were recorded when its bottle had another name."""
    names = [load_task("libero_90", number).name for number in range(90)]
    env = LiberoEnv(suite="libero_90", task_id=names.index(RENAMED))
    facts, robot = facts_of(env), load_embodiment("libero_sim")
    now = list(facts.scene_objects)
    assert "new_salad_dressing_1" in now
    before = [name.removeprefix("new_") for name in now]
    for said, scene in (("before", scene_of(before)), ("now", scene_of(now)), ("silent", None)):
        folder = tmp_path / said
        folder.mkdir()
        write(folder / f"{RENAMED}_demo.hdf5", [invented(3)], model_file=scene)
        words = ["import-hdf5", str(folder), "--output", str(folder / "set")]
        assert main(words) == 0
        if said != "before":
            assert len(load_recording(folder / "set", 0, robot, facts).actions) == 3
            continue
        with pytest.raises(DatasetError, match="recorded in another scene") as refused:
            load_recording(folder / "set", 0, robot, facts)
        assert "has new_salad_dressing_1, which" in str(refused.value)
        assert "that had salad_dressing_1." in str(refused.value)
