"""A rank that can be looked at from outside, while it is stuck.

Owns: a real-time signal that nobody else uses, at which faulthandler writes the stacks of all
threads, from C, whatever the interpreter does; and a thread that, when it is asked, writes a
digest of where the script's program stands and torch's flight recorder. Never does: anything at a
step (the thread sleeps in a read), decide. Called by: :func:`everstep.train.run.attach`, where an
agent gave a folder.

The handler stays until the process ends: taken off, a signal that is on its way would kill it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import cast

import msgspec

from everstep.core.stacks import TURN, Answers, Kind, file_of_rank

THREAD = "everstep-answer"
_DEEPEST = 200
_OPTIMIZED = 1  # inspect.CO_OPTIMIZED, without importing inspect
_KEEPERS = frozenset({"locals", "vars", "eval", "exec"})
"""Functions that call one of these may hold the copy of their variables."""
_OWN_REFERENCES = 3  # the frame's, the variable's, and the call's that asks
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = ("/site-packages/", "/dist-packages/")
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
_answering: tuple[int, str] | None = None
"""The process that answers and its folder; a forked child is another."""


def answer(folder: str, rank: int) -> str:
    """Have this process answer, once in its life. Why it cannot, where the folder is full or
    read-only or no thread starts, else empty: the rank is then looked at by other means, or not at
    all; training is none of that. Empty, too, where the folder is gone: its agent has ended."""
    global _answering
    if not folder or _answering == (os.getpid(), folder):
        return ""
    held: list[int] = []
    try:
        _begin(folder, rank, held)
    except (FileNotFoundError, NotADirectoryError):
        _close(held)
        return ""
    except (OSError, RuntimeError) as error:
        _close(held)
        return str(error)
    _answering = (os.getpid(), folder)
    return ""


def _begin(folder: str, rank: int, held: list[int]) -> None:
    _make_fifo(os.path.join(folder, file_of_rank(rank, "ask")))
    for kind, more in (("stacks", os.O_APPEND), ("ask", 0), ("turn", 0)):
        held.append(_open(folder, rank, cast(Kind, kind), more))
    stacks, ask, turn = held
    dump = next(_free_signals(), 0)
    held.clear()  # from here on they are in use, whatever fails
    if dump:
        faulthandler.register(dump, file=stacks, all_threads=True, chain=False)
    main = threading.main_thread().ident
    flight = os.path.join(folder, file_of_rank(rank, "flight"))
    threading.Thread(
        target=_answer, args=(ask, turn, flight, main), name=THREAD, daemon=True
    ).start()
    # Last: who finds it sends the signal, which must have its handler by then.
    _write(os.path.join(folder, file_of_rank(rank, "answers")),
           msgspec.json.encode(Answers(os.getpid(), dump)))  # fmt: skip


def _close(held: list[int]) -> None:
    for fd in held:
        os.close(fd)


def _open(folder: str, rank: int, kind: Kind, more: int = 0) -> int:
    """A descriptor that stays open for as long as the process lives."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | more
    return os.open(os.path.join(folder, file_of_rank(rank, kind)), flags, 0o600)


def _make_fifo(path: str) -> None:
    """In place of one that another process of this rank has made: the last to attach answers."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.mkfifo(path, 0o600)


def _write(path: str, data: bytes) -> None:
    """Renamed into place: whoever finds it finds it whole."""
    try:
        with open(f"{path}.new", "wb") as file:
            file.write(data)
        os.replace(f"{path}.new", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.new")
        raise


def _free_signals() -> Iterator[int]:
    """Real-time signals that have no handler, from the highest but one down: libraries take the
    lowest and the last."""
    used = _handled()
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 1, -1):
        if signal.getsignal(number) == signal.SIG_DFL and not used >> (number - 1) & 1:
            yield number


def _handled() -> int:
    """The signals that are caught or ignored, as the kernel has them: C code sets some as well."""
    mask = 0
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(("SigCgt:", "SigIgn:")):
                mask |= int(line.split()[1], 16)
    return mask


# -- the thread


def _answer(ask: int, turn: int, flight: str, main: int) -> None:
    """Answer each byte that comes. What is stuck with the interpreter's lock in its hand does not
    let this thread run: no answer is an answer as well."""
    count = 0
    while os.read(ask, 64):
        count += 1
        frame = sys._current_frames().get(main)
        turned = TURN.pack(count, digest(frame))
        del frame  # it would hold what the function lets go
        with contextlib.suppress(OSError):  # the disk is full, or the folder gone with its agent
            os.pwrite(turn, turned, 0)
            if recorded := _recorded():
                _write(flight, recorded)


def _recorded() -> bytes:
    """torch's flight recorder, where this torch has one and process groups are in use."""
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in _RECORDERS:
        dump: Callable[..., bytes] | None = getattr(module, name, None)
        if dump is not None and (recorded := dump(True, False, False)):
            return recorded
    return b""


def digest(frame: FrameType | None) -> int:
    """Changes when the program moves: where each of its frames stands, and which objects its
    variables hold; nothing can be read from it. Frames of Python, of torch and of everstep are
    left out: their loops that wait for something have variables that change as well."""
    left_out = _left_out()
    places = (_place(one) for one in _frames(frame) if _is_program(one, left_out))
    return hash(tuple(places)) & (2**64 - 1)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_program(frame: FrameType, left_out: tuple[str, ...]) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(_STANDARD) and not any(name in path for name in _PACKAGES):
        return False
    return not path.startswith(left_out)


def _left_out() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None) or ""
    ours = os.path.dirname(__file__)
    folders = (os.path.dirname(torch), os.path.dirname(ours))
    return ("<frozen", *(os.path.join(folder, "") for folder in folders if folder))


def _place(frame: FrameType) -> tuple[object, ...]:
    return id(frame.f_code), frame.f_lasti, tuple(_variables(frame))


def _variables(frame: FrameType) -> list[tuple[str, int, int]]:
    """Name and object of each variable, and what changes within it."""
    copies = bool(frame.f_code.co_flags & _OPTIMIZED) and sys.version_info < (3, 13)
    if copies and (sys.gettrace() or _KEEPERS.intersection(frame.f_code.co_names)):
        return []  # the copy that Python makes is, or may be, somebody else's as well
    held = frame.f_locals
    seen = [(name, id(value), _changing(value)) for name, value in list(held.items())]
    if copies and sys.getrefcount(held) <= _OWN_REFERENCES:
        # Python keeps the copy with the frame: it would hold what the function lets go.
        held.clear()
    return seen


def _changing(value: object) -> int:
    """What changes of an object that stays, or in whose place another of its kind is put."""
    if type(value) in (int, float):
        return hash(value)
    return len(value) if type(value) in (list, dict, set) else 0  # type: ignore[arg-type]
