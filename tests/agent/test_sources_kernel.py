"""The kernel's messages: a device's records, a file that is rotated and cut, the journal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from source_fakes import SetClock, classes

from everstep.agent.watch.follow import Follower
from everstep.agent.watch.journal import Journal
from everstep.agent.watch.kernel import Kernel, KernelFile, Kmsg, Stamps, message
from everstep.agent.watch.source import Blind, Source

XID = "NVRM: Xid (PCI:0000:b1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def record(text: str, usec: int = 999_000_000, prio: int = 4) -> str:
    return f"{prio},1234,{usec},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:b1:00.0\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


# -- the device


def test_records_of_a_device_become_lines_with_their_time(tmp_path: Path) -> None:
    device, clock = tmp_path / "kmsg", SetClock(mono=1000.0)
    os.mkfifo(device)
    source = Kmsg(device, clock)
    assert list(source.look()) == []
    writer = os.open(device, os.O_WRONLY)
    os.write(writer, (record(XID, usec=999_400_000) + record("noise", prio=7)).encode())
    (signal,) = source.look()
    assert (signal.source, signal.text, signal.mono) == ("kernel", XID, 999.4)
    assert classes(signal) == ["XID_79"]
    assert list(source.look()) == []
    os.close(writer)
    source.close()


def test_a_record_may_come_in_two_pieces(tmp_path: Path) -> None:
    device = tmp_path / "kmsg"
    os.mkfifo(device)
    source = Kmsg(device, SetClock())
    list(source.look())
    writer = os.open(device, os.O_WRONLY)
    whole = record("EXT4-fs error (device sda1)").encode()
    os.write(writer, whole[:20])
    assert list(source.look()) == []
    os.write(writer, whole[20:])
    assert [signal.text for signal in source.look()] == ["EXT4-fs error (device sda1)"]
    os.close(writer)
    source.close()


def test_what_the_device_held_before_is_old(tmp_path: Path) -> None:
    device = tmp_path / "kmsg"
    device.write_text(record("of yesterday"))
    source = Kmsg(device, SetClock())
    assert list(source.look()) == []
    append(device, record("of now"))
    assert [signal.text for signal in source.look()] == ["of now"]
    source.close()


def test_escaped_bytes_are_text_again() -> None:
    signal = message("4,1,5,-;name=\\xc3\\xa9t\\xc3\\xa9\\x0a", 1.0, Stamps())
    assert signal is not None
    assert signal.text == "name=été"


def test_stamps_of_a_clock_that_runs_apart_are_set_right() -> None:
    stamps = Stamps()
    assert stamps.mono(999_500_000, now=1000.0) == 999.5, "one clock"
    apart = Stamps()
    assert apart.mono(90_000_000, now=1000.0) == 1000.0
    assert apart.mono(91_000_000, now=1031.0) == 1001.0, "read late: its agent was stopped"


def test_a_device_that_is_not_there_is_blind(tmp_path: Path) -> None:
    with pytest.raises(Blind, match="kmsg is not there"):
        list(Kmsg(tmp_path / "kmsg", SetClock()).look())


# -- a file


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.log"
    path.write_text("of yesterday\n")
    return path


def test_a_file_is_read_as_it_grows(log: Path) -> None:
    source = KernelFile(log, SetClock())
    assert list(source.look()) == []
    append(log, f"Mar  3 04:11:22 gpu-a17 kernel: {XID}\nhalf a li")
    (signal,) = source.look()
    assert classes(signal) == ["XID_79"]
    append(log, "ne\n" + record("Out of memory: Killed process 17 (python)", usec=999_000_000))
    assert [signal.text for signal in source.look()] == [
        "half a line", "Out of memory: Killed process 17 (python)",
    ]  # fmt: skip
    source.close()


def test_a_rotated_file_is_read_to_its_end_and_then_the_new_one(log: Path) -> None:
    file = Follower(log)
    assert list(file.lines()) == []
    append(log, "one\ntwo")
    log.rename(log.with_suffix(".1"))
    log.write_text("three\n")
    assert list(file.lines()) == ["one", "two", "three"]
    append(log, "four\n")
    assert list(file.lines()) == ["four"]
    file.close()


def test_between_the_steps_of_a_rotation_nothing_is_lost(log: Path) -> None:
    file = Follower(log)
    assert list(file.lines()) == []
    log.rename(log.with_suffix(".1"))
    append(log.with_suffix(".1"), "one\n")
    assert list(file.lines()) == ["one"]
    append(log.with_suffix(".1"), "two\n")
    log.write_text("three\n")
    assert list(file.lines()) == ["two", "three"]
    file.close()


def test_what_was_read_before_a_file_vanished_is_given(log: Path) -> None:
    file = Follower(log)
    assert list(file.lines()) == []
    append(log, "one\n")
    log.rename(log.with_suffix(".1"))
    log.symlink_to(tmp := log.with_suffix(".2"))
    assert list(file.lines()) == ["one"]
    log.unlink()
    log.mkdir()
    append(log.with_suffix(".1"), "two\n")
    found = []
    with pytest.raises(OSError):
        found.extend(file.lines())
    assert found == ["two"]
    assert not tmp.exists()
    file.close()


def test_a_file_that_was_cut_is_read_from_its_beginning(log: Path) -> None:
    file = Follower(log)
    assert list(file.lines()) == []
    append(log, "a long line\n" * 5)
    assert len(list(file.lines())) == 5
    log.write_text("new\n")
    assert list(file.lines()) == ["new"]
    file.close()


def test_a_file_that_comes_later_is_new_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "later.log"
    file = Follower(path)
    with pytest.raises(Blind, match="is not there"):
        list(file.lines())
    path.write_text("first\n")
    assert list(file.lines()) == ["first"]
    file.close()


def test_a_pipe_may_stand_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    source = KernelFile(path, SetClock())
    assert list(source.look()) == []
    writer = os.open(path, os.O_WRONLY)
    for text in ("one", "two"):
        os.write(writer, f"{text}\n".encode())
        assert [signal.text for signal in source.look()] == [text]
    os.close(writer)
    source.close()


def test_bytes_that_are_no_text_hide_nothing(log: Path) -> None:
    source = KernelFile(log, SetClock())
    assert list(source.look()) == []
    with log.open("ab") as file:
        file.write(b"\xff\xfe " + XID.encode() + b"\n")
    (signal,) = source.look()
    assert classes(signal) == ["XID_79"]
    source.close()


# -- the journal


def journalctl(folder: Path, *answers: str) -> str:
    """A program that answers its n-th call with the n-th script."""
    program = folder / "journalctl"
    cases = "\n".join(f"{n}) {answer} ;;" for n, answer in enumerate(answers, 1))
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f"case $(wc -l < {folder}/calls) in\n{cases}\n*) true ;;\nesac\n"
    )
    program.chmod(0o755)
    return str(program)


def entry(text: str, cursor: str, usec: int) -> str:
    return (
        f"""echo '{{"MESSAGE": {text}, "__CURSOR": "{cursor}", "PRIORITY": "3","""
        f""" "__MONOTONIC_TIMESTAMP": "{usec}"}}'"""
    )


def test_the_journal_is_asked_for_what_came_since(tmp_path: Path) -> None:
    program = journalctl(
        tmp_path, entry('"old"', "s=1", 5), entry('"EDAC MC1: 1 UE"', "s=2", 990_000_000),
        entry("[79, 111, 112, 115]", "s=3", 995_000_000),
    )  # fmt: skip
    source = Journal(program, SetClock())
    assert list(source.look()) == []
    assert [(signal.text, signal.mono) for signal in source.look()] == [("EDAC MC1: 1 UE", 990.0)]
    assert [signal.text for signal in source.look()] == ["Oops"], "bytes, where it is no text"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.partition("--after-cursor ")[2] for call in calls] == [
        "", "s=1 --lines 4096", "s=2 --lines 4096",
    ]  # fmt: skip


@pytest.mark.parametrize(("answer", "why"), [
    ("true", "no message of the kernel"),
    ("echo 'Hint: You are currently not seeing messages from other users' >&2", "hides"),
    ("exit 3", "ended with code 3"),
    ("echo nonsense", "does not print JSON"),
])  # fmt: skip
def test_a_journal_that_shows_nothing_is_blind(tmp_path: Path, answer: str, why: str) -> None:
    with pytest.raises(Blind, match=why):
        Journal(journalctl(tmp_path, answer), SetClock()).look()


def test_of_several_ways_the_first_that_works_is_kept(tmp_path: Path) -> None:
    device, file = tmp_path / "kmsg", tmp_path / "kernel.log"
    ways: list[Source] = [Kmsg(device, SetClock()), KernelFile(file, SetClock())]
    source = Kernel(ways)
    with pytest.raises(Blind, match=r"kmsg is not there; .*kernel.log is not there"):
        list(source.look())
    file.write_text("")
    assert list(source.look()) == []
    append(file, "one\n")
    assert [signal.text for signal in source.look()] == ["one"]
    source.close()
