"""What makes two failures the same one: class, text, frame. The step is asked beside it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.faults.fingerprint import TEXT_LIMIT, fingerprint, normalise, normalise_frame
from everstep.faults.records import Evidence, Verdict

KEY_ERROR = Verdict(
    "USER_SHAPE_KEY", "user_code", "stop", (3,), step=120,
    message="KeyError: 'blocks.7.attn.weight' in shard 3 of /mnt/run-8841/state/part-00003.bin",
    frame="/scratch/me/job-17/src/model/load.py:88 restore",
)  # fmt: skip


def changed(**changes: object) -> Verdict:
    return msgspec.structs.replace(KEY_ERROR, **changes)


SAME = {
    "another rank": changed(root_ranks=(0,), victim_ranks=(3,)),
    "another step": changed(step=9000),
    "another node": changed(root_node="node-b"),
    "another number": changed(
        message="KeyError: 'blocks.12.attn.weight' in shard 11 of /mnt/run-8841/part-00011.bin"
    ),
    "another folder": changed(
        message="KeyError: 'blocks.7.attn.weight' in shard 3 of /scratch/x/part-00003.bin",
        frame="/opt/unpacked/src/model/load.py:88 restore",
    ),
    "colours": changed(
        message="\x1b[31mKeyError\x1b[0m: 'blocks.7.attn.weight' in shard 3 of "
        "/mnt/run-8841/state/part-00003.bin"
    ),
    "a launcher's prefix": changed(
        message="[rank3]: KeyError: 'blocks.7.attn.weight' in shard 3 of /m/part-00003.bin"
    ),
    "a time": changed(confidence=0.3, advice="read it"),
}
OTHER = {
    "another class": changed(fault="USER_EXCEPTION"),
    "another text": changed(message="KeyError: 'head' is missing"),
    "another line": changed(frame="/scratch/me/job-17/src/model/load.py:90 restore"),
    "another file": changed(frame="/scratch/me/job-17/src/model/save.py:88 restore"),
}


@pytest.mark.parametrize("how", SAME)
def test_what_differs_from_one_time_to_the_next_is_no_part_of_it(how: str) -> None:
    assert fingerprint(SAME[how]).key == fingerprint(KEY_ERROR).key


@pytest.mark.parametrize("how", OTHER)
def test_what_failed_and_where_is(how: str) -> None:
    assert fingerprint(OTHER[how]).key != fingerprint(KEY_ERROR).key


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("lost 10.0.0.12:29500 after 1.5e-3 s", "lost <address> after <n> s"),
        ("at 2026-11-03T10:00:01.5Z and 10:00:02", "at <time> and <time>"),
        ("ptr 0x7fff12 id 9f0c2d4e-0000-4000-8000-00000000beef", "ptr <n> id <id>"),
        ("get s3://bucket/key?sig=abc failed", "get <url> failed"),
        ("[default0]: 3:  no", "<n>: no"),
        ("commit deadbeef1234", "commit <id>"),
        ("loss is -3.2", "loss is <n>"),
        ("fraction and/or ratio", "fraction and/or ratio"),
    ],
)
def test_normalised_text(text: str, wanted: str) -> None:
    assert normalise(text) == wanted


def test_names_of_nodes_are_no_part_of_it() -> None:
    """A job that moves to new hosts fails of the same thing."""
    one = changed(message="connect to gpu-a timed out; gpu-ab too")
    two = changed(message="connect to tray-x timed out; rack too")
    assert fingerprint(one, ["gpu-a", "gpu-ab"]).key == fingerprint(two, ["tray-x", "rack"]).key


def test_without_a_message_the_root_evidence_speaks_whatever_its_order() -> None:
    lines = (
        Evidence("Xid 79 on device 3", "kernel", role="root"),
        Evidence("Xid 48 on device 3", "kernel", role="root"),
        Evidence("connection closed by peer", "log", role="victim"),
    )
    one = changed(message="", evidence=lines)
    assert fingerprint(one) == fingerprint(changed(message="", evidence=lines[::-1]))
    assert "Xid" in fingerprint(one).text


def test_frames_keep_the_last_two_parts_of_the_path() -> None:
    assert normalise_frame("/a/b/c/train.py:3  step") == "c/train.py:3 step"
    assert normalise_frame("train.py:3 step") == "train.py:3 step"
    assert normalise_frame("") == ""


@settings(max_examples=40)
@given(st.text(max_size=300))
def test_any_text_is_bounded_and_normalised_once_for_all(text: str) -> None:
    once = normalise(text)
    assert len(once) <= TEXT_LIMIT
    assert fingerprint(changed(message=text, frame=text)).key


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_numbers_never_make_a_difference(one: int, other: int) -> None:
    texts = [f"rank {n} lost {n}.5 GB at offset {n:#x} of part-{n}" for n in (one, other)]
    assert normalise(texts[0]) == normalise(texts[1])


def test_a_long_dump_costs_little() -> None:
    """It is cut before it is matched: no message can make the comparison slow."""
    assert len(normalise("x1" * 10**6)) <= TEXT_LIMIT
