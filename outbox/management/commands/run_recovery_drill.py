"""`manage.py run_recovery_drill`: kill each process at each stop point, and see what is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox.conf import settings
from outbox.embedded.errors import INSTALL
from outbox.errors import ConfigurationError

SUBJECT = "receipts.drill.ReceiptSubject"
COULD_NOT_RUN = 2


class Command(BaseCommand):
    help = (
        "Run web, dispatcher and worker on a PostgreSQL and a Valkey of the drill's own, kill each "
        "where it hurts, and report what was recovered, lost or doubled. Exit status: 0 where all "
        "was as expected, 1 where it was not, 2 where the drill could not be run."
    )
    # The configured servers need not be there.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("--list", action="store_true", help="say which points there are")
        add("--point", action="append", metavar="NAME", help="only this one; repeatable")
        add("--format", choices=("text", "json"), default="text")
        add("--output", type=Path, metavar="FILE", help="write the report there, not to stdout")
        add("--subject", default=SUBJECT, metavar="PATH", help="what is drilled (%(default)s)")
        add("--timeout", type=float, default=30, help="seconds for each wait (%(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with _one_interrupt():
                passed = self._run(**options)
        except KeyboardInterrupt:
            self._say("The drill was stopped; nothing is left behind.")
            sys.exit(128 + signal.SIGINT)
        if not passed:
            sys.exit(1)

    def _run(
        self, *, list: bool, point: Sequence[str] | None, output: Path | None, **options: Any
    ) -> bool:
        points = _chosen(point)
        if list:
            width = max(len(each.name) for each in points)
            for each in points:
                self.stdout.write(f"{each.name:<{width}} {each.line}")
            return True
        _check(output, timeout=options["timeout"])
        return self._drill(points, output=output, **options)

    def _drill(
        self,
        points: Sequence[Any],
        *,
        format: str,
        output: Path | None,
        subject: str,
        timeout: float,
        **_: Any,
    ) -> bool:
        engine, report, expected = _modules()
        try:
            drill = engine.run(points, subject=subject, timeout=timeout, say=self._say)
        except expected as error:
            raise _refused(str(error)) from error
        text = report.FORMATS[format](drill)
        if output is None:
            self.stdout.write(text, ending="")
        else:
            report.write(text, to=output)
            self._say(f"{report.verdict(drill)}: see {output}")
        return bool(drill.passed)

    def _say(self, text: str) -> None:
        self.stderr.write(text, style_func=str)


def _modules() -> tuple[ModuleType, ModuleType, tuple[type[Exception], ...]]:
    """Imported when used: they need packages that only this command does."""
    try:
        from outbox.drill import engine, report
        from outbox.drill.errors import DrillError
        from outbox.drill.processes import ProcessError
        from outbox.embedded import EmbeddedError
    except ModuleNotFoundError as error:
        raise _refused(f"The package {error.name} is not installed: {INSTALL}") from error
    return engine, report, (DrillError, EmbeddedError, ProcessError)


def _chosen(names: Sequence[str] | None) -> Sequence[Any]:
    engine, *_ = _modules()
    known = [point.name for point in engine.POINTS]
    if unknown := sorted(set(names or ()) - set(known)):
        raise _refused(f"There is no point {', '.join(unknown)}; there are {', '.join(known)}.")
    return [point for point in engine.POINTS if names is None or point.name in names]


def _check(output: Path | None, *, timeout: float) -> None:
    try:
        settings()
    except ConfigurationError as error:
        raise _refused(str(error)) from error
    if not timeout > 0:
        raise _refused("--timeout takes a number of seconds greater than 0.")
    if output is None:
        return
    if not output.parent.is_dir():
        raise _refused(f"--output: there is no folder {output.parent}; make it first.")
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise _refused(f"--output: {output} cannot be written; choose another file.")


def _refused(message: str) -> CommandError:
    return CommandError(message, returncode=COULD_NOT_RUN)


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C stop everything, and no second one interrupt that."""

    def leave(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
