"""Whoever leaves a loop in order loses nothing, and who cannot be helped is told. Real processes,
a real keeper, which is killed before the next start: what counts is in the store."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import train_bodies as bodies
from torch import nn
from train_bodies import Training, undisturbed
from train_jobs import Jobs

import everstep
from everstep.errors import UsageError
from everstep.train import boundary, since
from everstep.train.leaving import left_in_order

LAST = 9


# -- how an iterator is let go of


def _watched(found: list[bool]) -> Iterator[int]:
    try:
        yield from range(5)
    except GeneratorExit:
        found.append(left_in_order(sys._getframe(1)))
        raise


def _wrapped(inner: Iterator[int]) -> Iterator[int]:
    try:
        yield from inner
    finally:
        inner = iter(())


def _zipped(inner: Iterator[int]) -> Iterator[tuple[int, int]]:
    return zip(inner, range(9), strict=False)


def _return(it: Iterator[int]) -> int:
    for number in it:
        with open(os.devnull):
            return number
    return -1


def _break(it: Iterator[int]) -> None:
    for _ in it:
        try:
            break
        finally:
            int("1")


def _break_while_handling(it: Iterator[int]) -> None:
    try:
        int("x")
    except ValueError:
        for _ in it:
            break


def _raise(it: Iterator[int]) -> None:
    for _ in it:
        raise ValueError


def _exit(it: Iterator[int]) -> None:
    for _ in it:
        sys.exit(0)


def _raise_deep(it: Iterator[int]) -> None:
    for _ in it:
        try:
            int("x")
        finally:
            int("1")


@pytest.mark.parametrize("around", [iter, enumerate, _wrapped, _zipped])
@pytest.mark.parametrize(
    ("leave", "in_order"),
    [
        (_return, True), (_break, True), (_break_while_handling, True), (_raise, False),
        (_exit, False), (_raise_deep, False),
    ],
)  # fmt: skip
def test_break_and_return_are_told_from_exceptions(
    around: Callable[[Any], Any], leave: Callable[[Any], object], in_order: bool
) -> None:
    found: list[bool] = []

    def run() -> None:
        made = [around(_watched(found))]
        with contextlib.suppress(ValueError, SystemExit):
            leave(made.pop())

    run()
    assert found in ([in_order], [False]), "what is not known counts as an exception"


def test_a_plain_loop_is_known_to_be_left_in_order() -> None:
    found: list[bool] = []
    for _ in _watched(found):
        break
    for _ in enumerate(_watched(found)):
        break
    for _ in _wrapped(_watched(found)):
        break
    for _ in _watched(found):
        try:
            break
        finally:
            int("1")
    assert found == [True] * 4


# -- jobs that leave


How = Literal["break", "exit", "break first", "exit first", "break half", "exit half"]


def leave(how: How, at: int = 4, context: bool = False, all_marked: bool = True) -> int:
    """Leave at step ``at``: at the end of a body, at its start (``first``), or in between."""
    since.MARK_SHARE = 1e9 if all_marked else 1e-9
    training = Training()
    run = everstep.attach(**training.objects())
    if context:
        with run:
            _leave(run, training, how, at)
    else:
        _leave(run, training, how, at)
    torch.rand(3)  # draws of what comes after belong to no step
    with torch.no_grad():
        next(training.model.parameters()).zero_()
    return run.step


def _leave(run: everstep.Run, training: Training, how: str, at: int) -> None:
    first, half = how.endswith("first"), how.endswith("half")
    for batch in run.steps(until=1000):
        if first and run.step == at:
            break_or_exit(how)
            break
        if half and run.step == at:
            training.optimizer.zero_grad()
            training.backward(batch)
            break_or_exit(how)
            break
        run.log(loss=training.step(batch))
        if not first and not half and run.step + 1 == at:
            break_or_exit(how)
            break


def break_or_exit(how: str) -> None:
    if how.startswith("exit"):
        sys.exit(0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = Jobs(tmp_path_factory.mktemp("whole"), {})
    found: dict[str, Any] = jobs.run(undisturbed, until=LAST)
    return found


@pytest.mark.parametrize(
    ("how", "context"),
    [("break", False), ("break", True), ("break first", False), ("exit first", False)],
)
def test_a_loop_left_in_order_loses_nothing(
    jobs: Jobs, end_keepers: Callable[[], list[int]], whole: dict[str, Any], how: How,
    context: bool,
) -> None:  # fmt: skip
    """R4: what follows is what follows in a run that nobody left."""
    left = jobs.start(leave, how=how, context=context)
    assert left.wait() == 0, left.said()
    assert "left at step 4 of 1000: its checkpoint is committed" in left.said()
    assert "Exception ignored" not in left.said()
    end_keepers()
    digest = jobs.run(bodies.train, until=LAST)
    assert jobs.restored() == [(4, "store")]
    assert digest == whole["digest"]
    assert jobs.losses() == {step: {loss} for step, loss in enumerate(whole["losses"], 1)}


@pytest.mark.parametrize("how", ["break half", "exit half", "exit", "unmarked"])
def test_what_cannot_be_saved_is_told(jobs: Jobs, how: str) -> None:
    """R1: half a step is never saved; nor is one whose end only an exception knows."""
    jobs.run(bodies.train, until=2)
    unmarked = how == "unmarked"
    left = jobs.start(leave, how="break first" if unmarked else how, all_marked=not unmarked)
    assert left.wait() == 0, left.said()
    within = 3 if how == "exit" else 4
    said = f"left at step {within} of 1000, within step {within + 1}; the newest checkpoint is of"
    assert f"{said} step 2" in left.said()
    assert "`break` at the end of the body" in left.said()
    assert [e.step for e in jobs.events("checkpoint.committed")] == [2]


def leave_and_declare() -> dict[str, Any]:
    """The optimizer is of a kind that cannot be watched."""
    model = nn.Linear(2, 2)
    run = everstep.attach(model=model)
    for step in run.steps(until=100):
        with torch.no_grad():
            model.weight += 1
        if step == 4:
            break
    refused = ""
    try:
        run.checkpoint(wait=True)
    except UsageError as error:
        refused = str(error)
    run.step_end()  # the body was whole
    return {"refused": refused, "step": run.step, "committed": run.checkpoint(wait=True)}


def test_the_user_may_say_that_a_step_is_whole(jobs: Jobs) -> None:
    declared = jobs.start(leave_and_declare)
    assert declared.wait() == 0
    found = declared.result()
    assert "EVS-100" in found["refused"]
    assert "run.step_end()" in found["refused"]
    assert (found["step"], found["committed"]) == (5, True)
    assert "left at" not in declared.said()


def declare_twice() -> list[int]:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=100):
        training.step(batch)
        if run.step == 2:
            break
    steps = [run.step]
    run.step_end()  # says what is known
    steps.append(run.step)
    training.step(next(iter(training.loader)))
    run.step_end()
    return [*steps, run.step]


def test_a_step_that_was_counted_is_not_counted_again(jobs: Jobs) -> None:
    assert jobs.run(declare_twice) == [3, 3, 4]


def break_in_the_last() -> None:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=3):
        training.step(batch)
        if run.step + 1 == 3:
            break


def test_a_break_in_the_last_step_finishes_the_job(jobs: Jobs) -> None:
    jobs.run(break_in_the_last)
    assert [e.step for e in jobs.events("job.finished")] == [3]


# -- loops of the user's own


def own_loop(until: int = 4, then: str = "", ends: bool = True) -> str:
    """No checkpoint() at the end; ``then`` is what comes between it and the interpreter's exit."""
    since.MARK_SHARE = 1e9
    training = Training()
    objects = training.objects()
    del objects["loader"]
    run = everstep.attach(**objects)
    run.restore()
    for step in range(run.step, until):
        training.step(bodies._batch(step))
        if ends:
            run.step_end()
    digest = training.digest()
    if then == "draw":
        torch.rand(3)
    if then == "load":
        training.model.load_state_dict(Training().model.state_dict())
    if then == "raise":
        raise RuntimeError("the user's")
    return digest


def test_the_last_step_of_an_own_loop_is_saved_at_exit(
    jobs: Jobs, end_keepers: Callable[[], list[int]]
) -> None:
    first = jobs.start(own_loop, then="draw")
    assert first.wait() == 0
    assert "left at step 4: its checkpoint is committed" in first.said()
    end_keepers()
    digest = jobs.run(own_loop, until=7)
    other = Jobs(jobs.folder / "other", jobs.environment, name="whole")
    other.folder.mkdir()
    assert digest == other.run(own_loop, until=7)


def test_objects_that_were_changed_since_are_not_saved_as_that_step(jobs: Jobs) -> None:
    """Early stopping puts the best weights back before it ends."""
    changed = jobs.start(own_loop, then="load")
    assert changed.wait() == 0
    assert "left at step 4; there is no checkpoint yet" in changed.said()
    assert "run.checkpoint(wait=True) right after the last run.step_end()" in changed.said()
    assert not jobs.events("checkpoint.committed")


def test_nothing_is_saved_or_told_where_an_exception_ends_the_script(jobs: Jobs) -> None:
    said = jobs.fails(own_loop, then="raise")
    assert "left at" not in said
    assert not jobs.events("checkpoint.committed")


def test_steps_that_nobody_ended_are_told(jobs: Jobs) -> None:
    forgotten = jobs.start(own_loop, ends=False)
    assert forgotten.wait() == 0
    assert "its optimizers have stepped 4 times, but it never ended a step" in forgotten.said()
    assert "run.step_end() after each step" in forgotten.said()


def old_loop() -> None:
    training = Training()
    everstep.attach(**training.objects())
    for batch in training.loader:
        training.step(batch)


def test_the_old_loop_is_told(jobs: Jobs) -> None:
    forgotten = jobs.start(old_loop)
    assert forgotten.wait() == 0
    assert "has called everstep.attach and its optimizers have stepped 5 times" in forgotten.said()
    assert "Loop over run.steps(until=...)" in forgotten.said()


def test_a_job_with_nothing_left_to_do_is_not_warned(jobs: Jobs) -> None:
    jobs.run(own_loop)
    again = jobs.start(own_loop)
    assert again.wait() == 0
    assert not jobs.events("train.warning")


# -- several ranks


def break_on(rank: str, at: int = 3) -> None:
    """Ranks that do not wait for each other."""
    boundary._LONG_WAIT_SECONDS = 0.1
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=6):
        training.step(batch)
        if run.step + 1 == at and os.environ["RANK"] in rank:
            break


def _ranks(number: int) -> dict[str, str]:
    return {"WORLD_SIZE": "2", "RANK": f"{number}", "LOCAL_RANK": f"{number}"}


def test_ranks_that_leave_together_are_saved_together(jobs: Jobs) -> None:
    both = [jobs.start(break_on, rank="01", env=_ranks(number)) for number in range(2)]
    assert [started.wait() for started in both] == [0, 0]
    assert [e.step for e in jobs.events("checkpoint.committed")] == [3]
    assert {e.rank for e in jobs.events("train.stopped_early")} == {0, 1}


def test_a_rank_that_leaves_alone_does_not_hang(jobs: Jobs) -> None:
    deadline = {"EVERSTEP_FINAL_DEADLINE": "1"}
    alone, other = [jobs.start(break_on, rank="0", env={**_ranks(n), **deadline}) for n in range(2)]
    assert alone.wait() == 0
    assert "needs all ranks to leave at the same step" in alone.said()
    assert "left at step 3 of 6, and its checkpoint is not committed after 1 s" in alone.said()
    other.wait()


# -- a real interpreter

SCRIPT = """
import sys; sys.path.insert(0, sys.argv[1])
import test_leaving
test_leaving.leave("exit first", at=2)
"""


def test_a_script_that_leaves_ends_by_itself(jobs: Jobs) -> None:
    """With a real interpreter's end, whose threads and handlers could hang."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)], cwd=jobs.folder,
        env=jobs.environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "left at step 2 of 1000: its checkpoint is committed" in ended.stderr
    assert "Exception ignored" not in ended.stderr
