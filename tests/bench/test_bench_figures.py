"""The statistics of the benchmarks, the table, and the stable shape of ``--json``."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.bench import figures, memory, recover, save
from everstep.bench.figures import Spread, spread
from everstep.bench.footprint import Footprint, at_rest, leaks
from everstep.bench.phases import Recovery
from everstep.bench.result import FORMAT, Figure, Goal, Machine, Result, report
from everstep.bench.rounds import Limits, Round
from everstep.bench.table import show, text

seconds = st.floats(min_value=1e-6, max_value=1e4)


def test_a_spread_is_median_lowest_and_highest() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([1.0, 2.0]).median == 1.5


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_no_spread_is_made_of_nothing_or_of_what_is_not_finite(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="sample"):
        spread(samples)


@given(st.lists(st.tuples(seconds, seconds, st.floats(0.1, 10)), min_size=1, max_size=9))
def test_a_slow_round_does_not_change_its_ratio(rounds: list[tuple[float, float, float]]) -> None:
    quiet = figures.paired_ratios([a for a, _, _ in rounds], [b for _, b, _ in rounds])
    loaded = figures.paired_ratios([a * k for a, _, k in rounds], [b * k for _, b, k in rounds])
    assert loaded == pytest.approx(quiet)


def test_ratios_refuse_other_lengths_and_denominators_that_are_not_positive() -> None:
    with pytest.raises(ValueError, match="cannot pair"):
        figures.paired_ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="cannot pair"):
        figures.paired_differences([], [])
    with pytest.raises(ValueError, match="positive"):
        figures.paired_ratios([1.0, 1.0], [1.0, 0.0])


def test_drag_is_what_steps_took_beyond_undisturbed_ones() -> None:
    assert figures.drag([0.3, 0.2], [0.1, 0.1, 5.0]) == pytest.approx(0.3)
    assert figures.drag([], [0.1]) == 0.0
    assert figures.drag([0.1], [0.2]) == pytest.approx(-0.1)


@given(st.integers(1, 20))
def test_kills_are_spread_evenly_within_the_interval(count: int) -> None:
    places = figures.spaced(count)
    assert len(places) == count
    assert all(0 < place < 1 for place in places)
    assert sum(places) / count == pytest.approx(0.5)


def test_every_method_comes_at_every_place_and_not_always_after_the_same_one() -> None:
    names = list("abcd")
    orders = [figures.rotated(names, number) for number in range(8)]
    assert all(sorted(order) == names for order in orders)
    assert all(set(place) == set(names) for place in zip(*orders, strict=True))
    before_b = Counter(order[order.index("b") - 1] for order in orders if order[0] != "b")
    assert set(before_b) == {"a", "c"}


@pytest.mark.parametrize(
    ("value", "strict", "reached"), [(1.0, False, True), (1.0, True, False), (1.1, False, False)]
)
def test_a_goal_is_a_bound_that_is_strict_where_it_says_below(
    value: float, strict: bool, reached: bool
) -> None:
    assert Goal("g", value, 1.0, strict).reached is reached


def _machine() -> Machine:
    return Machine(2, "cpu", 8 * 10**9, "6.1", "3.11", "2.13", "0.1", "here", "ext4", 0.05)


def _result() -> Result:
    value = spread([0.25, 0.5])
    return Result(
        "save", _machine(), {"rounds": 2},
        (Figure("everstep", "blocked", "s", value, "copy", 0.2, spread([1.25, 2.5])),),
        report([Goal("fast", 2.5, 1.5), Goal("small", 1.0, 2.0)]),
        ("a note",), {"everstep": [{"blocked": 0.25}, {"blocked": None}]},
    )  # fmt: skip


def test_the_table_never_hides_a_missed_goal() -> None:
    shown = text(_result())
    assert "NO   fast (measured 2.5)" in shown
    assert "yes  small (measured 1)" in shown
    row = next(line for line in shown.splitlines() if line.startswith("everstep  blocked"))
    assert row.split("  ")[-1] == "1.25 - 2.50"
    assert "0.375 s" in row
    assert "2 cores" in shown
    assert "note: a note" in shown


def test_figures_are_shown_with_their_unit() -> None:
    assert show(0.12345, "s") == "0.123 s"
    assert show(2.5e6, "bytes") == "2.5 MB"
    assert show(3.0, "steps") == "3 steps"
    assert show(7.0, "count") == "7"
    assert show(0.875, "ratio") == "0.88"


def test_the_document_has_its_stable_shape_and_reads_back() -> None:
    result = _result()
    document = msgspec.json.decode(msgspec.json.encode(result))
    assert document["format"] == FORMAT == "everstep.bench/1"
    assert set(document) == {
        "bench", "machine", "parameters", "figures", "goals", "notes", "samples", "format",
    }  # fmt: skip
    assert set(document["figures"][0]) == {
        "of", "what", "unit", "value", "beside", "beside_value", "ratio",
    }  # fmt: skip
    assert set(document["figures"][0]["value"]) == {"median", "low", "high", "count"}
    assert document["goals"][0] == {"text": "fast", "value": 2.5, "most": 1.5, "reached": False}
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
    assert not result.reached


# -- the goals of each benchmark


def _pair(everstep: Recovery, torchrun: Recovery, floor: float) -> recover.Pair:
    return recover.Pair(everstep, torchrun, floor)


def _run(total: float, repeated: int) -> Recovery:
    return Recovery(total, total + 0.1, repeated, {"stop": total})


def test_recover_compares_within_pairs_and_counts_equal_repeats_as_missed() -> None:
    pairs = [_pair(_run(2.0, 4), _run(4.0, 4), 1.8), _pair(_run(4.0, 6), _run(5.0, 6), 3.0)]
    faster, above, fewer = recover.goals(pairs)
    assert faster.value == pytest.approx((0.5 + 0.8) / 2)
    assert faster.reached
    assert above.value == pytest.approx((0.2 + 1.0) / 2)
    assert not above.reached
    assert (fewer.value, fewer.most, fewer.reached) == (5.0, 5.0, False)


def test_the_row_beside_the_floor_is_the_whole_time_and_its_ratio() -> None:
    pairs = [_pair(_run(2.0, 4), _run(4.0, 4), 1.0), _pair(_run(6.0, 6), _run(5.0, 6), 2.0)]
    whole, above = recover.against_floor("everstep", [p.everstep for p in pairs], pairs)
    assert (whole.value.median, whole.beside_value) == (4.0, 1.5)
    assert whole.ratio == Spread(2.5, 2.0, 3.0, 2)
    assert above.value == Spread(2.5, 1.0, 4.0, 2)


def _round(blocked: float, durable: float, during: list[float]) -> Round:
    return Round(blocked, durable, [0.1, 0.1], during, [0.1])


def _samples(everstep: Round, peer: Round) -> save.Samples:
    rounds = {
        name: [everstep if name == "everstep" else peer] for name in save.SaveSetup().methods[1:]
    }
    return save.Samples([Limits(0.1, 0.5, 0.4)], rounds, dict.fromkeys(rounds, 10**6), 10**8)


def test_save_holds_everstep_against_the_copy_the_peers_and_the_raw_write() -> None:
    samples = _samples(_round(0.15, 0.6, [0.15, 0.12]), _round(0.1, 1.0, [0.3, 0.3]))
    blocked, thread, plain, durable = save.goals(samples)
    assert blocked.value == pytest.approx(1.5)
    assert thread.value == pytest.approx(0.22 / 0.5)
    assert plain.value == pytest.approx(0.22 / 0.5)
    assert durable.value == pytest.approx(1.5)
    assert durable.reached


def test_the_raw_write_is_the_faster_one_and_may_have_no_direct_form() -> None:
    assert save.raw_write(Limits(0.1, 0.5, 0.4)) == 0.4
    assert save.raw_write(Limits(0.1, 0.3, 0.4)) == 0.3
    assert save.raw_write(Limits(0.1, 0.5, None)) == 0.5


def test_memory_allows_two_slots_a_share_of_the_state_and_a_fixed_part() -> None:
    size = memory.Added(state=10**9, alone=2 * 10**9, peak=4 * 10**9, settled=4 * 10**9)
    assert size.allowance == 2.15 * 10**9 + 64 * 10**6
    quiet = memory.Leaked(200, _held(), _held())
    assert [goal.reached for goal in memory.goals(size, quiet)] == [True, True]
    grown = msgspec.structs.replace(size, peak=int(2 * 10**9 + size.allowance) + 1)
    leaky = memory.Leaked(200, _held(), _held(fds=11))
    assert [goal.reached for goal in memory.goals(grown, leaky)] == [False, False]


def _held(pss: int = 10**8, fds: int = 10, mappings: int = 400, threads: int = 5) -> Footprint:
    return Footprint(pss, pss, fds, mappings, threads, 2)


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (_held(fds=11), "fds"),
        (_held(threads=6), "threads"),
        (_held(mappings=405), "mappings"),
        (_held(pss=10**8 + (9 << 20)), "anonymous"),
    ],
)
def test_whatever_grows_is_named_as_a_leak(after: Footprint, what: str) -> None:
    (found,) = leaks(_held(), after)
    assert what in found


def test_what_an_allocator_moves_is_no_leak() -> None:
    assert leaks(_held(), _held(pss=10**8 + (7 << 20), mappings=404)) == []
    assert leaks(_held(), _held(pss=1, fds=1, mappings=1, threads=1)) == []


def test_what_is_opened_for_a_moment_is_not_counted_as_held() -> None:
    looks = iter([_held(fds=12), _held(threads=9), _held(pss=2 * 10**8)])
    assert at_rest(lambda: next(looks, _held(fds=30)), seconds=0.1) == _held()
    assert at_rest(lambda: _held(fds=11), seconds=0.0).fds == 11
