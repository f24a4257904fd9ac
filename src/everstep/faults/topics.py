"""Topics: what a line may speak of besides the catalogue's faults.

Owns: the topics' patterns (of RE2). Never does: search. Called by: :mod:`everstep.faults.catalog`,
which looks for them and for its own patterns in one search; readers name the topic that they read.

Most lines of most ranks speak of nothing. A reader that looks at its topic alone does not search
all of them again, so the time to judge grows with what is told and not with readers times lines.
"""

from __future__ import annotations

TOPICS: dict[str, str] = {
    "collective": (
        r"(?i)missing|barrier|caused by|culprit|laggard|suspect|straggl|join|waiting for"
        r"|timeout from|WorkNCCL|enqueued|dump signal|GIL|is running|watchdog got stuck|First PG"
    ),
    "traceback": (
        r"Error|Exception|Traceback|Interrupt|File \"|above exception|[│|] "
        r"|[a-z]\.[A-Z]\w+(?:: |$)"
    ),
    "end of a process": (
        r"(?i)exitcode|exit code|exited |return code|terminated with|killed by signal|died with"
        r"|srun: error"
        r"|^\s*(?:time|host|rank|exitcode)\s+: |closing signal"
    ),
    "restart": (
        r"(?i)will restart worker group|restarting worker group|starting worker group"
        r"|restart_count=[1-9]|attempt \d+ ended: .*restarting|decided: .* as attempt \d"
        r"|DUE TO JOB REQUEUE"
    ),
    "end of the run": r"(?i)train|final|max_steps|finish|complete|^done|step:? \d+ ?(?:/|of) ?\d",
    "place": (
        r"(?i)GPU|index|Using"
        r"|\brank \d+(?:\b|:)[^\n]{0,60}(?:\d+\.\d+|runs|running|listens|pid)"
    ),
    "loss": r"(?i)\bloss\b",
    "checksum": r"(?i)checksum|digest| hash",
    "compute": r"\bcompute_s=",
}
