"""Each row of a decision table in a docstring has a test of its name."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from proxy.conversation import ledger, lineage


@pytest.mark.parametrize(("module", "tests"), [(ledger, "test_ledger_paths.py"), (lineage, "test_lineage.py")])
def test_every_row_has_a_test_of_its_name(module: ModuleType, tests: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", module.__doc__ or "", re.MULTILINE)
    names = re.findall(r"^def test_(\w+)", Path(__file__).with_name(tests).read_text(), re.MULTILINE)
    assert len(rows) > 10 and len(set(rows)) == len(rows)
    assert not [row for row in rows if not any(f"{name}_".startswith(f"{row}_") for name in names)]
