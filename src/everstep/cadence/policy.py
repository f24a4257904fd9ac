"""The cadence of one job, decided from measured times.

Owns: :class:`Policy` and its questions. Never does: I/O, clocks. Called by: the coordinator
(keeper of node 0, which alone decides, R2).
"""

from __future__ import annotations

import math

import msgspec

LOOKAHEAD = 2
"""Steps between the newest boundary known and the cut that is published. Ranks of one process
group are at most one step apart; one more covers the way of the publication."""

MAX_LOOKAHEAD = 1000
"""Steps. A bound for steps so short that the way of a publication spans very many of them."""

NEVER = 2**53
"""Steps. The interval where nothing may block: only cuts that are asked for are taken."""


class Policy(msgspec.Struct, frozen=True):
    """``snapshot_every`` steps (0: from ``stall_budget``), ``checkpoint_every`` seconds.

    ``stall_budget`` is the share of training time that snapshots may block.
    """

    snapshot_every: int = 0
    checkpoint_every: float = 60.0
    stall_budget: float = 0.01


class Pace(msgspec.Struct, frozen=True):
    """What was measured: seconds a step takes, seconds the last cut blocked (0: unknown), and
    seconds that a publication may be on its way (``lag``)."""

    step_seconds: float = 0.0
    cut_seconds: float = 0.0
    lag: float = 0.0


def interval(policy: Policy, pace: Pace) -> int:
    """Steps between snapshots: so many that a cut costs at most the budget, at least 1."""
    if policy.snapshot_every:
        return policy.snapshot_every
    if pace.step_seconds <= 0 or pace.cut_seconds <= 0:
        return 1
    allowed = policy.stall_budget * pace.step_seconds
    if allowed <= pace.cut_seconds / NEVER:
        return NEVER
    return max(1, math.ceil(pace.cut_seconds / allowed))


def lookahead(pace: Pace) -> int:
    """Steps from the newest boundary to a cut that every rank still learns of in time."""
    if pace.step_seconds <= 0:
        return LOOKAHEAD
    if pace.lag >= MAX_LOOKAHEAD * pace.step_seconds:
        return MAX_LOOKAHEAD
    return min(MAX_LOOKAHEAD, LOOKAHEAD + math.floor(pace.lag / pace.step_seconds))


def next_cut(policy: Policy, pace: Pace, *, newest_boundary: int, last_cut: int) -> int:
    """The step of the next cut: a multiple of the interval that every rank can still reach.

    ``newest_boundary`` is the largest step any rank has finished, ``last_cut`` the step of the
    last complete cut (or the step restored).
    """
    return _from(policy, pace, max(newest_boundary + lookahead(pace), last_cut + 1), last_cut)


def first_cut(policy: Policy, pace: Pace, *, start: int) -> int:
    """The same while every rank still waits at the step ``start`` and so misses nothing."""
    return _from(policy, pace, start + 1, start)


def _from(policy: Policy, pace: Pace, earliest: int, last_cut: int) -> int:
    every = interval(policy, pace)
    if policy.snapshot_every:
        return -(-earliest // every) * every
    return max(earliest, last_cut + every)


def checkpoint_due(policy: Policy, *, now: float, last_persist_began: float | None) -> bool:
    """Whether the next complete snapshot is to be made durable. Times of one monotonic clock."""
    return last_persist_began is None or now - last_persist_began >= policy.checkpoint_every


def smoothed(average: float, sample: float) -> float:
    """A moving average of durations in which one slow step does not count for much."""
    return sample if average <= 0 else average + 0.25 * (min(sample, 4 * average) - average)
