"""Wheels as files: names, METADATA, RECORD, and the same wheel again with other contents.

The format is the binary distribution format of the packaging specifications (PEP 427, RECORD as in PEP 376).
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import os
import posixpath
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from builder.errors import IntegrityError, UsageError
from builder.zipdir import sound

_CHUNK = 1 << 20
_TIME = (1980, 1, 1, 0, 0, 0)
"""The first time that a zip archive can state."""

# RECORD cannot hold its own hash, and its signatures are over it.
_OF_RECORD = ("RECORD", "RECORD.jws", "RECORD.p7s")
_LOCAL = re.compile(r"[a-z0-9]+(\.[a-z0-9]+)*", re.ASCII)
# What `zipfile` raises on a file that is no wheel: damaged, cut off, encrypted, of an unknown compression.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError, KeyError)


@dataclass(frozen=True)
class Entry:
    """A member of a wheel as RECORD states it. ``digest`` is `sha256=` and unpadded base64, ``size`` in bytes."""

    digest: str
    size: int
    executable: bool = False


@dataclass(frozen=True)
class Wheel:
    """A wheel on disk whose every byte is the one that its RECORD states.

    ``name`` is normalised; ``version`` is the file name's, ``metadata_version`` the one that an installer reports.
    ``entries`` are the members that RECORD has a hash for, in no order that matters.
    """

    path: Path
    name: str
    version: str
    metadata_version: str
    info: str
    entries: Mapping[str, Entry]

    def read(self, member: str) -> bytes:
        """The content of a member. Raises `KeyError` for one that RECORD does not have."""
        if member not in self.entries:
            raise KeyError(member)
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(member)

    def read_all(self, members: list[str]) -> dict[str, bytes]:
        """The contents of several members, in that order; the archive's directory is read once."""
        with zipfile.ZipFile(self.path) as archive:
            return {member: archive.read(member) for member in members if member in self.entries}


@dataclass(frozen=True)
class Repacked:
    """A wheel that `repack` wrote. ``size`` in bytes."""

    path: Path
    version: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        """The file's name."""
        return self.path.name


def read_wheel(path: Path) -> Wheel:
    """Read the wheel at ``path`` and compare every member with RECORD.

    Raises `IntegrityError` for one that is damaged, `UsageError` for a file that is not called as a wheel.
    """
    try:
        name, version = parse_wheel_filename(path.name)[:2]
    except InvalidWheelFilename:
        raise UsageError(f"`{path.name}` is not a wheel's file name", where=str(path)) from None
    try:
        with sound(zipfile.ZipFile(path)) as archive:
            infos = _members(path, archive)
            folder = _info_folder(path, infos, name, version)
            metadata = _metadata_version(path, archive.read(f"{folder}/METADATA"), name, version)
            entries = _entries(path, archive, infos, folder)
    except _DAMAGED as error:
        raise _damaged(path, str(error) or type(error).__name__) from error
    except OSError as error:
        raise UsageError(f"`{path.name}` cannot be read", where=str(path), because=str(error)) from error
    return Wheel(path, name, str(version), metadata, folder, entries)


def with_local(version: str, local: str) -> str:
    """``version`` with a local part, or with its own one made longer: `0.3.21+cu130` → `0.3.21+cu130.sm120` (PEP 440).

    Raises `ValueError` for a local part that no version can have.
    """
    if not _LOCAL.fullmatch(local):
        raise ValueError(f"{local!r} cannot be a local version")
    parsed = Version(version)
    return str(Version(f"{parsed.public}+{parsed.local}.{local}" if parsed.local else f"{parsed.public}+{local}"))


def repack(
    source: Path | Wheel, folder: Path, replaced: Mapping[str, bytes], added: Mapping[str, bytes], local: str
) -> Repacked:
    """Write ``source`` with other contents and a local version into ``folder``; the same input gives the same bytes.

    Members are stored, not compressed: what zlib makes of a byte differs from one zlib to the next, and the image has
    the members alone. Order by name with the dist-info folder last and RECORD at the end, times and modes fixed,
    executable bits kept; signatures of the old RECORD are left out. Raises `IntegrityError` for a damaged wheel,
    `UsageError` for a member that cannot be replaced or added, `OSError` for a full disk (nothing is left behind then).
    """
    wheel = source if isinstance(source, Wheel) else read_wheel(source)
    _refuse_members(wheel, replaced, added)
    version = with_local(wheel.version, local)
    parts = wheel.path.name.split("-")
    target = folder / "-".join([parts[0], version, *parts[2:]])
    info = f"{wheel.info.removesuffix('.dist-info').rpartition('-')[0]}-{version}.dist-info"
    names = {member: _renamed(wheel, member, info) for member in [*wheel.entries, *added]}
    metadata = f"{wheel.info}/METADATA"
    new = {**replaced, **added, metadata: _with_version(wheel.read(metadata), version)}
    order = sorted(names, key=lambda member: (names[member].startswith(f"{info}/"), names[member]))
    rows: list[tuple[str, str, int | str]] = []
    with _beside(target) as file, zipfile.ZipFile(wheel.path) as old:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for member in order:
                entry = wheel.entries.get(member)
                if member in new:
                    content = new[member]
                    archive.writestr(_zip_info(names[member], entry, len(content)), content)
                    rows.append((names[member], digest(content), len(content)))
                    continue
                assert entry is not None
                with old.open(member) as reader, archive.open(_zip_info(names[member], entry), "w") as writer:
                    while chunk := reader.read(_CHUNK):
                        writer.write(chunk)
                rows.append((names[member], entry.digest, entry.size))
            rows.append((f"{info}/RECORD", "", ""))
            record = io.StringIO()
            csv.writer(record, lineterminator="\n").writerows(rows)
            text = record.getvalue().encode()
            archive.writestr(_zip_info(f"{info}/RECORD", None, len(text)), text)
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    return Repacked(target, version, sha256, size)


def digest(data: bytes) -> str:
    """`sha256=` and unpadded URL-safe base64, as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _damaged(path: Path, because: str) -> IntegrityError:
    return IntegrityError(
        f"`{path.name}` is a damaged wheel",
        where=str(path),
        because=because,
        hint="remove the file, so that it is fetched again",
    )


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Every file of the archive by name; folders are no members of a wheel."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename
        if name in found:
            raise _damaged(path, f"it has `{name}` twice")
        if (
            name.startswith("/")
            or "\\" in name
            or posixpath.normpath(name) != name.removesuffix("/")
            or ".." in name.split("/")
        ):
            raise _damaged(path, f"`{name}` does not stay inside of it")
        if not info.is_dir():
            found[name] = info
    return found


def _info_folder(path: Path, infos: Mapping[str, object], name: str, version: Version) -> str:
    """The dist-info folder's name; there is one, and it is the file name's."""
    folders = sorted({member.split("/")[0] for member in infos if ".dist-info/" in member and member.count("/") >= 1})
    folders = [folder for folder in folders if folder.endswith(".dist-info")]
    if len(folders) != 1:
        raise _damaged(path, f"it has {len(folders)} dist-info folders: {', '.join(folders) or 'none'}")
    said_name, _, said_version = folders[0].removesuffix(".dist-info").rpartition("-")
    if canonicalize_name(said_name) != name or not _same_release(said_version, version):
        raise _damaged(path, f"its file name says {name} {version}, its folder `{folders[0]}`")
    for member in ("METADATA", "WHEEL", "RECORD"):
        if f"{folders[0]}/{member}" not in infos:
            raise _damaged(path, f"it has no {member}")
    return folders[0]


def _same_release(said: str, version: Version) -> bool:
    """Equal, or equal but for a local part that the inside of some wheels lacks (sgl-kernel's +cu130, sglang #14327)."""
    try:
        parsed = Version(said)
    except ValueError:
        return False
    return parsed == version or str(parsed) == version.public


def _metadata_version(path: Path, metadata: bytes, name: str, version: Version) -> str:
    head = _head(metadata).decode("utf-8", errors="replace")
    said = {
        key: re.findall(rf"^{key}:[ \t]*(.*?)[ \t]*\r?$", head, re.MULTILINE | re.IGNORECASE)
        for key in ("Name", "Version")
    }
    if [canonicalize_name(value) for value in said["Name"]] != [name] or len(said["Version"]) != 1:
        raise _damaged(path, f"its METADATA is not {name}'s")
    if not _same_release(said["Version"][0], version):
        raise _damaged(path, f"its file name says version {version}, its METADATA {said['Version'][0]}")
    return str(said["Version"][0])


def _head(metadata: bytes) -> bytes:
    """The header of METADATA, up to the first empty line: the text after it may hold anything."""
    return re.split(rb"\r?\n\r?\n", metadata, maxsplit=1)[0]


def _entries(
    path: Path, archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo], folder: str
) -> dict[str, Entry]:
    """RECORD's lines, each compared with the member that it names."""
    own = {f"{folder}/{name}" for name in _OF_RECORD}
    text = io.StringIO(archive.read(f"{folder}/RECORD").decode("utf-8"), newline="")
    entries: dict[str, Entry] = {}
    for row in csv.reader(text):
        if not row:
            continue
        if len(row) != 3:
            raise _damaged(path, f"RECORD has a line with {len(row)} fields: {','.join(row)[:80]}")
        member, said, size = row
        if member in own:
            continue
        if member in entries:
            raise _damaged(path, f"RECORD has `{member}` twice")
        if member not in infos:
            raise _damaged(path, f"RECORD names `{member}`, which is not in the wheel")
        info = infos[member]
        if not said.startswith("sha256="):
            raise _damaged(path, f"RECORD has no sha256 of `{member}`")
        if size and size != str(info.file_size):
            raise _damaged(path, f"`{member}` has {info.file_size} bytes, RECORD says {size}")
        with archive.open(member) as file:
            found = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                found.update(chunk)
        if base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode() != said.removeprefix("sha256=").rstrip("="):
            raise _damaged(path, f"`{member}` is not the file that RECORD has the hash of")
        entries[member] = Entry(said.rstrip("="), info.file_size, bool(info.external_attr >> 16 & 0o111))
    if unlisted := sorted(infos.keys() - entries.keys() - own):
        raise _damaged(path, f"RECORD does not name `{unlisted[0]}`, which is in the wheel")
    return entries


def _refuse_members(wheel: Wheel, replaced: Mapping[str, bytes], added: Mapping[str, bytes]) -> None:
    for member in [*replaced, *added]:
        if member.startswith(f"{wheel.info}/"):
            raise UsageError(
                f"`{member}` of `{wheel.path.name}` is not to be changed", because="it describes the wheel"
            )
    for member in replaced:
        if member not in wheel.entries:
            raise UsageError(f"`{wheel.path.name}` has no file `{member}`")
    for member in added:
        if member in wheel.entries:
            raise UsageError(f"`{wheel.path.name}` has a file `{member}` already")
        if member.startswith("/") or posixpath.normpath(member) != member or member.split("/")[0] == "..":
            raise UsageError(f"`{member}` does not stay inside of a wheel")


def _renamed(wheel: Wheel, member: str, info: str) -> str:
    """Where a member is in the new wheel: two folders carry the version in their names."""
    for ending in (".dist-info", ".data"):
        old = wheel.info.removesuffix(".dist-info") + ending
        if member.startswith(f"{old}/"):
            return info.removesuffix(".dist-info") + ending + member.removeprefix(old)
    return member


def _with_version(metadata: bytes, version: str) -> bytes:
    head = _head(metadata)
    new = re.sub(rb"(?mi)^(Version:[ \t]*)[^\s]+", rb"\g<1>" + version.encode(), head, count=1)
    return new + metadata[len(head) :]


def _zip_info(name: str, entry: Entry | None, size: int | None = None) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(name, _TIME)
    made.compress_type = zipfile.ZIP_STORED
    made.create_system = 3
    made.external_attr = (0o100755 if entry is not None and entry.executable else 0o100644) << 16
    # Known beforehand, so that the header is the small one wherever that is enough.
    made.file_size = size if size is not None else entry.size if entry is not None else 0
    return made


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[io.BufferedRandom]:
    """A file that becomes ``target`` in the end, or is gone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
