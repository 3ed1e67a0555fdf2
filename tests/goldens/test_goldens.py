"""Every manifest of the folder of reference numbers is reproduced within its tolerance."""

import pytest
from golden_kinds.registry import Golden, passes, worst

pytestmark = pytest.mark.goldens


def test_golden(golden_path, error_table):
    golden = Golden(golden_path)
    name, kind = golden_path.stem, golden.kind
    try:
        results = golden.check()
    except BaseException:
        error_table.append((name, kind, "-", "-", "ERROR"))
        raise
    quantity, error, tolerance = worst(results)
    verdict = "ok" if passes(results) else "FAIL"
    error_table.append((name, kind, f"{error:.1e} ({quantity})", f"{tolerance:.0e}", verdict))

    beyond = {name: pair for name, pair in results.items() if not pair[0] <= pair[1]}
    assert not beyond, f"(error, tolerance): {beyond}"
