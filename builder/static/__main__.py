"""`python -m builder.static`: read the GPU code in the wheels of locks, and write the table that is shipped.

    python -m builder.static [LOCK…] [--release sgl-kernel==0.3.20 …]

It streams the wheels of torch and of sgl-kernel: 2.6 GB for the locks in `matrices/`. What the table has already is not
read again.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, canonicalize_version

from builder import settings
from builder.archverb import wheel_libraries
from builder.display import note
from builder.errors import BuilderError
from builder.files import write_atomic
from builder.lock import Artefact, read_lock
from builder.settings import Settings
from builder.static.gpucode import FORMAT, LARGE, TABLE, pack
from builder.streaming import StreamedReleases, StreamedWheel, open_file

_SHIPPED = Path(__file__).with_name(TABLE)


def main(argv: Sequence[str] | None = None, place: Path = _SHIPPED) -> int:
    """Write the table to ``place``; exit status 1 where a wheel could not be read."""
    parser = argparse.ArgumentParser(prog="python -m builder.static", description="Make the table that is shipped.")
    parser.add_argument("locks", nargs="*", type=Path, metavar="LOCK")
    parser.add_argument("--release", action="append", default=[], metavar="NAME==VERSION")
    given = parser.parse_args(argv)
    site = settings.load()
    releases = StreamedReleases(site)
    said: dict[str, Any] = {"format": FORMAT, "kinds": [], "wheels": {}}
    if place.exists():
        said = json.loads(zlib.decompress(place.read_bytes()))
    known = {(wheel["name"], canonicalize_version(wheel["version"])) for wheel in said["wheels"].values()}
    todo: list[Artefact] = []
    failed = 0
    for path in given.locks or sorted(Path("matrices").glob("*.lock.json")):
        todo += [a for a in read_lock(path).artefacts if a.name in LARGE and a.index == "default"]
    for text in given.release:
        name, _, version = text.partition("==")
        # One wheel of a release is enough: those for other Pythons are built for the same GPUs.
        if (canonicalize_name(name), canonicalize_version(version)) in known:
            continue
        try:
            todo.append(releases.find(canonicalize_name(name), version))
        except BuilderError as error:
            note(str(error))
            failed += 1
    for artefact in todo:
        if artefact.sha256 in said["wheels"]:
            continue
        note(f"{artefact.name} {artefact.version} …")
        try:
            _add(said, artefact, releases, site)
        except BuilderError as error:
            note(str(error))
            failed += 1
            continue
        write_atomic(place, zlib.compress(json.dumps(said, separators=(",", ":")).encode(), 9))
    return 1 if failed else 0


def _add(said: dict[str, Any], artefact: Artefact, releases: StreamedReleases, site: Settings) -> None:
    """Put the GPU code of a wheel into the table. Raises as the wheel does."""
    wheel = releases.artefact(artefact, {})
    streamed = wheel if isinstance(wheel, StreamedWheel) else open_file(wheel.path)
    numbers = {json.dumps(kinds): number for number, kinds in enumerate(said["kinds"])}
    members = {}
    for library in wheel_libraries(streamed, site):
        if library.error:
            note(f"{library.file} is left out: {library.error}")
        if library.containers:
            kinds = json.dumps(pack(library.containers))
            members[library.file] = numbers.setdefault(kinds, len(numbers))
    said["kinds"] = [json.loads(kinds) for kinds in numbers]
    said["wheels"][artefact.sha256] = {"name": artefact.name, "version": artefact.version, "members": members}


if __name__ == "__main__":
    sys.exit(main())
