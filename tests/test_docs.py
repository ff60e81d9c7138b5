"""The documentation says what is there: commands, code, settings, options, codes and links.

`WRITE_DOCS=1 python -m pytest tests/test_docs.py` rewrites what is generated from `EDGES`.
"""

import ast
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import redis
from celery import _state
from celery.app.trace import build_tracer
from django.core import mail
from django.core.management import CommandError, get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.db import connection, transaction
from django.dispatch import Signal

from outbox import conf, signals, ticks
from outbox.drill.scenarios import POINTS
from outbox.models import OutboxEntry
from outbox.states import EDGES, FINAL, State, Verb
from outbox.tasks import OutboxTask
from tests.following import APP

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
README, TUTORIAL = ROOT / "README.md", DOCS / "tutorial" / "first-task.md"
REFERENCE, RUNBOOKS = DOCS / "reference", DOCS / "runbooks"


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    @property
    def title(self) -> str:
        """What its first line says in a comment: the file that it is."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("# ") if first.startswith("# ") else ""


@cache
def blocks(language: str) -> list[Block]:
    fence = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
    return [
        Block(page, found[2], textwrap.dedent(found[3]))
        for page in PAGES
        for found in fence.finditer(page.read_text())
        if found[2] == language
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def table(page: Path, *, columns: int) -> list[list[str]]:
    """All rows of the page's tables with that many columns; not their heads."""
    rows = []
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if len(cells) == columns and cells[0].startswith("`"):
            rows.append(cells)
    return rows


def code(cell: str) -> str:
    return cell.strip("`")


# --- generated from EDGES -----------------------------------------------------------------------


def _diagram() -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for verb, edge in EDGES.items():
        # From several states back into the same ones: each stays where it is.
        if edge.sources == edge.targets:
            continue
        for source in sorted(edge.sources, key=str):
            for target in sorted(edge.targets):
                if source != target:
                    arrows.setdefault((str(source or "[*]"), str(target)), []).append(verb)
    lines = [f"    {a} --> {b}: {', '.join(verbs)}" for (a, b), verbs in arrows.items()]
    ends = [f"    {state} --> [*]" for state in State if state in FINAL]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, *ends, "```"])


def _verbs() -> str:
    head = ["| Verb | From | To | Log event | Event |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_verb(verb) for verb in EDGES)])


def _verb(verb: Verb) -> str:
    edge = EDGES[verb]
    sources = ", ".join(f"`{state}`" for state in State if state in edge.sources) or "–"
    targets = ", ".join(f"`{state}`" for state in State if state in edge.targets)
    event = "" if edge.quiet else "yes"
    return f"| `{verb}` | {sources} | {targets} | `outbox.entry.{edge.past}` | {event} |"


def _with(text: str, *, section: str, content: str) -> str:
    marked = re.compile(
        rf"(<!-- generated from outbox\.states\.EDGES: {section} -->\n).*?(<!-- end -->)", re.DOTALL
    )
    found, count = marked.subn(lambda marks: f"{marks[1]}\n{content}\n\n{marks[2]}", text)
    assert count == 1, section
    return found


def test_the_diagram_and_the_table_of_verbs_are_what_edges_gives() -> None:
    page = REFERENCE / "states-and-verbs.md"
    text = _with(page.read_text(), section="diagram", content=_diagram())
    text = _with(text, section="verbs", content=_verbs())
    if os.environ.get("WRITE_DOCS"):
        page.write_text(text)
    assert page.read_text() == text


def test_every_state_and_the_guard_of_every_verb_is_described() -> None:
    page = REFERENCE / "states-and-verbs.md"
    three = table(page, columns=3)
    described = {name for row in three for name in re.findall(r"`(\w+)`", row[0])}
    assert described == {*State, *Verb}
    finals = {code(row[0]) for row in three if row[2] == "yes"}
    assert finals == FINAL


# --- reference ----------------------------------------------------------------------------------


def test_every_setting_is_documented_with_its_default() -> None:
    rows = {code(row[0]): row[1] for row in table(REFERENCE / "settings.md", columns=3)}
    defaults = conf.Settings()
    assert list(rows) == list(conf.KEYS)
    for name, shown in rows.items():
        assert ast.literal_eval(code(shown)) == getattr(defaults, name), name


def test_every_task_option_is_documented_with_its_default() -> None:
    rows = {code(row[0]): row[1] for row in table(REFERENCE / "task-options.md", columns=3)}
    options = [name for name in OutboxTask.__annotations__ if not name.startswith("_")]
    assert list(rows) == options
    for name, shown in rows.items():
        assert ast.literal_eval(code(shown)) == getattr(OutboxTask, name), name


def test_every_check_is_documented_and_no_other() -> None:
    source = (ROOT / "outbox" / "checks.py").read_text()
    named = set(re.findall(r"\bcelery_outbox\.[EWI]\d{3}\b", source))
    numbered = {
        f"celery_outbox.E{int(n):03}" for n in re.findall(r"_error\([^\n]*, (\d+)\)", source)
    }
    headings = re.findall(r"^## (.+)$", (REFERENCE / "checks.md").read_text(), re.MULTILINE)
    assert set(headings) == named | numbered


def test_every_signal_is_documented_with_its_verb() -> None:
    rows = {code(row[0]): code(row[1]) for row in table(_SIGNALS, columns=2)}
    known = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert known.pop("owner_needed")  # of no verb: it has a section of its own
    assert "## For pagers" in _SIGNALS.read_text()
    assert rows.keys() == known.keys()
    for name, verb in rows.items():
        assert signals.by_verb[Verb(verb)] is known[name], name


def test_every_log_event_is_documented_and_no_other() -> None:
    call = re.compile(
        r"logger\.(?:debug|info|warning|error|exception)\(\s*\"(outbox\.[a-z_.]+[a-z])"
    )
    library = "".join(path.read_text() for path in (ROOT / "outbox").rglob("*.py"))
    rows = table(_SIGNALS, columns=3)
    shown = {name for row in rows for name in re.findall(r"`(outbox\.[a-z_.]+)`", row[0])}
    assert shown == set(call.findall(library)) - {"outbox.entry"}


_SIGNALS = REFERENCE / "signals-and-logs.md"


def _codes() -> tuple[set[str], set[str]]:
    """The problem codes in the library: whole ones, and endings after a tick's name."""
    library = (ast.parse(path.read_text()) for path in (ROOT / "outbox").rglob("*.py"))
    whole, endings = set(), set()
    for node in chain.from_iterable(map(ast.walk, library)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
            first = node.args[0]
            if isinstance(first, ast.Constant):
                whole.add(str(first.value))
            elif isinstance(first, ast.JoinedStr) and isinstance(first.values[-1], ast.Constant):
                endings.add(str(first.values[-1].value))
    return whole, endings


def test_every_problem_code_has_a_runbook_and_no_other() -> None:
    whole, endings = _codes()
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"index"}
    of_ticks = {name + ending for name in ticks.NAMES for ending in endings}
    assert whole <= pages
    assert pages - whole <= of_ticks
    assert all(any(page.endswith(ending) for page in pages) for ending in endings)


def test_every_runbook_is_in_their_index_and_has_the_three_parts() -> None:
    shown = {code(re.sub(r"\[(.+)\]\(.+\)", r"\1", cell)) for cell in _indexed()}
    pages = {path.stem: path.read_text() for path in RUNBOOKS.glob("*.md")}
    del pages["index"]
    assert shown == pages.keys()
    for name, text in pages.items():
        assert text.startswith(f"# {name}\n"), name
        for part in ("**What it means.**", "**Look at.**", "**Do.**"):
            assert part in text, (name, part)


def _indexed() -> Iterator[str]:
    for line in (RUNBOOKS / "index.md").read_text().splitlines():
        if line.startswith("| ["):
            yield line.split("|")[1].strip()


def test_every_stop_point_of_the_drill_is_documented() -> None:
    rows = table(DOCS / "how-to" / "run-the-drill.md", columns=2)
    names = [point.name for point in POINTS]
    assert [code(row[0]) for row in rows if code(row[0]) in names] == names
    promised = re.findall(r"\| ((?:`[a-z-]+`[^|]*|planned[^|]*)) \| `test_", README.read_text())
    shown = {name for cell in promised for name in re.findall(r"`([a-z]+-[a-z-]+)`", cell)}
    assert shown <= set(names)


def test_every_test_that_is_named_exists() -> None:
    there = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", page.read_text()))
        assert named <= there, page.name


# --- pages --------------------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        assert not anchor or anchor in _anchors(found), target


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+\.md[^)]*)\)", prose(page))
    }
    assert [page for page in PAGES if page.is_relative_to(DOCS) and page not in linked] == []


def test_the_first_forty_lines_of_the_readme_say_it_all() -> None:
    top = "\n".join(README.read_text().splitlines()[:40])
    for needed in ("The promise", "OutboxTask", "make drill", "make test", "docs/index.md"):
        assert needed in top, needed


# --- commands -----------------------------------------------------------------------------------


def _console() -> list[tuple[Path, str]]:
    """Each command of the console blocks, without its prompt and its comment."""
    return [
        (block.page, line.removeprefix("$ "))
        for block in blocks("console")
        for line in block.text.splitlines()
        if line.startswith("$ ")
    ]


def _words(line: str) -> list[str]:
    """The words of a command, without the variables that are set before it."""
    found = shlex.split(line, comments=True)
    while "=" in found[0]:
        found = found[1:]
    return found


def _own_commands() -> dict[str, BaseCommand]:
    owned = {name for name, app in get_commands().items() if app == "outbox"}
    return {name: load_command_class("outbox", name) for name in owned}


def _parse(name: str, arguments: list[str]) -> None:
    """Refuse what the command would refuse, without running it."""
    app = get_commands().get(name)
    assert app is not None, f"there is no manage.py {name}"
    command: Any = app if isinstance(app, BaseCommand) else load_command_class(app, name)
    try:
        # As from within Python: errors are raised, and nothing ends the process.
        command._called_from_command_line = False
        command.create_parser("manage.py", name).parse_args(arguments)
    except CommandError as error:
        pytest.fail(f"manage.py {name} {' '.join(arguments)}: {error}")


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "line"), _console(), ids=[f"{page.name}: {line}" for page, line in _console()]
)
def test_a_command_in_a_console_block_would_be_taken(page: Path, line: str) -> None:
    match _words(line):
        case ["make", target, *_]:
            assert target in _targets()
        case ["python", "manage.py", name, *arguments]:
            _parse(name, arguments)
        case [".venv/bin/python", "-m", "pytest", *arguments]:
            assert all((ROOT / path).exists() for path in arguments if path.endswith(".py"))
        case ["docker", "compose", "up", "--build"]:
            assert (ROOT / "docker-compose.yml").exists()
        case ["celery", "-A", "mysite", "worker" | "beat"] | ["pip", "install", ".", *_]:
            pass
        case _:
            pytest.fail(f"no test knows this command: {line}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_that_is_mentioned_exists(page: Path) -> None:
    text = prose(page)
    for target in re.findall(r"`(?:[A-Z]+=\w+ )?make (\w+)", text):
        assert target in _targets()
    for line in re.findall(r"`(?:python )?manage\.py ([^`]+)`", text):
        name, *arguments = line.split()
        _parse(name, arguments)


def test_every_command_is_documented_with_all_of_its_options() -> None:
    text = (REFERENCE / "commands.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    plain = {text for action in _actions(BaseCommand()) for text in action.option_strings}
    for name, command in _own_commands().items():
        assert name in sections
        own = {option for action in _actions(command) for option in action.option_strings} - plain
        alike = sections["outbox_requeue"] if "`outbox_requeue`" in sections[name] else ""
        for option in own:
            assert option in sections[name] + alike, (name, option)


def _actions(command: BaseCommand) -> list[Any]:
    return command.create_parser("manage.py", "any")._actions


# --- code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", blocks("python"), ids=lambda block: f"{block.page.name}: {block.title}"
)
def test_python_in_the_documentation_compiles_and_imports_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outbox"):
            module = __import__(str(node.module), fromlist=[alias.name for alias in node.names])
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "outbox":
            assert hasattr(sys.modules["outbox"], node.attr), f"outbox.{node.attr}"


@pytest.mark.django_db
@pytest.mark.parametrize("block", blocks("sql"), ids=lambda block: block.page.name)
def test_sql_in_the_documentation_runs(block: Block) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("CREATE ROLE producer")
        cursor.execute(block.text.replace("%", "%%"), [])
        transaction.set_rollback(True)


def _deliver(entry: OutboxEntry) -> OutboxEntry:
    """What a worker does with the entry's message, in this process."""
    task: Any = APP.tasks[entry.task]
    task.__trace__ = build_tracer(task.name, task, app=APP)
    request = {"id": str(entry.pk), "task": task.name, "delivery_info": {}, "hostname": "docs"}
    task.__trace__(str(entry.pk), (), {}, request)
    return OutboxEntry.objects.get(pk=entry.pk)


@pytest.fixture
def _no_new_tasks() -> Iterator[None]:
    """Forget the tasks that the documentation defines, in every app that is or will be there."""
    shared = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(shared)
    for app in _state._get_active_apps():
        for name in list(app._tasks):
            if name.startswith(("readme.", "accounts.")):
                del app._tasks[name]


def _run(block: Block, *, name: str, **given: Any) -> dict[str, Any]:
    namespace = {"__name__": name, **given}
    exec(compile(block.text, str(block.page), "exec"), namespace)
    return namespace


@pytest.mark.usefixtures("_no_new_tasks")
@pytest.mark.django_db(transaction=True)
def test_the_code_of_the_readme_owes_a_mail_and_sends_it(valkey: redis.Redis) -> None:
    first = next(block for block in blocks("python") if block.page == README)
    namespace = _run(first, name="readme")
    entry = OutboxEntry.objects.get()
    assert (entry.task, entry.args) == ("readme.send_receipt", [namespace["order"].pk])
    assert (entry.status, valkey.llen("celery")) == (State.PUBLISHED, 1)
    assert _deliver(entry).status == State.SUCCEEDED
    assert [message.to for message in mail.outbox] == [["ada@example.com"]]


def _tutorial() -> Mapping[str, Block]:
    """By title; where a file is shown twice, as it is in the end."""
    return {block.title: block for block in blocks("python") if block.page == TUTORIAL}


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, _no_new_tasks: None) -> Mapping[str, Block]:
    """The tutorial's app `accounts`, importable."""
    shown = _tutorial()
    monkeypatch.setitem(sys.modules, "accounts", ModuleType("accounts"))
    for name in ("tasks", "signup"):
        module = ModuleType(f"accounts.{name}")
        vars(module).update(_run(shown[f"accounts/{name}.py"], name=module.__name__))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return shown


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("valkey")
def test_the_tutorial_ends_in_a_welcome_mail(project: Mapping[str, Block]) -> None:
    namespace = _run(project["in the shell"], name="shell")
    entry = namespace["entry"]
    assert entry.status == State.PUBLISHED
    assert _deliver(entry).status == State.SUCCEEDED
    assert [message.body for message in mail.outbox] == ["Hello ada!"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("valkey")
def test_the_tutorial_shows_a_failure_that_is_kept_and_owed_again(
    project: Mapping[str, Block],
) -> None:
    namespace = _run(project["in the shell, to make it fail"], name="shell")
    failed = _deliver(namespace["entry"])
    assert (failed.status, failed.error.partition(":")[0]) == (State.FAILED, "DoesNotExist")
    _run(project["in the shell, after a failure"], name="shell", entry=failed)
    again = OutboxEntry.objects.get(pk=failed.pk)
    assert (again.status, again.failures) == (State.PENDING, 1)


def test_the_settings_of_the_tutorial_are_taken(settings: Any) -> None:
    found = _run(_tutorial()["mysite/settings.py"], name="mysite.settings")
    settings.OUTBOX = found["OUTBOX"]
    assert conf.settings().DEFAULT_OWNER == "accounts"
    assert "outbox" in found["INSTALLED_APPS"]


def test_the_celery_app_of_the_tutorial_schedules_the_ticks() -> None:
    try:
        module = _run(_tutorial()["mysite/celery.py"], name="mysite.celery")
        app = module["app"]
        app.finalize()
        assert {f"outbox.{name}" for name in ticks.NAMES} <= set(app.conf.beat_schedule)
        app.close()
    finally:
        APP.set_current()
        APP.set_default()
