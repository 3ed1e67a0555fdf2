"""Shared fixtures: where reference material lies, and what is skipped without it."""

import functools
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dzrobot.envs.libero.assets import VARIABLE, assets_folder, manifest, verify
from dzrobot.envs.libero.task_packages import TaskPackage
from dzrobot.envs.mujoco.simulator import point_caches_home
from dzrobot.errors import SimulatorError

# What robosuite compiles in its first steps takes 20 s and more. Tests move our cache, and whatever
# they start would compile it again.
point_caches_home()

# A stop of one test is none of another run on this machine.
_LOCKS = tempfile.TemporaryDirectory(prefix="dzrobot-locks-")
os.environ["DZROBOT_LOCK_FOLDER"] = _LOCKS.name

_SHARED = Path(__file__).parents[2] / "shared"


def folder(variable: str, default: str) -> Path | None:
    """Return the folder that ``variable`` names, else the shared one, else None."""
    path = Path(os.environ.get(variable) or _SHARED / default)
    return path if path.is_dir() else None


SELECTION = Path(__file__).parent / "goldens/reference"
"""Reference numbers that come with the checkout."""


def reference_numbers(named: str | None, shared: Path) -> Path | None:
    """Return the folder that is named, None where it is none; unnamed, the shared one or ours."""
    if named:
        return Path(named) if Path(named).is_dir() else None
    return shared if shared.is_dir() else SELECTION


GOLDENS = reference_numbers(os.environ.get("DZROBOT_GOLDENS"), _SHARED / "goldens")
CONTRACT = folder("DZROBOT_CONTRACT", "contract")
RLINF = folder("DZROBOT_RLINF", "data/rlinf_recipes")
# Looked for now: tests move our cache.
LIBERO_ASSETS: Path | SimulatorError
try:
    LIBERO_ASSETS = assets_folder()
except SimulatorError as error:
    LIBERO_ASSETS = error


# Modules are millions of objects that live to the end. Looking through them again and again took a
# quarter of the processor time of collecting.
gc.disable()


@pytest.fixture(autouse=True)
def ordinary_priority(request):
    """Take back the real-time priority that a native library may have given this process.

    Later tests would inherit it, and threads that wait for each other busily would never end.
    """
    yield
    if sys.platform == "linux" and os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        warnings.warn(f"{request.node.nodeid} left real-time priority", stacklevel=1)


def skip_or_fail(kind: str, reason: str) -> None:
    """Skip with the reason, or fail where ``DZROBOT_REQUIRE`` lists ``kind``."""
    if kind in os.environ.get("DZROBOT_REQUIRE", "").split(","):
        pytest.fail(f"{reason} (DZROBOT_REQUIRE asks for {kind})")
    pytest.skip(reason)


def need_tasks(package: TaskPackage) -> None:
    """Skip or fail without the wheel of LIBERO-PRO or LIBERO-Plus."""
    if not package.wheel.is_file():
        skip_or_fail("pro", f"no {package.wheel}: run `dzrobot libero setup {package.flag}`")


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Return the folder of reference numbers."""
    if GOLDENS is None:
        skip_or_fail("goldens", "DZROBOT_GOLDENS is not a folder")
    assert GOLDENS is not None
    return GOLDENS


@pytest.fixture(scope="session")
def contract() -> Path:
    """Return the folder with key and shape listings of the published checkpoints."""
    if CONTRACT is None:
        skip_or_fail("contract", "no key listings: set DZROBOT_CONTRACT")
    assert CONTRACT is not None
    return CONTRACT


@pytest.fixture(scope="session")
def rlinf_files() -> Path:
    """Return the folder of RLinf's own recipes."""
    if RLINF is None:
        skip_or_fail("rlinf", "no recipes of RLinf's: set DZROBOT_RLINF")
    assert RLINF is not None
    return RLINF


@pytest.fixture(scope="session")
def libero_assets() -> Path:
    """Return the folder of LIBERO's official assets, with hf-libero importable."""
    if importlib.util.find_spec("libero") is None:
        skip_or_fail("libero", "hf-libero is missing: run `dzrobot libero setup`")
    if isinstance(LIBERO_ASSETS, SimulatorError):
        skip_or_fail("libero", str(LIBERO_ASSETS))
    assert isinstance(LIBERO_ASSETS, Path)
    verdict = verify(LIBERO_ASSETS, manifest())
    if verdict.missing or verdict.altered:
        reason = f"LIBERO assets in {LIBERO_ASSETS}: {verdict.summary}"
        skip_or_fail("libero", f"{reason}; run `dzrobot libero setup`")
    os.environ[VARIABLE] = str(LIBERO_ASSETS)
    return LIBERO_ASSETS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that no process is left with one at the end.

    Of a family that is marked ``sampled``, two of three inputs are left to the long form.
    """
    begins = ("tests/training/", "tests/commands/", "tests/envs/", "tests/policies/")
    items.sort(key=lambda item: not item.nodeid.startswith(begins))
    items.sort(key=lambda item: item.nodeid.startswith("tests/test_"))
    # Its children train, which they cannot where a test before has begun a group of processes.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/test_kill_points"))
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("long"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        for number, item in enumerate(family):
            # Shifted row by row, so that every value of two crossed parameters is met.
            shift = number // 3 + number // 9 if len(family) > 4 else 0
            if (number + shift) % 3:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what all tests share out of every garbage collection.

    Modules and collected tests are millions of objects that live to the end. Looking through them
    again and again took 38 of 191 s of processor time in 123 tests, 36 as statsmodels is imported.
    """
    if session.config.getoption("processes", 0) and "torch" in sys.modules:
        # Torch imports its compiler, for seconds, when a process first trains; so all have it.
        importlib.import_module("torch._inductor.config")
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()
    # What a test writes twice within a second would be read from the bytecode of the first.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


@pytest.fixture(scope="session")
def chromium() -> tuple[str, str]:
    """Return the programs of a browser and of its driver."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if found[0] is None or found[1] is None:
        skip_or_fail("browser", "no browser: apt-get install chromium chromium-driver")
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``golden_path`` once for every manifest of the folder."""
    if "golden_path" in metafunc.fixturenames:
        paths = sorted(GOLDENS.glob("*.json")) if GOLDENS else [None]
        metafunc.parametrize(
            "golden_path",
            paths,
            indirect=True,
            ids=[path.stem if path else "none" for path in paths],
        )


@pytest.fixture(scope="session")
def heed_ctrl_c() -> Callable[[], object]:
    """Return the ``preexec_fn`` of a child that is to be interrupted.

    A shell that runs the tests in the background lets their children ignore Ctrl-C.
    """
    return lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(params=["float32", "bfloat16"])
def traced_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let modules that are compiled be traced alone, and return what to compute in.

    Generating code takes minutes. bfloat16 comes with channels side by side, as on an accelerator.
    """
    import torch

    traced = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    dtype: torch.dtype = getattr(torch, request.param)
    if dtype == torch.bfloat16:
        laid = functools.partial(torch.Tensor.contiguous, memory_format=torch.channels_last_3d)
        monkeypatch.setattr("dzrobot.policies.dreamzero.network.vae.channels_last", laid)
    torch.compiler.reset()
    return dtype


@pytest.fixture
def golden_path(request: pytest.FixtureRequest) -> Path:
    """Return one manifest of the folder of reference numbers."""
    if request.param is None:
        skip_or_fail("goldens", "DZROBOT_GOLDENS is not a folder")
    path: Path = request.param
    return path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many bad inputs were tried in each file, and how many held: see tests/fuzz."""
    counts: dict[str, dict[str, int]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                area = counts.setdefault(report.nodeid.partition("::")[0], {})
                for name, count in report.user_properties:
                    area[name] = area.get(name, 0) + count
    for area, found in sorted(counts.items()):
        if found.get("tried"):
            line = f"{area}: {found['tried']} bad inputs tried, {found['held']} held"
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True, scope="module")
def ended_watchdogs() -> Iterator[None]:
    """End the watchdogs of environments that a module left open: each looks 20 times a second."""
    yield
    for thread in threading.enumerate():
        if thread.name == "franka-watchdog":
            # The bound method that the thread runs.
            thread._target.__self__.end()  # type: ignore[attr-defined]
