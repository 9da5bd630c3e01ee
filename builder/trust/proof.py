"""What an image carries below /opt/sglang-stack: its lock, the smoke test's report, what was patched. Read back, not believed.

It is read from a container that is never started, or out of the image's uppermost layer, which has nothing else.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final, cast

from builder.errors import BuildError, UsageError
from builder.files import sha256_hex
from builder.lock import Lock, parse_lock
from builder.trust.layout import FormError

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError, ZstdFile
else:
    from backports.zstd import ZstdError, ZstdFile

if TYPE_CHECKING:
    from builder.engine import Engine

UNPACK_ERRORS: Final = (OSError, EOFError, ValueError, zlib.error, ZstdError)
"""What a damaged layer raises when it is unpacked."""

FOLDER: Final = "opt/sglang-stack"
NAMES: Final = ("lock.json", "smoke.json", "spec.json", "patches.json", "patches.diff")
OPTIONAL: Final = frozenset({"patches.json", "patches.diff"})
"""There only where a matrix names patches."""

LAYER_LIMIT: Final = 256 << 20
"""Bytes that the proof layer may unpack to; that of the default matrix has 0.7 MB."""

FILE_LIMIT: Final = 64 << 20


@dataclass(frozen=True)
class Proof:
    """``installed`` are the wheels as installed (the lock's, patched ones in their place); ``reports`` one a patched package.

    ``digests`` are the sha256 of the files that were read, by name.
    """

    lock: Lock
    smoke: Mapping[str, Any]
    installed: tuple[Mapping[str, str], ...]
    reports: tuple[Mapping[str, Any], ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)


def parse_proof(files: Mapping[str, bytes]) -> Proof:
    """A proof from the files of an image. Raises `FormError` where one is missing or is not what it is called."""
    for name in NAMES:
        if name not in files and name not in OPTIONAL:
            raise FormError(f"the image has no /{FOLDER}/{name}")
    try:
        lock = parse_lock(files["lock.json"].decode(), f"/{FOLDER}/lock.json")
    except (UsageError, UnicodeDecodeError) as error:
        because = f": {error.because}" if isinstance(error, UsageError) and error.because else ""
        raise FormError(f"/{FOLDER}/lock.json is no lock{because}") from error
    smoke, spec = _json(files, "smoke.json"), _json(files, "spec.json")
    reports = _json(files, "patches.json") if "patches.json" in files else []
    if not isinstance(smoke, dict) or not isinstance(smoke.get("checks"), list):
        raise FormError(f"/{FOLDER}/smoke.json is no report of the smoke test")
    artefacts = spec.get("artefacts") if isinstance(spec, dict) else None
    if not isinstance(artefacts, list) or not all(_texts(item) for item in artefacts):
        raise FormError(f"/{FOLDER}/spec.json names no wheels")
    if not isinstance(reports, list) or not all(_report(item) for item in reports):
        raise FormError(f"/{FOLDER}/patches.json is no list of reports")
    digests = {name: sha256_hex(data) for name, data in files.items() if name in NAMES}
    return Proof(lock, smoke, tuple(artefacts), tuple(reports), digests)


def _json(files: Mapping[str, bytes], name: str) -> Any:
    try:
        return json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise FormError(f"/{FOLDER}/{name} is no JSON") from error


def _report(item: object) -> bool:
    sites = item.get("sites") if isinstance(item, dict) else None
    return isinstance(sites, list) and all(isinstance(s, dict) and isinstance(s.get("set"), str) for s in sites)


def _texts(item: object) -> bool:
    wanted = ("name", "version", "file", "sha256")
    return isinstance(item, dict) and all(isinstance(item.get(key), str) for key in wanted)


def engine_proof(engine: Engine, image: str) -> Proof:
    """The proof of an image of an engine. Raises `FormError`, and `BuildError` where the engine does not answer."""
    files = {}
    for name in NAMES:
        try:
            files[name] = engine.read_file(image, f"/{FOLDER}/{name}")
        except BuildError as error:
            if " has no " not in error.what:
                raise
    return parse_proof(files)


def layer_proof(data: bytes) -> Proof:
    """The proof out of the image's uppermost layer, compressed or not. Raises `FormError`."""
    plain = unpacked(data, LAYER_LIMIT)
    files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
            for member in archive:
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                if folder != FOLDER or name not in NAMES:
                    continue
                if not member.isreg() or member.size > FILE_LIMIT or name in files:
                    raise FormError(f"/{FOLDER}/{name} is no plain file, or is there twice")
                reader = archive.extractfile(member)
                assert reader is not None
                files[name] = reader.read()
    except (tarfile.TarError, EOFError, OverflowError) as error:
        raise FormError(f"the uppermost layer is no tar archive: {error}") from error
    return parse_proof(files)


def unpacked(data: bytes, limit: int) -> bytes:
    """A layer without its compression, `limit` bytes at most. Raises `FormError`."""
    try:
        plain = plain_reader(io.BufferedReader(io.BytesIO(data))).read(limit + 1)
    except UNPACK_ERRORS as error:
        raise FormError(f"the layer cannot be unpacked: {str(error)[:200]}") from error
    if len(plain) > limit:
        raise FormError(f"the layer unpacks to more than {limit:,} bytes")
    return plain


def plain_reader(file: io.BufferedReader) -> IO[bytes]:
    """Reads a layer without its compression: gzip, zstd (whose window takes 128 MB at most) or none, by its first bytes."""
    start = file.peek(4)[:4]
    if start == b"\x28\xb5\x2f\xfd":
        return cast(IO[bytes], ZstdFile(file))
    return cast(IO[bytes], gzip.open(file)) if start[:2] == b"\x1f\x8b" else file


Licences = Mapping[str, tuple[str, ...]]
"""Package (canonical name) → what its METADATA says of its licence: an expression, a name, or classifiers."""

_LICENCES = """
import importlib.metadata as m, json, re
found = {}
for d in m.distributions():
    head = d.metadata
    said = head.get("License-Expression") or head.get("License") or ""
    rows = [c.rsplit(" :: ", 1)[-1] for c in head.get_all("Classifier") or () if c.startswith("License :: ")]
    words = [said] if said and said != "UNKNOWN" and "\\n" not in said and len(said) < 100 else rows
    found[re.sub(r"[-_.]+", "-", head["Name"]).lower()] = words
print("licences " + json.dumps(found, sort_keys=True))
"""


def licences(engine: Engine, image: str, label: str = "") -> Licences:
    """What the installed packages say of their licences, asked in a container without network; a second for 200 packages."""
    for line in engine.run(image, ["python3", "-P", "-c", _LICENCES], user="65534:65534", label=label):
        if isinstance(line, str) and line.startswith("licences "):
            return {name: tuple(words) for name, words in json.loads(line.removeprefix("licences ")).items()}
    raise BuildError("the image does not say its packages' licences", where=image)
