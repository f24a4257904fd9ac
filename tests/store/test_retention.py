"""S7: what retention may and may not name, as properties of the pure plan."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.health import Health, together
from everstep.core.ids import Point
from everstep.store.retention import (
    CheckpointInfo,
    Retention,
    RetentionPlan,
    plan,
    recoverable,
)

NOW = 10_000.0
SOUND = Health("finite", "all", "agreed")

infos = st.lists(
    st.builds(
        CheckpointInfo,
        point=st.builds(Point, st.integers(0, 9), st.integers(1, 3)),
        state=st.sampled_from(["committed", "committed", "tombstoned", "incomplete"]),
        modified=st.sampled_from([NOW - 5000, NOW - 700, NOW - 100, NOW + 50]),
        verified=st.sampled_from([None, "structure", "bytes", "damaged"]),
        on_lineage=st.booleans(),
        error=st.sampled_from(["", "", "broken"]),
        committed_at=st.sampled_from([None, NOW - 5000, NOW - 20, NOW - 1]),
        health=st.sampled_from([None, SOUND, SOUND, Health("bad", "all", "agreed")]),
    ),
    unique_by=lambda info: info.point,
    max_size=12,
)
policies = st.builds(Retention, st.integers(-1, 4), st.just(600.0))


def ruled(found: list[CheckpointInfo], policy: Retention, *, highest: int = 3) -> RetentionPlan:
    return plan(found, policy, now=NOW, highest_attempt=highest, proofs_known=True)


def removed(found: list[CheckpointInfo], policy: Retention) -> set[Point]:
    return {ruling.point for ruling in ruled(found, policy).remove}


@given(infos, policies)
def test_s7_the_last_k_good_ones_of_the_lineage_stay(
    found: list[CheckpointInfo], policy: Retention
) -> None:
    good = sorted(i.point for i in found if i.sound and i.on_lineage)
    assert not removed(found, policy) & set(good[-max(1, policy.keep_last) :])


@given(infos, policies)
def test_s7_the_last_verified_stays(found: list[CheckpointInfo], policy: Retention) -> None:
    proved = [i for i in found if i.sound and i.verified == "bytes"]
    proved = [i for i in proved if i.on_lineage] or proved
    if proved:
        assert max(i.point for i in proved) not in removed(found, policy)


@given(infos, policies)
def test_s7_the_last_healthy_stays(found: list[CheckpointInfo], policy: Retention) -> None:
    healthy = [
        i
        for i in found
        if i.sound and i.health == SOUND and i.committed_at is not None
        and NOW - i.committed_at >= policy.detection_delay
    ]  # fmt: skip
    healthy = [i for i in healthy if i.on_lineage] or healthy
    if healthy:
        assert max(i.point for i in healthy) not in removed(found, policy)


def test_s7_the_last_healthy_stays_behind_any_number_of_unsound_ones() -> None:
    """A job whose script only warns of values that are no numbers."""
    bad = Health("bad", "bad", "agreed")
    found = [committed(s, health=bad, committed_at=NOW - 5000) for s in (3, 4, 5, 6)]
    found += [committed(s, health=SOUND, committed_at=NOW - 5000) for s in (1, 2)]
    assert removed(found, Retention(keep_last=2)) == {Point(s, 1) for s in (1, 3, 4)}


@given(infos)
def test_what_the_job_can_go_back_to(found: list[CheckpointInfo]) -> None:
    known = {i.point: i for i in found}
    offered = recoverable(found, now=NOW, delay=10.0)
    assert [r.point for r in offered] == sorted(i.point for i in found if i.sound and i.on_lineage)
    for one in offered:
        info = known[one.point]
        known_age = info.committed_at is not None
        old = known_age and NOW - (info.committed_at or NOW) >= 10.0
        sound = info.health == SOUND
        assert one[:3] == (info.point, "store", old and sound)
        assert one.sound == (sound and known_age)


def test_the_health_of_all_ranks_is_the_worst_of_each_fact() -> None:
    """One rank that logs is enough; of one that says nothing nothing is known."""
    quiet = Health("none", "part", "agreed")
    assert together([SOUND, quiet]) == Health("finite", "part", "agreed")
    assert together([SOUND, Health("bad", "none", "differ")]) == Health("bad", "none", "differ")
    assert together([SOUND, None]) is None
    assert together([]) is None


@given(infos, policies)
def test_s7_nothing_younger_than_the_grace_period_goes(
    found: list[CheckpointInfo], policy: Retention
) -> None:
    young = {i.point for i in found if NOW - i.modified < policy.grace_seconds}
    assert not removed(found, policy) & young


@given(infos, policies)
def test_s7_without_a_good_checkpoint_no_committed_one_goes(
    found: list[CheckpointInfo], policy: Retention
) -> None:
    if not any(i.sound and i.on_lineage for i in found):
        committed = {i.point for i in found if i.state == "committed"}
        assert not removed(found, policy) & committed


@given(infos, policies)
def test_every_point_is_ruled_on_once_and_with_a_reason(
    found: list[CheckpointInfo], policy: Retention
) -> None:
    result = ruled(found, policy)
    rulings = [*result.remove, *result.keep]
    assert sorted(r.point for r in rulings) == sorted(
        i.point for i in found if i.state != "tombstoned"
    )
    assert all(r.reason for r in rulings)


@given(infos, policies)
def test_unreadable_proofs_block_everything(found: list[CheckpointInfo], policy: Retention) -> None:
    result = plan(found, policy, now=NOW, highest_attempt=3, proofs_known=False)
    assert result.remove == ()
    assert result.blocked


def committed(step: int, attempt: int = 1, **kwargs: object) -> CheckpointInfo:
    return CheckpointInfo(
        Point(step, attempt),
        "committed",
        NOW - 5000,
        on_lineage=True,
        **kwargs,  # type: ignore[arg-type]
    )


def test_the_oldest_go_first_and_damaged_ones_are_not_counted() -> None:
    found = [committed(s) for s in (1, 2, 4, 5)] + [committed(3, verified="damaged")]
    assert removed(found, Retention(keep_last=1)) == {Point(s, 1) for s in (1, 2, 3, 4)}
    assert removed(found, Retention(keep_last=2)) == {Point(s, 1) for s in (1, 2, 3)}
    assert removed(found, Retention(keep_last=4)) == set()


def test_a_damaged_one_is_kept_until_k_newer_good_ones_exist() -> None:
    found = [committed(s) for s in (1, 2, 4, 5)] + [committed(3, verified="damaged")]
    assert removed(found, Retention(keep_last=3)) == {Point(1, 1)}


def test_s7_an_incomplete_step_goes_only_where_its_checkpoint_would_not_be_kept() -> None:
    """A committer may complete it while it is being deleted."""
    left = CheckpointInfo(Point(9, 1), "incomplete", NOW - 700)
    living = CheckpointInfo(Point(9, 3), "incomplete", NOW - 700)
    old, late, newest = (
        CheckpointInfo(Point(step, 1), "incomplete", NOW - 700, on_lineage=True)
        for step in (2, 4, 8)
    )
    found = [left, living, old, late, newest, committed(3), committed(5)]
    assert removed(found, Retention(keep_last=1)) == {Point(s, 1) for s in (9, 2, 4, 3)}
    assert removed(found, Retention(keep_last=2)) == {Point(9, 1), Point(2, 1)}
    assert removed(found, Retention(keep_last=3)) == {Point(9, 1)}


@given(infos, policies, st.sets(st.builds(Point, st.integers(0, 9), st.integers(1, 3))))
def test_s7_nothing_goes_of_which_the_lineage_is_not_known(
    found: list[CheckpointInfo], policy: Retention, unknown: set[Point]
) -> None:
    found = [msgspec.structs.replace(i, undecided=i.point in unknown) for i in found]
    assert not removed(found, policy) & unknown
