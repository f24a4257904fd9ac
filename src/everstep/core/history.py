"""One record of a job's history as it crosses from the one who knows it to the one who keeps it.

Owns: the envelope: what the store needs to name and order a record, and its body as bytes. Never
does: know what a body says (:mod:`everstep.faults.history` does), I/O. Called by: faults, store.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Kind = Literal["incident", "decision", "progress", "result", "word"]
KINDS: tuple[str, ...] = get_args(Kind)
BODY_BYTES = 64 << 10
"""Bytes that a body may have at most."""


class Entry(msgspec.Struct, frozen=True):
    """``attempt`` is the one that the record is of (0: before the first), ``sequence`` its place
    among the records of that attempt: one more than the highest that its author had seen, so that
    a record stands behind all that it knew of, whatever the clocks say. ``format`` is that of the
    ``body``, which is msgpack."""

    kind: Kind
    attempt: int
    sequence: int
    format: int
    body: bytes
