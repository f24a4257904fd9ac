"""Named points at which a process can be told to fail. Inert unless ``EVERSTEP_FAULTS`` is set.

Owns: the points' registry and the meaning of the setting. Called by: the rooms that must survive
a death at that place; set by tests and the drill. A point costs one attribute test when inert.

``EVERSTEP_FAULTS`` is a JSON list of ``{"point", "action", "after", "rank", "once"}``:
``action`` is ``kill`` (SIGKILL to self), ``hang`` (stop for ever), ``exit:<code>`` or
``raise:<errno name>``; ``after`` counts passes to let through (default 0); ``rank`` limits the
fault to one rank (matched with the ``RANK`` variable); ``once`` is a path created exclusively
when the fault fires, so that it fires once per run and not once per process.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable

import msgspec

VARIABLE = "EVERSTEP_FAULTS"

KNOWN = (
    "agent.workers.after_start",
    "agent.workers.before_start",
    "keeper.branch.after_write",
    "keeper.branch.before_write",
    "keeper.commit.after_manifest",
    "keeper.commit.before_claim_check",
    "keeper.commit.before_manifest",
    "keeper.cut.before_take",
    "keeper.digest.before_write",
    "keeper.persist.after_index",
    "keeper.persist.before_claim_check",
    "keeper.persist.before_pack",
    "keeper.promise.before_claim",
    "keeper.read.before_list",
    "keeper.restore.before_check",
    "keeper.retain.before_plan",
    "state.capture.before_copy",
    "store.branch.before_create",
    "store.claim.before_create",
    "store.commit.before_last_look",
    "store.commit.before_manifest",
    "store.history.before_create",
    "store.history.before_forget",
    "store.load.before_read",
    "store.local.before_fsync",
    "store.local.before_link",
    "store.local.before_rename",
    "store.owner.before_put",
    "store.sweep.before_history",
    "store.sweep.before_index",
    "store.sweep.before_manifest",
    "store.sweep.before_pack",
    "store.sweep.before_tombstone",
    "store.write.before_index",
    "store.write.before_pack",
    "train.cut.before",
    "train.cut.begun",
    "train.cut.committed",
    "train.cut.copied",
    "train.data.prepare.before_open",
    "train.restore.before_apply",
    "train.restore.before_load",
    "train.restore.in_load",
)
"""Every point there is; a test holds it equal to the calls of :func:`reach`."""


class Fault(msgspec.Struct):
    """One instruction to fail."""

    point: str
    action: str
    after: int = 0
    rank: int | None = None
    once: str | None = None


class _Plan:
    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        fault = self._due(point)
        if fault is not None:
            _fire(fault)

    def _due(self, point: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.point == point and self._applies(fault):
                    fault.after -= 1
                    if fault.after == -1 and _first(fault.once):
                        return fault
        return None

    @staticmethod
    def _applies(fault: Fault) -> bool:
        return fault.rank is None or str(fault.rank) == os.environ.get("RANK")


def _first(once: str | None) -> bool:
    if once is None:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _fire(fault: Fault) -> None:
    action, _, detail = fault.action.partition(":")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        threading.Event().wait()
    elif action == "exit":
        os._exit(int(detail))
    elif action == "raise":
        number: int = getattr(errno, detail)
        raise OSError(number, f"{os.strerror(number)} (injected at {fault.point})")
    else:
        raise ValueError(f"{VARIABLE}: unknown action {fault.action!r} at {fault.point}")


def _load(text: str | None) -> Callable[[str], None] | None:
    return _Plan(msgspec.json.decode(text, type=list[Fault])).reach if text else None


_reach = _load(os.environ.get(VARIABLE))


def reach(point: str) -> None:
    """Pass the named point, or fail there when ``EVERSTEP_FAULTS`` says so."""
    if _reach is not None:
        _reach(point)
