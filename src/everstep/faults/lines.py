"""Raw text into clean lines that know who said them.

Owns: what programs put around a line (colours, carriage returns, ranks, stamps, collectors of
logs), wrapped and huge lines. Never does: I/O, meaning. Called by: :mod:`everstep.faults.match`,
:mod:`everstep.faults.read`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from everstep.faults.records import Signal, Source

LONGEST = 8192
"""Characters of a line that are looked at: its first and its last half."""
NARROWEST = 60
"""Columns below which no terminal wraps."""

WIDTHS = frozenset((80, 100, 120, 132, 140, 150, 160, 180, 200, 220, 240, 256))
"""Columns that terminals have; of another width one full line alone tells nothing."""

SHORT = 200
"""Characters of a field of a JSON object that is read besides what was said."""
MARKED = 3
"""Lines from which on a common beginning is one that a collector put there."""

_MARK = re.compile(r"(?:[\])>|:]|--) ?(?<= )")
_RANKED = re.compile(
    r"(?i)rank ?\d|\]<std|\[Rank|NCCL|NVRM|nvidia|kernel|EXT4|XFS|BTRFS|mlx5|EDAC|mce|slurm|srun"
    r"|torch|amdgpu|drm|pcie|nvme|nfs|lustre|ceph|kubelet|systemd|chrony|watchdog|rcu|oom|dcgm"
    r"|ERROR|WARN|INFO|DEBUG|Traceback|Error|File|\[[EWIF]\d*\b"
)
_NUMBER = re.compile(r"\d{1,4}: ")
"""What `srun -l` puts before each line, also where all are of one rank."""
_ODD = re.compile(
    r"^(?!.{0,40}\b(?:INFO|WARN|WARNING|DEBUG)\b)(?:[\[(<]?[\w./@=#,-]+[\])>]?(?: [|>]"
    r"|[:>])? ){1,2}(?<=[\]):>|] )"
    r"(?=(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b|Traceback \(most|  File \")"
)
"""A prefix of no known form before a line of a traceback."""
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SAID = ("log", "message", "msg", "text", "exc_info", "exception", "stack_trace", "traceback")
"""Keys under which loggers keep what was said."""
_BREAK = re.compile(r"\r\n|\n|\r|\x85|\u2028|\u2029")
_STAMP = (
    r"\[?\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d)?(?: [A-Z]+\d+)*\]?"
    r"|\[\d{3,7}\](?= \[)|"
    r"\[\d\d:\d\d:\d\d(?:[.,]\d+)?\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\]"
)
_PREFIX = re.compile(
    r"(?P<rank>\[rank:? ?(?P<r1>\d+)\]:? ?|\[\d+,(?P<r2>\d+)\]<std(?:err|out)>: ?)"
    r"|(?P<local>\[[A-Za-z_]\w*?(?P<l1>\d+)\]: ?)"
    r"|(?P<syslog>(?:<\d+>)?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<host>[\w.-]+)"
    r" (?=[\w./-]+(?:\[\d+\])?: )|(?P<host2>[\w.-]+) kernel: (?=\[|[A-Z]))"
    r"|(?P<collector>\[(?:pod/)?[\w.-]+/[\w.-]+\] |pod/[\w.-]+ |[\w.-]+ +\| "
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\) "
    r"|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) std(?:out|err) [FP] |kernel: (?=\[ *\d+\.\d+\] ))"
    rf"|(?P<stamp>(?:{_STAMP}) *(?:[-|] )?)"
    r"|(?P<uptime>\[ *\d+\.\d{6}\] )"
)
_LOW_PREFIX = re.compile(r"pod/|kernel: |[\w.-]+ +\| |[\w.-]+ kernel: ")
"""Which of these begin with a small letter."""
_GLUED = re.compile(r"\[rank(\d+)\]:(?: (?=\S)|(?=\[))")
"""A rank's prefix inside a line: what stood before it, a progress bar mostly, is another's."""
_ERRS = re.compile(r"Error|Exception|Traceback|  File ")
_IN_PREFIX = re.compile(r"(?i)\brank[ _:=-]?(\d+)")
_SPOKEN = re.compile(r"\[(?:PG [^\]]*)?Rank (\d+)\]")
_LABEL = re.compile(
    r"(?:(?P<host>[A-Za-z][\w.-]*)(?: (?P<r0>\d+))?|(?P<r1>\d+)): |\[(?P<r2>\d{1,4})\] (?=\S)"
)
_STARTS = re.compile(
    r"\[|Traceback|  File |[A-Z][\w.]*(?:Error|Exception)\b|[EWIF]\d{4} |\d{4}-\d\d"
)
_KERNEL = re.compile(
    r"^(?:kernel: |NVRM: |nvidia-nvswitch|amdgpu |amdgpu: |\[drm:|mce: \[|EDAC "
    r"|\{\d+\}\[Hardware Error\]|pcieport "
    r"|oom-kill:"
    r"|EXT4-fs |XFS \(|nfs: server |watchdog: BUG: |mlx5_core |nvme nvme|Buffer I/O error"
    r"|blk_update_)"
)
_RECORD = re.compile(
    r"attempt \d+(?: ended:|: start(?:ed)? |: rank \d| failed: rank)"
    r"|history (?:of )?\S+ (?:GPU|node)"
)
"""What an agent says of earlier attempts and other jobs, where its words stand in a merged log."""
_KERNEL_FIRST = frozenset("kNna[mE{poXwBb")
"""What the lines of ``_KERNEL`` begin with."""
_BARE = frozenset(("exit", "heartbeat", "steptime", "stack"))
"""Sources that nobody puts anything around; what reads a stack writes to no terminal, whose width
would break lines."""
_SLURM = re.compile(r"^(?:slurmstepd|srun|slurmd|slurmctld|sbatch|salloc): ")


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line without what was put around it. ``order`` is its place in its signal; two lines of
    different signals are ordered by their signals' times alone."""

    text: str
    source: Source
    rank: int | None
    node: str | None
    time: float | None
    order: int
    signal: int
    ours: bool = False


def clean(text: str) -> list[str]:
    """The lines of a text without colours and control characters; what a carriage return overwrote
    is a line of its own. Empty lines are left out."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if '{"' in text:
        text = "\n".join(_unpacked(line) for line in text.split("\n"))
    return [
        _bounded(line if line.isprintable() else _CONTROL.sub("", line))
        for line in _BREAK.split(text)
        if line and not line.isspace()
    ]


def starts_anew(line: str) -> bool:
    """Whether a line shows by its beginning that it goes on with nothing."""
    return bool(_STARTS.match(line))


def lines_of(
    signal: Signal, number: int, nodes: Mapping[str, tuple[int, ...]], *, merged: bool = True
) -> Iterator[Line]:
    """The lines of one signal; a rank that a line names goes before the signal's own. ``merged``:
    the output of a rank may hold lines of the kernel and of a scheduler."""
    raw = clean(signal.text)
    if signal.source in ("log", "slurm") and (common := _common(raw)):
        raw = [line[common:] for line in raw]
    labels = signal.source in ("log", "slurm") and _labels(raw)
    if signal.source in _BARE:
        for order, text in enumerate(raw):
            yield Line(
                text, signal.source, signal.rank, signal.node, signal.time, order, number,
                signal.ours,
            )  # fmt: skip
        return
    for order, text in enumerate(_joined(raw)):
        text, rank, node = _stripped(text, signal, labels, nodes)
        source = _source(signal.source, text, rank) if merged else signal.source
        yield Line(text, source, rank, node, signal.time, order, number, signal.ours)


def _unpacked(line: str) -> str:
    """What a collector or a logger wrapped as an object of JSON."""
    if not line.startswith('{"') or len(line) > 1 << 20:
        return line
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line
    said = [record[key].rstrip("\n") for key in _SAID if isinstance(record.get(key), str)]
    if said and "log" not in record:
        rest = [f"{key}: {value}" for key, value in record.items()
                if key not in _SAID and isinstance(value, str) and len(value) < SHORT]  # fmt: skip
        said += [", ".join(rest)] if rest else []
    return "\n".join(said) or line


def _bounded(line: str) -> str:
    if len(line) <= LONGEST:
        return line
    return f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def _labels(raw: list[str]) -> bool:
    """Whether most lines begin with a label of srun, pdsh or a collector (``3: ``, ``host: ``)."""
    found = Counter(m.group() for line in raw if (m := _LABEL.match(line)))
    if len(found) > max(len(raw) / 2, 2):
        return False  # numbers of lines, not of ranks
    numbers = sum(count for label, count in found.items() if label.lstrip("[")[0].isdigit())
    hosts = sum(count for label, count in found.items() if re.search(r"\d", label))
    return len(raw) > 1 and max(numbers, hosts) >= 0.6 * len(raw)


def _common(raw: list[str]) -> int:
    """Length of what a collector put before every line: the same on all, and set off by a mark."""
    if len(raw) < MARKED:
        return 0
    first, last = min(raw), max(raw)
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    marks = list(_MARK.finditer(first, 0, min(same, 60)))
    if not marks or _RANKED.search(first, 0, marks[-1].end()) or _NUMBER.match(first):
        return 0
    return marks[-1].end()


def _joined(raw: list[str]) -> list[str]:
    """Lines that a terminal broke at its width are one again."""
    width = max(map(len, raw), default=0)
    full = sum(len(line) == width for line in raw)
    if width < NARROWEST or (full < 2 and width not in WIDTHS):
        return raw
    whole: list[str] = []
    open_line = False
    for line in raw:
        if open_line and not _STARTS.match(line):
            whole[-1] += line
        else:
            whole.append(line)
        open_line = len(line) == width
    return whole


def _stripped(
    text: str, signal: Signal, labels: bool, nodes: Mapping[str, tuple[int, ...]]
) -> tuple[str, int | None, str | None]:
    """A line without what stands before it, with the rank and node that this names."""
    rank, node, source = signal.rank, signal.node, signal.source
    if labels and not _KERNEL.match(text) and (label := _LABEL.match(text)):
        text = text[label.end() :]
        named = label["r0"] or label["r1"] or label["r2"]
        rank = int(named) if named and rank is None and source == "log" else rank
        node = label["host"] if label["host"] and node is None else node
    for _ in range(8):
        if text[:1].islower() and not _LOW_PREFIX.match(text):
            break
        found = _PREFIX.match(text)
        if found is None:
            break
        if found["rank"]:
            rank = int(found["r1"] or found["r2"])
        elif found["local"]:
            if found.group().startswith(("[PG", "[c10d")) or not _is_local(found.group()):
                break
            rank = _of_local(int(found["l1"]), node, nodes) if rank is None else rank
        elif found["syslog"] and node is None:
            node = found["host"] or found["host2"]
        text = text[found.end() :]
    if source == "log" and "[rank" in text and (glued := _GLUED.search(text)):
        rank, text = int(glued[1]), text[glued.end() :]
    if source == "log" and _ERRS.search(text) and (odd := _ODD.match(text)):
        said = _IN_PREFIX.search(odd.group())
        rank = int(said[1]) if said and rank is None else rank
        text = text[odd.end() :]
    if rank is None and source == "log" and "Rank " in text and (named := _SPOKEN.search(text)):
        rank = int(named[1])
    return text.rstrip(), rank, node


def _is_local(label: str) -> bool:
    return bool(re.match(r"\[(?:default|trainer|worker|role|node)\w*?\d+\]:", label))


def _of_local(local: int, node: str | None, nodes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The rank of a local rank: known where the node is, or where there is only one."""
    if node in nodes and node is not None:
        ranks = sorted(nodes[node])
    elif len(nodes) <= 1:
        ranks = sorted(next(iter(nodes.values()), ()))
        if not ranks:
            return local
    else:
        return None
    return ranks[local] if local < len(ranks) else None


def is_of_others(text: str) -> bool:
    """Whether a line is worded as the kernel's and Slurm's are."""
    return bool(_KERNEL.match(text) or _SLURM.match(text))


def _source(source: Source, text: str, rank: int | None) -> Source:
    """A merged log holds lines of the kernel, of Slurm and of agents, too."""
    if source != "log":
        return source
    if rank is None and text[:1] in "ah" and _RECORD.match(text):
        return "agent"
    first = text[:1]
    if first in _KERNEL_FIRST and _KERNEL.match(text):
        return "kernel"
    return "slurm" if first == "s" and _SLURM.match(text) else "log"
