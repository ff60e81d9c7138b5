"""The statements of the happy path, as SQL: the ORM has no UPDATE … RETURNING, and compiling
them anew for every job would cost more than running them. Executed by `outbox.transitions` only.
"""

from __future__ import annotations

# Columns that the caller leaves to the database have no place here. A taken ID or a live unique
# key inserts nothing: raising would abort the caller's transaction.
ENQUEUE = """
INSERT INTO celery_outbox_entry
  (id, task, args, kwargs, options, queue, priority, available_at, publish_after, due_at,
   expires_at, deadline_at, crash_limit, subject, unique_key, owner, root_id, parent_id)
SELECT
  %(id)s::uuid, %(task)s::text, %(args)s::jsonb, %(kwargs)s::jsonb, %(options)s::jsonb,
  %(queue)s::text, %(priority)s::smallint, at,
  STATEMENT_TIMESTAMP() + %(publish_after)s::interval, at,
  COALESCE(%(expires_at)s::timestamptz, STATEMENT_TIMESTAMP() + %(expires_in)s::interval),
  at + %(retry_deadline)s::interval, %(crash_limit)s::integer, %(subject)s::text,
  %(unique_key)s::text, %(owner)s::text, %(root_id)s::uuid, %(parent_id)s::uuid
FROM (
  SELECT COALESCE(%(eta)s::timestamptz, STATEMENT_TIMESTAMP() + %(countdown)s::interval) AS at
) AS due
ON CONFLICT DO NOTHING
"""

# A statement of its own, after the INSERT: that may have waited for the commit by which the owner's
# last message was told, and would not have seen it. A message that failed for good counts as one
# that was sent: else what is wrong with it would be tried without a pause.
PUT_OFF = """
UPDATE celery_outbox_entry AS e SET available_at = next.at, due_at = next.at
FROM (
  SELECT %(every)s::interval + GREATEST(
    (SELECT max(told_at) FROM celery_outbox_notice WHERE owner = %(owner)s),
    (SELECT max(tried.finished_at) FROM celery_outbox_notice AS n
     JOIN celery_outbox_entry AS tried ON tried.id = n.told_by
     WHERE n.owner = %(owner)s AND n.told_at IS NULL)
  ) AS at
) AS next
WHERE e.id = %(id)s AND e.available_at < next.at
"""

# By version: an on-commit publish that marks late must not mark the entry's next life. The status
# as an expression: on stale statistics the planner else reads the whole backlog through the index
# on pending rows.
PUBLISH = """
UPDATE celery_outbox_entry AS e
SET status = 'published', version = e.version + 1, publishes = e.publishes + 1,
    published_at = STATEMENT_TIMESTAMP(), missing_since = NULL
FROM unnest(%(ids)s::uuid[], %(versions)s::bigint[]) AS seen (id, version)
WHERE e.id = seen.id AND e.version = seen.version AND e.status || '' = 'pending'
"""

# From pending, available_at counts: an old copy that the broker redelivers must not defeat the
# backoff. From running, only the delivery's own token: the repeat of a claim whose reply was lost.
_CLAIM = """
UPDATE celery_outbox_entry AS e
SET status = 'running', version = e.version + 1,
    attempts = e.attempts + CASE WHEN e.status = 'running' THEN 0 ELSE 1 END,
    claim_token = %(token)s, lease_owner = %(owner)s, lease_pid = %(pid)s,
    lease_until = STATEMENT_TIMESTAMP() + %(lease)s, started_at = STATEMENT_TIMESTAMP(),
    missing_since = NULL,
    unique_key = CASE WHEN %(keep_unique)s THEN e.unique_key END
{unsynced}
WHERE e.id = %(id)s AND e.task = %(task)s
  AND (e.status = 'published'
       OR e.status = 'pending' AND e.available_at <= STATEMENT_TIMESTAMP()
       OR e.status = 'running' AND e.claim_token = %(token)s)
  AND (e.status = 'running' OR (
        (e.expires_at IS NULL OR e.expires_at > STATEMENT_TIMESTAMP())
        AND (e.deadline_at IS NULL OR e.deadline_at > STATEMENT_TIMESTAMP())))
RETURNING {columns}
"""

CLAIMED = (
    "id", "task", "args", "kwargs", "options", "queue", "priority", "claim_token", "attempts",
    "failures", "forgiven_failures", "failure_limit", "deadline_at", "subject", "owner", "root_id",
    "parent_id",
)  # fmt: skip
_COLUMNS = ", ".join(f"e.{column}" for column in CLAIMED)

CLAIM = _CLAIM.format(unsynced="", columns=_COLUMNS)

# Commits this one statement without waiting for the disk and leaves the session as it was, so
# that it is right behind PgBouncer too. MATERIALIZED: it must run before the update.
CLAIM_UNSYNCED = (
    "WITH unsynced AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))"
    + _CLAIM.format(unsynced="FROM unsynced", columns=_COLUMNS)
)

# In ID order and skipping what is locked: one locked row must not hold up the others' renewal.
RENEW = """
WITH held AS MATERIALIZED (
  SELECT id FROM celery_outbox_entry
  WHERE id = ANY(%(ids)s::uuid[]) AND lease_owner = %(owner)s
    AND status IN ('running', 'cancelled')
  ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE celery_outbox_entry AS e
SET lease_until = STATEMENT_TIMESTAMP() + %(lease)s, version = e.version + 1
FROM held WHERE e.id = held.id AND e.lease_owner = %(owner)s
RETURNING e.id
"""

SUCCEED = """
UPDATE celery_outbox_entry
SET status = 'succeeded', version = version + 1, finished_at = STATEMENT_TIMESTAMP(),
    result = %(result)s::jsonb, error = '', traceback = '', unique_key = NULL,
    lease_owner = NULL, lease_pid = NULL, lease_until = NULL
WHERE id = %(id)s AND claim_token = %(token)s AND status = 'running'
"""

# What the dispatcher needs of a due row, locked until the batch is marked.
DUE = """
SELECT id, version, task, args, kwargs, options, queue, priority, failures - forgiven_failures,
       root_id, parent_id
FROM celery_outbox_entry
WHERE status = 'pending' AND available_at <= STATEMENT_TIMESTAMP()
  AND publish_after <= STATEMENT_TIMESTAMP()
  AND queue NOT IN (SELECT name FROM celery_outbox_queue WHERE paused)
ORDER BY available_at
LIMIT %(limit)s
FOR NO KEY UPDATE SKIP LOCKED
"""

# Sixteen bytes an ID in one value for a page: a million rows of three columns would take seconds
# and hundreds of megabytes to decode. By keyset, since rows leave while others are read.
_IDS = """
SELECT string_agg(uuid_send(id), ''::bytea ORDER BY published_at, id), max(published_at)
FROM (
  SELECT id, published_at FROM celery_outbox_entry
  WHERE status = 'published' AND (published_at, id) > (%(at)s, %(last)s) {marked}
  ORDER BY published_at, id LIMIT %(limit)s
) AS page
"""
IDS_OF_PUBLISHED = _IDS.format(marked="")
IDS_OF_MISSING = _IDS.format(marked="AND missing_since IS NOT NULL")

# One statement, so that of two at once the second sees what the first has found. Word that is far
# in the future was left before the clock was set back: then the time without a gap begins anew.
CONTACT = """
INSERT INTO celery_outbox_tick AS t (name, last_at, unbroken_since)
VALUES (%(name)s, STATEMENT_TIMESTAMP(), STATEMENT_TIMESTAMP())
ON CONFLICT (name) DO UPDATE SET
  unbroken_since = CASE
    WHEN t.last_at BETWEEN STATEMENT_TIMESTAMP() - %(gap)s AND STATEMENT_TIMESTAMP() + %(gap)s
    THEN LEAST(t.unbroken_since, STATEMENT_TIMESTAMP())
    ELSE STATEMENT_TIMESTAMP()
  END,
  last_at = CASE
    WHEN t.last_at > STATEMENT_TIMESTAMP() + %(gap)s THEN STATEMENT_TIMESTAMP()
    ELSE GREATEST(t.last_at, STATEMENT_TIMESTAMP())
  END
"""
