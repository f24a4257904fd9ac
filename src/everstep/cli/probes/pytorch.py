"""Asks another process what torch is there: the command line itself never loads it.

Owns: the question and its answer's record. Called by: cli.doctor.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

TIMEOUT = 60.0
"""Seconds. A first import from a cold network disk takes long and is no fault of torch."""

_QUESTION = """
import json, time
start = time.perf_counter()
try:
    import torch
except ImportError as missing:
    print(json.dumps({"version": None, "problem": str(missing)}))
    raise SystemExit(0)
seconds = time.perf_counter() - start
distributed = torch.distributed.is_available()
reducer = getattr(torch.distributed, "Reducer", None) if distributed else None
print(json.dumps({
    "version": str(torch.__version__),
    "import_seconds": seconds,
    "distributed": distributed,
    "bucket_rebuild": all(
        hasattr(reducer, name) for name in ("_push_all_rebuilt_params", "_rebuild_buckets")
    ),
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}))
"""


class TorchMeasured(msgspec.Struct, frozen=True):
    """``version`` is None where torch cannot be imported; ``problem`` says why. ``bucket_rebuild``:
    the private calls are there that give DDP the same bucket order in every attempt."""

    version: str | None
    problem: str = ""
    import_seconds: float = 0.0
    distributed: bool = False
    bucket_rebuild: bool = False
    devices: int = 0


def ask_torch(python: str = sys.executable, *, timeout: float = TIMEOUT) -> TorchMeasured:
    """Import torch in a process of ``python`` and report on it; never raises for its failures."""
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return TorchMeasured(None, f"import torch took more than {timeout:g} s")
    lines = answer.stdout.splitlines()
    if answer.returncode or not lines:
        last = answer.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return TorchMeasured(None, f"import torch failed: {' '.join(last)}")
    return msgspec.json.decode(lines[-1], type=TorchMeasured)
