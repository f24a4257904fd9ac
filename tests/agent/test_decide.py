"""The rules after an attempt's end, all of them pure."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.decide import AttemptEnd, History, WorkerEnd, decide, describe
from everstep.core import exits

KILLED = WorkerEnd(1, -9)
STOPPED = WorkerEnd(0, -9, by_everstep=True)
DONE = WorkerEnd(0, 0)


def run(ends: list[AttemptEnd], max_restarts: int | None = None) -> tuple[int, int | None]:
    """How many attempts were made, and the exit code (None: would go on)."""
    history = History()
    for made, end in enumerate(ends, 1):
        decision = decide(end, history, max_restarts)
        if decision.action == "stop":
            return made, decision.exit_code
        history = decision.history
    return len(ends), None


def died(restored: int = -1, reached: int = -1, finished: int = -1) -> AttemptEnd:
    return AttemptEnd(
        (KILLED, STOPPED), restored=restored, reached=reached, finished_step=finished, attached=True
    )


def test_three_attempts_without_progress_stop_with_their_own_code() -> None:
    assert run([died()] * 10) == (3, exits.NO_PROGRESS)


def test_an_attempt_that_restored_a_later_step_begins_the_count_anew() -> None:
    """All die before they come as far as the first did."""
    early = [died(step, finished=400) if step == 0 else died(step) for step in (0, 10, 10, 10)]
    assert run([*early, died(20), died(20), died(20), died(20)]) == (8, exits.NO_PROGRESS)
    assert run([*early, died(10), died(20)]) == (5, exits.NO_PROGRESS)


@pytest.mark.parametrize(
    "restored",
    [(-1, -1, -1), (-1, 4, 4), (-1, -1, 1), (-1, 1, 5), (0, 0, 0)],
    ids=str,
)
def test_a_script_that_fails_at_the_same_step_gets_three_attempts(
    restored: tuple[int, ...],
) -> None:
    """Whatever snapshot came in between and moved the restored step."""
    ends = [died(step, reached=5, finished=9) for step in (*restored, 8, 8, 8)]
    assert run(ends) == (3, exits.NO_PROGRESS)


def test_a_failing_step_that_moves_on_is_progress() -> None:
    assert run([died(step - 2, finished=step) for step in range(2, 40)]) == (38, None)


def test_quick_deaths_after_a_long_run_do_not_count_the_long_run() -> None:
    long = died(-1, reached=400, finished=420)
    assert run([long, died(400), died(400), died(400)]) == (4, None), "one of them restored more"
    assert run([long, died(400), died(400), died(400), died(400)]) == (5, exits.NO_PROGRESS)


def test_what_ends_the_job_is_said_with_the_step() -> None:
    history = History()
    for _ in range(3):
        decision = decide(died(finished=9), history, None)
        history = decision.history
    assert "3 attempts in a row got no further, not beyond step 9 (EVS-502)" in decision.reason


def test_attempts_that_get_further_are_never_stopped() -> None:
    assert run([died(step) for step in range(50)]) == (50, None)


def test_a_restored_step_that_goes_back_is_no_progress() -> None:
    assert run([died(30), died(20), died(10), died(5)]) == (4, exits.NO_PROGRESS)


def test_a_later_snapshot_gives_the_next_attempt_its_chance() -> None:
    """Three quick kills must not end a job whose third attempt had got far."""
    assert run([died(), died(), died(-1, reached=400), died(400)]) == (4, None)


def test_snapshots_that_can_never_be_restored_do_not_go_on_for_ever() -> None:
    assert run([died(10, reached=20)] * 20) == (3, exits.NO_PROGRESS)
    assert run([died(-1, finished=n) for n in range(20)]) == (6, exits.NO_PROGRESS)


def test_attempts_that_end_before_they_restore_do_not_hide_that_nothing_moves() -> None:
    """A start that fails now and then, and a failure that always comes one step on."""
    flaky = [died(), died(15, finished=16)] * 10
    assert run([died(finished=17), *flaky]) == (6, exits.NO_PROGRESS)


def test_a_script_that_attached_nothing_is_warned_about() -> None:
    decision = decide(AttemptEnd((DONE, WorkerEnd(1, 0))), History(), None)
    assert decision.exit_code == exits.FINISHED
    assert "never called everstep.attach" in decision.warning
    assert not decide(AttemptEnd((DONE,), attached=True), History(), None).warning


def test_max_restarts_given_is_honoured_and_replaces_the_rule_of_progress() -> None:
    assert run([died()] * 10, max_restarts=5) == (6, exits.FAILED)
    assert run([died()] * 10, max_restarts=0) == (1, exits.FAILED)


@pytest.mark.parametrize("code", sorted(exits.FINAL))
def test_a_final_code_of_a_worker_ends_the_job_with_that_code(code: int) -> None:
    end = AttemptEnd((WorkerEnd(1, code), STOPPED), attached=True)
    assert run([end]) == (1, code)


def test_the_most_telling_final_code_wins() -> None:
    end = AttemptEnd((WorkerEnd(0, exits.PREEMPTED), WorkerEnd(1, exits.REFUSED)))
    assert run([end]) == (1, exits.REFUSED)


def test_a_last_word_is_believed_even_where_the_worker_was_killed() -> None:
    end = AttemptEnd((STOPPED,), fatal=(exits.REFUSED, "rank 0: world size"))
    assert run([end]) == (1, exits.REFUSED)


def test_all_zero_is_finished() -> None:
    assert run([AttemptEnd((DONE, WorkerEnd(1, 0)))]) == (1, exits.FINISHED)


def test_death_after_the_job_finished_is_success_with_a_warning() -> None:
    end = AttemptEnd((DONE, WorkerEnd(1, -int(signal.SIGABRT))), attached=True, finished=True)
    decision = decide(end, History(), None)
    assert (decision.action, decision.exit_code) == ("stop", exits.FINISHED)
    assert "SIGABRT" in decision.warning


def test_sigterm_is_preemption_and_sigint_is_128_and_its_number() -> None:
    killed = (WorkerEnd(0, -15, by_everstep=True),)
    assert run([AttemptEnd(killed, stopped_by=15)]) == (1, exits.PREEMPTED)
    assert run([AttemptEnd(killed, stopped_by=2)]) == (1, 130)


def test_a_job_that_finished_while_sigterm_came_is_finished() -> None:
    end = AttemptEnd((DONE,), attached=True, stopped_by=15)
    assert run([end]) == (1, exits.FINISHED)


def test_workers_killed_when_the_grace_was_over_are_preempted_and_not_finished() -> None:
    end = AttemptEnd((WorkerEnd(0, -9, by_everstep=True),), attached=True, stopped_by=15)
    assert run([end]) == (1, exits.PREEMPTED)


def test_workers_that_everstep_killed_are_never_success() -> None:
    decision = decide(AttemptEnd((DONE, STOPPED)), History(), None)
    assert decision.action == "restart"


def test_nodes_that_come_and_go_are_not_counted_as_failures() -> None:
    changed = AttemptEnd((STOPPED,), members_changed=True)
    assert run([changed] * 20, max_restarts=0) == (20, None)


def test_a_lost_node_is_a_failure_and_never_success() -> None:
    end = AttemptEnd((DONE,), lost_nodes=(1,))
    decision = decide(end, History(), 0)
    assert (decision.action, decision.exit_code) == ("stop", exits.FAILED)
    assert "node 1 was lost" in decision.reason


@given(
    steps=st.lists(
        st.tuples(st.integers(-1, 5), st.integers(-1, 5), st.integers(-1, 9)),
        min_size=1,
        max_size=60,
    ),
)
def test_attempts_are_bounded_by_progress(steps: list[tuple[int, int, int]]) -> None:
    """F3 in small: with finitely many restored steps, attempts that go on are finitely many."""
    made, code = run([died(*step) for step in steps])
    rises = sum(b[0] > a[0] for a, b in zip([(-1, 0, 0), *steps], steps[:made], strict=False))
    assert made <= (rises + 1) * 6
    assert code in (None, exits.NO_PROGRESS)


def test_codes_in_words() -> None:
    assert describe(-9) == "SIGKILL"
    assert describe(3) == "exit code 3"
    assert describe(-1000) == "signal 1000"
