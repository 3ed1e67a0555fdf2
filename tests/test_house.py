"""Budgets of the house: file and function length, no prints in the library."""

import ast
import io
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
