"""Two final states are compared in every bit, and what differs is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.core.ids import Point
from everstep.core.layout import RankState
from everstep.drill import states
from everstep.drill.states import Final, blocks, compare_states, first_difference
from everstep.store.records import ExtentEntry


def _open(job: Any, step: int) -> Any:
    return job.open_checkpoint(Point(step, 1))


def test_equal_states_of_two_stores_are_identical(make_job: Any) -> None:
    left, right = make_job("a", [10], folder="one"), make_job("b", [5, 10], folder="two")
    report = compare_states(Final(_open(left, 10)), Final(_open(right, 10)))
    assert report.identical, report.differences
    assert (report.step, report.tensors, report.ranks) == (10, 5, 2)
    assert report.bytes == 5 * 3 * 4 + 3 * 2 + 8 + 2 * 7


def test_other_bytes_name_the_tensor_and_the_element(make_job: Any) -> None:
    left, right = make_job("a", [10]), make_job("b", [10], seed=1)
    report = compare_states(Final(_open(left, 10)), Final(_open(right, 10)))
    assert not report.identical
    assert any(text.startswith("w differs first at element") for text in report.differences)
    assert any("rng of rank 1" in text for text in report.differences)


def test_another_step_or_world_is_said(make_job: Any) -> None:
    left, right = make_job("a", [10], world=2), make_job("b", [20], world=1)
    said = compare_states(Final(_open(left, 10)), Final(_open(right, 20))).differences
    assert said[0] == "the last checkpoint is of step 20, undisturbed 10"
    assert said[1] == "the world has 1 ranks, undisturbed 2"


def test_large_extents_are_compared_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "BLOCK_BYTES", 32)
    extent = ExtentEntry("w", "float32", (9, 4), (2, 0), (5, 4), -1, 0)
    boxes = list(blocks(extent))
    assert [box.offsets[0] for box in boxes] == [2, 4, 6]
    assert sum(box.numel for box in boxes) == 20
    scalar = ExtentEntry("s", "float32", (), (), (), -1, 0)
    assert len(list(blocks(scalar))) == 1


@pytest.mark.parametrize(
    ("left", "right", "path"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, None),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a[1]"),
        ({"a": 1}, {"a": 1, "b": None}, "b"),
        ({"a": 1.0}, {"a": 1}, "a"),
        ([0.0], [-0.0], "[0]"),
        ([float("nan")], [float("nan")], None),
        ([1], [1, 2], "[1]"),
        (
            {"o": msgspec.msgpack.Ext(5, msgspec.msgpack.encode({"lr": 0.1}))},
            {"o": msgspec.msgpack.Ext(5, msgspec.msgpack.encode({"lr": 0.2}))},
            "o.lr",
        ),
    ],
)
def test_the_first_difference_of_objects_is_a_path(
    left: object, right: object, path: str | None
) -> None:
    assert first_difference(left, right) == path


class _Saved:
    """Only what the comparison of objects asks of a checkpoint."""

    world = 1
    indexes = ()

    def __init__(self, step: int, python: int, torch: int = 0, lr: float = 0.1) -> None:
        self.point = Point(step, 1)
        extra = {"step": step, "rng": {"python": [python], "torch": torch}}
        self._objects = {"lr": lr, "extra": msgspec.msgpack.encode(extra)}

    def rank_state(self, rank: int) -> RankState:
        assert rank == 0
        return RankState(self.point.step, (), {}, msgspec.msgpack.encode(self._objects))


def _compare(undisturbed: Any, drilled: Any) -> states.StateReport:
    runs = [Final(last, first) for first, last in (undisturbed, drilled)]
    return compare_states(runs[0], runs[1])


def test_a_generator_that_nobody_seeds_or_uses_may_differ_between_runs() -> None:
    """Python seeds its generator from the system: 7 in one run, 8 in the other, in all of it."""
    report = _compare((_Saved(10, 7), _Saved(20, 7)), (_Saved(10, 8), _Saved(20, 8)))
    assert report.identical, report.differences
    assert report.idle == ("Python's random of rank 0",)


@pytest.mark.parametrize(
    "drilled",
    [
        (_Saved(10, 8), _Saved(20, 9)),  # not carried through the restores
        (None, _Saved(20, 8)),  # nothing to compare it with
        (_Saved(10, 8), _Saved(20, 8, torch=1)),
        (_Saved(10, 8), _Saved(20, 8, lr=0.2)),
    ],
)
def test_whatever_else_differs_is_a_difference(drilled: Any) -> None:
    report = _compare((_Saved(10, 7), _Saved(20, 7)), drilled)
    assert len(report.differences) == 1
    assert "objects of rank 0 differ at" in report.differences[0]


def test_a_generator_that_is_used_must_be_equal() -> None:
    report = _compare((_Saved(10, 6), _Saved(20, 7)), (_Saved(10, 6), _Saved(20, 8)))
    assert report.differences == ("objects of rank 0 differ at extra.rng.python[0]",)
    assert report.idle == ()
