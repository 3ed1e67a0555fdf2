"""``dzrobot doctor policy``: one thing is put wrong at a time, and named; no other is."""

import base64
import json
import shutil
import threading
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import cv2
import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

import dzrobot  # noqa: F401
from dzrobot.cli import main
from dzrobot.commands.serve_env import make_hosted
from dzrobot.diagnostics.acting_trials import Trials
from dzrobot.diagnostics.live_inputs import LiveInputs
from dzrobot.diagnostics.own_rows import Recording
from dzrobot.diagnostics.policy_files import Files
from dzrobot.diagnostics.statistics_match import match_statistics
from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.fakes import PointEnv
from dzrobot.envs.remote.env_server import EnvServer, EnvServerOptions
from dzrobot.modality.input_variants import fit_images, fit_states
from dzrobot.policies.base import Abilities, Plan, Policy
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.trained_inputs import TrainedInputs
from dzrobot.policies.serving.endpoint import ServeOptions
from dzrobot.policies.serving.server import PolicyServer, in_background
from dzrobot.recording import EpisodeWriter
from dzrobot.rollout.demonstrations.record import (
    EXECUTED,
    CallableActor,
    RecordedEnv,
    record_episode,
)
from dzrobot.rollout.environment import EnvironmentFacts
from dzrobot.rollout.policy_spec import PolicySpec, resolve_policy
from dzrobot.rollout.protocol import EpisodeRules
from dzrobot.training.data.dataset import DatasetReader
from dzrobot.training.data.fingerprint import trained_inputs
from dzrobot.training.data.normalization import measure
from dzrobot.training.data.video_decoding import Videos

SIDE = 128
ROBOT = load_embodiment("libero_mini")
HERE = __name__


class Looking(Policy):
    """Goes from where the state says it is to where the image from above shows the red mark."""

    embodiment, execute = ROBOT, 2

    @property
    def can(self):
        """Return that it plans."""
        return Abilities(plans=True, serves=True)

    def plan(self, asks):
        """Return the same step eight times."""
        return [Plan.of(np.repeat(self.toward(ask.observation)[None], 8, 0)) for ask in asks]

    def toward(self, seen):
        """Return the step to the mark."""
        red = seen["video.image"][..., 0].astype(int) - seen["video.image"][..., 1] > 100
        rows, columns = np.nonzero(red)
        mark = np.zeros(2) if not len(rows) else np.array([columns.mean(), rows.mean()])
        at = 2 * mark / (SIDE - 1) - 1
        step = np.clip((at - seen["state.state"][:2]), -1, 1)
        return np.array([*step, 0, 0, 0, 0, 1], np.float32)


def looking(_):
    """Make the policy, for a robot or beside an environment."""
    return Looking()


class Mirrored(Looking):
    """The same, with one number of its actions the wrong way around."""

    def toward(self, seen):
        """Return a step whose x is mirrored."""
        return super().toward(seen) * np.array([-1, 1, 1, 1, 1, 1, 1], np.float32)


def mirrored(_):
    """Make it."""
    return Mirrored()


STARTS = []
"""States that recorded episodes began with."""


class Sleeping(Looking):
    """The same, once it has left its start: there, it learned to stand still."""

    def toward(self, seen):
        """Return no motion where an episode began."""
        at = seen["state.state"]
        asleep = any(np.allclose(at, start, atol=1e-3) for start in STARTS)
        return super().toward(seen) * (not asleep)


def sleeping(_):
    """Make it."""
    return Sleeping()


class Waiting(Looking):
    """An operator who looks around before each episode."""

    def __init__(self):
        self.waited = 0

    def toward(self, seen):
        """Return no motion for ten rows."""
        self.waited += 1
        if self.waited == 1:
            STARTS.append(seen["state.state"])
        return super().toward(seen) * (self.waited > 10)


class Circling(Looking):
    """Goes around in a circle."""

    def __init__(self):
        self.steps = 0

    def toward(self, seen):
        """Return the next step of the circle."""
        self.steps += 1
        angle = self.steps / 5
        return np.array([0.5 * np.cos(angle), 0.5 * np.sin(angle), 0, 0, 0, 0, 0], np.float32)


class Wrong(gym.Wrapper):
    """The point, and one thing that is wrong with it."""

    takes_missing_frames = True

    def __init__(self, env, fault):
        super().__init__(env)
        self.fault, self.first, self.steps = fault, {}, 0

    def reset(self, **given):
        seen, info = self.env.reset(**given)
        self.steps = 0
        self.first = {key: seen[key] for key in ROBOT.video_keys}
        return self.seen(seen), info

    def step(self, action):
        self.steps += 1
        if self.fault == "goal at reset" and self.steps <= 5:
            action = action + np.array([0.8, 0, 0, 0, 0, 0, 0], np.float32)
        moved = np.clip(action, -1, 1) * np.float32(-0.6 if self.fault == "actions" else 0.6)
        seen, reward, over, late, info = self.env.step(moved)
        if self.fault == "metric":
            over, info = False, {**info, "is_success": False}
        return self.seen(seen), reward, over, late, info

    def seen(self, seen):
        seen = dict(seen)
        if self.fault == "upside down":
            seen |= {key: seen[key][::-1].copy() for key in ROBOT.video_keys if key in seen}
        if self.fault == "millimeters":
            seen["state.state"] = seen["state.state"] * np.array([1000] * 3 + [1] * 5, np.float32)
        if self.fault == "words":
            seen["annotation.task"] = "do something else"
        if self.fault == "static":
            seen |= {key: image for key, image in self.first.items() if key in seen}
        return seen


HAND = HandMotion(
    position=slice(0, 3), rotation=slice(3, 6), rotation_form="rotation vector",
    fingers=slice(6, 8), translation=slice(0, 3), turn=slice(3, 6), gripper=6, closes=1,
    translation_m=0.06, rotation_rad=0.5,
)  # fmt: skip


def point(*, fault: str = "", resolution: int = SIDE):
    """Make the environment."""
    inner = gym.make("dzrobot/point-v0", resolution=resolution, disable_env_checker=True)
    if fault in ("goal at reset", "known hand"):
        inner.unwrapped.hand = HAND
    return Wrong(inner.unwrapped, fault)


def recorded(folder, actor, seeds, fault=""):
    """Record episodes of the point."""
    with EpisodeWriter(folder, ROBOT, fps=ROBOT.timing.control_hz) as writer:
        env = RecordedEnv(point(fault=fault), writer)
        for seed in seeds:
            rules = EpisodeRules(seed=seed, max_steps=60)
            acting = CallableActor(actor().toward)
            assert record_episode(env, acting, writer, rules, keep_all=True).kept
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("checkup") / "data", Looking, range(3))


def asked(capsys, *given):
    code = main(["doctor", "policy", *map(str, given), "--embodiment", "libero_mini", "--json"])
    shown = capsys.readouterr()
    assert code != 2, shown.err
    found = json.loads(shown.out.strip().splitlines()[-1])
    assert found["exit"] == code
    return found


def examined(capsys, data, fault="", policy="looking"):
    where = ["--env", f"{HERE}:point", "--env-arg", f"fault={fault!r}"]
    return asked(capsys, "--policy", f"{HERE}:{policy}", "--dataset", data, *where)


def line(found, step, what):
    return next(one for one in found["measurements"] if (one["step"], one["what"]) == (step, what))


def test_a_healthy_policy_has_no_cause_and_no_difference(capsys, data):
    found = examined(capsys, data)
    assert (found["exit"], found["causes"]) == (0, [])
    assert not [one for one in found["measurements"] if one["differs"]]
    assert "2 of 2 starts" in found["sentence"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fault", "key", "words"),
    [
        ("upside down", "video.image", "upside down"),
        ("millimeters", "state.state", "1000 times"),
        ("static", "video.image", "same image throughout"),
    ],
)
def test_what_is_seen_otherwise_is_named(capsys, data, fault, key, words):
    found = examined(capsys, data, fault)
    compared = line(found, "inputs", key)
    assert compared["differs"]
    assert words in compared["found"]
    if fault != "static":
        # The mark does not move: a static image differs, and does not matter to this policy.
        assert found["exit"] == 1
        assert words in found["causes"][0]
        assert line(found, "exchange", key)["matters"]
    else:
        assert (found["exit"], found["causes"]) == (0, [])
        # One reason, said once.
        assert f"video.image and video.wrist_image are live the {words}" in found["sentence"]


def test_other_words_differ_and_do_not_matter(capsys, data):
    found = examined(capsys, data, "words")
    assert (found["exit"], found["causes"]) == (0, [])
    assert line(found, "exchange", "annotation.task")["matters"] is False


@pytest.mark.parametrize("more", [0, 1])
def test_two_successes_do_not_clear_what_differs(capsys, data, monkeypatch, more):
    """From as many other starts it must succeed mostly, too."""
    turns = iter([2, more])
    monkeypatch.setattr(Trials, "won", lambda *_: next(turns))
    found = examined(capsys, data, "words")
    where, how = f"succeeds from {2 + more} of 4 starts", "what differs does not matter"
    assert where in found["sentence"]
    assert (how in found["sentence"], found["exit"]) == ((True, 0) if more else (False, 3))
    assert found["causes"] == []


def test_actions_that_mean_something_else_in_the_environment_fail_the_replay(capsys, data):
    found = examined(capsys, data, "actions")
    assert "0 of 3 succeed again" in line(found, "replay", "success")["found"]
    # Without knowing the hand, another simulator looks the same.
    assert (found["exit"], len(found["causes"])) == (1, 2)


def test_a_success_that_is_never_counted_is_the_environments(capsys, data):
    found = examined(capsys, data, "metric")
    assert "0 of 3 succeed again" in line(found, "replay", "success")["found"]
    assert (found["exit"], len(found["causes"])) == (1, 1)
    assert "never counts the success" in found["causes"][0]


def test_a_goal_that_is_elsewhere_at_reset_is_told_from_actions_that_mean_something_else(
    capsys, data
):
    found = examined(capsys, data, "goal at reset")
    assert line(found, "replay", "holding")["differs"]
    # Whether it matters is another thing: the point finds the mark all the same.
    told = [*found["causes"], found["sentence"]]
    assert any("hold" in words or "goal at reset" in words for words in told)


def test_a_policy_that_learned_answers_in_another_sense_than_was_executed_is_told(
    capsys, data, tmp_path
):
    """What was executed leads to success again: only the column beside it tells."""
    folder = shutil.copytree(data, tmp_path / "data")
    for file in sorted((folder / "data").rglob("*.parquet")):
        table = pq.read_table(file)
        done, at = table["action"], table.schema.get_field_index("action")
        rows = np.array(done.to_pylist(), np.float32) * np.array([-1, 1, 1, 1, 1, 1, 1], np.float32)
        field = table.schema.field(at)
        table = table.set_column(at, field, pa.array(rows.tolist(), field.type))
        pq.write_table(table.append_column(EXECUTED, done), file)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][EXECUTED] = info["features"]["action"]
    (folder / "meta/info.json").write_text(json.dumps(info))
    found = examined(capsys, folder, "known hand", "mirrored")
    assert line(found, "acting", "as it is")["found"] == "0 of 2 starts succeed"
    assert (found["exit"], len(found["causes"])) == (1, 1)
    assert "than what was executed (translation mirrored)" in found["causes"][0]
    assert "change the sign of action[0]" in found["sentence"]


def test_episodes_that_are_too_short_are_named_before_a_plan_is_made(capsys, data):
    where = ["--env", f"{HERE}:point", "--dataset", data, "--max-steps", "3"]
    found = asked(capsys, "--policy", f"{HERE}:looking", *where)
    assert found["exit"] == 1
    assert "too short" in found["causes"][0]
    assert sum(one["plans"] for one in found["measurements"]) == 0


def test_rows_in_which_the_robot_stands_still_are_the_cause_of_a_policy_that_does(capsys, tmp_path):
    STARTS.clear()
    data = recorded(tmp_path / "data", Waiting, range(3))
    found = examined(capsys, data, policy="sleeping")
    assert line(found, "files", "idle rows")["differs"]
    assert "stands still" in found["causes"][0]
    assert "first 10 rows" in found["sentence"]


def test_a_recording_takes_the_place_of_an_environment_and_nothing_moves(
    capsys, data, tmp_path, monkeypatch
):
    where = ["--policy", f"{HERE}:looking", "--dataset", data]
    there = recorded(tmp_path / "there", Looking, range(10, 13))
    turned = recorded(tmp_path / "turned", Looking, range(3), "upside down")
    units = recorded(tmp_path / "units", Looking, range(3), "millimeters")
    static = recorded(tmp_path / "static", Looking, range(3), "static")
    monkeypatch.setattr(PointEnv, "step", _never)
    healthy = asked(capsys, *where, "--recording", there)
    assert (healthy["exit"], healthy["causes"]) == (0, [])
    assert "was left out" in healthy["sentence"]
    assert not [one for one in healthy["measurements"] if one["differs"]]
    assert "3 of 3 recorded" in line(healthy, "acting", "as recorded")["found"]
    assert "upside down" in asked(capsys, *where, "--recording", turned)["sentence"]
    assert "1000 times" in asked(capsys, *where, "--recording", units)["sentence"]
    still = asked(capsys, *where, "--recording", static)
    assert "same image throughout" in line(still, "inputs", "video.image")["found"]


def test_two_pairs_of_drawn_starts_are_not_called_different(data):
    """Two starts that happen to be alike say little of how far others lie: formerly 96 of 100."""
    recording = Recording(DatasetReader(data, ROBOT), None, 2)
    seen = LiveInputs.recorded(recording, recording, None)
    draw, spread = np.random.default_rng(0), recording.every_state.std(0)

    def named(change):
        live = [{**one, "state.state": change(one["state.state"])} for one in seen.live]
        compared = {one.key: one.words for one in replace(seen, live=live).compare()}
        return compared["state.state"]

    moved = [named(lambda state: state + draw.normal(0, spread)) for _ in range(100)]
    assert sum(map(bool, moved)) <= 5
    assert "1000 times" in named(lambda state: state * np.where(np.arange(8) < 2, 1000, 1))


def test_a_recording_is_compared_with_what_its_hand_was_commanded(capsys, data, tmp_path):
    turned = recorded(tmp_path / "turned", Circling, range(3), "actions")
    found = asked(
        capsys, "--policy", f"{HERE}:looking", "--dataset", data, "--recording", turned,
        "--env", f"{HERE}:point", "--env-arg", "fault='goal at reset'",
    )  # fmt: skip
    assert found["exit"] == 1
    assert line(found, "commands", "translation, of the data")["differs"] is False
    assert "all three reversed" in found["sentence"]


def _never(*_):
    raise AssertionError("nothing is to move")


def test_a_checkpoint_says_whether_it_was_trained_on_these_instructions(data, tmp_path):
    left = shutil.ignore_patterns("libero_object", "*.py")
    folder = shutil.copytree(default_checkpoint(), tmp_path / "c", ignore=left)
    recording = Recording(DatasetReader(data, ROBOT), None, 3)
    inputs = trained_inputs([recording.reader], ROBOT)
    file = folder / "dzrobot_passport.json"
    for instructions, differs in ((inputs.instructions, False), (("close the drawer",), True)):
        passport = json.loads(file.read_text())
        trained = TypeAdapter(TrainedInputs).dump_python(
            replace(inputs, instructions=instructions), mode="json"
        )
        passport["embodiments"][ROBOT.tag]["inputs"] = trained
        file.write_text(json.dumps(passport))
        found = resolve_policy(PolicySpec(name=str(folder)), ROBOT)
        files = Files(
            found=found, recording=recording, facts=EnvironmentFacts(), episodes=(),
            most_steps=None,
        )  # fmt: skip
        (said,) = [one for one in files.said() if one.what == "trained instructions"]
        assert said.differs is differs


class Elsewhere(Looking):
    """What answers at an address where another policy is expected."""

    @property
    def card(self):
        """Return what it says of itself."""
        return {"server": {"checkpoint": "libero_object"}}

    def toward(self, seen):
        """Return what has nothing to do with the data."""
        return np.sin(np.arange(7) * float(seen["state.state"].sum()) * 1e3).astype(np.float32)


def test_a_server_that_serves_something_else_is_named_by_what_it_says(capsys, data):
    options = ServeOptions(port=0, array_port=None)
    card = {"checkpoint": "libero_object"}
    with in_background(PolicyServer(Elsewhere(), options, card=card)) as server:
        address = f"ws://127.0.0.1:{server.ports[0]}"
        found = asked(capsys, "--dataset", data, "--server", address)
    assert found["exit"] == 1
    assert (
        "another server than was meant: it says that it serves 'libero_object'" in found["sentence"]
    )


def test_plans_of_a_server_are_counted_where_it_acts(capsys, data):
    where = ["--dataset", data, "--env", f"{HERE}:point"]
    with in_background(PolicyServer(Looking(), ServeOptions(port=0, array_port=None))) as server:
        found = asked(capsys, *where, "--server", f"ws://127.0.0.1:{server.ports[0]}")
    here = asked(capsys, *where, "--policy", f"{HERE}:looking")
    (there, here) = (line(one, "acting", "as it is")["plans"] for one in (found, here))
    assert there == here > 0


def elsewhere(_):
    """Make it."""
    return Elsewhere()


def test_a_policy_that_is_given_without_a_server_is_not_taken_for_another_server(capsys, data):
    found = asked(
        capsys, "--dataset", data, "--policy", f"{HERE}:elsewhere", "--embodiment", "libero_mini"
    )
    assert found["exit"] == 1
    assert "too little training" in found["sentence"]
    for words in ("another server", "dzrobot inspect"):
        assert words not in found["sentence"]


def test_a_sign_of_the_policys_own_is_named(capsys, data):
    found = examined(capsys, data, policy="mirrored")
    assert line(found, "own rows", "first action")["differs"]
    assert "action[0] of the data is minus action[0] of the policy" in found["sentence"]


def test_data_on_disk_that_mean_something_else_are_named_without_an_environment(
    capsys, data, tmp_path
):
    folder = shutil.copytree(data, tmp_path / "other")
    for file in (folder / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        at = table.schema.get_field_index("action")
        rows = np.array(table["action"].to_pylist(), np.float32)
        rows[:, [0, 1]] = rows[:, [1, 0]]
        values = pa.array(rows.tolist(), table.schema.field(at).type)
        pq.write_table(table.set_column(at, table.schema.field(at), values), file)
    found = asked(capsys, "--policy", f"{HERE}:looking", "--dataset", folder)
    assert found["exit"] == 1
    assert "action[0] of the data is action[1] of the policy" in found["sentence"]
    assert "not measured: give --env" in line(found, "inputs", "")["found"]


def test_a_policy_that_does_not_do_its_data_is_one_of_a_pair(capsys, data):
    found = asked(capsys, "--policy", "random", "--dataset", data)
    assert (found["exit"], len(found["causes"])) == (1, 2)


def test_without_data_the_policy_acts(capsys):
    found = asked(capsys, "--policy", "hold", "--env", f"{HERE}:point")
    assert found["exit"] == 3
    assert "--dataset" in found["sentence"]


@pytest.mark.long
def test_an_option_is_blamed_once_the_policy_has_failed_from_other_starts_too(capsys, tmp_path):
    lift = ["--env", "dzrobot/lift-v0", "--env-arg", "resolution=128"]
    folder = tmp_path / "lift"
    made = ["--embodiment", "libero_mini", "--episodes", "3", "--hold-steps", "8"]
    assert main(["collect", *lift, *made, "--output", str(folder)]) == 0
    capsys.readouterr()
    acting = ["--checkpoint", default_checkpoint("lift"), "--solver-steps", "4", "--execute", "8"]
    found = asked(capsys, *acting, "--dataset", folder, *lift)
    assert found["causes"] == ["how plans are executed: --execute 8"]
    assert "of 2 more starts succeed" in line(found, "acting", "other starts")["found"]


@pytest.mark.parametrize(
    "given",
    [
        ["--checkpoint", "x", "--policy", "random", "--env", "dzrobot/point-v0"],
        ["--env", "dzrobot/point-v0"],
        ["--policy", "random"],
        ["--policy", "expert", "--env", "dzrobot/point-v0"],
    ],
)
def test_wrong_arguments_are_one_message(capsys, given):
    assert main(["doctor", "policy", *given]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("low", "high", "words"), [("q01", "q99", ""), ("min", "max", "min, max"),
                               ("mean", "std", "mean, std")],
)  # fmt: skip
def test_the_mode_of_foreign_statistics_is_named(data, tmp_path, low, high, words):
    left = shutil.ignore_patterns("libero_object", "*.py", "dzrobot_passport.json")
    folder = shutil.copytree(default_checkpoint(), tmp_path / "c", ignore=left)
    reader = DatasetReader(data, ROBOT)
    entry = json.loads(json.dumps(measure([reader], ROBOT)))
    for part in (part for kind in entry["statistics"].values() for part in kind.values()):
        one, two = part[low], part[high]
        part["q01"] = [min(a, b) for a, b in zip(one, two, strict=True)]
        part["q99"] = [max(a, b) for a, b in zip(one, two, strict=True)]
    file = folder / "experiment_cfg/metadata.json"
    file.write_text(json.dumps({ROBOT.tag: entry}))
    assert match_statistics(open_checkpoint(folder), reader).mode == words


def test_a_policy_behind_a_server_is_examined_like_one_of_this_process(capsys, data):
    """What reaches it through the server: a fault there is named as well."""
    options = ServeOptions(port=0, array_port=None)
    for served, code, words in ((Looking(), 0, "2 of 2 starts"), (Mirrored(), 1, "action[0]")):
        with in_background(PolicyServer(served, options, card={"who": "test"})) as server:
            address = f"ws://127.0.0.1:{server.ports[0]}"
            where = ["--env", f"{HERE}:point", "--dataset", data, "--server", address]
            found = asked(capsys, *where)
            assert (found["exit"], words in found["sentence"]) == (code, True), found["sentence"]
            if code:
                continue
            words = ["doctor", "policy", *map(str, where), "--policy-seed", "3"]
            assert main([*words, "--embodiment", "libero_mini"]) == 2
            assert "--policy-seed: the server decides" in capsys.readouterr().err


@pytest.mark.copies
def test_a_served_environment_is_examined_like_one_of_this_process(capsys, data):
    maker = partial(make_hosted, f"{HERE}:point", {"fault": "upside down"})
    server = EnvServer(maker, EnvServerOptions(port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        where = ["--env", "dzrobot/remote-v0"]
        where += ["--env-arg", f"server=ws://127.0.0.1:{server.port}"]
        found = asked(capsys, "--policy", f"{HERE}:looking", "--dataset", data, *where)
    finally:
        server.stop()
        thread.join()
    assert found["exit"] == 1
    assert "video.image is live upside down" in found["causes"][0]


class _Page(HTMLParser):
    """Collects the captions, headings and pictures of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.pictures, self.films = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.pictures.append(dict(attrs))
        if tag == "video":
            self.films.append(dict(attrs))

    def handle_data(self, data):
        if data.strip():
            self.words.append(data.strip())


def test_the_page_shows_what_was_compared(capsys, data, tmp_path):
    file = tmp_path / "why.html"
    where = ["--env", f"{HERE}:point", "--env-arg", "fault='upside down'", "--page", file]
    found = asked(capsys, "--policy", f"{HERE}:looking", "--dataset", data, *where)
    page = _Page(file.read_text())
    assert found["sentence"] in page.words
    for key in ROBOT.video_keys:
        captions = [one["alt"] for one in page.pictures if one["alt"].startswith(f"{key}, ")]
        assert captions[:2] == [f"{key}, recorded", f"{key}, live"]
    shown = {one["alt"]: one["src"] for one in page.pictures}
    # What fits is what is live.
    fitted = shown["video.image, recorded, made upside down"]
    assert fitted == shown["video.image, live"] != shown["video.image, recorded"]
    assert page.tags.count("svg") == 8 + 7
    # The film: recorded above live, which is upside down.
    data_url = page.films[0]["src"]
    file = tmp_path / "film.mp4"
    file.write_bytes(base64.b64decode(data_url.partition("base64,")[2]))
    first = Videos().clip(file, 0, [0])[0].astype(int)
    above, below = first[: len(first) // 2], first[len(first) // 2 :]
    assert np.abs(above - below[::-1]).mean() < np.abs(above - below).mean() / 2
    assert page.tags.count("tr") == 1 + len(found["measurements"])


CHANGED = {
    "upside down": lambda image: image[::-1],
    "red and blue": lambda image: image[..., ::-1],
    "90 degrees": lambda image: np.rot90(image),
    "cropped": lambda image: np.kron(image[32:96, 32:96], np.ones((2, 2, 1), np.uint8)),
    "resolution": lambda image: np.kron(image[::2, ::2], np.ones((2, 2, 1), np.uint8)),
    "one color": np.zeros_like,
    "0.6 times as bright": lambda image: (0.6 * image).astype(np.uint8),
    "0.6 times as red, 1 as green and 0.8 as blue": lambda image: image * [0.6, 1, 0.8],
    "at 0.5 times the contrast, 90 of 255 brighter": lambda image: 0.5 * image + 90,
    "shifted by 16 % to the left": lambda image: moved(image, [[1, 0, -20], [0, 1, 0]]),
    "shifted by 5 % to the right, shifted by 10 % upwards": lambda image: moved(
        image, [[1, 0, 6], [0, 1, -13]]
    ),
    "1.20 times as wide and 1.00 times as high": lambda image: moved(
        image, [[1.2, 0, -12.7], [0, 1, 0]]
    ),
    "mirrored, shifted by 9 % downwards": lambda image: moved(
        image[:, ::-1], [[1, 0, 0], [0, 1, 12]]
    ),
    "turned by 6 degrees to the right": lambda image: moved(
        image, cv2.getRotationMatrix2D((63.5, 63.5), -6, 1)
    ),
}


def moved(image, matrix):
    """Show an image elsewhere in the picture, and black around it."""
    return cv2.warpAffine(np.ascontiguousarray(image), np.float32(matrix), (SIDE, SIDE))


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_live_image_is_is_told_from_what_it_is_not(name):
    drawn = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    images = [np.kron(drawn, np.ones((16, 16, 1), np.uint8))]
    noisy = [np.clip(image + np.arange(SIDE)[None, :, None] / 8, 0, 255).astype(np.uint8)
             for image in images]  # fmt: skip
    recorded = [{"video.image": image} for image in images]
    changed = [np.uint8(CHANGED[name](image)) for image in images]
    live = [{"video.image": np.ascontiguousarray(image)} for image in changed]
    if name != "resolution":
        assert name in fit_images("video.image", recorded, live).words
    assert fit_images("video.image", recorded, recorded).words == ""
    # A recording that lossy compression changed everywhere is still the same view.
    assert fit_images("video.image", recorded, [{"video.image": noisy[0]}]).words == ""


def test_images_that_differ_in_part_are_told_from_those_that_are_changed_as_a_whole():
    drawn = np.random.default_rng(0).integers(60, 255, (8, 8, 3), np.uint8)
    image = np.kron(drawn, np.ones((16, 16, 1), np.uint8))
    floor = image.copy()
    floor[96:] //= 2
    seen = [[{"video.image": one}] for one in (image, floor)]
    words = fit_images("video.image", *seen, same_place=True).words
    assert words.startswith("the same in 75 % of its pixels and darker in 25 %")
    # From other starts, objects stand elsewhere anyway.
    assert "same in" not in fit_images("video.image", *seen).words


def test_numbers_of_a_state_that_are_exchanged_are_told():
    rows = np.random.default_rng(0).normal(size=(5, 8))
    live = rows[:, [0, 1, 2, 3, 4, 5, 7, 6]]
    words = fit_states(rows, live, np.ones(8)).words
    assert words == "number 6 holds recorded 7; number 7 holds recorded 6"


def test_a_number_about_zero_has_the_factor_of_the_others_where_that_fits():
    """In all units it is about the same, so by itself it tells none."""
    rows = np.random.default_rng(0).normal(size=(5, 8))
    rows[:, 1] *= 0.01
    live = rows.copy()
    live[:, :3] *= 1000
    words = fit_states(rows, live, np.ones(8)).words
    assert words == "numbers 0, 1, 2 hold 1000 times what was recorded"
    live[:, 1] += 5
    words = fit_states(rows, live, np.ones(8)).words
    assert words.startswith("numbers 0, 2 hold 1000 times what was recorded; number 1 differs")


def test_fingers_of_opposite_sign_are_told_as_negated_or_exchanged():
    """Both changes give the same numbers."""
    rows = np.random.default_rng(0).normal(size=(5, 8))
    rows[:, 7] = -rows[:, 6]
    live = rows[:, [0, 1, 2, 3, 4, 5, 7, 6]]
    told = "hold the negative of what was recorded, or are exchanged with one another"
    assert fit_states(rows, live, np.ones(8)).words == f"numbers 6, 7 {told}"
    live = rows * np.array([1, 1, 1, 1, 1, 1, 1, -1])
    assert "exchanged" not in fit_states(rows, live, np.ones(8)).words
