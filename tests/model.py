"""What an entry should do, in plain Python: the table of verbs in the docs, written a second time.

Nothing of the library is imported: where both agree, two readings of the contract agree. Times
are whole hours on a clock of the model's own: no pause of the machine can matter beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

PENDING, PUBLISHED, RUNNING, UNCERTAIN = "pending", "published", "running", "uncertain"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
GONE = "gone"  # pruned, or never there
WAITING = {PENDING, PUBLISHED}
OPEN = {*WAITING, RUNNING, UNCERTAIN}
FINAL = {SUCCEEDED, FAILED, CANCELLED}
GIVEN_UP = {FAILED, UNCERTAIN}

LEASE = 2
BACKOFF = 5  # after a crash; the library's own jitters, and is set to this once it was looked at
MAX_CRASHES = 3  # of a task that says nothing

QUIET = {"publish", "handoff", "claim", "renew", "succeed"}  # the happy path writes no event
# From and to of what writes one.
STEPS = {
    "reject": ({PENDING}, GIVEN_UP),
    "retry": ({RUNNING}, {PENDING}),
    "fail": ({RUNNING}, GIVEN_UP),
    "park": ({RUNNING}, {UNCERTAIN}),
    "timeout": ({RUNNING}, {PENDING, *GIVEN_UP}),
    "release": ({RUNNING}, {PENDING}),
    "decline": ({PUBLISHED}, {PENDING}),
    "crash": ({RUNNING}, {PENDING, *GIVEN_UP}),
    "settle": ({CANCELLED}, {CANCELLED}),
    "strand": ({PUBLISHED}, {PENDING}),
    "expire": (WAITING, GIVEN_UP),
    "cancel": (OPEN, {CANCELLED}),
    "resolve": ({UNCERTAIN}, {PENDING, SUCCEEDED}),
    "requeue": ({FAILED, CANCELLED}, {PENDING}),
    "run_now": ({PENDING}, {PENDING}),
    "erase": (FINAL, FINAL),
}

UNLEASED: dict[str, Any] = {"lease_owner": None, "lease_pid": None, "lease_until": None}


@dataclass(frozen=True)
class Terms:
    """What a producer asks for."""

    task: str = "one"
    key: str | None = None
    keeps_key: bool = False  # until the end, not only until the claim
    countdown: int = 0
    expires_in: int | None = None
    retry_deadline: int | None = None
    failure_limit: int | None = None
    crash_limit: int | None = None
    max_crashes: int | None = None
    on_crash: str = "retry"
    owner: str = ""
    is_followed: bool = False  # by a link, the rest of a chain, and two errbacks

    @property
    def is_synced(self) -> bool:
        """Whether its claim waits for the disk, so that a killed database does not forget it."""
        return self.on_crash != "retry"


@dataclass(frozen=True)
class Run:
    """A delivery's claim, as the worker remembers it: perhaps long after it was lost."""

    entry: int
    token: UUID
    owner: UUID
    pid: int


@dataclass
class Row:
    """An entry. Each verb says what it answers and, where its guard holds, moves the row."""

    terms: Terms
    available_at: int = 0
    due_at: int = 0
    expires_at: int | None = None
    deadline_at: int | None = None
    failure_limit: int | None = None
    crash_limit: int | None = None
    unique_key: str | None = None
    status: str = PENDING
    version: int = 0
    attempts: int = 0
    failures: int = 0
    crashes: int = 0
    releases: int = 0
    strands: int = 0
    publishes: int = 0
    forgiven_failures: int = 0
    claim_token: UUID | None = None
    lease_owner: UUID | None = None
    lease_pid: int | None = None
    lease_until: int | None = None
    missing: bool = False
    finished: bool = False
    erased: bool = False
    ended: str = ""  # how the run of the token that the row keeps has ended
    words: int = 0  # that the owner is to be told
    followers: int = 0  # links, steps of a chain and errbacks owed by its ends
    effects: dict[str, str] = field(default_factory=dict)  # name → begun, done or cleared
    events: list[tuple[str, str, str]] = field(default_factory=list)

    @classmethod
    def owed(cls, terms: Terms, *, now: int) -> Row:
        at = now + terms.countdown
        return cls(
            terms,
            available_at=at,
            due_at=at,
            expires_at=None if terms.expires_in is None else now + terms.expires_in,
            deadline_at=None if terms.retry_deadline is None else at + terms.retry_deadline,
            failure_limit=terms.failure_limit,
            crash_limit=terms.crash_limit,
            unique_key=terms.key,
        )

    def _move(self, verb: str, to: str, **changes: Any) -> bool:
        if verb not in QUIET:
            self.events.append((verb, self.status, to))
        if to in GIVEN_UP and to != self.status and self.terms.owner:
            self.words += 1
        if self.terms.is_followed and to != self.status:
            self.followers += {FAILED: 2, SUCCEEDED: 2 * (verb == "resolve")}.get(to, 0)
        vars(self).update(changes, status=to, version=self.version + 1, finished=to in FINAL)
        if self.finished:
            self.unique_key = None
        return True

    def _owe(self, verb: str, *, at: int, **changes: Any) -> bool:
        return self._move(verb, PENDING, available_at=at, missing=False, **changes)

    def _give_up(self, verb: str) -> bool:
        """Never failed while an effect's outcome is unknown."""
        return self._move(verb, UNCERTAIN if self.has_begun() else FAILED, **UNLEASED)

    @property
    def is_leased(self) -> bool:
        return self.lease_owner is not None

    def has_begun(self) -> bool:
        return "begun" in self.effects.values()

    def is_too_late(self, *, at: int) -> bool:
        return any(end is not None and end <= at for end in (self.expires_at, self.deadline_at))

    def is_lapsed(self, *, now: int) -> bool:
        return self.lease_until is not None and self.lease_until <= now

    def is_claimable(self, *, now: int) -> bool:
        due = self.status == PENDING and self.available_at <= now
        return (self.status == PUBLISHED or due) and not self.is_too_late(at=now)

    # Dispatcher and reconcile, by the version that they read.

    def act(self, verb: str, *, version: int, now: int) -> bool:
        source = PUBLISHED if verb == "strand" else PENDING
        if (self.status, self.version) != (source, version):
            return False
        if verb == "reject":
            return self._give_up("reject")
        if verb == "strand":
            self.strands += 1
            return self._owe("strand", at=now)
        self.publishes += 1
        if verb == "handoff":
            return self._move("handoff", SUCCEEDED)
        return self._move("publish", PUBLISHED, missing=False)

    def mark_missing(self, *, missing: bool) -> bool:
        marks = self.status == PUBLISHED and self.missing != missing
        self.missing = missing if marks else self.missing
        return marks

    def expire(self, *, now: int) -> bool:
        late = self.status in WAITING and self.is_too_late(at=now)
        return late and self._give_up("expire")

    # Workers.

    def claim(self, run: Run, *, task: str, now: int) -> bool:
        repeats = self.status == RUNNING and self.claim_token == run.token
        free = self.is_claimable(now=now) or repeats
        if not free or task != self.terms.task:
            return False
        lease = {"lease_owner": run.owner, "lease_pid": run.pid, "lease_until": now + LEASE}
        self.attempts += not repeats
        self.unique_key = self.unique_key if self.terms.keeps_key else None
        return self._move("claim", RUNNING, claim_token=run.token, ended="", missing=False, **lease)

    def renew(self, *, owner: UUID, now: int) -> bool:
        if self.lease_owner != owner:
            return False
        return self._move("renew", self.status, lease_until=now + LEASE)

    def end(self, how: str, *, token: UUID, delay: int, now: int) -> str:
        """The answer to a worker that says how its run ended: the value of an `Ending`."""
        if (self.status, self.claim_token) != (RUNNING, token):
            return self._end_late(how, token=token)
        self.ended = how
        if how in ("succeed", "park"):
            self._move(how, SUCCEEDED if how == "succeed" else UNCERTAIN, **UNLEASED)
            return "recorded"
        self.failures += 1
        deadline = self.deadline_at
        if how == "retry" and (deadline is None or deadline > now + delay):
            self._owe("retry", at=now + delay, **UNLEASED)
            return "recorded"
        self._give_up("fail")
        self.ended = "fail"
        return "gave up" if how == "retry" else "recorded"

    def _end_late(self, how: str, *, token: UUID) -> str:
        mine = self.claim_token == token
        if mine and self.ended == how:
            return "repeated"
        if mine and self.ended == "fail" and how == "retry":
            return "gave up"
        self.events.append(("late", self.status, self.status))
        if not mine or self.status != CANCELLED:
            return "refused"
        self._settle()
        return "cancelled"

    def is_held_by(self, run: Run, *, by_token: bool) -> bool:
        if not self.is_leased:
            return False
        if by_token:
            return self.claim_token == run.token
        return (self.lease_owner, self.lease_pid) == (run.owner, run.pid)

    def lose(self, how: str, *, now: int) -> bool:
        """The end of a run that says nothing itself."""
        if how == "settle":
            return self.settle()
        return self.crash(now=now) if how == "crash" else self.release(now=now)

    def release(self, *, now: int) -> bool:
        if self.status != RUNNING:
            return False
        self.releases += 1
        return self._owe("release", at=now, claim_token=None, **UNLEASED)

    def time_out(self, *, budget: int | None, delay: int, now: int) -> str | None:
        if self.status != RUNNING:
            return None
        limit = self.failure_limit
        if limit is None and budget is not None:
            limit = self.forgiven_failures + budget
        self.failures += 1
        self.claim_token = None
        if limit is not None and self.failures >= limit:
            self._give_up("timeout")
        else:
            self._owe("timeout", at=now + delay, **UNLEASED)
        return self.status

    def crash(self, *, now: int) -> bool:
        if self.status != RUNNING:
            return False
        self.crashes += 1
        self.claim_token = None
        limit = MAX_CRASHES if self.crash_limit is None else self.crash_limit
        if self.terms.on_crash == "park":
            return self._move("crash", UNCERTAIN, **UNLEASED)
        if self.terms.on_crash == "fail" or self.crashes >= limit:
            return self._give_up("crash")
        return self._owe("crash", at=now + BACKOFF, **UNLEASED)

    def settle(self) -> bool:
        return self.status == CANCELLED and self._settle()

    def _settle(self) -> bool:
        return self.is_leased and self._move("settle", CANCELLED, **UNLEASED)

    def decline(self, *, delay: int, now: int) -> bool:
        return self.status == PUBLISHED and self._owe("decline", at=now + delay)

    # People.

    def cancel(self) -> bool:
        return self.status in OPEN and self._move("cancel", CANCELLED)

    def resolve(self, *, effect: str | None, happened: bool, now: int) -> bool:
        known = not self.has_begun() if effect is None else self.effects.get(effect) == "begun"
        if self.status != UNCERTAIN or not known:
            return False
        if effect is None and happened:
            return self._move("resolve", SUCCEEDED)
        if effect is not None:
            self.effects[effect] = "done" if happened else "cleared"
        return self._owe("resolve", at=now)

    def requeue(self, *, now: int, key_is_free: bool) -> bool:
        ended = self.status in (FAILED, CANCELLED) and not self.is_leased and not self.erased
        if not ended or not key_is_free:
            return False
        span = None if self.deadline_at is None else self.deadline_at - self.due_at
        if self.failure_limit is not None:
            self.failure_limit += self.failures - self.forgiven_failures
        more = MAX_CRASHES if self.terms.max_crashes is None else self.terms.max_crashes
        self.crash_limit = self.crashes + more
        self.forgiven_failures = self.failures
        self.due_at, self.expires_at = now, None
        self.deadline_at = None if span is None else now + span
        return self._owe("requeue", at=now, claim_token=None, unique_key=self.terms.key)

    def run_now(self, *, now: int) -> bool:
        return self.status == PENDING and self._owe("run_now", at=now)

    def erase(self) -> bool:
        """What it says goes, and with that what its options asked for."""
        if self.status not in FINAL:
            return False
        told = self.terms
        self.terms = Terms(told.task, keeps_key=told.keeps_key, owner=told.owner)
        self.erased = True
        return self._move("erase", self.status)

    def may_be_pruned(self) -> bool:
        """Not before its owner has been told, which here nobody ever is."""
        return self.status in FINAL and not self.is_leased and not self.words
