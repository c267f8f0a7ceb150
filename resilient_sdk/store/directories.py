"""Directories of our own: private, writable, refused in one clear line where they are not."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilient_sdk.errors import StoreFull, StoreUnavailable

_FULL = (errno.ENOSPC, errno.EDQUOT)


def own_directory(path: Path) -> None:
    """Makes `path` (0700) or checks that an existing one is a directory of this user.

    Raises StoreUnavailable. A stranger's directory is refused because whoever owns it could replace what is
    read from it; /dev/shm and /tmp are open to all.
    """
    with io_errors(f"cannot use {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        owner = path.stat().st_uid
    if owner != os.geteuid():
        raise StoreUnavailable(
            f"{path} belongs to user {owner}, this process is user {os.geteuid()}",
            fix="give a directory of your own, or chown this one",
            path=str(path),
        )


@contextmanager
def io_errors(doing: str, fix: str = "") -> Iterator[None]:
    """Turns an OSError into StoreFull or StoreUnavailable, with `doing` as the line's start."""
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        kind = StoreFull if full else StoreUnavailable
        remedy = fix or (
            "free some room or lower the budget" if full else "check that it exists and is writable"
        )
        raise kind(f"{doing}: {error.strerror or error}", fix=remedy, errno=error.errno) from error
