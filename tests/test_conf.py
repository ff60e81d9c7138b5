"""The OUTBOX setting, the system checks, and what is refused when a task is registered."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.core.checks import run_checks
from django.db import connections

from outbox.conf import DAY, settings
from outbox.drill.processes import Process
from outbox.errors import ConfigurationError
from outbox.tasks import OutboxTask, beat_schedule


def body() -> int:
    """What the tasks of these tests do."""
    return 3


@pytest.fixture
def outbox_settings(settings: Any) -> Any:
    """Set OUTBOX to what the test gives."""

    def give(**values: Any) -> None:
        settings.OUTBOX = values

    return give


def test_the_defaults_are_the_documented_ones(outbox_settings: Any) -> None:
    outbox_settings()
    found = settings()
    assert (found.LEASE, found.DISPATCH_EVERY, found.BATCH_SIZE) == (30, 1, 500)
    assert found.RETENTION["succeeded"] == 7 * DAY


def test_a_part_of_the_retention_leaves_the_rest_as_it_is(outbox_settings: Any) -> None:
    outbox_settings(RETENTION={"failed": 1})
    assert settings().RETENTION == {"succeeded": 7 * DAY, "failed": 1, "cancelled": 30 * DAY}


def test_the_largest_numbers_and_several_addresses_are_taken(outbox_settings: Any) -> None:
    owners = {"shop": ("a@b.example", "Ada <ada@b.example>")}
    outbox_settings(LEASE=10**9, RETENTION={"failed": 1e9}, OWNERS=owners)
    found = settings()
    assert (found.LEASE, found.RETENTION["failed"], found.OWNERS) == (10**9, 1e9, owners)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"LEESE": 3}, "Did you mean 'LEASE'"),
        ({"NONSENSE": 3}, "Known are"),
        ({"LEASE": "30"}, "a number greater than 0"),
        ({"LEASE": 0}, "a number greater than 0"),
        ({"LEASE": True}, "a number greater than 0"),
        ({"LEASE": float("inf")}, "at most 1,000,000,000"),
        ({"LEASE": float("nan")}, "greater than 0 and at most 1,000,000,000"),
        ({"LEASE": 10**20}, "at most 1,000,000,000"),
        ({"MAX_CRASHES": 10**9 + 1}, "a whole number greater than 0 and at most 1,000,000,000"),
        ({"BATCH_SIZE": 1.5}, "a whole number greater than 0"),
        ({"PAUSED": 1}, "True or False"),
        ({"OWNERS": ["a"]}, "a dict"),
        ({"REDACT": "password"}, "a list of names"),
        ({"RETENTION": {"done": 1}}, "'done'"),
        ({"RETENTION": {"failed": "week"}}, "seconds"),
        ({"RETENTION": {"failed": float("inf")}}, "seconds, greater than 0 and at most"),
        ({"OWNERS": {"shop": "a@b.example"}}, "a list of addresses"),
        ({"OWNERS": {"shop": [5]}}, "each a text with an '@'"),
        ({"OWNERS": {"shop": ["a@b.example", ""]}}, "each a text with an '@'"),
        ({"OWNERS": {"shop": ["nobody"]}}, "each a text with an '@'"),
        ({"DEFAULT_OWNER": "nobody"}, "OWNERS"),
        ({"CODEC": "fernet"}, "no effect yet"),
        ({"DATABASES": []}, "at least one"),
        ({"STRAND_GRACE": 1, "DISPATCH_EVERY": 1}, "twice DISPATCH_EVERY"),
        ({"LEASE": 0.5, "DISPATCH_EVERY": 0.1}, "at least 1 second"),
        ({"LEASE": 2, "DISPATCH_EVERY": 1}, "three times DISPATCH_EVERY"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_a_way_out(
    outbox_settings: Any, values: dict[str, Any], words: str
) -> None:
    outbox_settings(**values)
    with pytest.raises(ConfigurationError, match=words):
        settings()
    assert any(words in message.msg for message in run_checks(tags=["celery_outbox"]))


def test_an_outbox_that_is_no_dict_is_refused(settings: Any) -> None:
    settings.OUTBOX = ["LEASE"]
    assert [message.id for message in run_checks(tags=["celery_outbox"])] == ["celery_outbox.E001"]


def test_the_shop_passes_every_check() -> None:
    assert run_checks() == []


@pytest.mark.parametrize(
    ("alias", "number"), [("elsewhere", "E002"), ("lite", "E003"), ("strict", "E004")]
)
def test_a_database_that_cannot_hold_the_outbox_is_refused(
    outbox_settings: Any, monkeypatch: pytest.MonkeyPatch, alias: str, number: str
) -> None:
    lite = {**connections["default"].settings_dict, "ENGINE": "django.db.backends.sqlite3"}
    strict = {**connections["default"].settings_dict, "OPTIONS": {"isolation_level": 3}}
    monkeypatch.setitem(connections.settings, "lite", lite)
    monkeypatch.setitem(connections.settings, "strict", strict)
    outbox_settings(DATABASES=[alias])
    found = [message.id for message in run_checks(tags=["celery_outbox"])]
    assert found == [f"celery_outbox.{number}"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_crash": "explode"}, "on_crash cannot be 'explode'"),
        ({"payload": "mesage"}, "payload"),
        ({"unknown_delivery": "keep"}, "unknown_delivery"),
        ({"consumer": "other"}, "consumer"),
    ],
)
def test_a_task_option_outside_its_choices_is_refused_at_registration(
    options: dict[str, Any], words: str
) -> None:
    app = Celery("refusing", set_as_current=False)
    with pytest.raises(ConfigurationError, match=words):
        app.task(body, shared=False, base=OutboxTask, name="bad", lazy=False, **options)


NUMBERS = ["over_age", "retention", "retry_deadline", "max_crashes"]


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize(
    "value", ["10m", "600", True, 0, -1, 1e300, float("nan"), float("inf"), timedelta(minutes=1)]
)
def test_a_task_option_that_is_no_usable_number_is_refused_at_registration(
    option: str, value: Any
) -> None:
    app = Celery("refusing", set_as_current=False)
    with pytest.raises(ConfigurationError, match=f"bad: {option} cannot be .* number.* greater"):
        app.task(body, shared=False, base=OutboxTask, name="bad", lazy=False, **{option: value})


def test_a_part_of_a_crash_is_refused_and_a_part_of_a_second_is_taken() -> None:
    app = Celery("refusing", set_as_current=False)
    usable = {"over_age": 0.5, "retention": 10**9, "retry_deadline": 2.5, "max_crashes": 1}
    app.task(body, shared=False, base=OutboxTask, name="good", lazy=False, **usable)
    with pytest.raises(ConfigurationError, match="a whole number"):
        app.task(body, shared=False, base=OutboxTask, name="bad", lazy=False, max_crashes=2.5)


def test_a_call_that_does_not_call_super_is_refused_at_registration() -> None:
    class Rude(OutboxTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    app = Celery("refusing", set_as_current=False)
    with pytest.raises(ConfigurationError, match=r"super\(\)"):
        app.task(body, shared=False, base=Rude, name="rude", lazy=False)


def test_a_call_that_calls_super_is_taken() -> None:
    class Polite(OutboxTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    app = Celery("accepting", set_as_current=False)
    assert app.task(body, shared=False, base=Polite, name="polite", lazy=False)() == 3


def test_deduplication_by_the_result_store_is_refused() -> None:
    app = Celery("deduplicating", set_as_current=False)
    app.conf.worker_deduplicate_successful_tasks = True
    with pytest.raises(ConfigurationError, match="worker_deduplicate_successful_tasks"):
        app.task(body, shared=False, base=OutboxTask, name="twice", lazy=False)


def test_celerys_own_tasks_stay_plain_under_a_whole_app_task_class() -> None:
    app = Celery("whole", task_cls=OutboxTask, set_as_current=False)
    own = app.task(body, shared=False, name="mine", lazy=False)
    assert own.is_durable
    assert not app.tasks["celery.backend_cleanup"].is_durable
    assert not app.tasks["celery.chord_unlock"].is_durable
    assert not app.tasks["outbox.dispatch"].is_durable


@pytest.mark.parametrize("program", ["worker", "beat"])
def test_a_worker_and_beat_refuse_to_start_on_settings_that_cannot_work(
    surroundings: dict[str, str], tmp_path: Path, program: str
) -> None:
    argv = [sys.executable, "-m", "celery", "-A", "tests.worker", program]
    if program == "beat":
        argv += ["--schedule", str(tmp_path / "schedule"), "--pidfile="]
    env = {**surroundings, "TESTS_TYPO": "1"}
    with Process(program, argv=argv, log=tmp_path / "log", env=env) as process:
        assert process.wait(30) == 1
        assert (
            "celery-outbox: OUTBOX has no setting 'LEESE'. Did you mean 'LEASE'?" in process.tail()
        )


def test_every_tick_expires_before_it_can_pile_up() -> None:
    for entry in beat_schedule().values():
        assert entry["options"]["expires"] <= max(1, entry["schedule"].total_seconds())
