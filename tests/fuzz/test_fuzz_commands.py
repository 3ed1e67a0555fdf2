"""What can be typed: every number and name of the command line, wrong in every way."""

import pytest
from harness import LIGHT, assert_held, assert_refused

from dzrobot.rollout.protocol import PROTOCOLS

run = LIGHT.run
WHOLE = (
    "",
    " ",
    "a",
    "1.5",
    "1e3",
    "²",
    "٣",
    "1_0",
    "0x1",
    "nan",
    "inf",
    "9" * 30,
    "-1",
    "--",
    "½",
)
REAL = ("", "a", "nan", "inf", "-inf", ".inf", "1e999", "-1", "²", "[1]", "true", "null", "9" * 400)
NUMBERS = ("", "a", "²", "0-²", "-", "1-", "-1", "3-1", "0,0,0", "0-99999999999", "0,1,", "0-20000")
WRONG = {
    "--episodes": (*WHOLE, "0", "99999999999"),
    "--max-steps": (*WHOLE, "0", "-5"),
    "--max-errors": (*WHOLE, "0"),
    "--workers": (*WHOLE, "99999999999"),
    "--seed": WHOLE,
    "--policy-seed": WHOLE,
    "--execute": (*WHOLE, "0"),
    "--dit-steps": (*WHOLE, "0", "dynamics"),
    "--video": ("", "none", "Full"),
    "--cfg-scale": REAL,
    "--tasks": (*NUMBERS, "999999999"),
    "--render-device": NUMBERS,
    "--shard": ("", "a", "1", "1/1", "0/0", "²/²", "-1/4", "0/99999999999", "0/1/2",
                "2/1"),
    "--device": ("", "foo", "cuda:", "cuda:-1", "CPU", "mps", "cpu:0", "cuda:²", "cuda:9999"),
    "--dtype": ("", "float", "int8"),
    "--history": ("", "none", "1"),
    "--noise": ("", "random"),
    "--protocol": ("", "standard", "rlinf"),
    "--videos": ("", "some"),
    "--ablate-images": ("", "all"),
    "--embodiment": ("", "nobody", "nobody:X", "os:path", "libero_sim:x", "a" * 5000),
    "--policy": ("", "nobody", "os:system", "os:path", "json:loads", "dzrobot.cli:main",
                 "os:", ":x", "random:Random", "builtins:dict", "nobody:x", "a" * 5000, "../x",
                 ".:x"),
    "--env": ("", " ", "nobody", "dzrobot/nobody-v0", "nobody:x", "a" * 5000, "a/b/c", "dzrobot/",
              "CartPole-v1", "os:x", "\udcff"),
    "--suite": ("", ",", "libero_nobody", "libero_spatial,libero_spatial", "libero_spatial,"),
    "--output": ("", "/dev/null", "/proc/x", "/dev/full", "x" * 300, "/x/" * 2000, "a\0b",
                 "\udcff"),
    "--env-arg": ("", "resolution", "=1", "resolution=", "resolution=abc", "resolution=1.5",
                  "resolution=1e9", "resolution=[1]", "resolution=&a [*a]", "resolution=-5",
                  "resolution=0", "resolution=9999999999999999999", "resolution=50000",
                  "resolution=true", "resolution=null", "resolution=!!bool maybe",
                  "resolution={a: 1}", "resolusion=32", "render_mode=human", "task_id=1",
                  "max_episode_steps=0", "embodiment=nobody", "1a=2"),
    "--checkpoint": ("", " "),
}  # fmt: skip
PLACES = WRONG["--output"]
CASES = [(flag, value) for flag, values in WRONG.items() for value in values]


def words(folder, **changes):
    """Return an evaluation of one short episode."""
    flags = {
        "env": "dzrobot/point-v0", "env-arg": "resolution=32", "policy": "random", "episodes": 1,
        "max-steps": 3, "workers": 0, "videos": "none", "output": folder / "run", **changes,
    }  # fmt: skip
    return ["eval", *(f"--{name}={value}" for name, value in flags.items() if value is not None)]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    result = run(words(tmp_path_factory.mktemp("good")))
    assert result.code == 0, result.output
    return result


@pytest.mark.parametrize("flag", WRONG)
def test_a_wrong_value_is_one_message(good, some, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = flag.removeprefix("--")
    for value in some(WRONG[flag]):
        changes = {name: value}
        if name in ("suite", "checkpoint"):
            changes |= {"env": None} if name == "suite" else {"policy": None}
        result = run(words(tmp_path, **changes))
        assert_refused(result, good)
        assert not (tmp_path / "run" / "card.json").exists(), f"{flag} {value!r} ran"


def test_enough_is_tried():
    assert len(CASES) > 200


def test_places_of_results_that_cannot_be(good, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "x")
    for place in ("file", "file/below", "loop", "dangling"):
        assert_refused(run(words(tmp_path, output=tmp_path / place)), good)


@pytest.mark.parametrize(
    ("command", "flag", "values"),
    [
        ("collect", "--episodes", (*WHOLE, "0")),
        ("collect", "--noise", REAL),
        ("collect", "--hold-steps", WHOLE),
        ("collect", "--max-steps", (*WHOLE, "0")),
        ("collect", "--first-seed", WHOLE),
        ("collect", "--starts", NUMBERS),
        ("collect", "--workers", (*WHOLE, "0")),
        ("plan", "--gpus", (*WHOLE, "0")),
        ("plan", "--memory", (*REAL, "0")),
        ("plan", "--peak-tflops", (*REAL, "0")),
        ("replay", "--episode", (*WHOLE, "99999999999")),
        ("replay", "--preview", (*WHOLE, "65536")),
        ("replay", "--env", WRONG["--env"]),
        ("replay", "--log", PLACES),
        ("record", "--episodes", (*WHOLE, "0")),
        ("record", "--attempts", (*WHOLE, "0")),
        ("record", "--max-steps", (*WHOLE, "0")),
        ("record", "--seed", (*WHOLE, "4294967296")),
        ("record", "--device", WRONG["--device"]),
        ("record", "--preview", (*WHOLE, "65536")),
        ("record", "--version", ("", "v1.6", "2.1", "v2.0")),
        ("record", "--env", WRONG["--env"]),
        ("record", "--env-arg", ("", "resolution", "resolution=abc", "resolution=0", "1a=2")),
        ("record", "--output", PLACES),
        ("compare", "--seed", WHOLE),
        ("compare", "--published", ("", "1", "1/0", "2/1", "²/²", "-1/2", "1/2/3", "0/0")),
        ("compare", "--json", ("", "x" * 300, "\udcff")),
        ("sweep", "--confirm", WHOLE),
        ("sweep", "--episodes", (*WHOLE, "0")),
        ("relabel", "--episode", ("", "a", "-1", "1.5", "3-1", "0,0", "²")),
        ("credit", "--own", REAL),
        ("credit", "--blame-s", REAL),
        ("consolidate", "--data-mb", REAL),
        ("consolidate", "--video-mb", REAL),
        ("emulate", "--domain", (*WHOLE, "233")),
        ("emulate", "--rate", (*REAL, "0")),
        ("emulate", "--host", ("", "0.0.0.0", "a", "::1", "127.0.0.1:80", "10.0.0.1", "²")),
    ],
)
def test_values_of_other_commands(good, some, command, flag, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = f"--output={tmp_path / 'data'}"
    needed = {
        "collect": ["--env=dzrobot/point-v0", output],
        "plan": ["tiny_cpu", "model.preset=5b"],
        "replay": [tmp_path / "set", "--env=dzrobot/point-v0"],
        "record": ["--env=dzrobot/point-v0", "--policy=random", "--max-steps=2", output],
        "compare": [tmp_path / "one", tmp_path / "two"],
        "sweep": ["random", "--env=dzrobot/point-v0", output],
        "relabel": [tmp_path / "set", "--success"],
        "credit": [tmp_path / "set", "--embodiment=libero_sim"],
        "consolidate": [tmp_path / "set"],
        "emulate": ["franka", "--no-cameras"],
    }
    for value in some(values):
        result = run([command, *needed[command], f"{flag}={value}"])
        assert_refused(result, good)
        assert flag == "--log" or not list(tmp_path.glob("*")), f"{flag} {value!r} left something"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        ["--policy="], ["--policy=os:path"], ["--policy=expert"],
        ["--call="], ["--call=nobody"], ["--call=nobody:x"], ["--call=os:path"], ["--call=a:b:c"],
        ["--keyboard"], [], ["--policy=random", "--keyboard"],
        *([f"--replay={value}"] for value in (
            "", "#", "#0", "set", "set#", "set#²", "set#-1", "set#1.5", "set#1_0", "set#0x1",
            "set#99999999999999999999", "set#0", "x" * 300 + "#0", "/dev/null#0", "set#0#0",
        )),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_recorded(good, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(["record", "--env=dzrobot/point-v0", "--output=data", *words])
    assert_refused(result, good)
    assert not list(tmp_path.glob("*"))


def test_words_mean_what_they_say(good, tmp_path):
    """A protocol that is named is the one that runs, also in the embedded default's place."""
    result = run(words(tmp_path, protocol="lift-100"))
    assert_refused(result, good)
    assert "made for dzrobot/lift-v0" in result.output
    assert_held(run(words(tmp_path, protocol="custom")), good, codes=(0,))
    assert '"protocol": "custom"' in (tmp_path / "run" / "card.json").read_text()
    assert PROTOCOLS["lift-100"].suite == "dzrobot/lift-v0"
