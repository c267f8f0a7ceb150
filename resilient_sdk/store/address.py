"""From the text a user writes to a store."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from resilient_sdk.errors import ConfigError
from resilient_sdk.store.base import Store
from resilient_sdk.store.files import FileStore

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_SUPPORTED = "give a directory's path (/data/run-1) or file:///data/run-1"


def open_store(address: str) -> Store:
    """Returns the store at `address`: a path, or file:///path. Raises ConfigError for anything else, and
    StoreUnavailable where the place cannot be used."""
    return FileStore(_path(address))


def _path(address: str) -> Path:
    if not _SCHEME.match(address):
        if not address.strip():
            raise ConfigError("the store's address is empty", fix=_SUPPORTED)
        return Path(address).expanduser()
    parts = urlsplit(address)
    if parts.scheme != "file":
        raise ConfigError(f"no store for {address!r}", fix=_SUPPORTED)
    if (
        parts.netloc not in ("", "localhost")
        or not parts.path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(f"{address!r} names no local directory", fix=_SUPPORTED)
    return Path(unquote(parts.path))
