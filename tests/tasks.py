"""Tasks for the tests. What they did is a row or a line in a file, never a variable."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from django.contrib.auth.models import Group
from django.db import connection, transaction

from outbox.effects import NOT_FOUND, Found
from outbox.errors import Cancelled
from outbox.lifecycle.effect import NotFound
from outbox.tasks import OutboxTask


class Passing(Exception):
    """Worth another try."""


def note(path: str, line: str) -> None:
    """Append a line, in one write, so that processes do not mix theirs."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


@shared_task(base=OutboxTask)
def add(x: int, y: int) -> int:
    return x + y


@shared_task(base=OutboxTask)
def echo(*args: Any, **kwargs: Any) -> list[Any]:
    return [list(args), kwargs]


@shared_task(base=OutboxTask, bind=True)
def noted(self: OutboxTask, path: str, words: str = "ran") -> str:
    """Note the run, with what the request says of it."""
    note(path, f"{self.request.id} {self.request.retries} {words}")
    return words


@shared_task(base=OutboxTask, bind=True)
def slow(self: OutboxTask, path: str, until: str) -> None:
    """Note the start, wait for the file `until`, note the end."""
    note(path, f"start {self.request.id}")
    while not Path(until).exists():
        time.sleep(0.02)
    note(path, f"end {self.request.id}")


@shared_task(base=OutboxTask, owner="tests")
def failing(words: str = "no") -> None:
    raise ValueError(words)


@shared_task(
    base=OutboxTask, autoretry_for=(Passing,), default_retry_delay=0, max_retries=2, owner="tests"
)
def flaky(path: str, succeed_at: int = 99) -> int:
    """Fail until the attempt `succeed_at`."""
    note(path, "try")
    attempt = len(Path(path).read_text().splitlines())
    if attempt < succeed_at:
        raise Passing(f"attempt {attempt}")
    return attempt


@shared_task(base=OutboxTask, bind=True, max_retries=3)
def rewriting(self: OutboxTask, path: str, left: int) -> str:
    """Retry with other arguments until nothing is left."""
    note(path, str(left))
    if left:
        raise self.retry(args=(path, left - 1), countdown=0)
    return "done"


@shared_task(base=OutboxTask)
def ignoring() -> None:
    raise Ignore("nothing to store")


@shared_task(base=OutboxTask)
def rejecting() -> None:
    raise Reject("not mine", requeue=False)


@shared_task(base=OutboxTask)
def leaving(how: str) -> None:
    """Leave the body by what would wedge or end a worker."""
    raise {"SystemExit": SystemExit, "MemoryError": MemoryError}[how](how)


@shared_task(base=OutboxTask)
def suicidal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@shared_task(base=OutboxTask, atomic=True)
def group_made(name: str, *, fail: bool = False) -> int:
    """An effect in the database."""
    group = Group.objects.create(name=name)
    if fail:
        raise ValueError(name)
    return group.pk


@shared_task(base=OutboxTask, atomic=True)
def group_made_in(using: str, name: str, fail: bool) -> None:
    """The same in another database."""
    Group.objects.using(using).create(name=name)
    if fail:
        raise ValueError(name)


@shared_task(base=OutboxTask, atomic=True)
def group_made_and_connection_lost(name: str, path: str) -> None:
    """The first time its connection is cut when it has done its work; it does not notice."""
    Group.objects.create(name=name)
    first = not Path(path).exists()
    note(path, "ran")
    if first:
        other = connection.copy()
        with other.cursor() as cursor:
            pid = connection.connection.info.backend_pid
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        other.close()


@shared_task(base=OutboxTask, atomic=True)
def group_waiting(name: str, started: str, until: str) -> None:
    Group.objects.create(name=name)
    note(started, "start")
    while not Path(until).exists():
        time.sleep(0.02)


@shared_task(base=OutboxTask, unknown_delivery="adopt", payload="message")
def adopted(path: str) -> None:
    note(path, "adopted")


@shared_task(base=OutboxTask, durable=False)
def plain(path: str) -> None:
    note(path, "plain")


@shared_task(base=OutboxTask, durable=False)
def plainly_told(result: Any, path: str) -> None:
    note(path, repr(result))


@shared_task(base=OutboxTask, on_crash="park", retry_deadline=60)
def careful() -> None:
    """Parks after a crash."""


class Unready(OutboxTask):
    """Its before_start fails, so that its body is never reached."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        raise RuntimeError("not ready")


class Exiting(OutboxTask):
    """Its handlers leave by what would wedge or end a worker."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if kwargs["where"] == "before_start":
            raise SystemExit("enough")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        if kwargs["where"] == "on_success":
            raise SystemExit("enough")


@shared_task(base=Exiting)
def exiting(*, where: str) -> str:
    return where


@shared_task(base=Unready)
def unready() -> None:
    """Never runs."""


@shared_task(base=OutboxTask, autoretry_for=(Passing,), default_retry_delay=99, retry_deadline=5)
def hopeless() -> None:
    """Its next start would be past its deadline."""
    raise Passing("no")


@shared_task(base=OutboxTask, ignore_result=False)
def strange_result() -> set[int]:
    """Celery stores no result of it either, and says FAILURE: the row says what happened."""
    return {1}


@shared_task(base=OutboxTask, unique_by=("name",))
def once_for_each(name: str, times: int = 1) -> None:
    """At most one entry of each name waits."""


@shared_task(base=OutboxTask)
def session() -> list[int]:
    """The server process behind its connection, and how many statements that keeps prepared."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid(), (SELECT count(*) FROM pg_prepared_statements)")
        return list(cursor.fetchone())


@shared_task(base=OutboxTask, atomic=True)
def group_made_and_ignored(name: str) -> None:
    Group.objects.create(name=name)
    raise Ignore("nothing to store")


@shared_task(base=OutboxTask)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@shared_task(base=OutboxTask, time_limit=1, max_retries=1, default_retry_delay=0)
def limited(until: str) -> None:
    """Killed by its hard time limit."""
    while not Path(until).exists():
        time.sleep(0.02)


def _leave(how: str) -> None:
    """Leave the connection in what must not reach the next job."""
    if how == "atomic":
        transaction.atomic().__enter__()
    elif how == "autocommit":
        transaction.set_autocommit(False)
    else:
        with connection.cursor() as cursor:
            cursor.execute(how)


@shared_task(base=OutboxTask)
def leaving_open(name: str, how: str = "atomic") -> None:
    """Begin a transaction, by Django or by hand, and forget about it."""
    _leave(how)
    Group.objects.create(name=name)


@shared_task(base=OutboxTask, atomic=True)
def leaving_open_atomically(name: str) -> None:
    _leave("atomic")
    Group.objects.create(name=name)


@shared_task(base=OutboxTask, atomic=True)
def ending_its_transaction(name: str, how: str) -> None:
    """End by hand the transaction that the task shares with its end, and go on."""
    Group.objects.create(name=name)
    _leave(how)
    Group.objects.create(name=f"{name}, too")


@shared_task(base=OutboxTask)
def poisoning(statement: str) -> None:
    """Do to its connection what makes every later statement of its child fail."""
    _leave(statement)


@shared_task(base=OutboxTask, bind=True)
def in_a_query(self: OutboxTask, path: str) -> None:
    """Be in the middle of a statement for a minute."""
    note(path, f"start {self.request.id}")
    _leave("SELECT pg_sleep(60)")


@shared_task(base=OutboxTask)
def forking() -> str:
    """Its copy leaves the body as well."""
    if copy := os.fork():
        os.waitpid(copy, 0)
        return "the original"
    return "the copy"


@shared_task(base=OutboxTask, atomic=True, autoretry_for=(Passing,), default_retry_delay=0)
def failing_atomically(path: str, until: str) -> int:
    """Fail once, when `until` is there."""
    Group.objects.create(name="undone")
    note(path, "start")
    if len(Path(path).read_text().splitlines()) > 1:
        return 2
    while not Path(until).exists():
        time.sleep(0.02)
    raise Passing("once")


@shared_task(base=OutboxTask, bind=True)
def polite(self: OutboxTask, path: str) -> None:
    """Go on until it is cancelled."""
    note(path, "start")
    try:
        while True:
            self.raise_if_cancelled()
            time.sleep(0.02)
    except Cancelled as error:
        note(path, str(error))
        raise


@shared_task(base=OutboxTask, bind=True, atomic=True)
def polite_group(self: OutboxTask, path: str, name: str) -> None:
    """The same in a transaction."""
    Group.objects.create(name=name)
    note(path, "start")
    while True:
        self.raise_if_cancelled()
        time.sleep(0.02)


@shared_task(base=OutboxTask, bind=True)
def stubborn(self: OutboxTask, path: str, until: str) -> None:
    """Heed no SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(path, f"start {os.getpid()}")
    while not Path(until).exists():
        time.sleep(0.02)
    signal.signal(signal.SIGTERM, before)


@shared_task(base=OutboxTask, soft_time_limit=1, max_retries=0)
def softly(path: str, until: str) -> str:
    """Leave in order when the soft time limit is met."""
    note(path, "start")
    try:
        while not Path(until).exists():
            time.sleep(0.02)
    except SoftTimeLimitExceeded:
        return "in order"
    return "done"


@shared_task(base=OutboxTask, bind=True)
def failing_late(self: OutboxTask, path: str, until: str) -> None:
    """Fail, with budget left, when the file is there."""
    note(path, "start")
    while not Path(until).exists():
        time.sleep(0.02)
    raise self.retry(exc=Passing("late"), countdown=0)


@shared_task(base=OutboxTask, time_limit=1, max_retries=3, default_retry_delay=0)
def limited_noted(path: str) -> None:
    """Killed by its hard time limit."""
    note(path, "start")
    time.sleep(60)


def _write(path: str, key: str) -> dict[str, str]:
    note(path, key)
    return {"key": key}


@shared_task(base=OutboxTask, bind=True)
def writing(self: OutboxTask, path: str, on_uncertain: str = "park") -> Any:
    """An effect outside that is a line in a file, and of which nobody can be asked."""
    return self.effect("line", partial(_write, path), on_uncertain=on_uncertain)


@shared_task(base=OutboxTask, bind=True)
def writing_verified(self: OutboxTask, path: str) -> Any:
    """The same, where the file can be looked into."""

    def verify(key: str) -> Found | NotFound:
        there = Path(path).exists() and key in Path(path).read_text().splitlines()
        return Found({"key": key}) if there else NOT_FOUND

    return self.effect("line", partial(_write, path), verify=verify, timeout=0.1)


@shared_task(base=OutboxTask)
def hearing(request: Any, error: Exception, traceback: str, path: str) -> None:
    """An errback that Celery calls, with all that is known."""
    note(path, f"{request.id} called: {error!r}")


@shared_task(base=OutboxTask)
def hearing_of(task_id: str, path: str) -> None:
    """An errback that is owed, with the ID alone."""
    note(path, f"{task_id} owed")


@shared_task(base=OutboxTask)
def deaf(request: Any, error: Exception, traceback: str) -> None:
    """An errback that fails itself, after it has written something."""
    Group.objects.create(name="undone")
    raise error


@shared_task(base=OutboxTask)
def cut_off_once(request: Any, error: Exception, traceback: str, path: str) -> None:
    """An errback whose connection is cut in the middle, the first time."""
    first = not Path(path).exists()
    note(path, "called")
    Group.objects.create(name="called")
    if first:
        _leave("SELECT pg_terminate_backend(pg_backend_pid())")


@shared_task(base=OutboxTask)
def hearing_once(request: Any, error: Exception, traceback: str) -> None:
    """An errback with an effect in the database."""
    Group.objects.create(name=str(error))


@shared_task(base=OutboxTask, on_crash="park")
def careful_add(x: int, y: int) -> int:
    """Dies, and is not run again by itself."""
    os.kill(os.getpid(), signal.SIGKILL)
    return x + y


@shared_task(base=OutboxTask)
def add_where_allowed(x: int, y: int, path: str) -> int:
    """Fail until the file is there."""
    if not Path(path).exists():
        raise ValueError(path)
    return x + y


@shared_task(base=OutboxTask)
def looking_at_errbacks() -> int:
    """What the body sees of them, and then a failure."""
    raise ValueError(len(looking_at_errbacks.request.errbacks))
