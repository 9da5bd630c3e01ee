"""The proof out of a layer, whatever it is compressed with, and never more of it than is allowed."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder.trust.layout import FormError
from builder.trust.proof import layer_proof, parse_proof, unpacked
from tests.trust_made import MadeImage, tar_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, zstd.compress], ids=["none", "gzip", "zstd"])
def test_compressed_or_not(pack: Callable[[bytes], bytes]) -> None:
    image = MadeImage()
    found = layer_proof(pack(image.layers[-1]))
    assert found.lock == image.lock
    assert set(found.digests) == {"lock.json", "smoke.json", "spec.json"}


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, zstd.compress], ids=["none", "gzip", "zstd"])
def test_a_layer_that_unpacks_to_too_much(pack: Callable[[bytes], bytes]) -> None:
    data = pack(b"\0" * 5000)
    assert unpacked(data, 5000) == b"\0" * 5000
    with pytest.raises(FormError, match="the layer unpacks to more than 4,999 bytes"):
        unpacked(data, 4999)


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
def test_a_damaged_layer(pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FormError, match="the layer cannot be unpacked: "):
        unpacked(pack(bytes(range(256)) * 9)[:-9], 5000)


def test_a_layer_that_is_no_archive() -> None:
    with pytest.raises(FormError, match="the uppermost layer is no tar archive: "):
        layer_proof(b"x" * 2000)


def test_a_link_in_place_of_a_file() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo("opt/sglang-stack/lock.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(FormError, match=r"/opt/sglang-stack/lock.json is no plain file, or is there twice"):
        layer_proof(buffer.getvalue())


def test_other_files_do_not_count() -> None:
    image = MadeImage()
    more = {"opt/sglang-stack/more/lock.json": b"x", "lock.json": b"y", "opt/sglang-stack/about.json": b"z"}
    files = {f"./opt/sglang-stack/{name}": data for name, data in image.files.items()}
    assert layer_proof(tar_of({**more, **files})) == parse_proof(image.files)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300), st.integers(0, 2))
def test_any_bytes(data: bytes, how: int) -> None:
    heads = (b"", b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd")
    with pytest.raises(FormError):
        layer_proof(heads[how] + data)
