"""Budgets of the repository: length, layers without circles, few crumbs, short ways in."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("dzrobot", "envs", "policies", "training", "plugins", "examples",
                        "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)
)  # fmt: skip


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def by_kind(path: Path) -> Mapping[type[ast.AST], Sequence[Any]]:
    """Return the nodes of a module by their class; a module is walked once for all tests."""
    found: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(parsed(path)):
        found.setdefault(type(node), []).append(node)
    return found


def nodes(path: Path, *kinds: type[ast.AST]) -> Iterator[Any]:
    """Yield the nodes of a module that are of the given classes."""
    for kind in kinds:
        yield from by_kind(path).get(kind, ())


def lines_of(node: Any) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@functools.cache
def code_lines(path: Path) -> frozenset[int]:
    """Return the line numbers that hold code: no blanks, comments or docstrings."""
    written = enumerate(text(path).splitlines(), 1)
    lines = {number for number, line in written if (held := line.strip()) and held[0] != "#"}
    # A text may have lines that are blank, or look like comments.
    for node in nodes(path, ast.Constant, ast.JoinedStr):
        if node.end_lineno != node.lineno:
            lines.update(lines_of(node))
    for node in nodes(path, ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(lines_of(node))
    return frozenset(lines)


def test_budgets():
    faults = []
    for path in FILES:
        code = code_lines(path)
        if len(code) > 400:
            faults.append(f"{path} has {len(code)} code lines")
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef):
            length = len(code.intersection(lines_of(node)))
            if length > 60:
                faults.append(f"{path}: {node.name} has {length} code lines")
    assert not faults


HEADLESS = re.compile(
    r"^(Of |Likewise\b|Whose\b|Which\b\.|As before\b)|:\s*(Whose|Which|Likewise)\.$", re.M
)
"""How a docstring begins, or describes an argument, that says nothing without its neighbors."""

UNIDIOMATIC = re.compile(
    r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer\b|more\b|\w+er\b)|\b[Nn]obody\b"
)
"""``is no folder`` for ``is not a folder``; ``nobody`` where no person is meant."""


def test_texts_are_idiomatic():
    faults = []
    for path in FILES:
        for number, line in enumerate(text(path).splitlines(), 1):
            if UNIDIOMATIC.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not faults, "\n".join(faults)


def test_a_docstring_can_be_read_alone():
    """As in a tooltip."""
    faults = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for node in nodes(path, ast.Expr):
            said = node.value.value if isinstance(node.value, ast.Constant) else None
            if isinstance(said, str) and HEADLESS.search(said):
                faults.append(f"{name}:{node.lineno}: {said[:60]}")
    assert not faults, "\n".join(faults)


CONTRIBUTING_WORDS = 960
"""Of what is read, outside the drawn trees: four minutes, at 240 words a minute."""


def test_the_rules_are_read_in_four_minutes():
    prose = re.sub(r"^```text$.*?^```$", "", text(ROOT / "CONTRIBUTING.md"), flags=re.M | re.S)
    words = [word for word in prose.split() if re.search(r"\w", word)]
    assert len(words) <= CONTRIBUTING_WORDS


def called(node: ast.Call) -> str:
    """Return the name of what is called; empty: it has none of its own."""
    return node.func.id if isinstance(node.func, ast.Name) else ""


PARSER_ERRORS = re.compile(
    r"\b(BadZipFile|zlib\.error|struct_error|struct\.error|UnpicklingError|sqlite3\.\w*Error|csv\.Error"
    r"|SafetensorError|ArrowException|FFmpegError|MarkedYAMLError|ReaderError|ParseError"
    r"|JSONDecodeError|MALFORMED|MemoryError|RecursionError)\b"
)
"""What libraries that read foreign files raise, among other things."""


def test_no_list_of_a_parsers_exceptions_is_made_by_hand():
    """What a parser may raise is not documented, so that such a list is one class short.

    `untrusted.parsing` catches whatever comes.
    """
    found = set()
    for path in FILES:
        caught = [node.type for node in nodes(path, ast.ExceptHandler) if node.type is not None]
        caught += [node for node in nodes(path, ast.Call) if called(node) == "suppress"]
        for named in map(ast.unparse, caught):
            if PARSER_ERRORS.search(named):
                found.add(f"{path.relative_to(ROOT)}: {named}")
    assert not found


DOCUMENTED = {"_exit", "_getframe", "_replace"}
"""Names with an underscore that Python documents for everybody."""

PRIVATE_READS = 218
"""How often tests read private names of others. Lower it with what it counts; never raise it: a
test of a private name breaks when code moves. Give the object a public name that users need too, or
the test a double."""


def test_tests_read_few_private_names():
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        names = [
            (node.lineno, node.attr)
            for node in nodes(path, ast.Attribute) if re.match(r"_[^_]", node.attr)
            and not is_own(node.value)
        ]  # fmt: skip
        for node in nodes(path, ast.ImportFrom):
            names += [(node.lineno, alias.name) for alias in node.names]
        found += [
            f"{path.relative_to(ROOT)}:{line}: {name}"
            for line, name in names if re.match(r"_[^_]", name) and name not in DOCUMENTED
        ]  # fmt: skip
    assert len(found) <= PRIVATE_READS, "\n".join(found)


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


PRIVATE_TORCH = {
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": (
        "training/test_data_loader.py::test_torchs_loader_has_shutdown_workers"
    ),
    "torch._C._distributed_c10d": "every run in one process, such as training/test_train_step.py",
    "torch.distributed.algorithms._checkpoint": (
        "training/test_train_distributed.py::test_recompute_changes_no_bit"
    ),
    "torch._higher_order_ops": "the same",
    "torch._dynamo": "policies/network/test_triton.py",
    "torch._C._select_conv_backend": (
        "policies/network/test_network_vae.py::"
        "test_single_clips_on_one_thread_have_the_bits_of_torch"
    ),
    "torch._foreach_copy_": "policies/network/test_graphs.py",
    "torch.utils._pytree": "policies/network/test_fake_cuda.py",
}
"""Names of torch that are not public -> what fails in tests/ if a new version lacks one. They are
why the versions of torch are bounded; beside them, `found_inf` is set on the fused AdamW, see
tests/training/test_train_optim.py::test_torchs_fused_adamw_reads_found_inf."""


def test_private_names_of_torch_are_listed():
    found = set()
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("examples", "benchmarks"):
            continue
        source = text(path)
        found |= set(re.findall(r"\btorch(?:\.[A-Za-z]\w*)*\._[A-Za-z]\w*(?:\._\w+)*", source))
        for module, names in re.findall(r"from (torch[\w.]*) import ([^\n(]*|\([^)]*\))", source):
            found |= {f"{module}.{name}" for name in re.findall(r"\b_\w+", names)}
    unknown = {name for name in found if not any(name.startswith(one) for one in PRIVATE_TORCH)}
    assert not unknown, f"not public in torch; list them with the test that needs them: {unknown}"
    unused = [one for one in PRIVATE_TORCH if not any(name.startswith(one) for name in found)]
    assert not unused, f"no longer used: {unused}"


def test_a_public_class_name_means_one_thing():
    places: dict[str, list[str]] = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("examples", "benchmarks"):
            continue
        for node in nodes(path, ast.ClassDef):
            if not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


BRITISH = re.compile(
    r"(?:colour|centre|centring|grey|neighbour|behaviour|favour|honour|flavour|labour|"
    r"(?:milli|centi|kilo)?metres?\b|licence|artefact|catalogue|analyse|practise|learnt|judgement|"
    r"labell|modell|travell|cancell(?!ed)|signall|"
    r"(?:de|un|re)?(?:normal|initial|optim|summar|util|recogn|token|random|quant|final|serial|"
    r"synchron|organ|standard|general|special|categor|parallel|discret|minim|maxim|visual|emphas|"
    r"author|custom|local|material|vector|binar|penal|character)is(?:e|ed|es|er|ers|ing|ation|ations)\b)",
    re.IGNORECASE,
)
SERIALIZED = re.compile(r"newly_initialised|\butilisation\b|light_grey\w*")
"""Names in files of others or in files that runs have left; they stay as they are."""

TEXTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "examples/*.ipynb", "tests/**/*.py")
    for path in ROOT.glob(pattern)
)  # fmt: skip


def test_spelling_is_american():
    places: dict[str, set[str]] = {}
    for path in FILES + TEXTS:
        if path != Path(__file__):
            for word in set(re.findall(r"[A-Za-z_]+", text(path))):
                places.setdefault(word, set()).add(str(path.relative_to(ROOT)))
    british = {word for word in places if BRITISH.search(SERIALIZED.sub("", word))}
    assert {word: sorted(places[word]) for word in british} == {}


CRUMB = 40
"""Code lines below which a module is a crumb."""

TOPS = {"dzrobot": "dzrobot", "envs": "dzrobot.envs", "policies": "dzrobot.policies",
        "training": "dzrobot.training"}  # fmt: skip
"""Top folder -> package that it is imported as."""


@functools.cache
def package_modules() -> Mapping[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in FILES:
        top, *parts = path.relative_to(ROOT).with_suffix("").parts
        if top in TOPS:
            found[".".join([TOPS[top], *parts]).removesuffix(".__init__")] = path
    return found


def imported(tree: ast.AST, *, typing: bool = True) -> Iterator[str]:
    """Yield what a module imports, in its functions and, with ``typing``, for type checkers too."""
    for node in ast.iter_child_nodes(tree):
        if not typing and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in package_modules() else node.module
        yield from imported(node, typing=typing)


@functools.cache
def arrows() -> Set[tuple[str, str]]:
    """Return (importing module, imported module) within the package.

    A package's ``__init__`` names for type checkers what it loads when it is asked for: that leads
    nowhere when it is imported.
    """
    return {
        (name, other) for name, path in package_modules().items()
        for other in imported(parsed(path), typing=path.stem != "__init__")
        if other in package_modules() and other != name
    }  # fmt: skip


def circle(pairs: Set[tuple[str, str]]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for one, other in pairs:
        graph.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others():
    assert circle(arrows()) == []


def room(name: str) -> str:
    """Return the leaf package of a module; a module beside sub-packages stands for itself."""
    packages = {name for name, path in package_modules().items() if path.stem == "__init__"}
    parents = {package.rpartition(".")[0] for package in packages}
    if name in packages:
        return f"{name}.__init__" if name in parents else name
    package = name.rpartition(".")[0]
    return name if package in parents else package


def test_no_circle_between_rooms():
    rooms = {name: room(name) for name in package_modules()}
    pairs = {(rooms[one], rooms[other]) for one, other in arrows()}
    assert circle({(one, other) for one, other in pairs if one != other}) == []


def test_few_modules_are_crumbs():
    crumbs = [
        name for name, path in package_modules().items()
        if path.stem not in ("__init__", "__main__") and len(code_lines(path)) < CRUMB
    ]  # fmt: skip
    assert len(crumbs) <= 30, crumbs


def test_a_file_name_means_one_thing():
    """Commands are named by what a user types."""
    stems = Counter(
        path.stem for name, path in package_modules().items()
        if path.stem not in ("__init__", "__main__") and not name.startswith("dzrobot.commands")
    )  # fmt: skip
    assert [stem for stem, count in stems.items() if count > 1] == []


def test_fields_are_read_by_name():
    calls = sum(
        called(node) in ("getattr", "hasattr")
        for path in package_modules().values() for node in nodes(path, ast.Call)
    )  # fmt: skip
    lines = sum(len(code_lines(path)) for path in package_modules().values())
    assert 1000 * calls / lines <= 0.5, f"{calls} calls of getattr and hasattr in {lines} lines"


def test_what_is_known_has_a_type():
    """A value that was checked has a type that says so; nothing is asked again in mid-work."""
    asserts = [
        f"{name}: {ast.unparse(node)}"
        for name, path in package_modules().items() for node in nodes(path, ast.Assert)
    ]  # fmt: skip
    assert [said for said in asserts if "assert isinstance(" in said] == []
    known = [said for said in asserts if re.search(r"'.*\b(filled|checked|begun)\b", said)]
    assert len(known) <= 5, known


def test_protocols_are_few():
    """What is ours has base classes; protocols are for hardware and for classes of others."""
    protocols = [
        f"{name}.{node.name}"
        for name, path in package_modules().items() for node in nodes(path, ast.ClassDef)
        if any(
            ast.unparse(base).split("[")[0].rpartition(".")[2] == "Protocol" for base in node.bases
        )
    ]  # fmt: skip
    assert len(protocols) <= 38, protocols


@pytest.mark.parametrize(("module", "most"), [("dzrobot", 6), ("dzrobot.commands.eval", 70)])
def test_a_way_in_imports_little(module, most):
    program = (
        f"import sys, {module}; "
        "print(*(name for name in sys.modules if name.partition('.')[0] == 'dzrobot'))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = ran.stdout.split()
    assert len(loaded) <= most, loaded
    heavy = (
        "dzrobot.envs.franka",
        "dzrobot.training",
        "dzrobot.recording.writer",
        "dzrobot.rollout.arm",
    )
    assert [name for name in loaded if name.startswith(heavy)] == []
