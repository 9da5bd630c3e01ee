"""Manifests from anybody: read as what they have to be, or refused in words."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder.trust.layout import (
    ENVELOPE,
    MANIFEST,
    FormError,
    digest_of,
    is_list,
    load,
    make_attachment,
    parse_manifest,
    tag_of,
)
from builder.trust.material import by_kind
from tests.made import sha

BLOB = {"mediaType": "x", "digest": f"sha256:{sha('x')}", "size": 1}


def manifest(**fields: object) -> bytes:
    return json.dumps({"schemaVersion": 2, "config": BLOB, "layers": [BLOB], **fields}).encode()


def test_a_manifest() -> None:
    found = parse_manifest(manifest())
    assert (found.media_type, found.config.digest, len(found.layers)) == (MANIFEST, BLOB["digest"], 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (manifest(schemaVersion=1), "schemaVersion is 1, not 2"),
        (manifest(mediaType="text/plain"), "its media type is `text/plain`"),
        (manifest(layers=None), "it has no list of layers, or too long a one"),
        (manifest(layers=[BLOB] * 201), "it has no list of layers, or too long a one"),
        (manifest(config=1), "a descriptor is no object"),
        (manifest(config={**BLOB, "digest": "sha256:../../etc"}), "a descriptor has no sha256: 'sha256:../../etc'"),
        (manifest(config={**BLOB, "digest": f"sha512:{sha('x')}"}), f"a descriptor has no sha256: 'sha512:{sha('x')}'"),
        (manifest(config={**BLOB, "size": -1}), "a descriptor's size is '-1'"),
        (manifest(config={**BLOB, "size": True}), "a descriptor's size is 'True'"),
        (manifest(config={**BLOB, "annotations": {"a": 1}}), "a descriptor's annotations are no texts"),
        (b"[]", "it is no JSON object"),
        (b"[" * 100_000, "it is nested too deep"),
        (b"\xff", "it is no JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b'{"schemaVersion": 2, "schemaVersion": 2}', "a key is there twice"),
        (b" " * (16 << 20) + b"{}", "it has 16,777,218 bytes, more than 16,777,216"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_none(data: bytes, words: str) -> None:
    with pytest.raises(FormError) as caught:
        parse_manifest(data)
    assert str(caught.value) == words


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([BLOB["digest"], MANIFEST, 2]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*BLOB, "layers", "config", "manifests"]), inner),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["schemaVersion", "config", "layers", "mediaType", "manifests"]), JSON))
def test_any_json(value: object) -> None:
    data = json.dumps(value).encode()
    is_list(data)
    for read in (parse_manifest, by_kind):
        try:
            read(data)
        except FormError as error:
            assert str(error)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    is_list(data)
    try:
        load(data)
    except FormError as error:
        assert str(error)


def test_what_is_attached_has_no_time() -> None:
    one = make_attachment(tag_of(digest_of(b"x"), "att"), ENVELOPE, [(b"a", {"k": "v"})])
    assert one.tag == f"sha256-{digest_of(b'x')[7:]}.att"
    assert [(item.annotations, data) for item, data in one.entries] == [({"k": "v"}, b"a")]
    config = json.loads(one.blobs[parse_manifest(one.manifest).config.digest])
    assert config["created"] == "0001-01-01T00:00:00Z"
