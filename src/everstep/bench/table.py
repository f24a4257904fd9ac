"""A result as text. Pure.

Owns: columns and units. Called by: :mod:`everstep.bench.main`.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.bench.figures import Spread
from everstep.bench.result import Figure, GoalReport, Result, Unit

HEADER = ("of", "what", "median", "min-max", "beside", "its median", "ratio", "ratio min-max")
LEFT = frozenset(("of", "what", "beside"))


def text(result: Result) -> str:
    """The whole result: machine, figures, goals, notes."""
    parts = [
        _machine(result),
        _columns([HEADER, *(_row(figure) for figure in result.figures)]),
        "\n".join(_goal(goal) for goal in result.goals),
        "\n".join(f"note: {note}" for note in result.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(value: float, unit: Unit) -> str:
    """A figure with its unit: ``1.234 s``, ``812.0 MB``, ``12 steps``, ``0.87``."""
    if unit == "bytes":
        return f"{value / 1e6:.1f} MB"
    if unit == "s":
        return f"{value:.3f} s"
    if unit == "ratio":
        return f"{value:.2f}"
    whole = f"{value:g}" if value == round(value) else f"{value:.1f}"
    return f"{whole} steps" if unit == "steps" else whole


def _machine(result: Result) -> str:
    m = result.machine
    parameters = ", ".join(f"{name} {value}" for name, value in result.parameters.items())
    return (
        f"everstep bench {result.bench}: everstep {m.everstep}, torch {m.torch}, "
        f"Python {m.python}, Linux {m.kernel}\n"
        f"{m.cores} cores ({m.cpu}), {m.memory_bytes / 1e9:.1f} GB of memory, "
        f"{m.filesystem} at {m.folder}, load {m.load:.2f} before the start\n"
        f"{parameters}"
    )


def _row(figure: Figure) -> tuple[str, ...]:
    unit = figure.unit
    beside = "" if figure.beside_value is None else show(figure.beside_value, unit)
    ratio = "" if figure.ratio is None else show(figure.ratio.median, "ratio")
    wide = "" if figure.ratio is None else _range(figure.ratio, "ratio")
    value = show(figure.value.median, unit)
    return (figure.of, figure.what, value, _range(figure.value, unit), figure.beside, beside,
            ratio, wide)  # fmt: skip


def _range(value: Spread, unit: Unit) -> str:
    if value.count == 1:
        return ""
    return f"{show(value.low, unit)} - {show(value.high, unit)}"


def _goal(goal: GoalReport) -> str:
    answer = "yes" if goal.reached else "NO "
    return f"{answer}  {goal.text} (measured {goal.value:.3g})"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for cell, width, name in zip(row, widths, HEADER, strict=True)
        ).rstrip()
        for row in rows
    )
