"""A log as training jobs write them, for measuring its classification. Pure.

Owns: the mix. Called by: :mod:`everstep.bench.classify`, tests.

Of the lines 99 % are benign; the rest is a storm of lines that all match. In between stand lines of
1 MB, progress bars of carriage returns, and bytes that are no UTF-8. At the end one rank fails, and
the verdict must be about it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

STORM, LONG, BARS, BROKEN = 0.01, 2e-6, 0.002, 0.005
"""Shares of the lines: a storm, 1 MB long, progress bars, invalid UTF-8."""
FAULT, RANK = "USER_EXCEPTION", 5
"""What the verdict must say."""

_END = (
    "[rank5]: Traceback (most recent call last):\n"
    '[rank5]:   File "/job/train.py", line 118, in step\n'
    "[rank5]:     weights = table[name]\n"
    "[rank5]: KeyError: 'encoder'\n"
)


def pieces(nbytes: int, seed: int) -> Iterator[bytes]:
    """About ``nbytes`` of log in pieces of some 100 kB, the same for the same ``seed``."""
    rng = random.Random(seed)
    made, held = 0, bytearray()
    step = 0
    while made < nbytes - len(_END):
        step += 1
        line = _line(rng, step)
        made += len(line)
        held += line
        if len(held) > 100_000:
            yield bytes(held)
            held.clear()
    yield bytes(held) + _END.encode()


def _line(rng: random.Random, step: int) -> bytes:
    draw, rank = rng.random(), step % 8
    if draw < STORM:
        return (
            f"[rank{rank}]:[W1106 15:23:10.900066904 TCPStore.cpp:106] [c10d] sendBytes failed on "
            f"SocketImpl(fd={step % 900}, addr=[n-1]:31214, remote=[n-0]:29500): Broken pipe\n"
        ).encode()
    if draw < STORM + LONG:
        return b"config: " + b"abcdefghij" * 100_000 + b"\n"
    if draw < STORM + LONG + BARS:
        bars = (f"\r{n}%|{'#' * (n // 5)}| {n}/100 [00:10<00:12, 9it/s]" for n in range(0, 100, 5))
        return "".join(bars).encode() + b"\n"
    if draw < STORM + LONG + BARS + BROKEN:
        return b"sample \xff\xfe\xc3\x28 decoded with replacement, step %d\n" % step
    return (
        f"[rank{rank}]: 2026-11-04 09:42:36,123 INFO trainer: step {step} loss {rng.random():.4f} "
        f"lr 3.0e-4 grad_norm 0.{step % 97:02d} tokens/s {40000 + step % 999} mem 61.2 GiB\n"
    ).encode()
