"""Evidence in bounds: never more than allowed, the telling lines first, and nothing silently."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.faults.cap import AFTER, BEFORE, LONGEST, MOST_BYTES, NOTE, capped
from everstep.faults.catalog import load
from everstep.faults.records import Signal

END = 10_000.0
OOM = "Memory cgroup out of memory: Killed process 3021 (python)"


def size(signals: tuple[Signal, ...]) -> int:
    return sum(len(msgspec.json.encode(signal)) + 1 for signal in signals)


def test_what_is_small_and_fresh_stays_as_it_is() -> None:
    given_ = (
        Signal("exit", rank=0, mono=END, exit_code=1),
        Signal("kernel", OOM, mono=END - 5),
        Signal("log", "loss 2.1", rank=0, mono=END - 1),
    )
    assert capped(given_, END, load()) == given_


def test_age_is_capped_for_all_but_ends() -> None:
    kept = (
        Signal("kernel", OOM, mono=END - BEFORE + 1),
        Signal("gpu", "XID 79", mono=END + AFTER - 1),
        Signal("log", "near", rank=1, mono=END - BEFORE + 1),
        Signal("exit", rank=2, mono=END - 4000, exit_code=-9),
        Signal("stack", "of no time"),
    )
    old = (
        Signal("kernel", OOM, mono=END - BEFORE - 1),
        Signal("gpu", "XID 79", mono=END + AFTER + 1),
        Signal("log", "far", rank=1, mono=END - BEFORE - 1),
    )
    found = capped(kept + old, END, load(), node="n-1")
    assert found[:-1] == kept
    assert found[-1].source == "agent"
    assert found[-1].node == "n-1"
    assert "3 older or later" in found[-1].text


def test_telling_lines_and_the_last_ones_stay_where_there_is_no_room() -> None:
    lines = [
        Signal("log", f"step {n} loss 2.{n} " + "x" * 300, rank=0, mono=END - 500 + n)
        for n in range(400)
    ]
    telling = Signal("log", "RuntimeError: CUDA out of memory", rank=0, mono=END - 499.5)
    end = Signal("exit", rank=0, mono=END, exit_code=1)
    found = capped([*lines, telling, end], END, load(), most_bytes=20_000)
    assert size(found) <= 20_000
    assert telling in found
    assert end in found
    assert lines[-1] in found
    assert lines[0] not in found
    assert "for which there was no room" in found[-1].text


def test_the_loudest_rank_hides_nobody() -> None:
    loud = [
        Signal("log", f"RuntimeError: {n} " + "y" * 200, rank=0, mono=END - 1) for n in range(2000)
    ]
    others = [Signal("log", f"ValueError of rank {r}", rank=r, mono=END - 60) for r in range(1, 9)]
    found = capped([*loud, *others], END, load(), most_bytes=30_000)
    assert set(others) <= set(found)
    assert size(found) <= 30_000


def test_a_long_output_keeps_what_it_says_of_its_end() -> None:
    rng = random.Random(1)
    noise = [f"step {rng.randrange(10**9)} loss 2.0 tokens/s 4000" for _ in range(20_000)]
    text = "\n".join([*noise[:9000], "RuntimeError: NCCL error: remote process exited",
                      *noise[9000:], "the last words"])  # fmt: skip
    (kept, note) = capped([Signal("log", text, rank=3, mono=END)], END, load())
    assert len(kept.text.encode()) <= LONGEST + 5
    assert "remote process exited" in kept.text
    assert kept.text.endswith("the last words")
    assert "parts of 1 long ones" in note.text


sources = st.sampled_from(("log", "kernel", "exit", "gpu", "stack", "agent"))
texts = st.one_of(
    st.sampled_from((OOM, "loss 2.0", "ValueError: x", "NVRM: Xid (PCI:0000:b1:00): 79, x")),
    st.text(max_size=300),
    st.builds(lambda word, n: word * n, st.sampled_from(("abc ", "é\n", '"')), st.integers(1, 900)),
)
signals = st.lists(
    st.builds(
        Signal, sources, texts, st.one_of(st.none(), st.integers(0, 3)),
        mono=st.one_of(st.none(), st.floats(END - 1000, END + 500)),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(signals, st.integers(NOTE + 200, 6000), st.randoms())
def test_evidence_is_bounded_and_no_order_changes_it(
    given_: list[Signal], most: int, rng: random.Random
) -> None:
    found = capped(given_, END, load(), most_bytes=most)
    assert size(found) <= most
    mixed = given_.copy()
    rng.shuffle(mixed)
    again = capped(mixed, END, load(), most_bytes=most)
    assert {msgspec.json.encode(one) for one in again} == {
        msgspec.json.encode(one) for one in found
    }
    whole = set(given_)
    if not set(found) >= whole:
        assert found[-1].text.startswith("evidence left out ("), "nothing is left out silently"


def test_the_default_bound_holds_for_a_whole_node() -> None:
    many = [Signal("log", f"{n} " + "z" * 900, rank=n % 8, mono=END - n / 100) for n in range(2000)]
    found = capped(many, END, load())
    assert MOST_BYTES * 0.9 < size(found) <= MOST_BYTES
