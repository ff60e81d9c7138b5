"""The drill's form, filled in: as text for a person, as JSON for a program."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outbox.drill.engine import Drill, Result
from outbox.drill.facts import Facts, Obligation
from outbox.drill.fleet import Death
from outbox.drill.record import Job

WIDTH = 100
LABEL = 18
SHOWN = 5  # jobs of a point whose IDs and events are shown; all are counted
SEEN_AT = "manage.py outbox_status, and in the admin at Outbox › Entries"


def as_text(drill: Drill) -> str:
    """For a person who has never seen a drill."""
    parts = [_heading(drill), _common(drill), *map(_point_text, _numbered(drill)), _table(drill)]
    return "\n\n".join(parts) + "\n"


def as_json(drill: Drill) -> str:
    """`points` and `summary` are stable; more keys may come."""
    found = {
        "points": [_point_json(result) for result in drill.results],
        "summary": summary(drill),
        "seconds": round(drill.seconds, 2),
        "about": {**asdict(drill.about), "renewal": _renewal(drill), "seen_at": SEEN_AT},
    }
    return json.dumps(found, indent=2, default=str, ensure_ascii=False) + "\n"


FORMATS = {"text": as_text, "json": as_json}


def summary(drill: Drill) -> dict[str, int]:
    results = drill.results
    return {
        "points": len(results),
        "passed": sum(result.passed for result in results),
        "failed": sum(not result.passed for result in results),
        "lost": sum(result.facts.lost for result in results),
        "duplicates": sum(result.facts.duplicates for result in results),
    }


def verdict(drill: Drill) -> str:
    """The whole drill in one line."""
    counts = summary(drill)
    doubled = sum(result.facts.duplicates for result in drill.results if result.passed)
    known = f" ({doubled} expected)" if doubled else ""
    return (
        f"{counts['passed']} of {counts['points']} points as expected, {counts['lost']} lost, "
        f"{_many(counts['duplicates'], 'duplicate')}{known}, {drill.seconds:.0f} s"
    )


def write(text: str, *, to: Path) -> None:
    """Write the file whole or not at all."""
    aside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(to)
    finally:
        aside.unlink(missing_ok=True)


# --- JSON -------------------------------------------------------------------------------------


def _point_json(result: Result) -> dict[str, Any]:
    facts = result.facts
    return {
        "name": result.point.name,
        "expected": result.texts.expected,
        "observed": observed(result),
        "passed": result.passed,
        "recovery_seconds": facts.recovery_seconds,
        "jobs": len(facts.jobs),
        "effects": len(facts.effects),
        "lost": facts.lost,
        "duplicates": facts.duplicates,
        "problems": list(result.problems),
        "stop_point": result.texts.summary,
        "uncertain": result.texts.uncertain,
        "risk": result.texts.risk,
        "seconds_open": facts.seconds_open,
        "details": asdict(replace(facts, obligations=facts.obligations[:SHOWN])),
    }


# --- text -------------------------------------------------------------------------------------


def _heading(drill: Drill) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in drill.about.versions.items())
    return f"RECOVERY DRILL: {verdict(drill)}\n{versions}"


def _common(drill: Drill) -> str:
    form = drill.about
    now = f"{drill.open_jobs} jobs" if drill.open_jobs else "none"
    longest = max((result.facts.seconds_open or 0 for result in drill.results), default=0)
    rows = {
        "Obligation": form.obligation,
        "Claim": form.claim,
        "Expiry": form.expiry,
        "Renewal": _renewal(drill),
        "Retry limit": form.retry_limit,
        "Backoff": form.backoff,
        "Failure owner": form.failure_owner,
        "Deduplication": form.deduplication,
        "Oldest pending": f"{now} open now, during the drill at most {longest:g} s old",
        "Its owner sees it": SEEN_AT,
    }
    return "AT EVERY POINT\n" + _rows(rows)


def _renewal(drill: Drill) -> str:
    watched = [result.facts.renewed for result in drill.results if result.facts.renewed is not None]
    if not watched:
        return "not watched: point after-claim does that"
    return (
        "by its worker while it lives, as was seen"
        if any(watched)
        else "none was seen in half a lease"
    )


def _numbered(drill: Drill) -> Iterator[tuple[int, Result]]:
    return enumerate(drill.results, start=1)


def _point_text(numbered: tuple[int, Result]) -> str:
    number, result = numbered
    facts, words = result.facts, result.texts
    rows = {
        "Stop point": words.summary,
        f"{words.business.capitalize()}, job": _ids(facts),
        "Durable record": "\n".join(_counted(map(_record, facts.jobs))) or "none",
        "Events": "\n".join(_events(facts)) or "none",
        "Expected": words.expected,
        "Observed": observed(result),
        "Uncertain result": words.uncertain,
        "Time to recover": _recovery(facts),
        "Lost, duplicates": f"{facts.lost}, {facts.duplicates}",
        "Remaining risk": words.risk,
    }
    if result.problems:
        rows["NOT AS EXPECTED"] = "\n".join(result.problems)
    title = f"{number} {result.point.name}".ljust(WIDTH - 6)
    return f"{title}{'PASSED' if result.passed else 'FAILED'}\n" + _rows(rows)


def observed(result: Result) -> str:
    """What was seen, in a sentence."""
    facts = result.facts
    effects, keys = len(facts.effects), len({effect.key for effect in facts.effects})
    deaths = [f"{death.name} {_end(death)}" for death in facts.deaths]
    noun = result.texts.effect if any(each.placed for each in facts.obligations) else "effect"
    parts = [*deaths, *_seen_jobs(result), _many(effects, noun)]
    if effects > 1:
        parts[-1] += f" under {_many(keys, 'key')}"
    if facts.signals:
        mails = "" if facts.owner_mails is None else f" and {_many(facts.owner_mails, 'mail')}"
        parts.append(f"owner told by {_many(facts.signals, 'signal')}{mails}")
    return "; ".join([*parts, *(f"{name}: {_plain(value)}" for name, value in facts.notes.items())])


def _end(death: Death) -> str:
    if death.returncode < 0:
        return f"ended by signal {-death.returncode}"
    return f"ended with status {death.returncode}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _seen_jobs(result: Result) -> list[str]:
    facts = result.facts
    if not facts.jobs:
        return [_many(facts.business, result.texts.business), "0 jobs"]
    found = [
        f"job {job.state} after {_many(job.attempts, 'attempt')}, "
        f"{_many(job.failures, 'failure')}, {_many(job.crashes, 'crash')}"
        + (f", {_many(job.releases, 'release')}" if job.releases else "")
        for job in facts.jobs
    ]
    discarded = f", {facts.discarded} discarded" if facts.discarded else ""
    return [*_counted(found), f"{_many(facts.deliveries, 'delivery')}{discarded}"]


def _counted(lines: Iterable[str]) -> list[str]:
    """Each line once, with how often it came."""
    found = Counter(lines)
    return [line if count == 1 else f"{count:,} × {line}" for line, count in found.items()]


def _many(count: int, noun: str) -> str:
    irregular = {"delivery": "deliveries", "crash": "crashes"}
    return f"{count} {noun if count == 1 else irregular.get(noun, noun + 's')}"


def _ids(facts: Facts) -> str:
    lines = [_id(each) for each in facts.obligations[:SHOWN]]
    more = len(facts.obligations) - SHOWN
    return "\n".join([*lines, *([f"and {more:,} more"] if more > 0 else [])]) or "none was placed"


def _id(obligation: Obligation) -> str:
    job = str(obligation.job.id) if obligation.job else "none"
    placed = obligation.placed
    if placed is None:
        return f"none, {job} (a task of the drill's own)"
    if placed.business_id is None:
        return f"none exists for {placed.reference}"
    return f"{placed.business_id}, {job}"


def _record(job: Job) -> str:
    error = f"; {job.error}" if job.error else ""
    return (
        f"{job.state}; attempts {job.attempts}, failures {job.failures}, crashes {job.crashes}, "
        f"releases {job.releases}, publishes marked {job.publishes}{error}"
    )


def _events(facts: Facts) -> Iterator[str]:
    for job in facts.jobs[:SHOWN]:
        for event in job.events:
            kept = ", traceback kept" if event.traceback else ""
            yield f"{event.verb} at attempt {event.attempt} by {event.actor}: {event.words}{kept}"


def _recovery(facts: Facts) -> str:
    if facts.recovery_seconds is not None:
        return f"{facts.recovery_seconds:.1f} s from the blow"
    if facts.struck_at:
        over = all(job.has_ended for job in facts.jobs)
        return "nothing was to recover" if over else "it did not"
    return f"nothing was struck; the job was open for {facts.seconds_open or 0:.1f} s"


def _rows(rows: Mapping[str, str]) -> str:
    return "\n".join(line for label, text in rows.items() for line in _row(label, text))


def _row(label: str, text: str) -> Iterator[str]:
    indent = " " * (LABEL + 2)
    for number, paragraph in enumerate(text.splitlines() or [""]):
        first = f"  {label:<{LABEL}}" if not number else indent
        yield textwrap.fill(
            paragraph, WIDTH, initial_indent=first, subsequent_indent=indent,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip


def _table(drill: Drill) -> str:
    name = max(len(result.point.name) for result in drill.results) + 1
    line = f"{{:<{name}}}{{:<8}}{{:>9}}{{:>7}}{{:>9}}{{:>6}}{{:>12}}"
    head = line.format("POINT", "", "RECOVERY", "JOBS", "EFFECTS", "LOST", "DUPLICATES")
    rows = [head]
    for result in drill.results:
        facts, seconds = result.facts, result.facts.recovery_seconds
        rows.append(
            line.format(
                result.point.name,
                "passed" if result.passed else "FAILED",
                "-" if seconds is None else f"{seconds:.1f} s",
                len(facts.jobs),
                len(facts.effects),
                facts.lost,
                facts.duplicates,
            )
        )
    logs = [] if drill.passed else [f"The logs of all processes are in {drill.folder}."]
    return "\n".join([*rows, "", verdict(drill), *logs])
