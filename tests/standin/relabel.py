"""The same files as another wheel: for stand-ins, whose names say what they are not."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from builder.wheel import digest, read_wheel

_CHUNK = 1 << 20
_TIME = (1980, 1, 1, 0, 0, 0)


def relabel(
    source: Path,
    target: Path,
    *,
    metadata_version: str,
    requires: Iterable[str],
    appended: Mapping[str, str] | None = None,
) -> None:
    """Write the wheel ``source`` as ``target``, whose name says what it claims to be. The same input gives the same bytes.

    Name, version and requirements are other ones, the rest of METADATA and every other file stays, but for what is
    ``appended`` to some. The dist-info folder has ``metadata_version``, as that of the wheels has that lack a local part
    there.
    """
    more = appended or {}
    wheel = read_wheel(source)
    project = target.name.split("-")[0]
    infos = {f"{wheel.info.removesuffix('.dist-info')}{end}/": f"{project}-{metadata_version}{end}/" for end in _ENDS}

    def renamed(member: str) -> str:
        head = member.split("/")[0] + "/"
        return member.replace(head, infos[head], 1) if head in infos else member

    rows: list[tuple[str, str, int | str]] = []
    part = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as new:
        for member in sorted(wheel.entries, key=lambda name: (name.startswith(f"{wheel.info}/"), name)):
            entry, name = wheel.entries[member], renamed(member)
            info = zipfile.ZipInfo(name, _TIME)
            info.create_system, info.external_attr = 3, (0o100755 if entry.executable else 0o100644) << 16
            if member == f"{wheel.info}/METADATA" or member in more:
                data = wheel.read(member) + more.get(member, "").encode()
                if member not in more:
                    data = _metadata(data.decode(), project.replace("_", "-"), metadata_version, requires)
                new.writestr(info, data)
                rows.append((name, digest(data), len(data)))
                continue
            info.file_size = entry.size
            with old.open(member) as reader, new.open(info, "w") as writer:
                while chunk := reader.read(_CHUNK):
                    writer.write(chunk)
            rows.append((name, entry.digest, entry.size))
        record = infos[f"{wheel.info}/"] + "RECORD"
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        info = zipfile.ZipInfo(record, _TIME)
        info.create_system, info.external_attr = 3, 0o100644 << 16
        new.writestr(info, text.getvalue())
    part.replace(target)


_ENDS = (".dist-info", ".data")


def _metadata(text: str, name: str, version: str, requires: Iterable[str]) -> bytes:
    head, blank, body = text.partition("\n\n")
    kept = [line for line in head.splitlines() if not line.startswith(("Name:", "Version:", "Requires-Dist:"))]
    said = [
        kept[0],
        f"Name: {name}",
        f"Version: {version}",
        *kept[1:],
        *(f"Requires-Dist: {item}" for item in requires),
    ]
    return ("\n".join(said) + (blank or "\n") + body).encode()
