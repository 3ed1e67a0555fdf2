"""Budgets of the repository: file and function length, no prints in the library."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("dzrobot", "envs", "policies", "training", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)
)  # fmt: skip


def code_lines(source: str) -> set[int]:
    """Return the line numbers that hold code: no blanks, comments or docstrings."""
    lines: set[int] = set()
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENCODING, tokenize.ENDMARKER}  # fmt: skip
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _is_docstring(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_budgets(path):
    source = path.read_text()
    code = code_lines(source)
    assert len(code) <= 400, f"{len(code)} code lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            assert length <= 60, f"{node.name} has {length} code lines"


def test_a_public_class_name_means_one_thing():
    places: dict[str, list[str]] = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("examples", "benchmarks"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
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
            for word in re.findall(r"[A-Za-z_]+", path.read_text()):
                places.setdefault(word, set()).add(str(path.relative_to(ROOT)))
    british = {word for word in places if BRITISH.search(SERIALIZED.sub("", word))}
    assert {word: sorted(places[word]) for word in british} == {}
