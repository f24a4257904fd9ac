"""Having something done in another thread, so that whoever waits can stop waiting.

Owns: how what a call gave, or raised, comes back. Never does: know what is done. Called by: what
may hang (a store, the rendezvous, a look at a rank), or takes long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def aside(call: Callable[[], T], name: str) -> Future[T]:
    """Do it in a thread of its own, which the agent's end does not wait for."""
    found: Future[T] = Future()
    threading.Thread(target=answer, args=(call, found), name=name, daemon=True).start()
    return found


def answer(call: Callable[[], T], found: Future[T]) -> None:
    """Do it here; what it gives or raises goes into ``found``."""
    try:
        found.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised again by whoever takes the answer
        found.set_exception(error)
