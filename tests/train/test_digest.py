"""The digest of where a program stands: it changes when the program moves, and changes nothing."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType

from everstep.train.stacks import digest


class Batch:
    """Something that a function lets go."""


def seen(program: Callable[[Callable[[], None]], None]) -> list[int]:
    """Digests of ``program``'s thread at each call of what it is given."""
    digests: list[int] = []

    def look() -> None:
        frame: FrameType | None = sys._getframe(1)
        digests.append(digest(frame))

    thread = threading.Thread(target=program, args=(look,))
    thread.start()
    thread.join()
    return digests


def test_it_is_equal_where_nothing_moves_and_differs_where_a_variable_does() -> None:
    def counts(look: Callable[[], None]) -> None:
        for _number in range(1000, 1003):
            look()

    def collects(look: Callable[[], None]) -> None:
        done: list[int] = []
        while len(done) < 3:
            done.append(0)
            look()

    times: list[int] = []

    def still(look: Callable[[], None]) -> None:
        while again():
            look()

    def again() -> bool:
        times.append(0)
        return len(times) < 4

    assert len(set(seen(counts))) == 3
    assert len(set(seen(collects))) == 3
    assert len(set(seen(still))) == 1
    assert len(times) == 4


def test_it_keeps_nothing_alive_and_leaves_a_functions_own_copy_alone() -> None:
    held: list[weakref.ref[Batch]] = []
    copies: list[dict[str, object]] = []

    def program(look: Callable[[], None]) -> None:
        batch = Batch()
        held.append(weakref.ref(batch))
        look()
        del batch
        gc.collect()
        assert held[0]() is None

    def keeper(look: Callable[[], None]) -> None:
        copy = locals()
        copies.append(copy)
        before = set(copy)
        look()
        assert set(copy) == before

    errors: list[BaseException] = []
    before, threading.excepthook = threading.excepthook, lambda args: errors.append(args.exc_value)  # type: ignore[arg-type,assignment]
    try:
        seen(program)
        seen(keeper)
    finally:
        threading.excepthook = before
    assert not errors
    assert copies[0]["look"]
