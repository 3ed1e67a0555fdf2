"""The package list, the links and the launchers' folders stay in order."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path, PurePath
from typing import get_origin

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dzrobot
from dzrobot.code_identity import counted_files
from dzrobot.rollout.lerobot_server import NEEDED

ROOT = Path(__file__).parents[1]
LINKED = ("envs", "policies", "training")


def test_package_list_equals_the_folders():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("dzrobot/**/__init__.py")
        if init.relative_to(ROOT).parts[1] not in LINKED
    }
    for name in LINKED:
        found |= {
            "dzrobot." + ".".join(init.parent.relative_to(ROOT).parts)
            for init in ROOT.glob(f"{name}/**/__init__.py")
        }
    assert set(listed) == found | {"dzrobot_examples"}


def tracked(*folders):
    """Return the files below ``folders`` that git tracks; links to folders are not followed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is not a checkout of git")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_tracked_file_is_in_the_wheel():
    """So that a wheel works as a checkout does, and has its hash; `make smoke` looks into both."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    missing = []
    files = {file.relative_to(ROOT / "dzrobot") for file in counted_files(ROOT / "dzrobot")}
    files |= {Path(name) for name in tracked(*LINKED)}
    files |= {Path(name).relative_to("dzrobot") for name in tracked("dzrobot")}
    files |= {Path(name) for name in tracked("examples")}
    for file in sorted(files):
        if file.parts[0] == "examples":
            name, within = "dzrobot_examples", file.name
        else:
            folders = [ROOT / "dzrobot" / folder for folder in file.parents]
            package = next(folder for folder in folders if (folder / "__init__.py").exists())
            name = ".".join(package.relative_to(ROOT).parts)
            within = (ROOT / "dzrobot" / file).relative_to(package).as_posix()
        patterns = [*given.get(name, []), *(() if "/" in within else ("*.py", *given["*"]))]
        if not any(PurePath(within).match(pattern) for pattern in patterns):
            missing.append(f"{name}: {within}")
    assert missing == []


def test_one_version_is_told_everywhere():
    """The newest section of the changelog is what this is, or what it becomes."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (?:Unreleased \()?(\d+\.\d+\.\d+)(\)?)", changelog, re.MULTILINE)
    (newest, unreleased), *_ = sections
    version = f"{newest}.dev0" if unreleased else newest
    assert dzrobot.__version__ == version
    for file in ("pyproject.toml", "plugins/lerobot_policy_dreamzero/pyproject.toml"):
        assert tomllib.loads((ROOT / file).read_text())["project"]["version"] == version, file
    released = next(number for number, bracket in sections if not bracket)
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text()
    assert len({number for number, _ in sections}) == len(sections)


def test_the_robots_machine_gets_the_same_versions_and_no_torch():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "requirements/robot.txt").read_text().splitlines()
    needed = [line for line in lines if line and not line.startswith("#")]
    assert set(needed) <= set(declared)
    assert not [line for line in needed if line.startswith(("torch", "transformers", "diffusers"))]
    # What LeRobot's Python needs besides is told in full, as a wheel has no requirements/.
    assert f"`{' '.join(NEEDED)}`" in (ROOT / "docs/guides/serve.md").read_text()
    assert {Requirement(line).name for line in needed} >= {*NEEDED} - {"prometheus_client"}
    lines = (ROOT / "requirements/simulators.txt").read_text().splitlines()
    assert {line for line in lines if line and not line.startswith("#") and "==" not in line} <= {
        *declared, "numpy<2"
    }  # fmt: skip


def test_the_constraints_are_what_the_declared_dependencies_allow():
    """`make lock` writes them anew, after a dependency was added or raised."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(one.name): str(one.specifier)[2:] for one in pinned}
    assert all(re.fullmatch("==[^,*]+", str(one.specifier)) for one in pinned)
    extras = project["optional-dependencies"]
    declared = [
        Requirement(text)
        for text in (*project["dependencies"], *extras["dev"], *extras["libero"], *extras["franka"])
    ]
    # Which torch is installed is the machine's choice.
    needed = {canonicalize_name(one.name): one for one in declared if one.name != "torch"}
    assert needed.keys() - versions.keys() == set()
    unfit = [name for name, one in needed.items() if not one.specifier.contains(versions[name])]
    assert unfit == []
    assert not {"torch", "dzrobot"} & versions.keys()


def test_the_image_is_made_of_what_is_there():
    """Read only: whether it builds is seen where there is Docker."""
    makefile = (ROOT / "Makefile").read_text()
    joined = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in joined.splitlines() if line[:1].isupper()]
    assert [rest for word, rest in steps if word == "USER"] == ["robot"]
    arguments = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
    assert arguments.keys() == {"TORCH_INDEX", "TORCH"}
    assert f"TORCH ?= {arguments['TORCH'].strip(chr(34))}\n" in makefile
    (install,) = (rest for _, rest in steps if "apt-get install" in rest)
    needed = re.search(r"^SYSTEM_PACKAGES := (.*)$", makefile, re.MULTILINE)[1].split()
    assert set(needed) <= set(install.split())
    assert steps.index(["USER", "robot"]) > [rest for _, rest in steps].index(install)
    targets = re.findall(r"make\W+([a-z-]+)", " ".join(rest for _, rest in steps))
    assert {"setup", "demo"} <= set(targets)
    assert all(f"\n{name}: " in makefile for name in ("setup", "demo"))
    # What is left out of the image is needed by none of that.
    ignored = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    assert not ignored & {"Makefile", "pyproject.toml", "README.md", ".ci", "examples", "tests"}


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_resolve(name):
    link = ROOT / "dzrobot" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_top_level_import_is_refused(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"import dzrobot.{name}" in done.stderr


@pytest.mark.parametrize("folder", ["training", "examples", "benchmarks"])
def test_nothing_beside_a_launcher_shadows_a_library(folder):
    # A script's folder is sys.path[0]: `training/datasets.py` would replace that library.
    dependencies = {
        *("av", "bddl", "cv2", "datasets", "diffusers", "franky", "gymnasium", "libero", "mujoco"),
        *("numpy", "peft", "pyarrow", "robosuite", "safetensors", "tensorboard", "torch"),
        *("transformers", "wandb", "yaml"),
    }
    names = {path.stem for path in (ROOT / folder).iterdir()}
    assert not names & (set(sys.stdlib_module_names) | dependencies)


OF_TORCH = "import torch; print(torch.get_num_threads())"
OF_WHAT_IT_READS = "import os; print(os.environ['OMP_NUM_THREADS'])"


@pytest.mark.parametrize(
    ("given", "threads", "said"),
    [
        (None, 1, OF_TORCH),
        ("2", 2, OF_WHAT_IT_READS),
        pytest.param("2", 2, OF_TORCH, marks=pytest.mark.long),
    ],
)
def test_a_command_computes_in_one_thread_unless_told(given, threads, said):
    program = f"from dzrobot.cli import main; main(['plan']); {said}"
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = kept if given is None else {**kept, "OMP_NUM_THREADS": given}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == str(threads)


def test_import_is_light():
    # What gymnasium loads is its own affair (0.2 s); we add nothing but ourselves, so that the
    # import stays as fast on a busy machine, where a time would not tell.
    code = """
import importlib.util
import sys
import gymnasium
before = set(sys.modules)
import dzrobot
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    added = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert added.stdout.split() == ["dzrobot"]


DOORS = (
    *("dzrobot", "dzrobot.embodiments", "dzrobot.envs", "dzrobot.policies", "dzrobot.rollout"),
    "dzrobot.training",
)


@pytest.mark.parametrize("package", DOORS)
def test_lazy_names_are_what_they_say(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        found = getattr(module, name)
        # What a subscript made, as Mapping[str, ...], bears the name of its origin.
        assert get_origin(found) is not None or getattr(found, "__name__", name) == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018
    # Type checkers and the interpreter read the same imports; who copies names reads `__all__`.
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if "TYPE_CHECKING" in ast.unparse(node) and isinstance(node, ast.If)
    )
    imported = {
        alias.name: node.module for node in block.body for alias in node.names
    }  # fmt: skip
    assert set(imported) == set(module.__all__)
    for name, home in imported.items():
        assert getattr(importlib.import_module(home), name) is getattr(module, name)


@pytest.mark.long
def test_a_users_type_checker_follows_an_editable_install(tmp_path):
    """An import hook, setuptools' choice for mapped folders, is something it cannot follow."""
    site = tmp_path / "venv"
    venv.create(site, with_pip=True)
    python = site / "bin/python"
    clean = {key: value for key, value in os.environ.items() if "PATH" not in key or key == "PATH"}
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ROOT]
    subprocess.run(install, check=True, env=clean)
    lines = (
        "from dzrobot.policies.dreamzero.checkpoints.hub import is_hub_id",
        "from dzrobot.errors import suggest",
        "number: int = suggest('a', ['b'])",
    )
    (tmp_path / "mine.py").write_text("\n".join(lines))
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "mine.py"],
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (fault,) = (line for line in found.stdout.splitlines() if "error:" in line)
    assert fault.startswith("mine.py:3: error: Incompatible types in assignment (expression has"), (
        found.stdout
    )


def test_actions_are_named_by_commit():
    """A tag can be moved to other code by whoever takes over the action."""
    used = [
        line.split("uses:")[1].split() for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in path.read_text().splitlines() if "uses:" in line
    ]  # fmt: skip
    assert len(used) >= 5
    assert [words for words in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", words[0])] == []
    assert all(len(words) == 3 and words[1] == "#" for words in used), "its version, for people"


def test_a_release_keeps_no_secret():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text
    build, publish = text.split("  publish:\n")
    assert "id-token: write" in publish
    assert "write" not in build
