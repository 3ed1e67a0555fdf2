"""One test per manifest of the folder, and a table of errors at the end of the run."""

import pytest

ROWS = pytest.StashKey[list[tuple[str, str, str, str, str]]]()


@pytest.fixture
def error_table(request):
    """Return the rows that the table at the end of the run shows."""
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    table = [("file", "kind", "worst relative error", "tolerance", "verdict"), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(5)]
    terminalreporter.section("reference numbers")
    for row in table:
        terminalreporter.line(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        )
