"""Looking at a broker: its lists under whatever options are set, and brokers without lists."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
from celery import Celery
from kombu.transport import virtual
from kombu.transport.memory import Channel as MemoryChannel
from redis.sentinel import SentinelConnectionPool

from outbox.brokers import fallback, messages, ping
from outbox.brokers import redis as broker
from outbox.brokers.connections import bounded
from outbox.drill.processes import Process
from outbox.embedded import Servers
from outbox.embedded.wheels import valkey_program
from outbox.errors import BrokerUnavailable
from outbox.lifecycle import publish
from outbox.lifecycle.reconcile import Findings, reconcile
from outbox.models import OutboxEntry, OutboxWorker
from outbox.states import State
from tests import tasks
from tests.factories import PAST, ago, at, make_entry, reread

APP = tasks.add.app

KEYED = [
    pytest.param({}, id="none"),
    pytest.param({"global_keyprefix": "mine:"}, id="a prefix"),
    pytest.param({"sep": ":"}, id="another separator"),
    pytest.param({"priority_steps": [0, 5]}, id="other steps"),
    pytest.param({"priority_steps": list(range(10)), "queue_order_strategy": "sorted"}, id="ten"),
    pytest.param({"unacked_key": "held", "unacked_index_key": "held_index"}, id="another hash"),
    pytest.param({"global_keyprefix": "a:", "sep": "/", "unacked_key": "u"}, id="all at once"),
]


def app_with(options: dict[str, Any], *, url: str = "") -> Celery:
    """An app of its own, which nothing else meets."""
    app = Celery("brokers", set_as_current=False)
    url = url or APP.conf.broker_url
    # Not `broker_url`: the environment's goes before that.
    app.conf.update(broker_write_url=url, broker_read_url=url)
    app.conf.update(broker_transport_options=options)
    return app


def looked(app: Celery, *queues: str) -> tuple[set[UUID], set[UUID]]:
    """What is seen in the lists, and in `unacked`."""

    def ids(raws: Any) -> set[UUID]:
        return {UUID(bytes=one) for one in messages.ids(raws) if one is not None}

    with broker.looking(app) as look:
        queued = [ids(found.raws) for found in broker.lists(look, queues)]
        return set().union(*queued), set().union(*map(ids, broker.unacked(look)))


def send(app: Celery, queue: str, priority: int = 0) -> UUID:
    """By kombu, as any producer does."""
    task_id = uuid4()
    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection)
        app.send_task(
            "plain", task_id=str(task_id), queue=queue, priority=priority, producer=producer
        )
    return task_id


def take(app: Celery, queue: str) -> Any:
    """As a worker does: the message goes from its list to `unacked`. The open connection."""
    connection = app.connection_for_read()
    assert connection.SimpleQueue(queue).get(timeout=5)
    return connection


@pytest.mark.parametrize("options", KEYED)
@pytest.mark.parametrize("database", [0, 3])
def test_what_kombu_has_sent_and_taken_is_seen_whatever_its_keys(
    valkey: redis.Redis, options: dict[str, Any], database: int
) -> None:
    url = APP.conf.broker_url.rpartition("/")[0] + f"/{database}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        app = app_with(options, url=url)
        taken = send(app, "celery")
        with take(app, "celery"):
            sent = {send(app, queue, priority) for queue in ("celery", "q") for priority in (0, 9)}
            assert looked(app, "celery", "q") == (sent, {taken})
        client.flushdb()


@pytest.mark.django_db(transaction=True)
def test_a_queue_that_the_user_may_not_touch_keeps_no_other_back(valkey: redis.Redis) -> None:
    allowed = ["~celery*", "~unacked*", "~_kombu*", "&*", "+@all"]
    valkey.execute_command("ACL", "SETUSER", "narrow", "on", ">word", "resetkeys", *allowed)
    address = APP.conf.broker_url.rpartition("@")[2].removeprefix("redis://")
    app = app_with({}, url=f"redis://narrow:word@{address}")
    try:
        bad, good = make_entry(State.PENDING, queue="secret"), make_entry(State.PENDING)
        assert publish.dispatch(app, using="default") == 1
        assert (reread(bad).status, reread(good).status) == (State.PENDING, State.PUBLISHED)
        long_ago(good)
        valkey.delete("celery")
        seen = look(app)
        assert (seen.missing, seen.broker) == (1, "")
        assert "the queue secret" in seen.skipped
    finally:
        valkey.execute_command("ACL", "DELUSER", "narrow")


def test_looking_changes_nothing(valkey: redis.Redis) -> None:
    app = app_with({})
    send(app, "celery")
    before = {key: valkey.dump(key) for key in valkey.scan_iter()}
    looked(app, "celery", "unheard_of")
    assert {key: valkey.dump(key) for key in valkey.scan_iter()} == before


def test_a_long_list_is_seen_whole_while_others_push_and_take(valkey: redis.Redis) -> None:
    """What is there from the beginning to the end of the look is seen, whatever comes and goes."""
    there = [uuid4() for _ in range(3000)]
    for one in there:
        valkey.lpush("celery", json.dumps({"properties": {"correlation_id": str(one)}}))
    valkey.rpush("celery", *(["{}"] * 500))  # these are taken first
    stop = threading.Event()

    def traffic() -> None:
        with redis.Redis.from_url(APP.conf.broker_url) as client:
            for _ in range(500):
                client.lpush("celery", "{}")
                client.rpop("celery")
                if stop.is_set():
                    return

    busy = threading.Thread(target=traffic)
    busy.start()
    seen, _ = looked(app_with({}), "celery")
    stop.set()
    busy.join()
    assert set(there) <= seen


@pytest.mark.parametrize("order", ["large ones first", "large ones last", "large ones between"])
def test_a_read_is_bounded_by_messages_and_by_bytes(valkey: redis.Redis, order: str) -> None:
    small, large = [b"{}"] * 3000, [b"x" * 50_000] * 3000
    raws = {"first": large + small, "last": small + large, "between": small + large + small}
    sent = raws[order.rpartition(" ")[2]]
    for start in range(0, len(sent), 500):
        valkey.rpush("celery", *sent[start : start + 500])
    with broker.looking(app_with({})) as look:
        reads = [found.raws for found in broker.lists(look, ["celery"])]
    assert [raw for raws in reads for raw in raws] == sent
    assert max(map(len, reads)) == broker.LONGEST
    too_large = [raws for raws in reads if sum(map(len, raws)) > broker.LARGEST]
    assert len(too_large) <= 3  # where the large ones begin


def test_a_look_that_is_given_up_leaves_no_reply_behind_for_the_next_one(
    valkey: redis.Redis,
) -> None:
    """Two reads are under way at any time, and the connection is the pool's."""
    valkey.rpush("celery", *([b"{}"] * 9000))
    with broker.looking(app_with({})) as look:
        reads = broker.lists(look, ["celery"])
        next(reads)
        reads.close()  # type: ignore[attr-defined]
        assert look.client.get("nothing") is None
        assert look.client.ping()


@pytest.mark.parametrize(
    ("raw", "there"),
    [
        (b'{"properties": {"correlation_id": "%s"}}', True),
        (b'{"properties":{"correlation_id":"%s"}}', True),  # without kombu's spaces
        (b'{"headers": {"correlation_id": "x"}, "properties": {"correlation_id": "%s"}}', True),
        (b'{"headers": {"argsrepr": "\\"correlation_id\\": \\"%s\\""}}', False),
        (b'{"properties": {"correlation_id": null}} %s', False),
        (b"%s", False),
    ],
)
def test_the_id_is_read_from_where_no_argument_can_forge_it(raw: bytes, there: bool) -> None:
    one = uuid4()
    plain = b'{"properties": {"correlation_id": "%s"}}' % str(one).encode()
    found = messages.ids([plain, raw % str(one).encode(), plain])
    assert found == [one.bytes, one.bytes if there else None, one.bytes]


def test_ids_of_any_form_shift_no_others() -> None:
    """Cut out at fixed places they would be read across each other."""
    first, last = uuid4(), uuid4()
    texts = [str(first), "a" * 36, uuid4().hex, "deadbeef", "", "own-id", str(last)]
    raws = [b'{"properties": {"correlation_id": "%s", "x": 1}}' % text.encode() for text in texts]
    found = messages.ids(raws)
    assert (found[0], found[-1]) == (first.bytes, last.bytes)
    assert found[1:-1] == [None] * 5


def test_a_broker_that_hangs_is_given_up(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "PUBLISH_TIMEOUT": 0.2}
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        app = app_with({}, url=f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        with pytest.raises(BrokerUnavailable, match="does not answer"):
            looked(app, "celery")


def test_of_a_list_of_brokers_the_next_is_taken_where_the_first_is_down(
    servers: Servers, valkey: redis.Redis
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        down = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    app = app_with({}, url=f"{down};{servers.valkey.url}")
    assert ping.why_unreachable(app) == ""
    assert looked(app, "celery") == (set(), set())


# --- Sentinel -----------------------------------------------------------------------------------


def test_a_sentinels_own_timeouts_are_bounded_beside_its_options(settings: Any) -> None:
    """Options for the sentinels replace what they would get of the sockets'."""
    options = {"master_name": "main", "sentinel_kwargs": {"password": "secret"}}
    app = app_with(options, url="sentinel://127.0.0.1:1/0")
    kept = bounded(app).transport_options["sentinel_kwargs"]
    assert kept == {"password": "secret", "socket_timeout": 2, "socket_connect_timeout": 2}
    assert app.conf.broker_transport_options == options


@pytest.fixture
def sentinel(servers: Servers, tmp_path: Path) -> Iterator[str]:
    """A live Sentinel that watches the tests' Valkey; its URL."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    watched = redis.Redis.from_url(servers.valkey.url).connection_pool.connection_kwargs
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nsentinel monitor main 127.0.0.1 {watched['port']} 1\n"
        f"sentinel auth-pass main {watched['password']}\n"
    )
    argv = [str(valkey_program()), str(config), "--sentinel"]
    with Process("sentinel", argv=argv, log=tmp_path / "sentinel.log") as process:
        client = redis.Redis(port=port)
        process.wait_for(lambda: _pings(client), timeout=15, what="an answer")
        yield f"sentinel://:{watched['password']}@127.0.0.1:{port}/0"
        client.close()


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_through_a_sentinel_the_primarys_lists_are_seen(valkey: redis.Redis, sentinel: str) -> None:
    app = app_with({"master_name": "main", "global_keyprefix": "mine:"}, url=sentinel)
    taken = send(app, "celery")
    with take(app, "celery"):
        sent = send(app, "celery", 6)
        with broker.looking(app) as look:
            assert isinstance(look.client.connection_pool, SentinelConnectionPool)
        assert looked(app, "celery") == ({sent}, {taken})


# --- brokers that cannot be listed --------------------------------------------------------------


def transports(folder: Path) -> dict[str, Celery]:
    files = {name: str(folder) for name in ("data_folder_in", "data_folder_out")}
    return {
        "memory": app_with({}, url="memory://"),
        "filesystem": app_with(files, url="filesystem://"),
    }


@pytest.fixture(params=["memory", "filesystem"])
def unlisted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Celery]:
    MemoryChannel.queues.clear()
    app = transports(tmp_path)[request.param]
    app.tasks.register(APP.tasks["tests.tasks.add"])
    yield app
    MemoryChannel.queues.clear()


def look(app: Celery, **how: Any) -> Findings:
    return reconcile(app, using="default", **how)


def long_ago(entry: OutboxEntry, **columns: Any) -> None:
    OutboxEntry.objects.filter(pk=entry.pk).update(published_at=at(PAST), **columns)


@pytest.mark.django_db(transaction=True)
def test_where_nothing_can_be_listed_it_says_so_and_goes_by_queues_that_are_empty(
    unlisted: Celery,
) -> None:
    entry, other = make_entry(), make_entry(queue="other")
    publish.dispatch(unlisted, using="default")
    for one in (entry, other):
        long_ago(one)
    assert look(unlisted).missing == 0
    with take(unlisted, "celery") as taken:
        taken.default_channel.qos.restore_at_shutdown = False
        found = look(unlisted)
    assert (found.missing, found.stranded, found.broker) == (1, 0, "")
    assert "cannot be listed" in found.unlisted
    assert reread(entry).missing_since is not None
    assert look(unlisted).stranded == 0  # too soon after the first look
    long_ago(entry, missing_since=ago(seconds=1.5))  # the tests' lease is 2 s
    assert look(unlisted).stranded == 0
    long_ago(entry, missing_since=at(PAST))
    assert look(unlisted).stranded == 1
    assert "empty" in entry.events.get().reason
    assert reread(other).status == State.PUBLISHED


@pytest.mark.django_db(transaction=True)
def test_an_entry_whose_empty_queue_a_worker_has_emptied_into_its_hands_is_not_missing(
    unlisted: Celery,
) -> None:
    entry = make_entry(State.PUBLISHED, published_at=at(PAST))
    worker = OutboxWorker.objects.create(holds=[str(entry.pk)], heartbeat_at=at())
    assert look(unlisted).missing == 0
    long_ago(entry, missing_since=at(PAST))
    assert look(unlisted).stranded == 0
    assert reread(entry).missing_since is None
    OutboxWorker.objects.filter(pk=worker.pk).update(stopped_at=at())
    assert look(unlisted).missing == 1


@pytest.mark.django_db(transaction=True)
def test_a_dry_run_without_lists_changes_nothing(unlisted: Celery) -> None:
    entry = make_entry(State.PUBLISHED, published_at=at(PAST))
    assert look(unlisted, dry=True).missing == 1
    assert reread(entry).missing_since is None


def test_a_transport_that_counts_nothing_leaves_every_queue_in_doubt(
    unlisted: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kombu's stand-in says 0 of every queue: taken at its word it would strand everything."""
    assert fallback.empty(unlisted, queues=["celery"]) == {"celery"}
    with unlisted.connection_for_write() as connection, connection.channel() as channel:
        kind = type(channel)
    monkeypatch.setattr(kind, "_size", virtual.Channel._size)
    assert fallback.empty(unlisted, queues=["celery"]) == set()


@pytest.mark.django_db(transaction=True)
def test_a_broker_that_is_away_strands_nothing() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        app = app_with({}, url=f"amqp://127.0.0.1:{listener.getsockname()[1]}//")
    entry = make_entry(State.PUBLISHED, published_at=at(PAST), missing_since=at(PAST))
    found = look(app)
    assert found.broker.startswith("The broker does not answer: ")
    assert (found.missing, found.stranded) == (0, 0)
    assert reread(entry).status == State.PUBLISHED
