"""One name for one store, however its path was written.

Owns: the text by which processes of one job find each other. Never does: look at a file system
(how a path is resolved is passed in). Called by: the keeper's room, for the socket and the log.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote, urlsplit


def canonical_store(url: str, resolve: Callable[[str], str]) -> str:
    """The store ``url`` as every process names it: ``file://`` and an absolute path without
    symbolic links for a store on this machine, any other URL as it is.

    ``resolve`` makes a path absolute and free of links (``os.path.realpath`` after
    ``os.path.expanduser``).
    """
    if "://" not in url:
        return f"file://{resolve(url)}"
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return f"file://{resolve(unquote(parts.path))}"
    return url
