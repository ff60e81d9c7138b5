"""The whole shop on this machine: `python -m shop.demo`. Ctrl-C ends it, and all it started."""

import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections

from outbox.drill.processes import Process, ProcessError, free_port, port_is_free
from outbox.embedded import EmbeddedError, Servers, servers
from receipts.destination import CannotListen
from receipts.provider import MailProvider
from receipts.smtp import MailDestination

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".run" / "demo"
MAILS = FOLDER / "mails"
USUAL_PORT = 8000
READY_SECONDS = 60.0
WATCH_SECONDS = 0.2

ADDRESSES = """
  Shop    http://127.0.0.1:{port}/
  Admin   http://127.0.0.1:{port}/admin/   user admin, password admin
  Mails   http://127.0.0.1:{port}/mails/

  Logs    {folder}/*.log
  Ctrl-C ends everything.

  To look at it from another terminal:

{exports}
.venv/bin/python manage.py outbox_status
"""


class DemoError(Exception):
    """The demo cannot go on. The message says why and what to do."""


def main() -> int:
    try:
        run(port=choose_port(os.environ.get("PORT", "")))
    except (
        DemoError,
        EmbeddedError,
        CannotListen,
        ProcessError,
        ImproperlyConfigured,
    ) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.")
    return 0


def choose_port(wanted: str) -> int:
    """The port that is wanted, or else 8000, or any where that is taken."""
    if not wanted:
        return USUAL_PORT if port_is_free(USUAL_PORT) else free_port()
    if not wanted.isdecimal() or not 0 < int(wanted) < 65536:
        raise DemoError(f"PORT={wanted} is no port: give a number from 1 to 65535.")
    if not port_is_free(int(wanted)):
        raise DemoError(f"Port {wanted} is taken: choose another PORT, or leave it unset.")
    return int(wanted)


def run(*, port: int) -> None:
    """Run everything until a signal comes or a part of it dies."""
    print("Starting PostgreSQL and Valkey …", flush=True)
    with (
        servers(FOLDER) as running,
        MailDestination(folder=MAILS) as destination,
        MailProvider(folder=MAILS) as provider,
    ):
        env = environment(running, mail_port=destination.port, provider_url=provider.url)
        prepare_database(env)
        print("Starting worker, beat and web …", flush=True)
        with started(children(env, port=port)) as processes:
            wait_until_ready(processes, port=port)
            shown = ADDRESSES.format(port=port, folder=FOLDER, exports=exports(running))
            print(shown, flush=True)
            watch([running.postgres.process, running.valkey.process, *processes])


def environment(running: Servers, *, mail_port: int, provider_url: str) -> dict[str, str]:
    return {
        **running.environment,
        "EMAIL_HOST": "127.0.0.1",
        "EMAIL_PORT": str(mail_port),
        "RECEIPTS_PROVIDER_URL": provider_url,
        "SHOP_MAIL_FOLDER": str(MAILS),
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "DJANGO_DEBUG": "1",
    }


def exports(running: Servers) -> str:
    """Lines for a shell whose commands shall use the demo's servers."""
    given = running.environment.items()
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in given)


def prepare_database(env: Mapping[str, str]) -> None:
    os.environ.update(env)
    django.setup()
    call_command("migrate", verbosity=0)
    create_admin()
    connections.close_all()


def create_admin() -> None:
    # Imported here: models cannot be imported before Django is set up.
    from django.contrib.auth.models import User

    if not User.objects.filter(username="admin").exists():
        User.objects.create_superuser("admin", "admin@shop.example", "admin")


def children(env: Mapping[str, str], *, port: int) -> list[Process]:
    celery = ["celery", "-A", "shop"]
    schedule = ["--schedule", str(FOLDER / "beat-schedule"), "--pidfile="]
    commands = {
        "worker": [*celery, "worker", "-c", "2", "-l", "INFO"],
        "beat": [*celery, "beat", "-l", "INFO", *schedule],
        "web": ["waitress", f"--listen=127.0.0.1:{port}", "shop.wsgi:application"],
    }
    return [
        Process(
            name,
            argv=[sys.executable, "-m", *command],
            env=env,
            cwd=ROOT,
            log=FOLDER / f"{name}.log",
        )
        for name, command in commands.items()
    ]


@contextlib.contextmanager
def started(processes: Sequence[Process]) -> Iterator[Sequence[Process]]:
    """Start them all, and stop them all together."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
        try:
            yield processes
        finally:
            for process in processes:
                process.signal(process.stop_signal)


def wait_until_ready(processes: Sequence[Process], *, port: int) -> None:
    worker, _, web = processes
    web.wait_for(lambda: listens(port), timeout=READY_SECONDS, what="it listened")
    worker.wait_for(
        lambda: " ready." in worker.tail(200), timeout=READY_SECONDS, what="it was ready"
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def watch(processes: Sequence[Process]) -> None:
    while all(process.alive for process in processes):
        time.sleep(WATCH_SECONDS)
    dead = next(process for process in processes if not process.alive)
    raise DemoError(
        f"{dead.name} ended with {dead.returncode}: everything else is stopped too."
        f" The end of {dead.log}:\n{dead.tail()}"
    )


if __name__ == "__main__":
    sys.exit(main())
