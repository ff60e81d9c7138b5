"""The design's walls: who imports whom, who writes, and that each stop point is tested."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import outbox
from outbox.failpoints import Failpoint

PACKAGE = Path(outbox.__file__).parent
TESTS = Path(__file__).parent

# From the top down: a module may import those of its own layer and below, never above.
LAYERS = [
    {
        "states",
        "errors",
        "failpoints",
        "clock",
        "conf",
        "payload",
        "outage",
        "silence",
        "sql",
        "prepared",
    },
    {"models", "signals", "ticks"},
    {"events"},
    {"transitions"},
    {"lifecycle", "brokers"},
]
WRITER = PACKAGE / "transitions"


def modules() -> Iterator[Path]:
    return (path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts)


def layer_of(name: str) -> int | None:
    part = name.split(".")[1] if "." in name else name
    return next((index for index, names in enumerate(LAYERS) if part in names), None)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outbox"):
            if node.module == "outbox":
                yield from (f"outbox.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def test_imports_go_one_way() -> None:
    wrong = []
    for path in modules():
        own = layer_of("outbox." + path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for name in imports_of(path):
            other = layer_of(name)
            if own is not None and other is not None and other > own:
                wrong.append(f"{path.name} imports {name}")
    assert wrong == []


def test_only_transitions_writes_entries_and_notices() -> None:
    """By their words: an ORM update of an entry's status, or SQL that writes the entry table."""
    writes = re.compile(
        r"\.update\(status=|\.save\(\)|Outbox(Entry|Notice)\.objects\S*\.(\w*update|\w*create|delete)"
        r"|\b(bulk_create|bulk_update)\(\[OutboxEntry"
        r"|\bsql\.(ENQUEUE|PUT_OFF|PUBLISH|CLAIM|RENEW|SUCCEED)"
    )
    found = {path for path in modules() if writes.search(path.read_text())}
    assert found
    assert {path.parent for path in found} == {WRITER}


def test_sql_that_writes_entries_lives_in_one_module() -> None:
    statement = re.compile(r"(INSERT INTO|UPDATE|DELETE FROM)\s+celery_outbox_entry")
    found = {
        (path.name, verb) for path in modules() for verb in statement.findall(path.read_text())
    }
    # There the drill plays a producer of another code base, which can do no more than insert.
    found.discard(("enqueuing.py", "INSERT INTO"))
    assert {name for name, _ in found} == {"sql.py"}


def test_every_failpoint_is_reached_in_the_library_and_has_a_crash_test() -> None:
    crash_tests = (TESTS / "test_crashes.py").read_text()
    library = "".join(path.read_text() for path in modules())
    for point in Failpoint:
        assert f"reach(Failpoint.{point.name})" in library, point
        assert f"Failpoint.{point.name}" in crash_tests, point
