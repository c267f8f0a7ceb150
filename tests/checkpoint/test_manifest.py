"""Manifests and references: round trip, signature, damage, versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_sdk.checkpoint.layout import Place, Table
from resilient_sdk.checkpoint.manifest import (
    Manifest,
    ManifestRef,
    chunk_prefix,
    decode,
    encode,
    parse_ref,
    ref_of,
)
from resilient_sdk.errors import Corrupt, NewerFormat

KEY = bytes(range(32))


def manifest(*, step: int = 7, names: tuple[str, ...] = ("a", "ü\n")) -> Manifest:
    arrays = tuple(Place(name, 64 * number, 10) for number, name in enumerate(names))
    nbytes = 64 * len(names) + 5
    table = Table(step, 3, nbytes, arrays, 5, "0" * 64, 4096, ("ab" * 16,) * -(-nbytes // 4096))
    return Manifest("run-1", 1, 4, table)


@given(step=st.integers(0, 10**13), names=st.lists(st.text(), max_size=5, unique=True).map(tuple))
def test_round_trip(step: int, names: tuple[str, ...]) -> None:
    written = manifest(step=step, names=names)
    assert decode(encode(written, KEY), KEY) == written
    assert encode(written, KEY) == encode(written, KEY)


def test_every_flipped_byte_and_every_cut_is_found() -> None:
    data = encode(manifest(), KEY)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises((Corrupt, NewerFormat)):
            decode(bytes(damaged), KEY)
        with pytest.raises(Corrupt):
            decode(data[:position], KEY)
    with pytest.raises(Corrupt):
        decode(data + b" ", KEY)


def test_only_the_owners_signature_counts() -> None:
    with pytest.raises(Corrupt, match="signature"):
        decode(encode(manifest(), KEY), b"another key, as long")
    with pytest.raises(ValueError, match="16 bytes"):
        encode(manifest(), b"short")


def test_a_newer_format_is_named_whatever_its_body() -> None:
    with pytest.raises(NewerFormat, match=r"format 12, this version reads up to 1") as caught:
        decode(b"resilient-manifest 12\n\x00\xff nothing we know", KEY)
    assert (caught.value.evidence["found"], caught.value.evidence["known"]) == (12, 1)
    with pytest.raises(Corrupt):
        decode(b"resilient-manifest 0\n" + b"0" * 64 + b"\n{}", KEY)


@pytest.mark.parametrize(
    "body", ["{}", "[]", "nonsense", '{"rank":0,"run":"r","world_size":1,"table":{"step":1}}']
)
def test_signed_nonsense_is_corrupt(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_sdk.checkpoint.manifest.canonical", lambda _: body.encode())
    data = encode(manifest(), KEY)
    with pytest.raises(Corrupt):
        decode(data, KEY)


@pytest.mark.parametrize(
    "change",
    [{"nbytes": 5000}, {"chunks": []}, {"chunk_nbytes": 0}, {"scalars_nbytes": 999}, {"arrays": [["a", 0,
    9999]]},
     {"arrays": [["a", -1, 1]]}, {"step": "x"}, {"arrays": [["a"]]}],
)  # fmt: skip
def test_a_table_that_does_not_add_up_is_corrupt(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Table.record
    monkeypatch.setattr(Table, "record", lambda self: record(self) | change)
    data = encode(manifest(), KEY)
    with pytest.raises(Corrupt):
        decode(data, KEY)


def test_keys() -> None:
    written = manifest(step=12)
    ref = ref_of(written, encode(written, KEY))
    assert ref.key == f"rank-00001/manifests/000000000012-3-{ref.digest}"
    assert parse_ref(ref.key) == ref
    assert chunk_prefix(1) == "rank-00001/chunks/"
    for key in ("head", "rank-00001/chunks/ab", ref.key + "0", ref.key.replace("-3-", "--")):
        assert parse_ref(key) is None
    assert ManifestRef(0, 9, 1, "").order < ManifestRef(0, 5, 2, "").order
