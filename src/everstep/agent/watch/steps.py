"""Heartbeats and step boundaries of this node's ranks, from the control page.

Owns: the page's words as records and as signals. Never does: judge them. Called by:
:mod:`everstep.agent.hang`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.agent.keeper import NodeKeeper
from everstep.faults.hang import RankBeat
from everstep.faults.records import Signal
from everstep.keeper.control import Beat

_NANO = 1e-9


@dataclass(frozen=True)
class Steps:
    """Reads what the workers of ``attempt`` post. ``ranks`` are this node's, by local rank."""

    keeper: NodeKeeper
    attempt: int
    ranks: tuple[int, ...]

    def read(self) -> tuple[RankBeat, ...]:
        """One record a rank; empty where no page of this attempt is held: then nothing is known.
        Whatever the keeper's fate, and after it was replaced, the page is the one in use."""
        beats = self.keeper.beats(self.attempt, len(self.ranks))
        return tuple(_beat(rank, beat) for rank, beat in zip(self.ranks, beats, strict=False))


def heartbeats(
    beats: Iterable[RankBeat],
    now: float,
    time: float,
    waiting: Mapping[int, bool] | None = None,
) -> list[Signal]:
    """The signals of ``beats``. ``time`` is ``now`` as seconds of the attempt. ``waiting`` says
    which ranks were seen in a collective: what a rank calls a step is mostly waiting then."""
    return [
        Signal(
            "heartbeat", f"step={beat.step} phase={_word(beat, waiting or {})} "
            f"last_beat_age_s={max(0.0, now - beat.moved_at):.1f}{_stepped(beat, now)}",
            rank=beat.rank, time=time, mono=now,
        )
        for beat in beats
    ]  # fmt: skip


def _stepped(beat: RankBeat, now: float) -> str:
    """How long ago it ended a step, where it did: a phase that began since then moved it, too."""
    if beat.boundary_at <= 0.0 or beat.step < 0:
        return ""
    return f" last_step_age_s={max(0.0, now - beat.boundary_at):.2f}"


def _word(beat: RankBeat, waiting: Mapping[int, bool]) -> str:
    if beat.phase == "step" and waiting.get(beat.rank):
        return "step:collective"
    return "_".join(beat.phase.split()) or "starting"


def _beat(rank: int, beat: Beat) -> RankBeat:
    return RankBeat(
        rank=rank,
        step=-1 if beat.step is None else beat.step,
        phase=beat.phase,
        phase_since=beat.since * _NANO,
        boundary_at=beat.boundary * _NANO,
        limit=beat.limit * _NANO if beat.limit else None,
        steps=beat.steps,
        longest=beat.longest * _NANO,
        longest_cut=beat.cut * _NANO,
    )
