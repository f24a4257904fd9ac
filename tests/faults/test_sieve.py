"""Large logs: what matters is kept, memory is bounded, and the verdict stays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from plain_logs import LOGS

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.lines import LONGEST
from everstep.faults.read import SMALL, log, read
from everstep.faults.sieve import FIRST, LAST, pieces_of, sieved

NOISE = (
    "2026-03-11 14:00:00,000 INFO trainer: step {0} loss 2.{1} lr 3e-4 tokens/s 4{1}",
    "DEBUG dataloader: queue 8 of 8 \xff\xfe",
    "\r 12%|#     | {1}/1000 [00:10<01:12, 12.1it/s]",
    "NCCL INFO Channel 0{1}/0 : 0[0] -> 1[1] via P2P/CUMEM",
)


def noise(rng: random.Random, count: int) -> list[bytes]:
    return [
        rng.choice(NOISE).format(rng.randrange(10**6), rng.randrange(9)).encode("latin-1")
        for _ in range(count)
    ]


def test_verdict_of_a_log_in_noise_stays(tmp_path: Path) -> None:
    rng = random.Random(3)
    for name, text, fault, ranks, _ in LOGS:
        if name == "ranks in brackets":
            continue  # a label is one only where most lines have it
        lines = noise(rng, 50_000)
        lines += [line.encode() for line in text.split("\n")]
        path = tmp_path / "big.log"
        path.write_bytes(b"\n".join(lines + noise(rng, 50)))
        assert path.stat().st_size > SMALL
        (one,) = read(path)
        verdict = judge(one.incident, load())
        assert (verdict.fault, verdict.root_ranks) == (fault, ranks), name


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 18])
def test_the_edges_of_pieces_do_not_matter(size: int) -> None:
    rng = random.Random(5)
    raw = b"\n".join([*noise(rng, 300), b"ValueError: x", *noise(rng, 300)])
    assert sieved(pieces_of(raw, size), load()) == sieved([raw], load())


def test_of_a_storm_the_first_and_the_last_lines_are_kept() -> None:
    storm = b"\n".join(b"RuntimeError: no %07d" % number for number in range(5000))
    kept = sieved([storm], load()).split(b"\n")
    assert len(kept) <= FIRST + LAST + 1
    assert kept[0].endswith(b"0000000")
    assert kept[-1].endswith(b"0004999")


def test_a_line_of_a_megabyte_is_cut() -> None:
    raw = b"\n".join([b"a", b"CUDA out of memory " + b"x" * (1 << 20), b"b"])
    kept = sieved(pieces_of(raw), load())
    assert b"CUDA out of memory" in kept
    assert len(kept) < 3 * LONGEST


def test_bytes_that_are_no_text_hide_nothing() -> None:
    raw = b"\xff\xfe\x00 [rank1]: ValueError: \xc3\x28 bad\n"
    assert judge(log("x", raw), load()).fault == "USER_EXCEPTION"
