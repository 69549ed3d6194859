"""`gyre doctor --dialects`: the closed tables of request fields, as text, as JSON, and as the page of the docs.

It only prints what the dialects' own tables say.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from proxy.dialects.dialect import Dialect
from proxy.dialects.registry import DIALECTS

HEAD = """# Dialects

Each dialect that the proxy speaks has a closed table of request fields: *honoured* fields have their effect, *ignored*
fields are recorded with the call and have none, *refused* fields get a 400 in the provider's words unless they are null
or have the value named. A field that is in no table is refused. `gyre doctor --dialects` prints the same.
"""


def as_json() -> dict[str, Any]:
    """Per dialect its paths, and per field its treatment and note."""
    return {
        dialect.NAME: {
            "paths": list(dialect.PATHS),
            "fields": {name: {"treatment": f.treatment, "note": f.note} for name, f in dialect.FIELDS.items()},
        }
        for dialect in DIALECTS
    }


def print_tables(console: Console) -> None:
    for dialect in DIALECTS:
        table = Table("field", "treatment", "note", title=_title(dialect), title_justify="left")
        for name, field in dialect.FIELDS.items():
            table.add_row(name, field.treatment, field.note)
        console.print(table)


def page() -> str:
    """The page of the docs: Markdown."""
    parts = [HEAD]
    for dialect in DIALECTS:
        rows = [f"| `{name}` | {field.treatment} | {field.note} |" for name, field in dialect.FIELDS.items()]
        parts.append(f"## {_title(dialect)}\n\n| field | treatment | note |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _title(dialect: Dialect) -> str:
    return f"{dialect.NAME}: POST {', '.join(dialect.PATHS)}"
