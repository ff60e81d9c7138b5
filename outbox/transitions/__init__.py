"""The only writer of an entry's status. Each verb is one guarded compare-and-set.

Locks are taken in ID order, FOR NO KEY UPDATE; recoverers skip what somebody holds. Whoever
works is fenced by the claim token, whoever read before acting by the version. Losing a race is
a value (False, None, a count), never an exception. Times are the database's.
"""

from outbox.transitions.effects import (
    Begin,
    Standing,
    begin_effect,
    begin_effect_again,
    effect_cleared,
    effect_done,
)
from outbox.transitions.endings import (
    fail,
    late,
    park,
    release,
    retry,
    settle,
    settle_locked,
    succeed,
    time_out,
)
from outbox.transitions.followers import FOLLOW, Kind, followers
from outbox.transitions.jobs import claim, enqueue, plain_row, publish, renew
from outbox.transitions.moves import Ending, Holder, begun_effects
from outbox.transitions.notices import TELL_OWNER, gathered, has_no_message, untold
from outbox.transitions.people import (
    Asked,
    cancel,
    erase,
    prune,
    requeue,
    resolve,
    resolve_answered,
    resolve_next,
    run_now,
    settle_own_effect,
)
from outbox.transitions.repairs import (
    adopt,
    crash,
    decline,
    expire,
    hand_off,
    lost_run,
    mark_missing,
    note_over_age,
    postpone,
    recovering,
    reject,
    short_of_patience,
    strand,
)
from outbox.transitions.telling import note_told, owe_untold, take_notices

__all__ = [
    "FOLLOW",
    "TELL_OWNER",
    "Asked",
    "Begin",
    "Ending",
    "Holder",
    "Kind",
    "Standing",
    "adopt",
    "begin_effect",
    "begin_effect_again",
    "begun_effects",
    "cancel",
    "claim",
    "crash",
    "decline",
    "effect_cleared",
    "effect_done",
    "enqueue",
    "erase",
    "expire",
    "fail",
    "followers",
    "gathered",
    "hand_off",
    "has_no_message",
    "late",
    "lost_run",
    "mark_missing",
    "note_over_age",
    "note_told",
    "owe_untold",
    "park",
    "plain_row",
    "postpone",
    "prune",
    "publish",
    "recovering",
    "reject",
    "release",
    "renew",
    "requeue",
    "resolve",
    "resolve_answered",
    "resolve_next",
    "retry",
    "run_now",
    "settle",
    "settle_locked",
    "settle_own_effect",
    "short_of_patience",
    "strand",
    "succeed",
    "take_notices",
    "time_out",
    "untold",
]
