"""`builder lock MATRIX --repin PACKAGE`: take the content that a replaced file has now, into the matrix and its lock."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pypi_simple import NoSuchProjectError
from ruamel.yaml import YAML
from ruamel.yaml import events as yaml_events

from builder.contents import described
from builder.download import TransferError
from builder.errors import ExitCode, IntegrityError, LockError, UnreachableError, UsageError
from builder.fetch import THE_URL, Bars, Fetcher, Missing
from builder.files import write_atomic
from builder.index import MAX_METADATA
from builder.lock import Artefact, Lock, check_current, inputs_digest, lock_path, read_lock, write_lock
from builder.matrix import LoadedMatrix, Matrix, load, parse_matrix
from builder.nearest import nearest
from builder.origins import DirectFile
from builder.resolve import marker_environment
from builder.settings import Settings, redact
from builder.zipdir import sound


@dataclass(frozen=True)
class Repinned:
    """What became of one entry. ``sha256`` is what there is now, None if the file is gone; ``written`` whether it was taken."""

    artefact: Artefact
    place: str
    sha256: str | None
    written: tuple[Path, ...] = ()
    lock: str = ""
    withdrawn: tuple[str, ...] = ()
    """what attested the old content, and is no longer in the matrix"""
    remarks: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """`LOCK` for a file of an index that is another one now: only a new resolution takes it."""
        same = self.sha256 == self.artefact.sha256
        return ExitCode.OK if same or self.written else ExitCode.LOCK

    def as_json(self) -> dict[str, Any]:
        """The report."""
        old = self.artefact.sha256
        return {
            "ok": self.exit_code is ExitCode.OK,
            "package": self.artefact.name,
            "file": self.artefact.file,
            "from": self.place,
            "old": {"sha256": old, "known": described(self.artefact.file, old)},
            "new": {"sha256": self.sha256, "known": described(self.artefact.file, self.sha256)}
            if self.sha256
            else None,
            "written": [str(path) for path in self.written],
            "lock": self.lock,
            "withdrawn": list(self.withdrawn),
            "remarks": list(self.remarks),
        }

    def as_text(self, matrix: str) -> str:
        """The same for people."""
        artefact = self.artefact
        title = f"{artefact.name} {artefact.version}"
        if self.sha256 is None:
            return f"{title}: {self.place} no longer has {artefact.file}; resolve again: `builder lock {matrix}`"
        old = _hash_words(artefact.file, artefact.sha256)
        if self.sha256 == artefact.sha256:
            return f"{title}: {self.place} has the file that the lock pins, {old}: nothing to take"
        lines = [
            f"{title}: {self.place} has another content of {artefact.file}",
            f"  old: {old}",
            f"  new: {_hash_words(artefact.file, self.sha256)}",
        ]
        lines += [f"  no longer attested by: {line}" for line in self.withdrawn]
        lines += [f"  note: {line}" for line in self.remarks]
        if not self.written:
            return "\n".join([*lines, f"nothing was written; resolve again: `builder lock {matrix}`"])
        return "\n".join([*lines, f"written: {', '.join(map(str, self.written))}; lock {self.lock[:12]}"])


def _hash_words(file: str, sha256: str) -> str:
    content = described(file, sha256)
    return f"sha256 {sha256}" + (f" ({content})" if content else "")


def repin(path: Path, package: str, settings: Settings) -> Repinned:
    """Take what the file of `package` is now. Writes the matrix at `path` and its lock, or neither.

    A package of an index is only looked at. Raises `UsageError` for a package that is not in the lock, `LockError`,
    `UnreachableError`, and `IntegrityError` for a file that is no wheel of the package.
    """
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    artefact = lock.by_name.get(canonicalize_name(package))
    if artefact is None:
        near = nearest(package, lock.by_name)
        raise UsageError(
            f"`{package}` is not in the lock", where=str(lock_path(path)), hint=f"did you mean `{near}`" if near else ""
        )
    with Bars() as bars:
        fetcher = Fetcher(settings, {name: index.url for name, index in loaded.matrix.indexes.items()}, bars)
        if artefact.index is not None:
            return _of_index(fetcher, artefact)
        try:
            place, file, sha256 = fetcher.current(artefact)
        except Missing as missing:
            raise missing.error() from None
    if place == THE_URL:
        place = redact(artefact.url or "")
    if sha256 == artefact.sha256:
        return Repinned(artefact, place, sha256)
    try:
        headers = _headers(file, artefact, place)
    except IntegrityError:
        if file.is_relative_to(settings.cache):
            file.unlink()
        raise
    return _write(loaded, lock, artefact, file, Repinned(artefact, place, sha256), headers)


def _of_index(fetcher: Fetcher, artefact: Artefact) -> Repinned:
    url = fetcher.index_url(artefact)
    place = f"the index `{artefact.index}`"
    try:
        offered = fetcher.offered(artefact, url)
    except NoSuchProjectError:
        return Repinned(artefact, place, None)
    except TransferError as error:
        raise UnreachableError(
            f"the index page of `{artefact.name}` could not be read", where=redact(url or ""), because=error.why
        ) from error
    stated = [package.digests["sha256"] for package in offered if "sha256" in package.digests]
    if offered and not stated:
        raise UnreachableError(f"{place} states no sha256 of {artefact.file}", where=redact(url or ""))
    return Repinned(artefact, place, next((s for s in stated if s == artefact.sha256), stated[0] if stated else None))


def _headers(file: Path, artefact: Artefact, place: str) -> Mapping[str, list[str]]:
    """METADATA of a wheel that is about to be trusted. Raises `IntegrityError` for anything else: a login page, say."""
    try:
        with sound(zipfile.ZipFile(file)) as archive:
            members = [
                m
                for m in archive.infolist()
                if m.filename.count("/") == 1 and m.filename.endswith(".dist-info/METADATA")
            ]
            if len(members) != 1 or members[0].file_size > MAX_METADATA:
                raise ValueError("it has no METADATA of its own")
            parsed = HeaderParser().parsestr(archive.read(members[0]).decode("utf-8", errors="replace"))
            if canonicalize_name(parsed["Name"] or "") != artefact.name:
                raise ValueError(f"its METADATA is that of `{parsed['Name']}`")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        raise IntegrityError(
            f"what came is not a wheel of `{artefact.name}`",
            where=place,
            because=str(error),
            hint="nothing was written; look at what the address gives, a login page as a rule",
        ) from error
    return {name: [str(value) for value in parsed.get_all(name) or []] for name in ("Version", "Requires-Dist")}


def _write(
    loaded: LoadedMatrix, lock: Lock, artefact: Artefact, file: Path, report: Repinned, headers: Mapping[str, list[str]]
) -> Repinned:
    matrix, path = loaded.matrix, loaded.path
    position, entry = next((i, f) for i, f in enumerate(matrix.files) if canonicalize_name(f.name) == artefact.name)
    sha256 = report.sha256 or ""
    size = None if entry.size is None else file.stat().st_size
    text = edited(loaded, position, sha256, size)
    changed = parse_matrix(text, path).matrix
    new_artefact = artefact.model_copy(update={"sha256": sha256, "size": size})
    artefacts = tuple(new_artefact if each.name == artefact.name else each for each in lock.artefacts)
    new_lock = lock.model_copy(update={"inputs": inputs_digest(changed), "artefacts": artefacts})
    write_atomic(path, text)
    write_lock(new_lock, lock_path(path))
    return Repinned(
        artefact=artefact,
        place=report.place,
        sha256=sha256,
        written=(path, lock_path(path)),
        lock=new_lock.digest,
        withdrawn=entry.attested_by,
        remarks=tuple(_remarks(matrix, entry, artefact, headers)),
    )


def _remarks(matrix: Matrix, entry: DirectFile, artefact: Artefact, headers: Mapping[str, list[str]]) -> Iterator[str]:
    """What the new content's METADATA says otherwise than the matrix: the lock still has what the matrix says."""
    version = "".join(headers["Version"][:1]).strip()
    if version != artefact.metadata_version:
        yield f"its METADATA says version {version}, the matrix {artefact.metadata_version} (`metadata_version`)"
    environment = {**marker_environment(matrix), "extra": ""}
    states, said = (_holding(lines, environment) for lines in (headers["Requires-Dist"], entry.requires))
    for more, less, words in ((states, said, "requires in METADATA, not in the matrix"), (said, states, "the reverse")):
        if only := sorted(more - less):
            yield f"{words}: {', '.join(f'`{line}`' for line in only)}"


def _holding(lines: list[str] | tuple[str, ...], environment: Mapping[str, str]) -> set[str]:
    found = set()
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
            found.add(f"{canonicalize_name(requirement.name)}{requirement.specifier}")
    return found


def edited(loaded: LoadedMatrix, position: int, sha256: str, size: int | None) -> str:
    """The matrix's text with another hash (and size, where it states one) in `files[position]`, and no attestation.

    Everything else stays as it is, comments too. Raises `LockError` if the text cannot be edited in its place.
    """
    matrix, text = loaded.matrix, loaded.text
    entry = matrix.files[position]
    update = {"sha256": sha256, "size": size, "attested_by": ()}
    wanted = [f.model_copy(update=update) if i == position else f for i, f in enumerate(matrix.files)]
    spans = _spans(text, position)
    changes = [(*spans["sha256"][1:], text[slice(*spans["sha256"][1:])].replace(entry.sha256, sha256))]
    if size is not None:
        changes.append((*spans["size"][1:], str(size)))
    if entry.attested_by:
        colon, start, end = spans["attested_by"]
        if text[start] == "[":
            changes.append((start, end, "[]"))
        else:
            # A block: the comment on its key's line stays, its items go with theirs.
            line_end = text.index("\n", colon)
            last = text.find("\n", end)
            changes += [(colon, colon, " []"), (line_end, len(text) if last < 0 else last, "")]
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    if parse_matrix(text, loaded.path).matrix != matrix.model_copy(update={"files": tuple(wanted)}):
        raise LockError(
            f"the entry of `{entry.name}` cannot be edited in its place",
            where=loaded.where("files", position),
            hint=f"write it yourself: `sha256: {sha256}`, `attested_by: []`; then `builder lock {matrix.name}`",
        )
    return text


def _spans(text: str, position: int) -> dict[str, tuple[int, int, int]]:
    """Of each key in `files[position]`: where its colon ends, where its value begins and ends."""
    events = iter(YAML(typ="safe", pure=True).parse(text))

    def value(event: Any) -> tuple[int, int, Any]:
        """Begin, end and children of the value that begins with `event`."""
        if isinstance(event, yaml_events.SequenceStartEvent):
            items = []
            while not isinstance(each := next(events), yaml_events.SequenceEndEvent):
                items.append(value(each))
            # The end of a block is told where the next thing begins, comments later.
            end = each.end_mark.index if event.flow_style or not items else items[-1][1]
            return event.start_mark.index, end, items
        if isinstance(event, yaml_events.MappingStartEvent):
            entries = {}
            end = event.end_mark.index
            while not isinstance(each := next(events), yaml_events.MappingEndEvent):
                found = value(next(events))
                end = found[1]
                entries[each.value] = (text.index(":", each.end_mark.index) + 1, found)
            return event.start_mark.index, each.end_mark.index if event.flow_style else end, entries
        return event.start_mark.index, event.end_mark.index, None

    root = value(next(e for e in events if isinstance(e, yaml_events.MappingStartEvent)))
    entry = root[2]["files"][1][2][position][2]
    return {key: (colon, found[0], found[1]) for key, (colon, found) in entry.items()}
