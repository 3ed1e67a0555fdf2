"""A robot and an environment of a user's own, in the current folder, through every command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import av
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dzrobot.cli import main

pytestmark = pytest.mark.copies
PACKAGE = """
import gymnasium as gym
import numpy as np

from dzrobot import Embodiment, Part, Timing, View

HZ = 5.0
ROBOT = Embodiment(
    tag="gantry",
    views=(View(key="video.top", feature="top", resolution=(24, 40), size=(24, 40)),),
    state=(
        # In the dataset the other way round than in the state.
        Part(key="state.speed", feature="sensors", start=2, dim=2),
        Part(key="state.place", feature="sensors", start=0, dim=2),
    ),
    action=(
        Part(key="action.push", feature="commands", start=1, dim=2, hold="zero"),
        Part(key="action.hook", feature="commands", start=0, dim=1, hold="zero"),
    ),
    tiles=(("video.top",),),
    prompt="{task}",
    timing=Timing(control_hz=HZ, action_horizon=8),
)
"""

ENVIRONMENT = '''
class Gantry(gym.Env):
    metadata = {"render_modes": []}
    hand_position = slice(2, 4)

    def __init__(self, *, goal: float = 1.0):
        import gantry_tools  # of the current folder too, when it is needed

        self.embodiment, self.control_hz, self.init_states = ROBOT, HZ, 4
        self.observation_space = gym.spaces.Dict({
            "video.top": gym.spaces.Box(0, 255, (24, 40, 3), np.uint8),
            "state.speed": gym.spaces.Box(-9, 9, (2,), np.float32),
            "state.place": gym.spaces.Box(-9, 9, (2,), np.float32),
            "annotation.task": gym.spaces.Text(99),
        })
        self.action_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.goal = goal * gantry_tools.SCALE

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = (options or {}).get("init_state_id", (seed or 0) % 4)
        self.place = np.array([0.1 * self.start, 0.0], np.float32)
        self.speed = np.zeros(2, np.float32)
        return self.seen(), self.info()

    def step(self, action):
        self.speed = np.float32(0.2) * action[:2]
        self.place = self.place + self.speed
        info = self.info()
        return self.seen(), float(info["is_success"]), info["is_success"], False, info

    def seen(self):
        return {"video.top": np.full((24, 40, 3), 7 * self.start, np.uint8),
                "state.speed": self.speed, "state.place": self.place,
                "annotation.task": "push the hook over"}

    def info(self):
        return {"is_success": bool(self.place[0] >= self.goal), "task": "push the hook over",
                "init_state_id": self.start, "reset_reason": ""}


class Push:
    """Goes right; takes the robot, or as a demonstrator the environment."""

    def __init__(self, robot):
        pass

    def reset(self, session=None, *, episode=None):
        pass

    def act(self, obs, *, session="default"):
        return np.array([0.5, 0.25 - obs["state.place"][0], 1.0], np.float32)


def pull(observation):
    return [0.25, -0.25, -1.0]


# Registered as a class, as Gymnasium's own tutorials do.
gym.register("Gantry-v0", entry_point=Gantry, max_episode_steps=40)
'''

ENV = "gantry_world:Gantry-v0"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with a user's package, which is the current one."""
    import gymnasium as gym

    from dzrobot.rollout import environment

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "gantry_world.py").write_text(PACKAGE + ENVIRONMENT)
    (tmp_path / "gantry_tools.py").write_text("SCALE = 1.0\n")
    environment.accepted.cache_clear()
    yield tmp_path
    for name in ("gantry_world", "gantry_tools"):
        sys.modules.pop(name, None)
    gym.registry.pop("Gantry-v0", None)


def rows(folder):
    (path,) = (folder / "data").rglob("*.parquet")
    return pq.read_table(path)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_it_is_evaluated_here_and_in_a_worker_process(world, workers, capsys):
    code = main(
        ["eval", "--env", ENV, "--policy", "gantry_world:Push", "--episodes", "2",
         "--workers", workers, "--output", "results"]
    )  # fmt: skip
    assert code == 0, capsys.readouterr()
    records = [json.loads(line) for line in Path("results/records.jsonl").read_text().splitlines()]
    assert [record["success"] for record in records] == [True, True]
    assert [record["steps"] for record in records] == [10, 9]
    card = json.loads(Path("results/card.json").read_text())
    assert card["policy"]["embodiment"] == "gantry"
    # What the policy sees is filmed, although the environment draws nothing for people.
    assert all(Path("results", record["video"]).stat().st_size for record in records)


DRAWS = """
class Picky(Gantry):
    \"\"\"As Gymnasium's tutorial has it: what is not in its modes is refused.\"\"\"

    metadata = {"render_modes": ["human"], "render_fps": 4}

    def __init__(self, render_mode=None):
        assert render_mode is None or render_mode in self.metadata["render_modes"]
        super().__init__()


class Keeps(Gantry):
    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        super().__init__()


class Promises(Keeps):
    metadata = {"render_modes": ["rgb_array"]}


class Draws(Promises):
    def render(self):
        return np.full((30, 30, 3), 255, np.uint8)


class Silent(Gantry):
    metadata = {}


def made():
    return Gantry()


def passes(**arguments):
    return Gantry(**arguments)


def draws(render_mode=None):
    return Draws(render_mode)
"""


def test_whatever_it_draws_the_film_shows_what_the_policy_sees(world, capsys):
    """In whichever way it is made and says what it draws; beside its own image, if it has one."""
    with Path("gantry_world.py").open("a") as module:
        module.write(DRAWS)
    widths = {}
    for name in (
        "Gantry-v0",
        "Picky",
        "Keeps",
        "Promises",
        "Silent",
        "made",
        "passes",
        "Draws",
        "draws",
    ):
        words = ["--env", f"gantry_world:{name}", "--policy", "hold", "--max-steps", "2"]
        output = Path("results", name)
        code = main(["eval", *words, "--episodes", "1", "--workers", "0", "--output", str(output)])
        assert code == 0, (name, capsys.readouterr())
        (film,) = (output / "videos").glob("*.mp4")
        with av.open(film) as opened:
            assert opened.streams.video[0].height in (24, 30)
            widths[name] = opened.streams.video[0].width
    assert widths.pop("Draws") == widths.pop("draws") == 30 + 50
    assert set(widths.values()) == {40}


def test_it_is_recorded_and_replayed_by_what_the_recording_says_of_its_columns(world, capsys):
    record = ["record", "--env", ENV, "--call", "gantry_world:pull", "--max-steps", "6"]
    record += ["--attempts", "1", "--keep-failures"]
    assert main([*record, "--seed", "3", "--output", "told"]) == 0, capsys.readouterr()
    assert "6 frames" in capsys.readouterr().out
    info = json.loads(Path("told/meta/info.json").read_text())
    assert info["fps"] == 5
    assert info["features"]["top"]["shape"] == [24, 40, 3]
    assert info["features"]["commands"]["shape"] == [3]
    # hook first, in the column's own order.
    (first, *_) = rows(Path("told")).column("commands").to_pylist()
    assert first == [-1, 0.25, -0.25]
    assert main(["replay", "told", "--env", ENV]) == 0
    said = capsys.readouterr().out
    assert "6 of 6 recorded steps carried out" in said
    assert "hand: 0.0000 m away on average, 0.0000 m at most" in said
    assert "state.place: largest difference 0.0000" in said


def test_a_foreign_layout_is_replayed_through_its_modality_json(world, capsys):
    """The columns are renamed and shifted; only ``modality.json`` says so."""
    record = ["record", "--env", ENV, "--policy", "gantry_world:Push", "--output", "told"]
    record += ["--attempts", "1", "--keep-failures", "--max-steps", "6"]
    assert main(record) == 0
    path = Path("told/meta/modality.json")
    modality = json.loads(path.read_text())
    (data,) = Path("told/data").rglob("*.parquet")
    table = pq.read_table(data)
    features = json.loads(Path("told/meta/info.json").read_text())
    swapped = [[push[1], push[2], push[0]] for push in table.column("commands").to_pylist()]
    index = table.column_names.index("commands")
    kind = table.schema.field("commands").type
    pq.write_table(table.set_column(index, "moves", pa.array(swapped, kind)), data)
    features["features"]["moves"] = features["features"].pop("commands")
    Path("told/meta/info.json").write_text(json.dumps(features))
    modality["action"] = {
        "push": {"original_key": "moves", "start": 0, "end": 2},
        "hook": {"original_key": "moves", "start": 2, "end": 3},
    }
    path.write_text(json.dumps(modality))
    capsys.readouterr()
    assert main(["replay", "told", "--env", ENV]) == 0
    said = capsys.readouterr().out
    assert "hand: 0.0000 m away on average, 0.0000 m at most" in said


def test_demonstrations_are_collected_from_it(world, capsys):
    words = ["collect", "--env", ENV, "--policy", "gantry_world:Push", "--episodes", "2"]
    assert main([*words, "--output", "shown", "--noise", "0.1"]) == 0, capsys.readouterr()
    info = json.loads(Path("shown/meta/info.json").read_text())
    assert info["total_episodes"] == 2
    assert info["features"]["commands"]["shape"] == [3]
    # It ends with its first success, so nothing can be recorded after that.
    assert main([*words, "--output", "held", "--hold-steps", "3"]) == 2
    assert "stop_on_success" in capsys.readouterr().err


def test_collecting_from_the_light_environment_ends_in_a_message(tmp_path, capsys):
    words = ["collect", "--env", "dzrobot/point-v0", "--output", str(tmp_path / "shown")]
    assert main(words) == 2
    assert "reads the simulator's physics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keyboard"], "--keyboard drives arms of 7 numbers"),
        (["--teleop", "keyboard"], "--keyboard drives arms of 7 numbers"),
        (["--policy", "hold", "--env-arg", "gaol=2"], "Did you mean 'goal'"),
        (["--policy", "hold", "--env-arg", "goal=far"], "goal"),
        (["--policy", "hold", "--env", "gantry_wrld:Gantry-v0"], "there is no module"),
        (["--policy", "hold", "--env", "gantry_world:Gantree-v0"], "unknown environment"),
        (["--policy", "hold", "--env", "CartPole-v1"], "does not say which robot it is"),
    ],
)
def test_what_does_not_fit_is_one_message(world, words, said, capsys):
    assert main(["record", "--env", ENV, "--output", "told", *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed


def test_the_command_itself_looks_in_the_current_folder(world):
    """A console script does not; the path is the one that ``python -m`` would not change."""
    code = "import sys; sys.path = [p for p in sys.path if p]; from dzrobot.cli import main; "
    words = ["eval", "--env", ENV, "--policy", "hold", "--episodes", "1", "--max-steps", "2"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code} sys.exit(main({words!r}))"],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_exit_at_import_is_an_error_of_the_command(tmp_path, monkeypatch, capsys):
    """A script without an `if __name__` guard, named as a policy."""
    monkeypatch.chdir(tmp_path)
    Path("unguarded_script.py").write_text("import sys\n\nsys.exit(0)\n")
    words = ("--env", "dzrobot/point-v0", "--policy", "unguarded_script:Policy", "--episodes", "1")
    assert main(["eval", *words]) == 2
    assert re.search(r"sys\.exit\(0\) \(.*unguarded_script\.py:3\)", capsys.readouterr().err)
