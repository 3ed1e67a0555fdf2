"""LeRobot's own policies, served from LeRobot's own Python: the actions are ``select_action``'s.

``make lerobot`` makes the environments; the policies have random weights.
"""

import json
import os
import subprocess
from itertools import product
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest

import dzrobot
from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.rollout.policy_spec import PolicySpec, load_policy, resolve_policy

FOLDER = os.environ.get("DZROBOT_LEROBOT")
VERSIONS = ["0.4.4", "0.6.1"]
SCRIPT = Path(__file__).parents[1] / "lerobot" / "lerobot_policies.py"
STEPS = 15
needs_lerobot = [
    pytest.mark.lerobot,
    pytest.mark.skipif(FOLDER is None, reason="no environments of LeRobot: run `make lerobot`"),
]


def features(robot):
    images = {view.feature: ("VISUAL", (3, *view.resolution)) for view in robot.views}
    (column,) = {part.feature for part in robot.state}
    return {
        **images,
        column: ("STATE", (robot.state_dim,)),
        "action": ("ACTION", (robot.action_dim,)),
    }


def python_of(version):
    found = Path(FOLDER) / version / "bin" / "python"
    if not found.exists():
        pytest.skip(f"no environment of LeRobot {version}")
    return found


def in_lerobot(python, *words):
    paths = {**os.environ, "PYTHONPATH": str(Path(dzrobot.__file__).parents[1])}
    subprocess.run([python, SCRIPT, *words], env=paths, check=True)


def made(python, kind, robot, folder):
    in_lerobot(python, "make", kind, folder, json.dumps(features(robot)))
    return f"lerobot:{folder}"


@pytest.mark.parametrize(
    ("version", "kind"),
    # The environment of 0.4.4 has no transformers, which SmolVLA needs.
    [*product(VERSIONS, ["act", "act_ensemble", "diffusion"]), ("0.6.1", "smolvla")],
)
@needs_lerobot[0]
@needs_lerobot[1]
def test_actions_through_the_wire_are_select_actions(version, kind, tmp_path):
    python, robot = python_of(version), load_embodiment("libero_sim@64x64")
    name = made(python, kind, robot, tmp_path / "policy")
    spec = PolicySpec(name=name, embodiment="libero_sim@64x64", lerobot_python=python)
    policy = load_policy(resolve_policy(spec, robot))
    env = gym.make("dzrobot/point-v0", resolution=64)
    seen, actions = [], []
    policy.reset("a", episode=0)
    observation, info = env.reset(seed=1)
    for _ in range(STEPS):
        seen.append(observation)
        actions.append(policy.act(observation, session="a"))
        # Another episode between two steps of this one changes nothing.
        policy.act(observation, session="b")
        observation, *_ = env.step(actions[-1])
    columns = {view.feature: view.key for view in robot.views}
    columns["observation.state"] = "state.state"
    np.savez(
        tmp_path / "seen.npz", task=info["task"],
        **{name: np.stack([one[key] for one in seen]) for name, key in columns.items()},
    )  # fmt: skip
    in_lerobot(python, "play", tmp_path / "policy", tmp_path / "seen.npz", tmp_path / "played.npy")
    assert np.array_equal(np.load(tmp_path / "played.npy"), np.stack(actions))
    if (version, kind) == ("0.6.1", "act"):
        words = (tmp_path / "policy", tmp_path / "seen.npz", tmp_path / "async.npy")
        in_lerobot(python, "play_async", *words)
        assert np.array_equal(np.load(tmp_path / "async.npy"), np.stack(actions))
    assert policy.card["server"]["lerobot"] == version
    policy.close()


@pytest.mark.parametrize(
    ("env", "robot", "arguments"),
    [
        ("dzrobot/lift-v0", "libero_sim@64x64", ["--env-arg", "resolution=64"]),
        ("dzrobot/Franka-PnP-emulated-v0", "franka_pnp", []),
    ],
)
@needs_lerobot[0]
@needs_lerobot[1]
def test_it_is_evaluated_in_simulation_and_on_the_emulated_arm(
    env, robot, arguments, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    python = python_of("0.4.4")
    name = made(python, "act", load_embodiment(robot), tmp_path / "policy")
    words = ["eval", "--env", env, "--policy", name, "--lerobot-python", str(python)]
    words += [*arguments, "--embodiment", robot, "--episodes", "2", "--max-steps", "15"]
    words += ["--unattended"] if "Franka" in env else []
    assert main([*words, "--videos", "none", "--output", "results"]) == 0, capfd.readouterr()
    assert "took" not in capfd.readouterr().err, "the server's line for each plan"
    rows = [json.loads(line) for line in Path("results/records.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == [None, None]
    card = json.loads(Path("results/card.json").read_text())
    assert card["policy"]["server"]["type"] == "act"


@needs_lerobot[0]
@needs_lerobot[1]
def test_a_policy_of_other_features_is_refused_and_its_server_is_gone(tmp_path, capfd):
    python = python_of("0.4.4")
    name = made(python, "act", load_embodiment("franka_pnp"), tmp_path / "policy")
    spec = PolicySpec(name=name, embodiment="libero_sim", lerobot_python=python)
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="ended with 2"):
        load_policy(resolve_policy(spec, None))
    assert "does not fit libero_sim: it wants observation.state" in capfd.readouterr().err
    assert set(psutil.Process().children()) <= set(before)


def test_without_lerobot_the_error_says_what_to_do():
    spec = PolicySpec(name="lerobot:lerobot/act_aloha", embodiment="libero_sim")
    with pytest.raises(ConfigError, match=r"--lerobot-python .* dzrobot serve lerobot:lerobot/act"):
        load_policy(resolve_policy(spec, None))


def test_a_python_that_is_none_is_refused(tmp_path):
    spec = PolicySpec(name="lerobot:a/b", embodiment="libero_sim", lerobot_python=tmp_path / "no")
    with pytest.raises(ConfigError, match="cannot be started: No such file"):
        load_policy(resolve_policy(spec, None))
