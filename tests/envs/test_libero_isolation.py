"""The simulator asks nothing, prints nothing, and writes into one folder only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dzrobot.envs.libero.assets import libero_folder
from dzrobot.envs.mujoco.simulator import check_versions, choose_backend
from dzrobot.errors import DzrobotError, MissingDependencyError, SimulatorError

ROOT = Path(__file__).parents[2]

EPISODE = """
import hashlib, sys
import gymnasium as gym
import dzrobot
env = gym.make(sys.argv[1], resolution=64, settle_steps=1, disable_env_checker=True)
observation, _ = env.reset(seed=3)
observation, *_ = env.step(env.action_space.low)
digest = hashlib.sha256()
for key in sorted(observation):
    value = observation[key]
    digest.update(value.encode() if isinstance(value, str) else value.tobytes())
print(digest.hexdigest(), "torch" in sys.modules)
"""


@pytest.fixture
def run(tmp_path):
    """Run an episode in a process with its own home, cache and working directory."""

    def run(env_id, **variables):
        for folder in ("home", "cache", "work"):
            (tmp_path / folder).mkdir(exist_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(tmp_path / "home"),
            "TMPDIR": str(tmp_path / "work"),
            "DZROBOT_CACHE": str(tmp_path / "cache"),
            **variables,
        }
        done = subprocess.run(
            [sys.executable, "-c", EPISODE, env_id],
            env=environment, cwd=tmp_path / "work", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=800,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        digest, torch = done.stdout.split()
        return digest, torch == "True"

    return run


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.long
@pytest.mark.libero
def test_libero_starts_silently_from_nothing(run, libero_assets, tmp_path):
    """No question, no torch, no word at exit without close, nothing written outside the cache."""
    # What robosuite compiles at its first step takes 20 s: it alone may be there. The long form
    # below compiles it again.
    compiled = os.environ["NUMBA_CACHE_DIR"]
    _, torch = run(
        "dzrobot/libero_object-v0",
        DZROBOT_LIBERO_ASSETS=str(libero_assets), NUMBA_CACHE_DIR=compiled,
    )  # fmt: skip
    assert not torch
    assert files(tmp_path / "home") == []
    assert files(tmp_path / "work") == []
    assert any(name.endswith("config.yaml") for name in files(tmp_path / "cache"))


@pytest.mark.long
def test_both_opengl_backends_draw_the_same_image(run, tmp_path):
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    egl, torch = run("dzrobot/lift-v0")
    osmesa, _ = run("dzrobot/lift-v0", MUJOCO_GL="osmesa")
    assert egl == osmesa
    assert not torch
    assert files(tmp_path / "home") == files(tmp_path / "work") == []


def pretend_installed(tmp_path, monkeypatch, name, version):
    folder = tmp_path / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("version", ["3.3.3", "3.4.0", "4.0.0", "2.3.7"])
def test_other_mujoco_versions_are_refused(tmp_path, monkeypatch, version):
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    check_versions()
    pretend_installed(tmp_path, monkeypatch, "mujoco", version)
    with pytest.raises(SimulatorError, match=r"pip install mujoco==3\.3\.2"):
        check_versions()


def test_other_robosuite_versions_are_refused(tmp_path, monkeypatch):
    pretend_installed(tmp_path, monkeypatch, "mujoco", "3.3.2")
    pretend_installed(tmp_path, monkeypatch, "robosuite", "1.5.2")
    with pytest.raises(SimulatorError, match=r"pip install robosuite==1\.4\.0"):
        check_versions()


def test_a_missing_libero_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "ditable" not in repr(f)])
    monkeypatch.delitem(sys.modules, "libero", raising=False)
    with pytest.raises(MissingDependencyError, match="dzrobot libero setup"):
        libero_folder()


def test_the_opengl_backend_is_egl_unless_another_is_asked_for(monkeypatch):
    for asked, chosen in ((None, "egl"), ("", "egl"), ("OSMesa", "osmesa"), ("egl", "egl")):
        if asked is None:
            monkeypatch.delenv("MUJOCO_GL", raising=False)
        else:
            monkeypatch.setenv("MUJOCO_GL", asked)
        assert choose_backend() == chosen == os.environ["MUJOCO_GL"]
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(DzrobotError, match="egl, osmesa, glx"):
        choose_backend()
