"""Addresses that open a store, and those that are refused with what is supported."""

from pathlib import Path

import pytest

from resilient_sdk.errors import ConfigError
from resilient_sdk.store import FileStore, open_store


def test_paths_and_file_urls_open_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a store"
    open_store(str(place)).put("k", b"1")
    assert isinstance(open_store(str(place)), FileStore)
    assert open_store(place.as_uri()).get("k") == b"1"
    assert open_store(f"file://localhost{tmp_path}/a%20store").get("k") == b"1"
    monkeypatch.chdir(tmp_path)
    assert open_store("a store").get("k") == b"1"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/a store").get("k") == b"1"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "  ",
        "ignite://host:10800",
        "s3://bucket/x",
        "file://host/x",
        "file:x",
        "file:///x?y",
        "ignite:host",
    ],
)
def test_anything_else_is_refused_and_says_what_is_supported(address: str) -> None:
    with pytest.raises(ConfigError, match=r"give a directory's path .* or file:///"):
        open_store(address)
