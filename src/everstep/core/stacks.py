"""What a worker and its agent agree on, so that a stuck worker can be looked at from outside.

Owns: the names of the files and their content. Never does: I/O, signals. Called by: train (which
writes them), agent (which reads them).

In the folder that ``EVERSTEP_STACKS`` names each rank has: ``answers``, which process it is and by
which signal faulthandler appends the stacks of all threads to ``stacks``; ``ask``, a FIFO: for each
byte the rank writes ``turn`` anew, and ``flight``, torch's flight recorder.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

Kind = Literal["answers", "stacks", "ask", "turn", "flight"]

TURN = struct.Struct("<QQ")
"""How often the rank was asked and has answered, and a digest of where its program stands."""


class Answers(msgspec.Struct, frozen=True):
    """The process ``pid`` dumps its stacks at the signal ``dump`` (0: no signal was free)."""

    pid: int
    dump: int


def file_of_rank(rank: int, kind: Kind) -> str:
    """The name of that file in the folder."""
    return f"{rank}.{kind}"
