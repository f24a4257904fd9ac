"""The arguments of ``everstep bench``.

Owns: parsing them, progress on stderr, the result on stdout, the exit code: 0 measured, 1 not
measured (or, with --strict, a goal missed), 2 bad arguments. Called by: cli, ``python -m``.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from everstep.bench.result import Result
from everstep.bench.table import text
from everstep.errors import EverstepError, UsageError

MB = 10**6


def main(arguments: Sequence[str]) -> int:
    """Measure what the arguments ask for; the exit code."""
    args = _parser().parse_args(arguments)
    measure: Callable[[argparse.Namespace, Callable[[str], None]], Result] = args.measure
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:7.1f}s  {what}", file=sys.stderr, flush=True)

    try:
        with _ended_by_sigterm():
            result = measure(args, say)
    except EverstepError as error:
        print(f"everstep: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(_json(result) if args.json else text(result), end="", flush=True)
    return 1 if args.strict and not result.reached else 0


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that no process and no file is left."""

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _json(result: Result) -> str:
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="everstep bench",
        description="Measure everstep beside its peers and the machine's limits, in one run. "
        "Close everything else first: the load of the machine stands above the table.",
    )
    benches = parser.add_subparsers(title="benchmarks", required=True)
    _add_recover(benches)
    _add_save(benches)
    _add_memory(benches)
    _add_classify(benches)
    return parser


def _recover(args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    from everstep.bench.recover import RecoverSetup, measure

    return measure(
        RecoverSetup(args.pairs, args.every, args.width, args.layers, args.batch, args.folder), say
    )


def _save(args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    from everstep.bench.save import SaveSetup, measure

    return measure(
        SaveSetup(
            args.rounds, args.state_mb * MB, args.trained, args.batch, args.threads, args.folder
        ),
        say,
    )


def _memory(args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    from everstep.bench.memory import MemorySetup, measure

    return measure(MemorySetup(args.state_mb * MB, args.saves, args.leak_mb * MB, args.folder), say)


def _classify(args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    from everstep.bench.classify import ClassifySetup, measure

    return measure(ClassifySetup(args.rounds, args.log_mb * MB, args.folder), say)


def _add_recover(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _bench(benches, "recover", _recover, "kill a worker; seconds to the first new step")
    _number(parser, "pairs", 5, "kills of each system")
    _number(parser, "every", 20, "steps between two saves of both systems")
    _number(parser, "width", 128, "of the GPT")
    _number(parser, "layers", 2, "of the GPT")
    _number(parser, "batch", 8, "sequences of a rank in each step")


def _add_save(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _bench(benches, "save", _save, "one save: seconds blocked, drag, seconds to durable")
    _number(parser, "rounds", 7, "saves of each method")
    _number(parser, "state-mb", 1000, "size of the state in MB (10^6 bytes)")
    _number(parser, "batch", 64, "samples in each step; more make the steps longer")
    _number(parser, "threads", 0, "threads of the training; 0: one for each core")
    parser.add_argument(
        "--trained", type=float, default=0.2, metavar="SHARE",
        help="share of the state that is trained in each step; the rest is frozen (default: 0.2)",
    )  # fmt: skip


def _add_memory(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _bench(benches, "memory", _memory, "memory that everstep adds, and what saves leak")
    _number(parser, "state-mb", 500, "size of the state whose memory is measured, in MB")
    _number(parser, "saves", 200, "saves that must leak nothing")
    _number(parser, "leak-mb", 16, "size of the state of those saves, in MB")


def _add_classify(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _bench(benches, "classify", _classify, "judge large logs: seconds of a core, memory")
    _number(parser, "rounds", 5, "logs")
    _number(parser, "log-mb", 200, "size of a log in MB")


def _bench(
    benches: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    measure: Callable[[argparse.Namespace, Callable[[str], None]], Result],
    help_text: str,
) -> argparse.ArgumentParser:
    parser = benches.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(measure=measure)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="PATH",
        help="a folder on the disk that is to be measured; it is left as it was (default: .)",
    )  # fmt: skip
    return parser


def _number(parser: argparse.ArgumentParser, name: str, default: int, what: str) -> None:
    parser.add_argument(
        f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})"
    )
