"""One small world per session, and torchrun launches that many tests read from."""

import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import train_worker
import train_worlds

from dzrobot.envs.libero.task_packages import PRO
from dzrobot.rollout import environment

# Looked for now: tests move the cache.
TASKS = PRO.wheel.parent
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def train_cache(tmp_path_factory):
    """Return a cache folder for this session, with the tasks of LIBERO-PRO and LIBERO-Plus."""
    cache = tmp_path_factory.mktemp("train-cache")
    (cache / TASKS.name).symlink_to(TASKS)
    return cache


@pytest.fixture
def own_module(tmp_path, monkeypatch, train_cache):
    """Return a function: the current folder, with a user's module that registers an environment."""
    made = []

    def write(name, text, env):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("DZROBOT_CACHE", str(train_cache))
        environment.accepted.cache_clear()
        made.append((name, env))
        return tmp_path

    yield write
    for name, env in made:
        sys.modules.pop(name, None)
        gym.registry.pop(env, None)


@pytest.fixture(scope="session")
def train_root(tmp_path_factory, train_cache):
    """Return a folder with a dataset, its statistics and a tiny checkpoint."""
    os.environ.setdefault("DZROBOT_CACHE", str(train_cache))
    return train_worlds.fill(tmp_path_factory.mktemp("train") / "world")


@pytest.fixture(scope="session")
def lab(train_root):
    """Return a folder with the modules of docs/extend/training.md, on the import path."""
    folder = train_worlds.write_lab(train_root.parent / "lab")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def touched(lab, train_root):
    """Return a world whose robot has pads: its dataset and statistics, and the tiny checkpoint."""
    root, hand = train_root.parent / "hand", importlib.import_module("lab").HAND
    root.mkdir()
    train_worlds.record(root / "dataset", robot=hand)
    train_worlds.statistics(root / "dataset", root / "metadata.json", hand)
    (root / "tiny").symlink_to(train_root / "tiny")
    return root


@pytest.fixture(scope="session")
def train_environment(train_cache):
    """Return the environment of training processes."""
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths),
        "DZROBOT_CACHE": str(train_cache),
        # Without it, restarted processes look for the store of the first attempt.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # A native library that aborts names no line by itself.
        "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip


@pytest.fixture(scope="session")
def solo():
    """Return a world of one process, this one."""
    import torch.distributed as dist

    from dzrobot.training.run.parallel import init_distributed

    if not dist.is_initialized():
        solo.world = init_distributed("cpu")
    return solo.world


class Launches:
    """Runs scenarios in as few launches as their process counts allow."""

    def __init__(self, root, output, environment):
        self._root, self._environment = root, environment
        self.output = output

    def run(self, processes, *names, arguments=()):
        """Run scenarios one after the other in ``processes`` processes."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments,
            "--nproc-per-node", str(processes), str(HERE / "train_worker.py"), str(self._root),
            str(self.output), *names,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, done.stderr[-12000:]

    def side_by_side(self, processes, *names):
        """Run scenarios in processes that no torchrun starts; copies, where tests are marked so."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        several = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        several |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = []
        for rank in range(processes):
            mine = self._environment | several | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (mine, self._root, self.output, names)
            context = multiprocessing.get_context("spawn")
            ranks.append(context.Process(target=train_worker.be_a_rank, args=arguments))
            ranks[-1].start()
        for each in ranks:
            each.join(800)
        assert [each.exitcode for each in ranks] == [0] * processes

    def result(self, name, processes):
        """Return what a scenario reported."""
        return json.loads((self.output / f"{name}-{processes}.json").read_text())


@pytest.fixture(scope="session")
def launches(train_root, train_environment, tmp_path_factory):
    """Return the runner of multi-process scenarios."""
    return Launches(train_root, tmp_path_factory.mktemp("launches"), train_environment)


@pytest.fixture(scope="session")
def pair(launches):
    """Return the launches after what two processes do in the short forms."""
    launches.side_by_side(2, "straight", "first_half", "second_half", "collectives")
    return launches


@pytest.fixture(scope="session")
def long_pair(launches, touched):
    """Return the launches after what two processes do in the long forms."""
    launches.run(
        2, "more_gradients", "clipping", "precision", "poisoned", "gives_up", "adapters",
        "averaged", "evaluated", "rolled_out", "damaged", "plugged",
    )  # fmt: skip
    return launches
