"""The exception tree. Every error everstep raises on purpose is one of these.

Owns: the classes, their stable codes (``EVS-nnn``) and what a handler may do with them
(``retryable``, ``blame``). Never does: I/O, formatting for a terminal. Called by: every room.

Numbering: 1xx the caller's arguments or objects, 2xx the store, 3xx snapshots and the keeper,
4xx restore, 5xx the agent, 6xx the drill, 7xx the benchmarks, 8xx the judgement of faults, 9xx what
training computes. A code is never reused for another meaning.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Blame = Literal["user", "storage", "node", "everstep", "none"]


class EverstepError(Exception):
    """Base of the tree. ``str(error)`` is ``<code>: <what happened>. <what to do next>``."""

    code: ClassVar[str] = "EVS-000"
    retryable: ClassVar[bool] = False
    blame: ClassVar[Blame] = "everstep"

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.code}: {self.what}" + (f" {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.hint)


def _rebuild(cls: type[EverstepError], what: str, hint: str) -> EverstepError:
    return cls(what, hint=hint)


class UsageError(EverstepError, ValueError):
    """A bad argument, setting or call order."""

    code: ClassVar[str] = "EVS-100"
    blame: ClassVar[Blame] = "user"


class UnsavableObject(UsageError):
    """An attached object's state holds something that no safe record can hold."""

    code: ClassVar[str] = "EVS-101"


class PendingGradients(UsageError):
    """A step boundary with gradients accumulated since the last optimizer step."""

    code: ClassVar[str] = "EVS-102"


class BadStoreUrl(UsageError):
    """The store's URL cannot be understood or names a backend that is not there."""

    code: ClassVar[str] = "EVS-103"


class BadName(UsageError):
    """A job name or key holds characters that could leave its folder."""

    code: ClassVar[str] = "EVS-104"


class InexactData(UsageError):
    """The attached loader's position cannot be restored exactly."""

    code: ClassVar[str] = "EVS-105"


class StoreError(EverstepError):
    """The store failed or refused."""

    code: ClassVar[str] = "EVS-200"
    retryable: ClassVar[bool] = True
    blame: ClassVar[Blame] = "storage"


class ObjectMissing(StoreError):
    """The key does not exist."""

    code: ClassVar[str] = "EVS-201"
    retryable: ClassVar[bool] = False


class ObjectExists(StoreError):
    """A create-only write found other bytes under its key."""

    code: ClassVar[str] = "EVS-202"
    retryable: ClassVar[bool] = False


class StaleVersion(StoreError):
    """A conditional update of a ref lost against another writer."""

    code: ClassVar[str] = "EVS-203"
    retryable: ClassVar[bool] = False


class StoreNotWritable(StoreError):
    """The store's folder cannot be written by this user."""

    code: ClassVar[str] = "EVS-204"
    retryable: ClassVar[bool] = False
    blame: ClassVar[Blame] = "user"


class StoreFull(StoreError):
    """No space, inodes or quota left."""

    code: ClassVar[str] = "EVS-205"


class CorruptObject(StoreError):
    """Bytes read do not match their digest, checksum, length or format."""

    code: ClassVar[str] = "EVS-206"
    retryable: ClassVar[bool] = False


class NewerFormat(StoreError):
    """An object was written by a newer format than this reader knows."""

    code: ClassVar[str] = "EVS-207"
    retryable: ClassVar[bool] = False
    blame: ClassVar[Blame] = "user"


class CommitRefused(StoreError):
    """A commit that must not happen: a tombstone, a higher claim, or a branch in the way."""

    code: ClassVar[str] = "EVS-208"
    retryable: ClassVar[bool] = False


class KeeperError(EverstepError):
    """The keeper failed, is not reachable or refused."""

    code: ClassVar[str] = "EVS-300"
    retryable: ClassVar[bool] = True
    blame: ClassVar[Blame] = "node"


class MemoryTooSmall(KeeperError):
    """The slots do not fit into the memory this process may use."""

    code: ClassVar[str] = "EVS-301"
    retryable: ClassVar[bool] = False
    blame: ClassVar[Blame] = "user"


class NotDurable(KeeperError):
    """The last checkpoint could not be committed before its deadline."""

    code: ClassVar[str] = "EVS-303"
    blame: ClassVar[Blame] = "storage"


class RestoreError(EverstepError):
    """The state could not be put back."""

    code: ClassVar[str] = "EVS-400"


class NoRecoveryPoint(RestoreError):
    """A recovery point is expected and none verifies."""

    code: ClassVar[str] = "EVS-401"
    blame: ClassVar[Blame] = "storage"


class WorldChanged(RestoreError):
    """The saved state belongs to another world size."""

    code: ClassVar[str] = "EVS-402"
    blame: ClassVar[Blame] = "user"


class StateMismatch(RestoreError):
    """Names, shapes or dtypes of the saved state and the attached objects differ."""

    code: ClassVar[str] = "EVS-403"
    blame: ClassVar[Blame] = "user"


class AgentError(EverstepError):
    """The launcher failed or refused."""

    code: ClassVar[str] = "EVS-500"


class JobOwned(AgentError):
    """Another live agent owns the job."""

    code: ClassVar[str] = "EVS-501"
    blame: ClassVar[Blame] = "user"


class NoProgress(AgentError):
    """Too many attempts in a row that did not get further."""

    code: ClassVar[str] = "EVS-502"
    blame: ClassVar[Blame] = "user"


class RepeatedFailure(AgentError):
    """The same failure came again at the same step: no restart helps."""

    code: ClassVar[str] = "EVS-504"
    blame: ClassVar[Blame] = "user"


class RendezvousLost(AgentError):
    """The agents of the job do not hear of each other any more."""

    code: ClassVar[str] = "EVS-505"
    retryable: ClassVar[bool] = True


class AttemptLived(AgentError):
    """The attempt's number belongs to one that was lived through already, in memory."""

    code: ClassVar[str] = "EVS-503"
    retryable: ClassVar[bool] = True


class DrillError(EverstepError):
    """The drill itself could not go on: nothing was proved, neither good nor bad."""

    code: ClassVar[str] = "EVS-600"


class BenchError(EverstepError):
    """A benchmark could not go on: nothing was measured, neither good nor bad."""

    code: ClassVar[str] = "EVS-700"


class BadCatalog(UsageError):
    """A file of failure signatures cannot be used; file and entry are named."""

    code: ClassVar[str] = "EVS-800"


class BadIncident(UsageError):
    """A file of incidents cannot be read; file and line are named."""

    code: ClassVar[str] = "EVS-801"


class NonFinite(EverstepError):
    """A logged figure or a parameter is no finite number: the step is not kept.

    ``rank``, ``step``, ``figure`` and ``value`` say whose, when, which and what. Whether program,
    data or device is to blame nobody knows yet: an exact replay of the step tells.
    """

    code: ClassVar[str] = "EVS-900"
    retryable: ClassVar[bool] = True
    blame: ClassVar[Blame] = "none"

    rank: int = 0
    step: int = 0
    figure: str = ""
    value: float = float("nan")

    @classmethod
    def at(cls, *, rank: int, step: int, figure: str, value: float) -> NonFinite:
        """The error of one rank's figure at a step."""
        made = cls(
            f"rank {rank}: non-finite value at step {step}: {figure} is {value}. The step is not "
            "kept.",
            hint="A restart goes on from a state before it. To be told of such values and go on, "
            "set EVERSTEP_NONFINITE to warn.",
        )
        made.rank, made.step, made.figure, made.value = rank, step, figure, value
        return made

    def __reduce__(self) -> tuple[object, ...]:
        about = {name: getattr(self, name) for name in ("rank", "step", "figure", "value")}
        return _rebuild, (type(self), self.what, self.hint), about
