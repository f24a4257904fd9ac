"""A backend that fails, tears, delays, dies or loses its answer, on command.

Owns: the plan's records and the wrapper. Called by: crash-point tests in one process, and the
drill through URLs such as ``faulty+file:///path/of/store?plan=/path/of/plan.json``, where the plan
is a JSON list of :class:`BackendFault`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from everstep.core.clock import Clock
from everstep.errors import BadStoreUrl, StoreError, StoreFull
from everstep.store.backends import (
    Backend,
    Buffer,
    Condition,
    ObjectInfo,
    Version,
    open_backend,
    parts_of,
)

T = TypeVar("T")

WRITES = ("create", "put", "delete")
_SPENT = -1


class BackendFault(msgspec.Struct, forbid_unknown_fields=True):
    """One instruction.

    ``call`` is a method's name, ``write`` for any of create, put and delete, or ``any``; ``key`` a
    text that the key must hold; ``after`` counts calls to let through, ``times`` how often it fires
    (0 for ever). ``once`` is a path created exclusively when it fires, so that it fires once among
    all processes; ``during`` a path that must exist for it to fire (a disk is full until the file
    is removed).

    ``action``: ``fail`` (not done, ``StoreError``), ``full`` (not done, ``StoreFull``), ``lost``
    (done, then ``StoreError``), ``tear`` (create: half of the first part is there, then
    ``StoreError``), ``delay:<seconds>``, ``die`` (SIGKILL to this process before the call),
    ``stop`` (:class:`Stopped` before the call and at every later one: a process that is dead, in a
    test), ``stop-after`` (the same, once the call is done).
    """

    action: str
    call: str = "any"
    key: str = ""
    after: int = 0
    times: int = 1
    once: str | None = None
    during: str | None = None


class Stopped(BaseException):
    """The simulated process is dead. Not an ``Exception``: nobody may handle it and go on."""


class FaultyBackend:
    """``inner`` with faults. ``calls`` lists (method, key) of everything that was asked for."""

    def __init__(self, inner: Backend, faults: Iterable[BackendFault] = ()) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: list[tuple[str, str]] = []
        self._faults = list(faults)
        self._lock = threading.Lock()
        self._stopped = False

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._pass("get", key, lambda: self.inner.get(key, offset, length))

    def read_into(self, key: str, buffer: memoryview, offset: int) -> None:
        self._pass("read_into", key, lambda: self.inner.read_into(key, buffer, offset))

    def stat(self, key: str) -> ObjectInfo:
        return self._pass("stat", key, lambda: self.inner.stat(key))

    def create(self, key: str, parts: Buffer | Iterable[Buffer]) -> None:
        def tear() -> None:
            first = memoryview(next(iter(parts_of(parts)))).cast("B")
            self.inner.create(key, first[: len(first) // 2])

        self._pass("create", key, lambda: self.inner.create(key, parts), tear)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        return self._pass("get_versioned", key, lambda: self.inner.get_versioned(key))

    def put(self, key: str, data: bytes, if_version: Condition = None) -> Version:
        return self._pass("put", key, lambda: self.inner.put(key, data, if_version))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._pass("list", prefix, lambda: self.inner.list(prefix))

    def list_folders(self, prefix: str) -> Sequence[str]:
        return self._pass("list_folders", prefix, lambda: self.inner.list_folders(prefix))

    def delete(self, key: str) -> None:
        self._pass("delete", key, lambda: self.inner.delete(key))

    def sweep_temporaries(self, older_than: float) -> int:
        return self._pass("sweep_temporaries", "", lambda: self.inner.sweep_temporaries(older_than))

    def _pass(
        self, call: str, key: str, do: Callable[[], T], tear: Callable[[], None] | None = None
    ) -> T:
        action, _, detail = self._due(call, key).partition(":")
        if action == "delay":
            time.sleep(float(detail))
        elif action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "tear" and tear is not None:
            tear()
        if action in ("fail", "tear"):
            raise StoreError(f"{call} of {key} failed (injected).", hint="Try again.")
        if action == "full":
            raise StoreFull(f"cannot write {key}: no space left (injected).", hint="Free space.")
        result = do()
        if action == "lost":
            raise StoreError(f"the answer to {call} of {key} was lost (injected).", hint="Retry.")
        if action == "stop-after":
            raise Stopped(call, key)
        return result

    def _due(self, call: str, key: str) -> str:
        """The action that this call meets; an empty text for none."""
        with self._lock:
            self.calls.append((call, key))
            if self._stopped:
                raise Stopped(call, key)
            for fault in self._faults:
                if _matches(fault, call, key) and _counts(fault) and _first(fault.once):
                    self._stopped = fault.action.startswith("stop")
                    if fault.action == "stop":
                        raise Stopped(call, key)
                    return fault.action
        return ""


def _matches(fault: BackendFault, call: str, key: str) -> bool:
    named = fault.call in ("any", call) or (fault.call == "write" and call in WRITES)
    active = fault.during is None or os.path.exists(fault.during)
    return named and active and fault.key in key


def _counts(fault: BackendFault) -> bool:
    """Count a matching call; whether the fault fires at it."""
    if fault.after > 0:
        fault.after -= 1
        return False
    if fault.times > 0:
        fault.times -= 1
        if fault.times == 0:
            fault.times = _SPENT
        return True
    return fault.times == 0


def _first(once: str | None) -> bool:
    if once is None:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def open_url(url: str, create: bool, clock: Clock) -> FaultyBackend:
    """``faulty+<url>?plan=<path of a JSON list of BackendFault>``."""
    parts = urlsplit(url)
    plan = parse_qs(parts.query).get("plan")
    if plan is None:
        raise BadStoreUrl(f"store URL {url!r} names no plan.", hint="Add ?plan=<path of its JSON>.")
    with open(plan[0], "rb") as file:
        faults = msgspec.json.decode(file.read(), type=list[BackendFault])
    inner = url.removeprefix("faulty+").partition("?")[0]
    return FaultyBackend(open_backend(inner, create=create, clock=clock), faults)
