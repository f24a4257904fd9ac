"""The ends of an attempt after which there is nothing to judge, all of them pure."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from everstep.agent.decide import AttemptEnd, WorkerEnd, describe, first, last_word
from everstep.core import exits

KILLED = WorkerEnd(1, -9)
STOPPED = WorkerEnd(0, -9, by_everstep=True)
DONE = WorkerEnd(0, 0)


def code_of(end: AttemptEnd) -> int | None:
    word = last_word(end)
    return None if word is None else word.exit_code


def test_a_script_that_attached_nothing_is_warned_about() -> None:
    word = last_word(AttemptEnd((DONE, WorkerEnd(1, 0))))
    assert word is not None
    assert word.exit_code == exits.FINISHED
    assert "never called everstep.attach" in word.warning
    assert word == replace(last_word(AttemptEnd((DONE,), attached=True)), warning=word.warning)


@pytest.mark.parametrize(
    "end",
    [
        AttemptEnd((DONE, STOPPED)),
        AttemptEnd((STOPPED,), members_changed=True),
        AttemptEnd((DONE,), lost_nodes=(1,)),
        AttemptEnd((KILLED, STOPPED), attached=True),
    ],
    ids=["killed by everstep", "nodes changed", "node lost", "killed"],
)
def test_what_is_no_last_word_is_judged(end: AttemptEnd) -> None:
    """Workers that everstep killed are never success, nor is a node that was lost."""
    assert last_word(end) is None


@pytest.mark.parametrize("code", sorted(exits.FINAL))
def test_a_final_code_of_a_worker_ends_the_job_with_that_code(code: int) -> None:
    end = AttemptEnd((WorkerEnd(1, code), STOPPED), attached=True)
    assert code_of(end) == code


def test_the_most_telling_final_code_wins() -> None:
    end = AttemptEnd((WorkerEnd(0, exits.PREEMPTED), WorkerEnd(1, exits.REFUSED)))
    assert code_of(end) == exits.REFUSED


def test_a_last_word_is_believed_even_where_the_worker_was_killed() -> None:
    end = AttemptEnd((STOPPED,), fatal=(exits.REFUSED, "rank 0: world size"))
    assert code_of(end) == exits.REFUSED


def test_all_zero_is_finished() -> None:
    assert code_of(AttemptEnd((DONE, WorkerEnd(1, 0)))) == exits.FINISHED


def test_death_after_the_job_finished_is_success_with_a_warning() -> None:
    end = AttemptEnd((DONE, WorkerEnd(1, -int(signal.SIGABRT))), attached=True, finished=True)
    word = last_word(end)
    assert word is not None
    assert (word.exit_code, word.failed) == (exits.FINISHED, False)
    assert "SIGABRT" in word.warning


def test_sigterm_is_preemption_and_sigint_is_128_and_its_number() -> None:
    killed = (WorkerEnd(0, -15, by_everstep=True),)
    assert code_of(AttemptEnd(killed, stopped_by=15)) == exits.PREEMPTED
    assert code_of(AttemptEnd(killed, stopped_by=2)) == 130


def test_a_job_that_finished_while_sigterm_came_is_finished() -> None:
    end = AttemptEnd((DONE,), attached=True, stopped_by=15)
    assert code_of(end) == exits.FINISHED


def test_workers_killed_when_the_grace_was_over_are_preempted_and_not_finished() -> None:
    end = AttemptEnd((WorkerEnd(0, -9, by_everstep=True),), attached=True, stopped_by=15)
    assert code_of(end) == exits.PREEMPTED


def test_codes_in_words() -> None:
    assert describe(-9) == "SIGKILL"
    assert describe(3) == "exit code 3"
    assert describe(-1000) == "signal 1000"


def test_a_hang_is_a_failure_though_everstep_ended_every_worker() -> None:
    """F2: no rank's end is its own, and what follows is judged."""
    killed = (STOPPED, WorkerEnd(1, -9, by_everstep=True))
    hung = AttemptEnd(killed, hang="no step for 31 s: rank 1 in next", hung=(1,), attached=True)
    assert last_word(hung) is None
    assert not hung.failures
    assert first(hung) == "no step for 31 s: rank 1 in next"
    stopped = last_word(replace(hung, stopped_by=15))
    assert stopped is not None
    assert stopped.exit_code == exits.PREEMPTED
