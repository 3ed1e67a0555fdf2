"""What the documents tell a user to type exists and is accepted; no code block is left out."""

import argparse
import ast
import functools
import inspect
import json
import os
import re
import shlex
import tomllib
from collections import Counter
from importlib import import_module
from pathlib import Path

import gymnasium as gym
import pytest
import yaml
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import dzrobot
from dzrobot import cli, errors
from dzrobot.configuration import load_config
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.safeguards.limits import Abort
from dzrobot.importing import is_reference
from dzrobot.rollout.policy_spec import BUILT_IN, LEROBOT
from dzrobot.training.sft_config import DataConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
FENCES = [
    (page, *fence)
    for page in DOCUMENTS
    for fence in re.findall(
        r"^ *```([^\n`]*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
]
"""Page, language and content of every block."""

NEEDS = {"{.python .needs-arm}", "{.python .needs-gpu}", "{.python .needs-server}"}
"""Python that is not run here; everything that it names is looked up."""

BLOCKS = "\n".join(content for _, language, content in FENCES if language == "bash")
BLOCKS = BLOCKS.replace("\\\n", " ")
LINES = [line.partition("  #")[0].strip() for line in BLOCKS.splitlines() if line.strip()]

SCRIPTS = {
    "benchmarks/gpu.sh": "benchmarks/gpu.py",
    "benchmarks/pack_gpu.sh": "benchmarks/pack_gpu.sh",
}
"""Shell script -> what reads its flags."""


def test_every_block_of_yaml_is_a_workcell_or_part_of_a_recipe():
    found = [content for _, language, content in FENCES if language == "yaml"]
    assert found
    for content in found:
        values = yaml.safe_load(content)
        if "data" in values:
            load_config(DataConfig, values.pop("data"))
            assert values == {}
        else:
            FrankaConfig.model_validate(values)


def test_every_block_is_run_or_checked():
    found = Counter(language for _, language, _ in FENCES)
    # What shows something and is no code, besides.
    assert set(found) <= {"python", "bash", "mermaid", "text", "yaml", *NEEDS}
    run = [
        example
        for page in DOCUMENTS
        for example in Document.parse(str(page), PythonCodeBlockParser()).examples()
        if page.name != "CONTRIBUTING.md"
    ]
    assert len(run) == found["python"] > 0
    assert "<!-- skip" not in TEXT
    assert "<!--- skip" not in TEXT


def test_every_line_for_a_shell_is_of_a_kind_that_is_checked():
    kinds = {"dzrobot", "make", "python", "torchrun", "pip", "lerobot-eval", "lerobot-train"}
    kinds |= {*SCRIPTS}
    assert [line for line in LINES if shlex.split(line)[0] not in kinds] == []


TABLES = re.findall(r"^\| `(--[a-z-]+)` \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
"""Option at the head of a table's first column, and the table's rows."""


@pytest.mark.parametrize(("option", "rows"), TABLES, ids=[option for option, _ in TABLES])
def test_values_in_a_table_headed_by_an_option_are_accepted(option, rows):
    actions = [
        action
        for name, module in cli.available().items()
        for action in cli.build_parser(name, import_module(module))._actions
        if option in action.option_strings
    ]
    values = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in rows.splitlines()))
    assert values
    for value in values:
        assert any(_takes(action, value) for action in actions), f"{option} {value}"


def _takes(action, value):
    """Return whether an option accepts a value, where one table of values is allowed."""
    if action.dest == "policy":
        return value in BUILT_IN or value.startswith(LEROBOT) or is_reference(value)
    try:
        taken = action.type(value) if action.type else value
    except (ValueError, argparse.ArgumentTypeError):
        return False
    return action.choices is None or taken in action.choices


def test_what_lerobot_is_told_of_the_plug_in_are_its_fields():
    sources = (ROOT / "plugins/lerobot_policy_dreamzero/src").rglob("*.py")
    own = {
        node.target.id
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    theirs = {"path", "type", "push_to_hub"}
    lines = [line for line in LINES if line.startswith("lerobot-")]
    named = set(re.findall(r"--(?:policy|env)\.(\w+)", "\n".join(lines)))
    assert len(lines) >= 3
    assert named <= own | theirs


def test_scripts_are_programs_and_take_their_flags():
    for line in LINES:
        program, *words = shlex.split(line)
        if program in SCRIPTS:
            assert os.access(ROOT / program, os.X_OK)
            source = (ROOT / SCRIPTS[program]).read_text()
            for flag in (word for word in words if word.startswith("--")):
                assert f'"{flag}"' in source, line


@pytest.mark.parametrize(
    ("page", "code"),
    [(page, content) for page, language, content in FENCES if language in NEEDS],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_python_that_needs_a_device_names_what_exists(page, code):
    tree = ast.parse(code)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: import_module(alias.name) for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module)
            names |= {
                alias.asname or alias.name: getattr(module, alias.name) for alias in node.names
            }
    checked = 0
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        first, *attributes = ast.unparse(call.func).split(".")
        called = names.get(first)
        for attribute in attributes if called is not None else ():
            called = getattr(called, attribute)
        if callable(called):
            keywords = {word.arg: None for word in call.keywords}
            inspect.signature(called).bind(*call.args, **keywords)
            checked += 1
    assert checked


def test_what_pip_is_told_to_install_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    lines = [line for line in LINES if line.startswith("pip")] + re.findall(r"`(pip [^`]+)`", TEXT)
    assert lines
    for line in lines:
        for named in re.findall(r"\[([\w,]+)\]", line):
            assert set(named.split(",")) <= extras
        for file in re.findall(r"-r (\S+)", line):
            assert (ROOT / file).is_file()


def commands(*prefix):
    return [words for words in map(shlex.split, LINES) if tuple(words[: len(prefix)]) == prefix]


def test_the_documents_have_commands():
    assert len(commands("dzrobot")) >= 4
    assert commands("make")


@functools.cache
def parser_of(name):
    """Return the parser of a command, made once."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    import_module(cli.available()[name]).add_arguments(parser)
    return parser


@pytest.mark.parametrize("words", commands("dzrobot"), ids=" ".join)
def test_dzrobot_lines_are_accepted(words):
    parser = parser_of(words[1])
    nested = parser._subparsers is not None
    # Whether there is a GPU is looked up as the flag is read; here, it does not matter.
    given = ["cpu" if re.fullmatch(r"cuda(:\d+)?", word) else word for word in words[2:]]
    (parser.parse_args if nested else parser.parse_intermixed_args)(given)


def options(parser):
    for action in parser._actions:
        yield from action.option_strings
        for inner in (action.choices or {}).values() if hasattr(action, "add_parser") else ():
            yield from options(inner)


@pytest.mark.parametrize("span", sorted(set(re.findall(r"`dzrobot ([a-z][^`]*)`", TEXT))))
def test_commands_and_flags_named_in_the_text_exist(span):
    name, *words = span.split()
    assert name in cli.available()
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert flags <= set(options(parser_of(name)))


def sentences(file):
    """Yield the texts of a Python file; what is filled in at run time is {}."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_commands_and_flags_named_in_messages_exist():
    """Read where the package is installed: the sources of a checkout, or of a wheel."""
    named = 0
    package = Path(dzrobot.__file__).parent
    # In a checkout these are links, which are not followed.
    linked = [package / name for name in ("envs", "policies", "training")]
    for file in sorted({file for folder in (package, *linked) for file in folder.rglob("*.py")}):
        for text in sentences(file):
            for name, rest in re.findall(r"`dzrobot ([a-z][a-z0-9-]+)([^`]*)`", text):
                assert name in cli.available(), f"{file}: dzrobot {name}"
                flags = {word.partition("=")[0].rstrip(".,:;)") for word in rest.split()}
                flags = {flag for flag in flags if re.fullmatch(r"--[a-z-]+", flag)}
                assert flags <= {*options(parser_of(name)), "--help-all"}, f"{file}: {text}"
                named += 1
    assert named > 50


def test_make_targets_exist():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    text = page.read_text()
    # Links of a file that a page includes must lead somewhere from that page.
    shown = re.sub(r'--8<-- "(.+)"', lambda found: (ROOT / found[1]).read_text(), text)
    linked = {page.parent / name for name in re.findall(r"\]\(([^)#:]+)\)", shown)}
    named = re.findall(r"\b(?:examples|training|benchmarks|tests|dzrobot|docs)/[\w/.]+\.\w+", text)
    missing = [path for path in {*linked, *(ROOT / name for name in named)} if not path.exists()]
    # Reference pages are made when the site is built: nothing in the repository leads to them.
    assert missing == []


def test_sections_of_the_model_page_that_the_code_cites_exist():
    headings = set(
        re.findall(r"^#+ ([0-9.]+) ", (ROOT / "docs/model.md").read_text(), re.MULTILINE)
    )
    cited = {
        number
        for folder in ("dzrobot", "envs", "policies", "training")
        for path in (ROOT / folder).rglob("*.py")
        for words in re.findall(
            r"docs/model\.md,?\s+sections? ([0-9., and]*[0-9])", path.read_text()
        )
        for number in re.findall(r"[0-9]+(?:\.[0-9]+)?", words)
    }
    assert cited
    assert cited <= headings


def test_every_kind_of_error_is_in_troubleshooting():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    kinds = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.DzrobotError)
    }
    assert {name for name in kinds if f"`{name}`" not in page} - {"DzrobotError"} == set()


def test_environments_that_are_named_are_registered():
    named = set(re.findall(r"\b(?:dzrobot/)?[A-Za-z_-]+-v0\b", TEXT))
    own = set(re.findall(r'gym\.register\("([^"]+)"', TEXT))
    assert named - own
    assert named - own <= set(gym.registry)


@pytest.mark.parametrize(
    "words", [w for w in map(shlex.split, LINES) if w[0] in ("python", "torchrun")], ids=" ".join
)
def test_scripts_that_are_named_take_the_flags(words):
    script = next(word for word in words[1:] if word.endswith(".py"))
    # What `dzrobot example` has written lies in the folder it was called in.
    text = next(p for p in (ROOT / script, ROOT / "examples" / script) if p.is_file()).read_text()
    for flag in (word.partition("=")[0] for word in words[words.index(script) :]):
        if flag.startswith("--"):
            assert f'"{flag}"' in text or "dzrobot.commands" in text, flag


def names_in(path):
    """Return the functions, classes and methods (``Class.method``) of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body
                      if isinstance(inner, ast.FunctionDef)}  # fmt: skip
    return found


def missing(cell, *folders):
    """Return what a cell of places, ``path::name`` each, names and is not there."""
    places = re.findall(r"`([^`]+)`", cell)
    assert places, cell
    assert cell.strip() == " ".join(f"`{place}`" for place in places)
    for place in places:
        path, _, name = place.partition("::")
        files = [folder / path for folder in folders if (folder / path).is_file()]
        if not files or name not in names_in(files[0]):
            yield place


def test_every_guard_and_every_test_of_the_safety_page_exists():
    page = (ROOT / "docs/guides/safety.md").read_text()
    table = page[page.index("## Hazards and guards") :].partition("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in re.split(r" ?(?<!\\)\| ?", line)[1:-1]]
        for line in table.splitlines() if line.startswith("|")
    ]  # fmt: skip
    assert head == ["hazard", "guard", "code", "test", "left to the person"]
    assert len(rows) > 20
    wrong = []
    for hazard, guard, code, test, _ in rows:
        assert hazard, "a row says what may happen"
        assert guard, hazard
        wrong += missing(code, ROOT / "envs/franka", ROOT)
        wrong += missing(test, ROOT / "tests")
    assert wrong == []
    picture = page.partition("```mermaid")[2].partition("```")[0]
    drawn = re.findall(r"\b([A-Z]\w+)\.(\w+)\b", picture)
    files = (path for room in ("franka", "panda") for path in (ROOT / "envs" / room).rglob("*.py"))
    code = {name for path in files for name in names_in(path)}
    assert drawn
    assert {".".join(place) for place in drawn} - code == set()
    for path in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", page):
        assert any((folder / path).is_file() for folder in (ROOT / "envs/franka", ROOT)), path


def test_every_kind_of_stop_has_an_entry():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    text = page[page.index("### The arm stopped") :]
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(kind.value for kind in Abort if kind)


def test_the_keys_of_results_are_those_that_a_run_writes(tmp_path):
    """Each table of docs/scores.md names every key of its file, and no other."""
    page = (ROOT / "docs/scores.md").read_text()
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "hold", "--episodes", "1"]
    words += ["--max-steps", "2", "--workers", "0", "--output", str(tmp_path / "results")]
    assert cli.main(words) == 0
    for name, only_sometimes in (
        ("records.jsonl", set()), ("card.json", {"perturbation", "execution"}),
        ("summary.json", set()),
    ):  # fmt: skip
        (part,) = re.findall(rf"^### {name}\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE)
        cells = re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
        told = [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]
        written = json.loads((tmp_path / "results" / name).read_text())
        assert set(told) == set(written) | only_sometimes
        assert len(told) == len(set(told))
