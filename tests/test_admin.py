"""The admin: what people see of entries, and what they may do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import escape
from django_celery_results.models import TaskResult

from outbox.admin import deeds, filters, paging
from outbox.lifecycle.cancel import cancel
from outbox.models import OutboxEffect, OutboxEntry, OutboxTick
from outbox.states import State
from tests.factories import ago, begin_effect, make_entries, make_entry, parked

if TYPE_CHECKING:
    from pytest_django import DjangoAssertNumQueries, Settings

pytestmark = pytest.mark.django_db

LIST = "/admin/celery_outbox/outboxentry/"
SCRIPT = "<script>alert(1)</script>"


def page_of(entry: OutboxEntry, deed: str = "") -> str:
    return reverse(f"admin:celery_outbox_outboxentry_{deed or 'change'}", args=[entry.pk])


def person(*permissions: str) -> Client:
    """A client logged in as ada, of the staff, with these permissions."""
    user = User.objects.create_user("ada", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def ada() -> Client:
    return person("view_outboxentry", "requeue_entry", "cancel_entry", "resolve_entry")


@pytest.fixture
def viewer() -> Client:
    return person("view_outboxentry")


def text(client: Client, url: str, **data: Any) -> str:
    response = client.get(url, data)
    assert response.status_code == 200
    return response.content.decode()


def told(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]]


def select(client: Client, action: str, entries: list[OutboxEntry], **data: Any) -> Any:
    chosen = {"action": action, "_selected_action": [str(entry.pk) for entry in entries]}
    return client.post(LIST, {**chosen, **data}, follow=True)


def status_of(entry: OutboxEntry) -> str:
    return OutboxEntry.objects.get(pk=entry.pk).status


def listed(client: Client, **data: Any) -> list[UUID]:
    response = client.get(LIST, data)
    assert response.status_code == 200
    return [entry.pk for entry in response.context["cl"].result_list]


def page_query(client: Client, **data: Any) -> str:
    """The query that fetched the list's rows."""
    with CaptureQueriesContext(connection) as queries:
        listed(client, **data)
    (page,) = [query["sql"] for query in queries if '"error"' in query["sql"]]
    return page


# --- the list -----------------------------------------------------------------------------------


def test_the_list_shows_state_task_subject_age_and_the_errors_first_line(viewer: Client) -> None:
    make_entry(
        State.FAILED, subject="shop.order:42", error="ValueError: no\nmore", due_at=ago(minutes=7)
    )
    shown = text(viewer, LIST)
    assert all(words in shown for words in ("add", "shop.order:42", "7 min", "ValueError"))
    assert "more" not in shown.partition("ValueError: no")[2][:20]


def test_the_list_has_the_latest_first(viewer: Client) -> None:
    first, second = make_entries(2)
    assert listed(viewer) == [second.pk, first.pk]


def test_the_list_takes_the_same_few_queries_however_long_it_is(
    viewer: Client, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    make_entries(150, subject="shop.order:42")
    # Session, user, two of permissions, the bounded count, the page.
    with django_assert_num_queries(6):
        text(viewer, LIST)


def test_the_list_leaves_the_large_columns_alone(viewer: Client) -> None:
    make_entry()
    page = page_query(viewer)
    assert '"traceback"' not in page
    assert '"kwargs"' not in page


def test_the_count_is_bounded_and_says_so(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "COUNTED", 3)
    make_entries(3)
    assert "3 entries" in text(viewer, LIST)
    make_entry()
    assert "the latest 3 entries" in text(viewer, LIST)


def test_unfinished_entries_have_what_is_owed_for_longest_first(viewer: Client) -> None:
    young = make_entry(due_at=ago(minutes=1))
    old = make_entry(State.RUNNING, due_at=ago(hours=1))
    assert listed(viewer, state="unfinished") == [old.pk, young.pk]


@pytest.mark.parametrize("state", [*State, "unfinished"])
def test_the_list_is_filtered_by_state(viewer: Client, state: str) -> None:
    made = {entry.pk: entry for entry in map(make_entry, State)}
    wanted = [
        pk
        for pk, entry in made.items()
        if entry.status == state or (state == "unfinished" and not entry.is_final)
    ]
    assert sorted(listed(viewer, state=state)) == sorted(wanted)


def test_the_list_is_filtered_by_task(viewer: Client) -> None:
    make_entry()
    entry = make_entry(task="tests.tasks.echo")
    assert "?task=tests.tasks.echo" in text(viewer, LIST)
    assert listed(viewer, task="tests.tasks.echo") == [entry.pk]


def test_a_task_alone_is_looked_for_among_the_latest_and_with_a_state_among_all(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "LATEST", 2)
    failed = make_entry(State.FAILED)
    assert listed(viewer, task=failed.task) == [failed.pk]
    later = make_entries(2, task="tests.tasks.echo")
    assert listed(viewer, task=failed.task) == []
    assert "among the latest 2 of all" in text(viewer, LIST, task=failed.task)
    assert len(listed(viewer, task=later[0].task)) == 2
    assert listed(viewer, task=failed.task, state="failed") == [failed.pk]


@pytest.mark.parametrize("length", [36, 13, 8])
def test_an_entry_is_found_by_its_id_or_the_beginning_of_it(viewer: Client, length: int) -> None:
    entry = make_entry(pk=UUID("11112222-3333-7444-8555-666677778888"))
    make_entry()
    assert listed(viewer, q=str(entry.pk)[:length].upper()) == [entry.pk]


def test_an_entry_is_found_by_its_subject(viewer: Client) -> None:
    entry = make_entry(subject="shop.order:42")
    make_entry(subject="shop.order:421")
    assert listed(viewer, q=" shop.order:42 ") == [entry.pk]


@pytest.mark.parametrize("term", ["shop.order:42", "01990b7e"])
def test_a_search_looks_into_indexes_alone(viewer: Client, term: str) -> None:
    make_entries(2, subject="shop.order:42")
    page = page_query(viewer, q=term)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {page}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Seq Scan" not in plan
    assert "celery_outbox_subject" in plan


# --- the page of an entry -----------------------------------------------------------------------


def test_the_page_says_what_happened_to_the_entry(viewer: Client) -> None:
    entry = make_entry(kwargs={"order": 42}, subject="shop.order:42")
    cancel(entry.pk, actor="user:grace", reason="ordered twice")
    shown = text(viewer, page_of(entry))
    assert all(
        words in shown
        for words in (str(entry.pk), "user:grace", "ordered twice", "pending → cancelled")
    )
    assert "&quot;order&quot;: 42" in shown


def test_the_page_takes_the_same_few_queries_however_long_the_history(
    viewer: Client, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    entry = make_entry(State.FAILED, parent_id=uuid4())
    for _ in range(5):
        deeds.REQUEUE.do([entry.pk], actor="user:ada", using="default")
        deeds.CANCEL.do([entry.pk], actor="user:ada", using="default")
    # Session, user, two of permissions, the entry, events, effects, ancestors.
    with django_assert_num_queries(8):
        assert text(viewer, page_of(entry)).count("→ pending") == 5


def test_nothing_that_a_row_says_is_markup(ada: Client) -> None:
    entry = make_entry(
        State.FAILED,
        task=SCRIPT,
        subject=SCRIPT,
        owner=SCRIPT,
        error=SCRIPT,
        traceback=SCRIPT,
        args=[SCRIPT],
        kwargs={SCRIPT: SCRIPT},
        options={"headers": {SCRIPT: SCRIPT}},
        result=SCRIPT,
        queue=SCRIPT,
    )
    deeds.REQUEUE.do([entry.pk], actor=SCRIPT, reason=SCRIPT, using="default")
    OutboxEffect.objects.create(
        entry=entry, name=SCRIPT, key=SCRIPT, request=SCRIPT, begin_token=uuid4()
    )
    for url in (LIST, page_of(entry)):
        shown = text(ada, url)
        assert SCRIPT not in shown
        assert "&lt;script&gt;alert(1)" in shown


def test_secret_arguments_are_hidden_by_name_wherever_they_stand(
    viewer: Client, settings: Settings
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "REDACT": ["Token", "x"]}
    secrets = {"deep": [{"token": "secret-1"}], "TOKEN": "secret-2", "plain": "shown"}
    # The task is add(x, y): its first argument is x, by position.
    shown = text(viewer, page_of(make_entry(args=["secret-3", "seen"], kwargs=secrets)))
    assert "secret-" not in shown
    assert shown.count("•••") == 3
    assert "seen" in shown


def test_effects_are_shown_with_their_outcome(viewer: Client) -> None:
    entry = make_entry(State.UNCERTAIN)
    OutboxEffect.objects.create(
        entry=entry, name="charge", key=f"{entry.pk}:charge", begin_token=uuid4()
    )
    assert "begun, outcome unknown" in text(viewer, page_of(entry))


def test_the_page_leads_to_the_parent_and_to_celerys_result() -> None:
    client = person("view_outboxentry", "view_taskresult")
    parent = make_entry(State.SUCCEEDED, task="tests.tasks.echo")
    entry = make_entry(State.SUCCEEDED, parent_id=parent.pk, root_id=parent.pk)
    result = TaskResult.objects.create(task_id=str(entry.pk), status="SUCCESS")
    shown = text(client, page_of(entry))
    assert f'href="{page_of(parent)}"' in shown
    assert reverse("admin:django_celery_results_taskresult_change", args=[result.pk]) in shown


def test_an_entry_that_is_not_there_leads_back_with_a_word(viewer: Client) -> None:
    url = reverse("admin:celery_outbox_outboxentry_change", args=[uuid4()])
    response = viewer.get(url, follow=True)
    assert "exist" in told(response)[0]


@pytest.mark.parametrize("url", ["add/", "{pk}/delete/"])
def test_nothing_is_added_or_deleted_even_by_a_superuser(admin_client: Client, url: str) -> None:
    response = admin_client.get(LIST + url.format(pk=make_entry().pk))
    assert response.status_code == 403


def test_nothing_is_changed_by_a_form_even_by_a_superuser(admin_client: Client) -> None:
    entry = make_entry()
    assert admin_client.post(page_of(entry), {"task": "other"}).status_code == 403
    assert OutboxEntry.objects.get(pk=entry.pk).task == entry.task


@pytest.mark.parametrize("table", ["outboxtick", "outboxworker", "outboxqueue"])
def test_the_small_tables_can_be_looked_at(admin_client: Client, table: str) -> None:
    OutboxTick.objects.create(name="dispatch", last_at=ago(minutes=3), findings={"published": 7})
    shown = text(admin_client, f"/admin/celery_outbox/{table}/")
    assert ("published 7" in shown) == (table == "outboxtick")


# --- retry and cancel ---------------------------------------------------------------------------


def test_retry_owes_a_failed_entry_again_with_the_persons_name(ada: Client) -> None:
    entry = make_entry(State.FAILED)
    response = select(ada, "requeue_selected", [entry])
    assert status_of(entry) == State.PENDING
    assert entry.events.get().actor == "user:ada"
    assert told(response) == ["1 entry owed again, with a new retry budget."]
    log = LogEntry.objects.get()
    assert (log.user.get_username(), log.object_id) == ("ada", str(entry.pk))


def test_a_selection_is_told_how_many_were_refused_and_why(ada: Client) -> None:
    failed = make_entry(State.FAILED, options={"unique_key": "once"})
    make_entry(unique_key="once")
    running = make_entry(State.RUNNING)
    cancelled = make_entry(State.RUNNING)
    cancel(cancelled.pk, actor="user:grace")
    done = make_entry(State.SUCCEEDED)
    again = make_entry(State.CANCELLED)
    response = select(ada, "requeue_selected", [failed, running, cancelled, done, again])
    assert sorted(told(response)) == sorted(
        [
            "1 entry owed again, with a new retry budget.",
            f"1 entry refused: a newer entry holds the unique key ({failed.pk}).",
            f"2 entries refused: a run still goes on ({cancelled.pk}, {running.pk}).",
            f"1 entry refused: succeeded already ({done.pk}).",
        ]
    )
    assert LogEntry.objects.count() == 1


def test_cancel_ends_what_is_open_and_refuses_what_has_ended(ada: Client) -> None:
    entries = [make_entry(State.PENDING), make_entry(State.RUNNING), make_entry(State.FAILED)]
    response = select(ada, "cancel_selected", entries)
    assert [status_of(entry) for entry in entries] == ["cancelled", "cancelled", "failed"]
    assert told(response) == [
        "2 entries cancelled.",
        f"1 entry refused: already ended: failed ({entries[2].pk}).",
    ]


def test_a_whole_filtered_list_is_done_up_to_a_limit(
    ada: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deeds, "AT_ONCE", 2)
    entries = make_entries(3, State.FAILED)
    response = select(ada, "requeue_selected", entries[:1], select_across="1")
    assert OutboxEntry.objects.filter(status=State.PENDING).count() == 2
    assert "Only the first 2" in told(response)[1]


@pytest.mark.parametrize(
    ("deed", "status", "then"),
    [("requeue", "failed", "pending"), ("cancel", "running", "cancelled")],
)
def test_a_button_on_the_page_does_it_with_a_reason(
    ada: Client, deed: str, status: str, then: str
) -> None:
    entry = make_entry(status)
    assert page_of(entry, deed) in text(ada, page_of(entry))
    response = ada.post(page_of(entry, deed), {"reason": "the mail server is back"}, follow=True)
    assert response.redirect_chain[0][0] == page_of(entry)
    assert status_of(entry) == then
    assert entry.events.get().reason == "the mail server is back"
    assert "the mail server is back" in LogEntry.objects.get().change_message


def test_only_what_the_state_allows_is_offered(ada: Client) -> None:
    offered = {
        state: [deed for deed in deeds.DEEDS if page_of(entry, deed) in text(ada, page_of(entry))]
        for state, entry in ((state, make_entry(state)) for state in State)
    }
    assert offered == {
        "pending": ["cancel"],
        "published": ["cancel"],
        "running": ["cancel"],
        "uncertain": ["cancel", "happened", "not_happened"],
        "succeeded": [],
        "failed": ["requeue"],
        "cancelled": ["requeue"],
    }


def test_who_may_only_look_is_offered_nothing(viewer: Client) -> None:
    entry = make_entry(State.FAILED)
    assert "_selected" not in text(viewer, LIST)
    assert page_of(entry, "requeue") not in text(viewer, page_of(entry))


@pytest.mark.parametrize(
    ("deed", "state"),
    [
        ("requeue", State.FAILED),
        ("cancel", State.PENDING),
        ("happened", State.UNCERTAIN),
        ("not_happened", State.UNCERTAIN),
    ],
)
def test_who_may_only_look_is_refused(viewer: Client, deed: str, state: State) -> None:
    entry = make_entry(state)
    assert select(viewer, f"{deed}_selected", [entry]).status_code == 403
    assert viewer.post(page_of(entry, deed)).status_code == 403
    assert status_of(entry) == entry.status


def test_each_deed_has_a_permission_of_its_own() -> None:
    client = person("view_outboxentry", "cancel_entry")
    entry = make_entry(State.FAILED)
    assert client.post(page_of(entry, "requeue")).status_code == 403
    assert select(client, "requeue_selected", [entry]).status_code == 403
    assert client.post(page_of(make_entry(), "cancel")).status_code == 302


def asked(client: Client, entry: OutboxEntry) -> dict[str, Any]:
    """What the page asks, as its form says it."""
    response = client.get(page_of(entry))
    question = response.context["question"]
    words = escape(question["words"])
    assert words in response.content.decode()
    return {"version": response.context["original"].version, "effect": question["effect"]}


def uncertain(*effects: str) -> OutboxEntry:
    """Parked, with these effects begun."""
    entry = make_entry(State.UNCERTAIN)
    for name in effects:
        begin_effect(entry, name)
    return entry


def outcome_of(entry: OutboxEntry, name: str) -> str:
    effect = OutboxEffect.objects.get(entry=entry, name=name)
    if effect.done_at:
        return "done"
    return "cleared" if effect.cleared_at else "begun"


@pytest.mark.parametrize(
    ("deed", "outcome", "said"),
    [("happened", "done", "it happened"), ("not_happened", "cleared", "it did not happen")],
)
def test_both_answers_settle_the_effect_that_the_page_asks_about_and_the_body_runs_on(
    ada: Client, deed: str, outcome: str, said: str
) -> None:
    entry = uncertain("charge", "mail")
    response = ada.post(
        page_of(entry, deed), {**asked(ada, entry), "reason": "the bank says so"}, follow=True
    )
    assert status_of(entry) == State.PENDING
    assert [outcome_of(entry, "charge"), outcome_of(entry, "mail")] == [outcome, "begun"]
    event = entry.events.get()
    assert (event.actor, event.reason) == ("user:ada", f"charge: {said}: the bank says so")
    assert said in told(response)[0]
    assert said in LogEntry.objects.get().change_message


def test_an_answer_to_what_is_no_longer_asked_is_refused(ada: Client) -> None:
    entry = uncertain("charge", "mail")
    question = asked(ada, entry)
    OutboxEffect.objects.filter(name="charge").update(done_at=ago(seconds=0))
    response = ada.post(page_of(entry, "happened"), question, follow=True)
    (words,) = told(response)
    assert words.startswith("1 entry refused: it has moved since you looked")
    OutboxEntry.objects.filter(pk=entry.pk).update(version=F("version") + 1)
    question = {**asked(ada, entry), "version": entry.version}
    ada.post(page_of(entry, "happened"), question)
    assert (status_of(entry), outcome_of(entry, "mail")) == (State.UNCERTAIN, "begun")


def test_an_answer_that_does_not_say_to_what_is_refused(ada: Client) -> None:
    entry = uncertain("charge")
    for data in ({}, {"version": "x"}):
        assert ada.post(page_of(entry, "happened"), data).status_code == 400
    assert status_of(entry) == State.UNCERTAIN


@pytest.mark.parametrize(
    ("deed", "then"), [("happened", State.SUCCEEDED), ("not_happened", State.PENDING)]
)
def test_a_run_that_a_person_is_asked_about_has_happened_or_runs_again(
    ada: Client, deed: str, then: State
) -> None:
    entry = uncertain()
    ada.post(page_of(entry, deed), asked(ada, entry))
    assert status_of(entry) == then


@pytest.mark.parametrize("deed", ["happened", "not_happened"])
def test_who_performed_an_effect_knows_better_than_the_answer(ada: Client, deed: str) -> None:
    entry = make_entry(State.UNCERTAIN)
    parked(entry)
    begin_effect(entry, done_at=ago(seconds=-1), result={"id": 1})
    select(ada, f"{deed}_selected", [entry])
    assert (status_of(entry), outcome_of(entry, "mail")) == (State.PENDING, "done")


def test_a_selection_is_resolved_where_the_list_cannot_mean_another_effect(ada: Client) -> None:
    entries = [uncertain("mail"), uncertain("mail"), make_entry(State.FAILED)]
    ran_on = uncertain("mail")  # has been answered before, went on, and asks about this one now
    begin_effect(ran_on, "charge", done_at=ago(minutes=1))
    response = select(ada, "happened_selected", [*entries, ran_on])
    assert [status_of(entry) for entry in entries] == ["pending", "pending", "failed"]
    assert (status_of(ran_on), outcome_of(ran_on, "mail")) == (State.UNCERTAIN, "begun")
    assert sorted(told(response)) == sorted(
        [
            "2 entries resolved: it happened.",
            f"1 entry refused: it waits for nobody's word, but is failed ({entries[2].pk}).",
            "1 entry refused: it has moved since you looked, or has several effects: answer on its "
            f"page ({ran_on.pk}).",
        ]
    )


def test_who_may_not_see_entries_may_not_touch_them() -> None:
    client = person("requeue_entry")
    entry = make_entry(State.FAILED)
    assert client.get(LIST).status_code == 403
    assert client.post(page_of(entry, "requeue")).status_code == 403


def test_a_deed_is_a_post_with_a_token(ada: Client) -> None:
    entry = make_entry(State.FAILED)
    assert ada.get(page_of(entry, "requeue")).status_code == 405
    ada.handler.enforce_csrf_checks = True
    assert ada.post(page_of(entry, "requeue")).status_code == 403
    assert status_of(entry) == State.FAILED
    token = ada.get(page_of(entry)).context["csrf_token"]
    assert (
        ada.post(page_of(entry, "requeue"), {"csrfmiddlewaretoken": str(token)}).status_code == 302
    )
    assert status_of(entry) == State.PENDING
