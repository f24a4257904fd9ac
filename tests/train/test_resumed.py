"""F7: what proves that an attempt goes on from what was restored, and what is no proof."""

from __future__ import annotations

import math
import signal
from typing import Any

import msgspec
from train_bodies import BATCHES, Training, train
from train_jobs import Jobs, fault

import everstep
from everstep.core.layout import RankState
from everstep.train.sources import MemorySource, StoreSource

CUTS = (3, 6, 9)


def killed_in_the_second_cut(jobs: Jobs) -> None:
    faults = fault("train.cut.committed", after=1)
    started = jobs.start(train, at=CUTS, env={"EVERSTEP_FAULTS": faults})
    assert started.wait() == -signal.SIGKILL, started.said()


def test_the_first_step_is_the_next_one_with_the_next_batch_and_a_finite_loss(jobs: Jobs) -> None:
    """F7."""
    killed_in_the_second_cut(jobs)
    jobs.run(train, at=CUTS)
    assert jobs.restored() == [(6, "memory")]
    before, after = jobs.events("train.resumed")
    assert (before.step, before.facts["restored"], before.facts["data_from"]) == (1, 0, [-1, 0])
    assert (after.step, after.facts["restored"]) == (7, 6)
    epoch, batch = divmod(6, BATCHES)
    assert after.facts["data_from"] == [epoch, batch]
    assert after.facts["data"] == [epoch, batch + 1]
    assert after.facts["figures"] == "finite"


def train_out_of_step(to: int) -> None:
    training = Training()
    run = everstep.attach(**training.objects())
    run.restore()
    run.step = to
    for batch in run.steps(until=12):
        training.step(batch)


def test_a_first_step_that_is_not_the_next_one_is_an_error_and_never_saved(jobs: Jobs) -> None:
    """F7: it names both."""
    killed_in_the_second_cut(jobs)
    said = jobs.fails(train_out_of_step, to=8)
    assert "the first step that was done is 9, though step 6 was restored" in said
    assert "EVS-400" in said
    assert len(jobs.events("train.resumed")) == 1
    assert not [e for e in jobs.events("snapshot.complete") if (e.step or 0) > 6]


def train_to_no_number() -> None:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=12):
        run.log(loss=training.step(batch) * math.nan)


def test_a_first_loss_that_is_no_number_proves_nothing(jobs: Jobs) -> None:
    """F7."""
    killed_in_the_second_cut(jobs)
    said = jobs.fails(train_to_no_number)
    assert "step 7" in said
    assert len(jobs.events("train.resumed")) == 1, "of the attempt before"


def train_from_another_step(by: int) -> None:
    """Both sources give a state that tells another step than the keeper has offered."""
    for source in (MemorySource, StoreSource):
        _shift(source, by)
    train()


def _shift(source: Any, by: int) -> None:
    told = source.rank_state

    def shifted(self: Any, rank: int) -> RankState:
        state: RankState = told(self, rank)
        return msgspec.structs.replace(state, step=state.step + by)

    source.rank_state = shifted


def test_a_state_of_another_step_than_was_offered_is_not_loaded(jobs: Jobs) -> None:
    """F7, R5: and where there is no other, the job stops."""
    killed_in_the_second_cut(jobs)
    said = jobs.fails(train_from_another_step, by=2)
    assert "EVS-401" in said
    assert "holds the state of step 8" in jobs.events("restore.candidate_failed")[0].text
    assert not jobs.restored()
