"""The code in README and docs is run as tests: one namespace a page, in order.

Nothing is skipped. Blocks that need what a test machine has not are written ```{.python .needs-arm}
and the like; ``tests/test_docs.py`` checks their names and arguments, and counts.
"""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
).pytest()

pytest_plugins = ["forked"]
