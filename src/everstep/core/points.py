"""Named points at which a process can be told to fail. Inert unless ``EVERSTEP_FAULTS`` is set.

Owns: the points' registry and the meaning of the setting. Called by: the rooms that must survive
a death at that place; set by tests and the drill. A point costs one attribute test when inert.

``EVERSTEP_FAULTS`` is a JSON list of :class:`Fault`. What a fault does is its ``action``:

- ``kill`` (SIGKILL to self), ``segv`` (reads address 0), ``bus`` (fills /dev/shm through a mapping
  until the kernel sends SIGBUS), ``exit:<code>``;
- ``raise:<errno name>`` (an OSError), ``error:<name of a built-in exception>``;
- ``hang`` (stop for ever);
- ``nan``: what is computed here is no number, where the code asks by :func:`spoils`;
- ``shift:<seconds>``: the clock that is read here is wrong by so much, for :func:`shift`.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import mmap
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec

VARIABLE = "EVERSTEP_FAULTS"

KNOWN = (
    "agent.claim.after_write",
    "agent.decision.after_write",
    "agent.decision.before_announce",
    "agent.late.after_write",
    "agent.result.before_write",
    "agent.workers.after_start",
    "agent.workers.before_start",
    "core.clock.wall",
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
    "train.data.before_batch",
    "train.data.prepare.before_open",
    "train.restore.before_apply",
    "train.restore.before_load",
    "train.restore.in_load",
    "train.step.before_boundary",
    "train.step.gradients",
)
"""Every point there is; a test holds it equal to the calls of :func:`reach`, :func:`spoils` and
:func:`shift`."""


class Fault(msgspec.Struct):
    """One instruction to fail.

    ``after`` counts passes to let through; ``rank`` limits it to one rank (matched with the
    ``RANK`` variable) and ``step`` to one training step, where the point knows it. It goes off
    once in a process, so at each attempt again; with ``once``, a path that is created exclusively,
    once in a run. ``during`` is a path that must exist for it. Each time it goes off a line
    ``<rank> <CLOCK_MONOTONIC> <pid>`` is added to the file ``told``.
    """

    point: str
    action: str
    after: int = 0
    rank: int | None = None
    once: str | None = None
    step: int | None = None
    during: str | None = None
    told: str | None = None


class _Plan:
    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._lock = threading.Lock()

    def reach(self, point: str, step: int | None) -> None:
        fault = self._due(point, step)
        if fault is not None:
            _fire(fault)

    def spoils(self, point: str, step: int) -> bool:
        return self._due(point, step) is not None

    def shift(self, point: str) -> float:
        """While a shift lasts it holds at every pass."""
        held = [f for f in self._faults if f.point == point and self._applies(f, None)]
        return sum(float(fault.action.removeprefix("shift:")) for fault in held)

    def has(self, point: str) -> bool:
        return any(fault.point == point for fault in self._faults)

    def _due(self, point: str, step: int | None) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.point == point and self._applies(fault, step):
                    fault.after -= 1
                    if fault.after == -1 and _first(fault.once):
                        _tell(fault)
                        return fault
        return None

    @staticmethod
    def _applies(fault: Fault, step: int | None) -> bool:
        if fault.step is not None and fault.step != step:
            return False
        if fault.during is not None and not Path(fault.during).exists():
            return False
        return fault.rank is None or str(fault.rank) == os.environ.get("RANK")


def _first(once: str | None) -> bool:
    if once is None:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _tell(fault: Fault) -> None:
    if fault.told is None:
        return
    line = f"{os.environ.get('RANK', '-1')} {time.monotonic()!r} {os.getpid()}\n"
    fd = os.open(fault.told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def _fire(fault: Fault) -> None:
    action, _, detail = fault.action.partition(":")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "segv":
        ctypes.string_at(0)
    elif action == "bus":
        _fill_shared_memory()
    elif action == "hang":
        threading.Event().wait()
    elif action == "exit":
        os._exit(int(detail))
    elif action == "raise":
        number: int = getattr(errno, detail)
        raise OSError(number, f"{os.strerror(number)} (injected at {fault.point})")
    elif action == "error":
        _raise(detail, f"injected at {fault.point}")
    else:
        raise ValueError(f"{VARIABLE}: unknown action {fault.action!r} at {fault.point}")


def _raise(name: str, text: str) -> NoReturn:
    kind: type[Exception] = getattr(builtins, name)
    raise kind(text)


def _fill_shared_memory() -> NoReturn:
    """Write more to /dev/shm than fits, as loaders do that pass batches through it: a file may be
    made longer than there is room, and the write that finds none ends the process by SIGBUS. The
    file stays, so this is for a /dev/shm that the run has to itself."""
    size = 64 << 20
    fd, name = tempfile.mkstemp(prefix="everstep-", dir="/dev/shm")
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as shared:
        for at in range(0, size, mmap.PAGESIZE):
            shared[at] = 1
    os.unlink(name)
    raise ValueError(f"{VARIABLE}: /dev/shm has room for {size} bytes, so it cannot be filled")


def _load(text: str | None) -> _Plan | None:
    return _Plan(msgspec.json.decode(text, type=list[Fault])) if text else None


_plan = _load(os.environ.get(VARIABLE))


def reach(point: str, step: int | None = None) -> None:
    """Pass the named point, or fail there when ``EVERSTEP_FAULTS`` says so. ``step`` is the
    training step that is being computed, where it is known."""
    if _plan is not None:
        _plan.reach(point, step)


def spoils(point: str, step: int) -> bool:
    """Whether what is computed at this point in ``step`` is to be no number."""
    return _plan is not None and _plan.spoils(point, step)


def shift(point: str) -> float:
    """Seconds by which the clock that is read here is told to be wrong; 0."""
    return 0.0 if _plan is None else _plan.shift(point)


def armed(point: str) -> bool:
    """Whether anything is to happen there at all: for code that would have to prepare for it."""
    return _plan is not None and _plan.has(point)
