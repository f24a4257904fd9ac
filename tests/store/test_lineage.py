"""S6: the current lineage, against its definition, and R5: when a point is expected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.ids import Point
from everstep.store.lineage import chain, expected, on_lineage, undecided


@st.composite
def histories(draw: st.DrawFn) -> dict[int, Point | None]:
    found: dict[int, Point | None] = {}
    for attempt in range(1, draw(st.integers(0, 7)) + 1):
        if draw(st.booleans()) or attempt == 1:
            earlier = sorted(found)
            restored = None
            if earlier and draw(st.integers(0, 5)):
                restored = Point(draw(st.integers(0, 5)), draw(st.sampled_from(earlier)))
            found[attempt] = restored
    return found


points = st.sets(st.builds(Point, st.integers(0, 6), st.integers(1, 8)), max_size=12)


def by_definition(branches: dict[int, Point | None], point: Point) -> bool:
    """S6, word by word."""
    if not branches:
        return False
    links, attempt = [], max(branches)
    while True:
        links.append(attempt)
        restored = branches[attempt]
        if restored is None:
            break
        attempt = restored.attempt
    if point.attempt not in links:
        return False
    later = links[: links.index(point.attempt)]
    steps = [branches[attempt].step for attempt in later]  # type: ignore[union-attr]
    return all(step >= point.step for step in steps)


@given(histories(), points)
def test_s6_candidates_are_those_of_the_definition(
    branches: dict[int, Point | None], found: set[Point]
) -> None:
    assert on_lineage(branches, found) == sorted(
        (p for p in found if by_definition(branches, p)), reverse=True
    )


@given(histories(), points, st.randoms(use_true_random=False))
def test_s6_the_order_of_commits_does_not_matter(
    branches: dict[int, Point | None], found: set[Point], random: object
) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert on_lineage(branches, shuffled) == on_lineage(branches, sorted(found))


@given(histories(), points)
def test_r5_a_candidate_or_a_restored_branch_is_always_expected(
    branches: dict[int, Point | None], found: set[Point]
) -> None:
    if on_lineage(branches, found) or (branches and branches[max(branches)] is not None):
        assert expected(branches, found)


@given(histories(), points)
def test_r5_a_root_cuts_off_what_came_before(
    branches: dict[int, Point | None], found: set[Point]
) -> None:
    rooted = {**branches, 9: None}
    assert not expected(rooted, found)
    assert on_lineage(rooted, found) == []
    assert on_lineage(rooted, {*found, Point(3, 9)}) == [Point(3, 9)]


@st.composite
def unreadable(draw: st.DrawFn) -> tuple[dict[int, Point | None], int, Point | None]:
    """A history with the branch of one attempt unread, which may have named any earlier point."""
    branches = draw(histories().filter(bool))
    attempt = draw(st.sampled_from(sorted(branches)))
    earlier = [a for a in branches if a < attempt]
    told = st.none()
    if earlier:
        told |= st.builds(Point, st.integers(0, 5), st.sampled_from(earlier))
    return {**branches, attempt: None}, attempt, draw(told)


@given(unreadable(), points)
def test_s6_an_unread_branch_makes_no_wrong_candidate_and_hides_none_that_is_not_undecided(
    history: tuple[dict[int, Point | None], int, Point | None], found: set[Point]
) -> None:
    branches, unread, told = history
    truth = set(on_lineage({**branches, unread: told}, found))
    seen = set(on_lineage(branches, found))
    assert {p for p in truth if p.attempt >= unread} <= seen <= truth
    assert truth - seen <= set(undecided(branches, found, {unread}))
    assert not seen & set(undecided(branches, found, {unread}))
    if expected({**branches, unread: told}, found):
        assert expected(branches, found, {unread})


@given(histories(), points)
def test_s6_nothing_is_undecided_where_every_branch_is_read(
    branches: dict[int, Point | None], found: set[Point]
) -> None:
    assert undecided(branches, found) == (list(found) if not branches else [])


def test_s6_an_unread_branch_decides_what_lies_before_it_where_another_one_says_so() -> None:
    branches = {1: None, 2: None, 3: Point(15, 2)}
    known = [Point(10, 1), Point(20, 1), Point(15, 2), Point(16, 2)]
    assert on_lineage(branches, known) == [Point(15, 2)]
    assert undecided(branches, known, {2}) == [Point(10, 1)]
    assert undecided(branches, known, {1}) == []
    assert undecided({3: Point(15, 2)}, known) == [Point(10, 1), Point(15, 2)]


def test_r5_an_unread_branch_is_a_recovery_point_only_after_an_earlier_one() -> None:
    assert not expected({1: None}, [], {1})
    assert expected({1: None, 2: None}, [], {2})
    assert not expected({1: None, 2: None, 3: None}, [], {2}), "a root comes after it"


def test_r5_without_any_branch_anything_known_is_expected() -> None:
    assert expected({}, [Point(1, 1)])
    assert not expected({}, [])
    assert not expected({1: None}, [])


def test_s6_a_late_commit_beyond_the_branch_is_dead_and_one_before_it_counts() -> None:
    branches = {1: None, 2: Point(10, 1), 3: Point(15, 2)}
    late = [Point(5, 1), Point(10, 1), Point(11, 1), Point(15, 2), Point(16, 2), Point(20, 3)]
    assert on_lineage(branches, late) == [
        Point(20, 3),
        Point(15, 2),
        Point(10, 1),
        Point(5, 1),
    ]


def test_a_chain_ends_where_a_branch_is_missing_or_points_forward() -> None:
    assert chain({3: Point(1, 2)}) == [3]
    assert chain({1: Point(1, 2), 2: Point(1, 1)}) == [2, 1]
    assert chain({}) == []


def test_r5_what_an_unread_branch_may_have_restored_is_expected() -> None:
    """Nothing else is left of what attempt 2 went on from; attempt 1 has made a checkpoint."""
    assert expected({2: None}, [Point(5, 1)], unread={2})
    assert not expected({2: None}, [], unread={2})
    assert not expected({2: None}, [Point(5, 1)], unread=())
