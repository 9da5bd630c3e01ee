"""What `repro --write` and `check` make of a report of one line, for each release of sglang (or another package).

`python -m tests.index.lines [--package sglang] [--date DATE] [VERSION…]`: without VERSION the last patch of each release from 0.5.4 on.
Prints a table: the day, torch, how many wheels the lock has, what had to be named or declared, the verdict, its errors and
what is not known. Exit status 1 if a matrix cannot be locked. Nothing is built; metadata and parts of wheels are read.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

from builder import settings as site
from builder.download import project_page
from builder.errors import BuilderError
from builder.findings import Severity
from builder.lock import Base, lock_path, read_lock
from builder.locking import resolve_lock
from builder.matrix import load
from builder.repro.verb import repro
from builder.rulebook import Context
from builder.settings import Settings
from builder.static.check import UNCERTAIN, check

ROOT = Path(__file__).resolve().parents[2]
FIRST = Version("0.5.4")
COLUMNS = ("release", "as of", "torch", "wheels", "pre-releases", "overrides", "verdict", "errors; not known")


def releases(package: str, settings: Settings) -> list[str]:
    """The last patch of each release, the oldest first."""
    last: dict[tuple[int, ...], Version] = {}
    for file in project_page(package, settings):
        try:
            version = Version(file.version or "")
        except InvalidVersion:
            continue
        if version >= FIRST and not version.is_prerelease and not file.is_yanked:
            last[version.release] = max(version, last.get(version.release, version))
    return [str(last[release]) for release in sorted(last)]


def row(
    package: str, version: str, settings: Settings, base: Base, folder: Path, when: date | None = None
) -> list[str]:
    """One line of the table. Raises `BuilderError` where the matrix cannot be locked."""
    text = f"Python: 3.11.9\n{package}: {version}\nGPU 0: NVIDIA H100 80GB HBM3\n"
    answer = repro(text, settings, folder, name=f"r-{version}", static=False, when=when)
    assert answer.written is not None
    loaded = load(answer.written)
    lock = resolve_lock(loaded, settings, base)
    found = check(Context(loaded, datetime.now(UTC).date(), lock), lock, settings)
    errors = [f"{each.rule}: {each.subject}" for each in found.findings if each.severity is Severity.ERROR]
    unknown = [f"{each.rule}: {each.subject}" for each in found.findings if each.rule in UNCERTAIN]
    matrix = loaded.matrix
    return [
        version,
        str(matrix.as_of),
        matrix.stack.pins().get("torch", "-"),
        str(len(lock.artefacts)),
        ", ".join(matrix.prereleases) or "-",
        ", ".join(each.package for each in matrix.overrides) or "-",
        found.verdict,
        "; ".join(filter(None, [", ".join(errors), ", ".join(unknown)])) or "-",
    ]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.index.lines", description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--package", default="sglang")
    parser.add_argument("--date", type=date.fromisoformat, help="the day to resolve as of (default: the release's)")
    arguments = parser.parse_args()
    settings = site.load()
    base = read_lock(lock_path(ROOT / "matrices" / "cu130-next.yaml")).base
    failed = 0
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for version in arguments.versions or releases(arguments.package, settings):
            try:
                cells = row(arguments.package, version, settings, base, Path(folder), arguments.date)
            except BuilderError as error:
                failed += 1
                cells = [version, *["-"] * (len(COLUMNS) - 2), f"cannot be locked: {error.what}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
