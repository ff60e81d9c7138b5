"""The tables: rules as CHECK constraints, indexes over open rows only, read-only querysets.

Nothing here writes: `outbox.transitions` is the only module that does. Every column but `task`
has a database default, so that plain SQL can produce.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

from django.contrib.postgres.functions import RandomUUID
from django.db import models
from django.db.models import DurationField, Exists, F, OuterRef, Q, Subquery, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce, Now

from outbox.conf import LARGEST
from outbox.payload import PayloadField
from outbox.states import FINAL, OPEN, WAITING, State

UNIQUE_KEY = "celery_outbox_unique_key"  # the constraint
ERASED = {"erased": True}  # the options of an entry whose contents were removed

_FINAL = sorted(FINAL)
_OPEN = sorted(OPEN)
_WAITING = sorted(WAITING)

# Seconds in the options, which enqueue wrote there, or anybody's plain SQL: null where they are no
# number that can be used. A cast that fails would fail the look at all rows, so it is reached
# only within CASE, whose condition compares jsonb: that never fails. A microsecond is the least
# that an interval can be; much less would fail as a float8. Raw: the ORM has no such cast.
_OWN_SECONDS = f"""
CASE WHEN jsonb_typeof(options -> '{{0}}') = 'number'
      AND options -> '{{0}}' >= '0.000001'::jsonb AND options -> '{{0}}' <= '{LARGEST}'::jsonb
     THEN (options ->> '{{0}}')::float8 * interval '1 second' END
"""


def own_seconds(option: str, default: float) -> Coalesce:
    """The task's own `option`, as a span, or else `default`, in seconds."""
    own = RawSQL(_OWN_SECONDS.format(option), (), output_field=DurationField())
    return Coalesce(own, Value(timedelta(seconds=default)), output_field=DurationField())


class EntryQuerySet(models.QuerySet["OutboxEntry"]):
    """What people and recoverers look for."""

    def unfinished(self) -> EntryQuerySet:
        return self.filter(status__in=_OPEN)

    def due(self) -> EntryQuerySet:
        """Owed now, and past the moment that is left to the on-commit publish."""
        return self.filter(status=State.PENDING, available_at__lte=Now(), publish_after__lte=Now())

    def lapsed(self) -> EntryQuerySet:
        """Running under a lease that nobody renewed."""
        return self.filter(status=State.RUNNING, lease_until__lt=Now())

    def too_late(self) -> EntryQuerySet:
        """Not started, and past `expires_at` or `deadline_at`."""
        return self.filter(status__in=_WAITING).filter(
            Q(expires_at__lte=Now()) | Q(deadline_at__lte=Now())
        )

    def answered(self) -> EntryQuerySet:
        """Waiting for a person's word on effects that were all settled since, by who did them.

        Those whose task asks for a person after a crash have asked about more than an effect.
        """
        asked = OutboxEvent.objects.parking().filter(entry=OuterRef("pk"))
        since = Subquery(asked.order_by("-id").values("at")[:1])
        ledger = OutboxEffect.objects.filter(entry=OuterRef("pk"))
        later = Q(done_at__gt=OuterRef("since")) | Q(cleared_at__gt=OuterRef("since"))
        waiting = self.filter(status=State.UNCERTAIN).annotate(since=since)
        return waiting.exclude(options__contains={"on_crash": "park"}).filter(
            Exists(ledger.filter(later)), ~Exists(ledger.filter(done_at=None, cleared_at=None))
        )

    def abandoned(self) -> EntryQuerySet:
        """Cancelled while it ran, by a worker whose lease is past."""
        return self.filter(status=State.CANCELLED, lease_owner__isnull=False, lease_until__lt=Now())


class OutboxEntry(models.Model):
    """One obligation. Its ID is Celery's task ID, through every publish, retry and repair."""

    id = models.UUIDField(primary_key=True, db_default=RandomUUID(), editable=False)
    task = models.TextField()
    args = PayloadField(db_default=[])
    kwargs = PayloadField(db_default={})
    options = PayloadField(db_default={})
    queue = models.TextField(db_default="celery")
    priority = models.SmallIntegerField(db_default=0)
    status = models.TextField(
        choices=[(state.value, state.value) for state in State], db_default=State.PENDING.value
    )
    version = models.BigIntegerField(db_default=0)

    available_at = models.DateTimeField(db_default=Now())
    publish_after = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True)
    due_at = models.DateTimeField(db_default=Now())
    deadline_at = models.DateTimeField(null=True)

    attempts = models.PositiveIntegerField(db_default=0)
    failures = models.PositiveIntegerField(db_default=0)
    crashes = models.PositiveIntegerField(db_default=0)
    releases = models.PositiveIntegerField(db_default=0)
    strands = models.PositiveIntegerField(db_default=0)
    publishes = models.PositiveIntegerField(db_default=0)
    # The counts at which it ends; null leaves the limit to the task's own options.
    failure_limit = models.PositiveIntegerField(null=True)
    crash_limit = models.PositiveIntegerField(null=True)
    # The failures before the last requeue: the retry count of a new budget starts at 0.
    forgiven_failures = models.PositiveIntegerField(db_default=0)

    claim_token = models.UUIDField(null=True)
    lease_owner = models.UUIDField(null=True)
    lease_pid = models.IntegerField(null=True)
    lease_until = models.DateTimeField(null=True)
    missing_since = models.DateTimeField(null=True)
    over_age_at = models.DateTimeField(null=True)  # when it was found to be, and its owner told

    subject = models.TextField(db_default="")
    # Live only: cleared by the claim or the end. Null, since many entries have none.
    unique_key = models.TextField(null=True)  # noqa: DJ001
    owner = models.TextField(db_default="")

    result = PayloadField(null=True)
    error = models.TextField(db_default="")
    traceback = models.TextField(db_default="")

    trace_context = models.TextField(db_default="")
    root_id = models.UUIDField(null=True)
    parent_id = models.UUIDField(null=True)
    schema_version = models.SmallIntegerField(db_default=1)

    created_at = models.DateTimeField(db_default=Now())
    published_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    objects = EntryQuerySet.as_manager()

    class Meta:
        db_table = "celery_outbox_entry"
        verbose_name = "entry"
        verbose_name_plural = "entries"
        permissions = [
            ("requeue_entry", "Can retry entries"),
            ("cancel_entry", "Can cancel entries"),
            ("resolve_entry", "Can resolve uncertain entries"),
            ("run_now_entry", "Can make entries due now"),
            ("erase_entry", "Can erase the contents of entries"),
        ]
        constraints = [
            # Few, since each is evaluated at every step of every job. This one refuses unknown
            # states as well.
            models.CheckConstraint(
                name="celery_outbox_final_has_end",
                condition=Q(status__in=_FINAL, finished_at__isnull=False)
                | Q(status__in=_OPEN, finished_at__isnull=True),
            ),
            models.CheckConstraint(
                name="celery_outbox_running_has_lease",
                condition=~Q(status=State.RUNNING)
                | Q(
                    claim_token__isnull=False,
                    lease_owner__isnull=False,
                    lease_until__isnull=False,
                    started_at__isnull=False,
                ),
            ),
            models.CheckConstraint(
                name="celery_outbox_lease_has_run",
                condition=Q(lease_owner__isnull=True, lease_until__isnull=True)
                | Q(status__in=[State.RUNNING, State.CANCELLED]),
            ),
            models.CheckConstraint(
                name="celery_outbox_published_has_time",
                condition=~Q(status=State.PUBLISHED) | Q(published_at__isnull=False),
            ),
            models.CheckConstraint(
                name="celery_outbox_ended_keeps_no_key",
                condition=Q(unique_key__isnull=True) | Q(status__in=_OPEN),
            ),
            models.CheckConstraint(
                name="celery_outbox_counted_once",
                condition=Q(attempts__gte=F("failures") + F("crashes") + F("releases")),
            ),
            models.UniqueConstraint(
                "task",
                "unique_key",
                name=UNIQUE_KEY,
                condition=Q(unique_key__isnull=False),
            ),
        ]
        indexes = [
            models.Index(
                "available_at", name="celery_outbox_due", condition=Q(status=State.PENDING)
            ),
            models.Index(
                "published_at", name="celery_outbox_published", condition=Q(status=State.PUBLISHED)
            ),
            # By ID, never by lease_until: an indexed column would cost each renewal its HOT update.
            models.Index("id", name="celery_outbox_running", condition=Q(status=State.RUNNING)),
            models.Index(
                "id",
                name="celery_outbox_abandoned",
                condition=Q(status=State.CANCELLED, lease_owner__isnull=False),
            ),
            models.Index("due_at", name="celery_outbox_open", condition=Q(status__in=_OPEN)),
            models.Index(
                "expires_at",
                name="celery_outbox_expiring",
                condition=Q(status__in=_WAITING, expires_at__isnull=False),
            ),
            models.Index(
                "deadline_at",
                name="celery_outbox_deadline",
                condition=Q(status__in=_WAITING, deadline_at__isnull=False),
            ),
            models.Index(
                "finished_at", name="celery_outbox_finished", condition=Q(status__in=_FINAL)
            ),
            # What a look at the broker did not find: few, among a million that wait.
            models.Index(
                "missing_since",
                name="celery_outbox_missing",
                condition=Q(status=State.PUBLISHED, missing_since__isnull=False),
            ),
            # Those whose task says itself when they are old: no bound on `due_at` finds them.
            models.Index(
                "due_at",
                name="celery_outbox_own_over_age",
                condition=Q(status__in=_OPEN, options__has_key="over_age"),
            ),
            # Few, and looked for in every pass: among a million that are open.
            models.Index("id", name="celery_outbox_uncertain", condition=Q(status=State.UNCERTAIN)),
            # What people look for first, among millions that went well.
            models.Index(
                "status",
                "id",
                name="celery_outbox_ended_badly",
                condition=Q(status__in=[State.CANCELLED, State.FAILED]),
            ),
            # Those whose task keeps them for a time of its own: prune would read the whole table.
            models.Index(
                "finished_at",
                name="celery_outbox_own_retention",
                condition=Q(status__in=_FINAL, options__has_key="retention"),
            ),
            models.Index("subject", "id", name="celery_outbox_subject", condition=~Q(subject="")),
        ]

    def __str__(self) -> str:
        return f"{self.task}[{self.id}]"

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("An entry moves through outbox.transitions, never through save().")

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("Entries leave by their retention (outbox_prune), never through delete().")

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def is_erased(self) -> bool:
        """Whether what it said was removed: nothing of it may be written down again."""
        # Plain SQL may have written something else than an object.
        return isinstance(self.options, dict) and bool(self.options.get("erased"))

    @property
    def run_goes_on(self) -> bool:
        """Whether a worker still holds it: running, or cancelled and not settled yet."""
        return self.lease_owner is not None

    @property
    def retries(self) -> int:
        """Celery's retry count: the failures since it was enqueued or last requeued."""
        return self.failures - self.forgiven_failures


class EventQuerySet(models.QuerySet["OutboxEvent"]):
    """What people and recoverers look for."""

    def parking(self) -> EventQuerySet:
        """By which an entry came to wait for a person; not what was noted while it waited."""
        return self.filter(to_status=State.UNCERTAIN).exclude(from_status=State.UNCERTAIN)


class OutboxEvent(models.Model):
    """A step off the plain happy path: who, when, why, and how that attempt went.

    `published_at`, `started_at` and `at` are that attempt's publish, claim and end.
    """

    id = models.BigAutoField(primary_key=True)
    entry = models.ForeignKey(OutboxEntry, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(db_default=Now())
    verb = models.TextField()
    from_status = models.TextField()
    to_status = models.TextField()
    actor = models.TextField(db_default="")
    attempt = models.PositiveIntegerField(db_default=0)
    worker = models.UUIDField(null=True)
    reason = models.TextField(db_default="")
    published_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    error = models.TextField(db_default="")
    traceback = models.TextField(db_default="")

    objects = EventQuerySet.as_manager()

    class Meta:
        db_table = "celery_outbox_event"
        verbose_name = "event"
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.verb}: {self.from_status} → {self.to_status}"


class OutboxEffect(models.Model):
    """The ledger: an effect outside the database that was begun, and what became of it."""

    id = models.BigAutoField(primary_key=True)
    # None: of a command or a script, which brought a key of its own.
    entry = models.ForeignKey(
        OutboxEntry, on_delete=models.CASCADE, related_name="effects", null=True
    )
    name = models.TextField()
    key = models.TextField()
    request = PayloadField(null=True)
    begin_token = models.UUIDField()
    attempt = models.PositiveIntegerField(db_default=0)
    first_begun_at = models.DateTimeField(db_default=Now())
    begun_at = models.DateTimeField(db_default=Now())
    performer_until = models.DateTimeField(null=True)
    done_at = models.DateTimeField(null=True)
    cleared_at = models.DateTimeField(null=True)
    result = PayloadField(null=True)
    settled_by = models.TextField(db_default="")

    class Meta:
        db_table = "celery_outbox_effect"
        verbose_name = "effect"
        constraints = [
            models.UniqueConstraint(fields=["entry", "name"], name="celery_outbox_effect_once"),
            models.UniqueConstraint(fields=["key"], name="celery_outbox_effect_key"),
            models.CheckConstraint(
                name="celery_outbox_effect_one_outcome",
                condition=Q(done_at__isnull=True) | Q(cleared_at__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return self.key


class OutboxNotice(models.Model):
    """What an entry's owner is to be told of, and which message does. It holds no texts.

    `told_by`: the entry of the message that has taken it. While `told_at` is null and that entry
    has ended, or is gone, it is as if nobody had taken it.
    """

    id = models.BigAutoField(primary_key=True)
    entry = models.ForeignKey(OutboxEntry, on_delete=models.CASCADE, related_name="notices")
    owner = models.TextField()
    about = models.TextField()  # "failed", "uncertain" or "over_age"
    at = models.DateTimeField(db_default=Now())
    told_by = models.UUIDField(null=True)
    told_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "celery_outbox_notice"
        verbose_name = "notice"
        indexes = [
            models.Index("owner", name="celery_outbox_untold", condition=Q(told_at__isnull=True)),
            models.Index("owner", "told_at", name="celery_outbox_last_told"),
            models.Index(
                "told_by", name="celery_outbox_told_by", condition=Q(told_by__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.owner}: {self.about}"


class OutboxWorker(models.Model):
    """A worker's boot: host names and PIDs are reused, this UUID is not."""

    id = models.UUIDField(primary_key=True, db_default=RandomUUID())
    hostname = models.TextField(db_default="")
    pid = models.IntegerField(db_default=0)
    pool = models.TextField(db_default="")
    queues = models.JSONField(db_default=[])
    holds = models.JSONField(db_default=[])  # the IDs that it holds prefetched
    refused = models.JSONField(db_default={})  # deliveries that it did not run, by reason
    started_at = models.DateTimeField(db_default=Now())
    heartbeat_at = models.DateTimeField(db_default=Now())
    stopped_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "celery_outbox_worker"
        verbose_name = "worker"

    def __str__(self) -> str:
        return self.hostname or str(self.id)


class OutboxTick(models.Model):
    """A maintenance tick: its lease, its last run and what that found."""

    name = models.TextField(primary_key=True)
    lease_owner = models.UUIDField(null=True)
    lease_until = models.DateTimeField(null=True)
    last_at = models.DateTimeField(null=True)
    duration = models.DurationField(null=True)
    findings = models.JSONField(db_default={})
    # Reconcile's: what ended before has been compared with the result store for the last time.
    compared_until = models.DateTimeField(null=True)
    # Of the row "contact": since when somebody has always had the database in reach.
    unbroken_since = models.DateTimeField(null=True)

    class Meta:
        db_table = "celery_outbox_tick"
        verbose_name = "tick"

    def __str__(self) -> str:
        return self.name


class OutboxQueue(models.Model):
    """A queue that a person has paused: its entries stay pending."""

    name = models.TextField(primary_key=True)
    paused = models.BooleanField(db_default=False)
    paused_by = models.TextField(db_default="")
    paused_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "celery_outbox_queue"
        verbose_name = "queue"

    def __str__(self) -> str:
        return self.name
