"""Exit codes of a worker and of ``everstep run``, each with one meaning.

Called by: train, agent, cli; docs/reference/exit-codes.md is made from it.
"""

from __future__ import annotations

FINISHED = 0
FAILED = 1
USAGE = 2
NO_STORE = 74
PREEMPTED = 75
NOT_DURABLE = 76
NO_RECOVERY_POINT = 77
REFUSED = 78
OWNED = 79
NO_PROGRESS = 93
REPEATED = 94
LEFT_OUT = 95
SIGNALLED = 128

MEANING: dict[int, str] = {
    FINISHED: "the job reached its last step, and its last checkpoint is committed; or all workers "
    "ended by themselves with 0, as after a `break`",
    FAILED: "a worker failed and no restart was left, or --max-restarts was reached",
    USAGE: "bad arguments or settings",
    NO_STORE: "the store cannot be read or written now (EVS-2xx; a path that can never be a store "
    "is 2), so no attempt could be started; "
    "start the job again when it can",
    PREEMPTED: "stopped by SIGTERM, after a cut where the grace period allowed one; start the job "
    "again and it goes on",
    NOT_DURABLE: "all steps ran, but the last checkpoint could not be committed in time; "
    "the keeper holds it and goes on trying",
    NO_RECOVERY_POINT: "a recovery point is expected and none verifies (EVS-401)",
    REFUSED: "the job cannot go on as it was started (what the script says to everstep, world "
    "size, state names, loader); a restart would not help",
    OWNED: "another live agent runs this job (EVS-501)",
    NO_PROGRESS: "a budget of restarts is used up: three attempts in a row got no further, say; do "
    "not requeue (EVS-502)",
    REPEATED: "the same failure came again at the same step: change the code, the data or the "
    "configuration; do not requeue (EVS-504)",
    LEFT_OUT: "this node was taken out of the job, which goes on without it: it failed, or "
    "`everstep node exclude` said so; do not start the job on it again before it was looked at",
    SIGNALLED: "and the number of the signal (130: Ctrl-C): stopped by a signal but SIGTERM, "
    "without a last cut; start the job again and it goes on from its newest state",
}

FINAL = frozenset({PREEMPTED, NOT_DURABLE, NO_RECOVERY_POINT, REFUSED})
"""Codes of a worker that end the job: the agent does not restart after them."""
