"""Runs a drill: servers, tables and processes of its own, then one point after the other."""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from celery import current_app
from django.conf import settings as django_settings
from django.core.management import call_command

from outbox.conf import settings
from outbox.drill import about, environment, looks, own_effects, record, results, ticking
from outbox.drill.broker import Broker
from outbox.drill.database import Database
from outbox.drill.errors import DrillError, WaitedInVain
from outbox.drill.facts import Facts
from outbox.drill.fleet import Fleet
from outbox.drill.scenarios import POINTS
from outbox.drill.scenarios.point import Given, Point, Texts, texts
from outbox.drill.stage import Means, Say, Stage
from outbox.drill.subject import Subject, kinds_of, load
from outbox.drill.waits import POLL_SECONDS
from outbox.embedded import EmbeddedError, Servers, servers
from outbox.embedded.folder import held
from outbox.embedded.interrupts import signals_as_exit

__all__ = ["FOLDER", "POINTS", "Drill", "Result", "run"]

FOLDER = Path(".run") / "drill"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A point that was played: what was seen, and what of it was not as expected."""

    point: Point
    texts: Texts
    facts: Facts
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A whole run."""

    about: about.About
    results: tuple[Result, ...]
    seconds: float
    open_jobs: int
    folder: Path  # with the logs, where a point failed

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def run(points: Sequence[Point], *, subject: str, timeout: float, say: Say) -> Drill:
    """Play the points on servers and processes of the drill's own.

    `subject` is a dotted path; `timeout` bounds each wait, in seconds.

    Raises:
        DrillError, EmbeddedError: it cannot be run here. Nothing is left behind.
    """
    start = time.monotonic()
    subject_ = load(subject)
    task = about.durable(subject_, app=current_app)
    limit = about.retries(task, settings=subject_.settings)
    points = _played_by(subject_, points, say=say)
    folder = FOLDER.absolute()
    say("starting PostgreSQL and Valkey")
    with (
        signals_as_exit(),
        _folder(folder) as keep_logs,
        servers(folder / "servers", keep=False) as own,
        _means(own, subject_, folder=folder, say=say) as means,
    ):
        crashes = task.max_crashes or settings().MAX_CRASHES
        means = replace(means, retries=limit, crashes=crashes, timeout=timeout)
        played = tuple(_play(point, means) for point in points)
        drill = Drill(
            about=about.describe(task, subject=subject_, own=own),
            results=_compared(played, means),
            seconds=time.monotonic() - start,
            open_jobs=record.open_jobs(),
            folder=folder,
        )
        if not drill.passed:
            keep_logs()
    return drill


def _played_by(subject: Subject, points: Sequence[Point], *, say: Say) -> list[Point]:
    """Those that the subject can play.

    Raises:
        DrillError: none of them.
    """
    kinds = kinds_of(subject)
    left = [point for point in points if point.needs and point.needs not in kinds]
    for point in left:
        say(f"{point.name}: left out, since the subject has no kind {point.needs!r}")
    if len(left) == len(points):
        raise DrillError("The subject can play none of these points: see the kinds of a Subject.")
    return [point for point in points if point not in left]


@contextmanager
def _folder(folder: Path) -> Iterator[Callable[[], None]]:
    """The drill's folder, which one drill has at a time. Call what this gives to keep its logs."""
    kept = threading.Event()
    with held(folder):
        _empty(folder)  # a drill that was killed has left its files
        try:
            yield kept.set
        finally:
            if not kept.is_set():
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # others have theirs in there
                    folder.parent.rmdir()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


@contextmanager
def _means(own: Servers, subject: Subject, *, folder: Path, say: Say) -> Iterator[Means]:
    """The subject's destination, this process's database, its tables, and a fleet to start."""
    found: dict[str, str] = {}
    with ExitStack() as stack:
        _start(subject, found)
        stack.callback(subject.cleanup)
        env = environment.variables(
            database=own.postgres.url,
            broker=own.valkey.url,
            folder=folder,
            overrides=subject.settings,
        )
        stack.enter_context(environment.at_database(own.postgres.url))
        stack.enter_context(environment.at_broker(own.valkey.url))
        say("making the tables")
        call_command("migrate", verbosity=0, interactive=False)
        own_effects.make_table()
        results.watch()
        ticking.watch()
        looks.watch()
        fleet = Fleet(
            env=env | found,
            folder=folder,
            celery_app=subject.celery_app,
            wsgi=django_settings.WSGI_APPLICATION,
        )
        stack.callback(fleet.kill_all)
        yield Means(
            subject=subject,
            fleet=fleet,
            broker=Broker(own.valkey, app=current_app),
            database=Database(own.postgres),
            say=say,
        )


def _start(subject: Subject, env: dict[str, str]) -> None:
    try:
        subject.start(env)
    except Exception as error:
        raise DrillError(f"The subject's destination does not start: {error}") from error


def _play(point: Point, means: Means) -> Result:
    def say(text: str) -> None:
        means.say(f"{point.name}: {text}")

    given = _given(means)
    stage = Stage(replace(means, say=say))
    problems: list[str] = []
    try:
        point.play(stage)
    except (DrillError, EmbeddedError):
        raise
    except WaitedInVain as error:
        problems.append(str(error))
    except Exception as error:  # the other points are worth playing all the same
        problems.append(f"{type(error).__name__}: {error}")
    facts = stage.facts()
    problems = [*_differences(facts, point.wants(given)), *problems]
    say("NOT as expected" if problems else "as expected")
    return Result(
        point=point, texts=texts(point, given=given), facts=facts, problems=tuple(problems)
    )


def _compared(played: Sequence[Result], means: Means) -> tuple[Result, ...]:
    """With what the result store still says wrong, after reconcile has had time to correct it."""
    means.say("comparing the result store with the record")
    means.fleet.ensure({"dispatcher": {}})
    deadline = time.monotonic() + means.timeout
    while any(map(_disagreements, played)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return tuple(
        replace(result, problems=(*result.problems, *_disagreements(result))) for result in played
    )


def _disagreements(result: Result) -> list[str]:
    return results.disagreements(record.jobs([job.id for job in result.facts.jobs]))


def _given(means: Means) -> Given:
    subject = means.subject
    return Given(
        kind=subject.kind,
        effect=subject.effect,
        business=subject.business,
        attempts=means.attempts,
        crashes=means.crashes,
        has_ledger=bool(kinds_of(subject)),
    )


def _differences(facts: Facts, wants: Mapping[str, Any]) -> list[str]:
    values = defaultdict(lambda: "not seen", facts.values())
    # None where the subject cannot tell: then the record must do.
    unlike = [name for name, want in wants.items() if values[name] not in (want, None)]
    missing = [name for name, want in wants.items() if values[name] is None and name == "state"]
    return [f"{name}: {values[name]} instead of {wants[name]}" for name in [*unlike, *missing]]
