"""Verdicts of `builder abi` beside the loader's own words: releases are installed, torch is imported, each file is opened.

    python -m tests.loads [--torch 2.9.1] [--folder DIR] [--free 25]

For each torch: it and what it requires are installed into a folder; each of the others is laid over a copy of that (of hard
links), which is removed at once. Each native file is opened in a process of its own, after `import torch`, with stand-ins of the
driver's libraries that this builder writes (no GPU is asked). While a torch is installed, what `builder.members` reads of its
wheels by byte ranges, with nothing kept, is compared with the installed files, read whole by `builder.elf`.

Prints the tables of docs/loads.md; exit status 1 where a file that was called broken opens, one that was called ok is refused by
the loader, or a fact differs that was not marked as uncertain. Needs Python 3.11, Debian 12, the package index, 10 GB of disk
above ``--free``, and about ten minutes. Wheels are executed: they are from the package index, and nothing confines them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version
from uv import find_uv_bin

from builder import elf, settings
from builder.abi.model import Extension
from builder.abi.verb import Question, ask, base_named, installed
from builder.abi.wheels import Index, Target
from builder.elf_image import ElfError
from builder.ledger import smoke_facts
from builder.nativefacts import (
    ElfFacts,
    facts_of,
)
from builder.settings import Settings
from builder.smoke import load_child, stub
from builder.smoke.tree import is_shared_object
from tests.made import PART_OF

PYTHON, BASE = "3.11", "bookworm"
# What is laid over each torch; after a space what else of its requirements a file needs to be opened.
PAIRS: Mapping[str, Sequence[str]] = {
    "2.9.1": (
        "sgl-kernel==0.3.21",
        "torchvision==0.24.1",
        "torchaudio==2.9.1",
        "sgl-kernel==0.1.2.post1",
        "torchao==0.9.0",
        "torchao==0.16.0",
    ),
    "2.11.0": (
        "sglang-kernel==0.4.4",
        "sgl-deep-gemm==0.1.4.post1 apache-tvm-ffi",
        "torch-memory-saver==0.0.9.post1",
        "sgl-kernel==0.3.21",
        "torchvision==0.29.2",
    ),
    "2.8.0": ("sgl-kernel==0.3.21",),
}
COMPARED = ("2.9.1", "2.11.0")
INSTALL, OPEN, ALL = 900, 60, 600
"""Seconds for one installation, for one file, for all of a pair."""
ROOM = 10
"""GB that a torch and what is laid over it take, above what has to stay free."""


@dataclass(frozen=True)
class Opened:
    """What became of a file: the exit status of the process (negative: a signal, None: too late), and what was said."""

    code: int | None
    said: str

    @property
    def refused(self) -> bool:
        """Whether the loader refused it, as against code of it that ran and ended the process."""
        return self.code == load_child.REFUSED

    def __str__(self) -> str:
        if self.code == load_child.OPENED:
            return "opens"
        if self.refused:
            return self.said
        return f"ends the process ({'too late' if self.code is None else f'status {self.code}'}): {self.said}"


def foreseen(item: Extension, said: str) -> bool:
    """Whether what the loader names is among what was found to be missing."""
    missing = {*item.missing_libraries, *item.missing_versions, *(each.symbol for each in item.missing_symbols)}
    named = re.search(r"undefined symbol: (\S+)|(\S+): cannot open shared object|version `([^']+)' not found", said)
    return named is not None and bool(missing & {name.rstrip(",") for name in named.groups() if name})


def judge(item: Extension, opened: Opened) -> str:
    """Whether a verdict and the loader agree: `yes`, `no`, or in words why it is neither."""
    if item.by_design:
        return "by design" if opened.code != load_child.OPENED else "no: by design, and it opens"
    if item.verdict == "uncertain":
        return "nothing was said"
    if item.verdict == "broken":
        return ("yes" if foreseen(item, opened.said) else "yes, for another reason") if opened.refused else "no"
    if opened.code == load_child.OPENED:
        return "yes"
    if not opened.refused:
        return "an ok that does not load"
    soname = opened.said.partition(": cannot open shared object file")[0]
    package = smoke_facts()["os_packages"].get(soname) or base_named(BASE).packages.get(soname)
    return f"needs {package} here" if package in item.packages else "no"


def compare(read: ElfFacts, true: ElfFacts) -> tuple[str, list[str]]:
    """`identical`, `marked` or `different`, and the fields that differ; a marked one is named in ``uncertain``."""
    differ = [field.name for field in fields(ElfFacts) if field.name != "uncertain"]
    differ = [name for name in differ if getattr(read, name) != getattr(true, name)]
    if any(PART_OF.get(name) not in read.uncertain for name in differ):
        return "different", differ
    return ("marked" if read.uncertain else "identical"), differ


def install(folder: Path, *lines: str, alone: bool = False) -> None:
    """Install into a folder; ``alone`` without what they require."""
    argv = [find_uv_bin(), "pip", "install", "--quiet", "--target", str(folder), "--only-binary", ":all:"]
    argv += ["--python", sys.executable, "--cache-dir", str(folder.parent / "uv"), "--link-mode", "hardlink"]
    argv += [*(["--no-deps"] if alone else []), *lines]
    subprocess.run(argv, check=True, timeout=INSTALL, env=settings.load().child_environment())


def natives(site: Path) -> list[str]:
    """The shared objects of a folder, relative to it."""
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.so*") if is_shared_object(path.name))


def wanted(site: Path) -> set[str]:
    """Every name that a shared object of a folder leaves undefined."""
    found: set[str] = set()
    for file in natives(site):
        with contextlib.suppress(ElfError):
            read = elf.read_file(site / file)
            found.update(symbol.name for symbol in (*read.undefined_strong, *read.undefined_weak))
    return found


def stand_ins(names: Iterable[str], folder: Path) -> None:
    """Write what the driver would bring, with those of these names that are its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plain = [name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
    for soname, fact in smoke_facts()["driver_libraries"].items():
        own = [name for name in plain if re.search(str(fact["symbols"]), name)]
        if own:
            stub.write_stub(folder / soname, soname, own)


def first(distribution: str, file: str, site: Path) -> list[tuple[str, bool]]:
    """What its own package opens before a file, with whether RTLD_GLOBAL (facts/smoke.yaml, `loaded_first`)."""
    found = []
    for fact in smoke_facts()["loaded_first"]:
        if fact["distribution"] == distribution and any(fnmatchcase(file, glob) for glob in fact["files"]):
            for glob in fact["libraries"]:
                found += [(str(path), bool(fact.get("global"))) for path in sorted(site.glob(glob))]
    return found


def opened(site: Path, files: Sequence[tuple[str, str]], drivers: Path) -> dict[str, Opened]:
    """Open files (distribution, file), each in a fork of a process that imported torch."""
    python = Path(sys.base_prefix) / "bin" / f"python{PYTHON}"
    command = [str(python), "-I", "-S", load_child.__file__, str(site), "torch", str(OPEN)]
    jobs = [{"path": str(site / file), "first": first(owner, file, site)} for owner, file in files]
    environment = {"PATH": os.defpath, "HOME": str(site.parent), "LD_LIBRARY_PATH": str(drivers)}
    lines = "".join(f"{json.dumps(job)}\n" for job in jobs)
    done = subprocess.run(
        command,
        input=lines,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=ALL,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"`import torch` fails: {done.stderr.strip().splitlines()[-1:]}")
    found = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        words = said["error"].replace(f"{site}/", "").strip()
        # Of a file's own words the first line says what it is, as `terminate called …` does not.
        lines_ = [text for text in words.splitlines() if text.strip()] or [""]
        found[said["path"].removeprefix(f"{site}/")] = Opened(said["code"], lines_[-1 if said["code"] == 3 else 0])
    return found


def remote(site: Path, asked: Settings) -> Iterator[str]:
    """Lines of a table: the native members of what is installed, read by byte ranges, beside the installed files."""
    question = Question(asked, Target(PYTHON, base_named(BASE)))
    total: Counter[str] = Counter()
    index: Index = question.index
    for found in sorted(distributions(path=[str(site)]), key=lambda item: canonicalize_name(item.name)):
        name = canonicalize_name(found.name)
        if not any(is_shared_object(str(file)) for file in found.files or ()):
            continue
        members = index.members(index.release(name, Version(found.version)))
        counts: Counter[str] = Counter()
        odd = []
        for member, native in members.read().items():
            place = site / installed(member)
            true = facts_of(elf.read_file(place))
            kind, differ = ("different", ["trouble"]) if native.facts is None else compare(native.facts, true)
            counts[kind] += 1
            if kind != "identical":
                odd.append(f"`{place.name}`: {', '.join(differ) or 'all values right'}")
        total += counts
        yield f"| {name} {found.version} | {sum(counts.values())} | {counts['identical']} | {'; '.join(odd)} | {counts['different']} |"
    yield (
        f"| all | {total.total()} | {total['identical']} | {total['marked']} marked | {total['different']} "
        f"({index.bytes_read:,} bytes of {index.bytes_total:,}) |"
    )


def room(folder: Path, wanted: int) -> str:
    """What to say where the disk has less than ``wanted`` GB left."""
    left = shutil.disk_usage(folder).free / 1e9
    return "" if left >= wanted else f"{left:.0f} GB are free, {wanted} have to be"


def pair(base: Path, torch: str, line: str, names: set[str], asked: Settings) -> tuple[str, list[str], int]:
    """A row of the table of pairs, rows of the files that do not open, and how many do not agree.

    ``names`` are those that the files of ``base`` leave undefined.
    """
    subject, *further = line.split()
    report = ask([subject, f"torch=={torch}"], asked, python=PYTHON, base=BASE, find=None)
    site, drivers = base.with_name("pair"), base.with_name("drivers")
    subprocess.run(["cp", "-al", str(base), str(site)], check=True, timeout=120)
    try:
        install(site, subject, *further, alone=True)
        owner = subject.partition("==")[0]
        own = base.with_name("own")
        install(own, subject, *further, alone=True)
        stand_ins(names | wanted(own), drivers)
        shutil.rmtree(own)
        got = opened(site, [(owner, item.file) for item in report.extensions], drivers)
    finally:
        shutil.rmtree(site)
    rows = []
    wrong = loads = 0
    words = Counter(judge(item, got[item.file]).partition(":")[0] for item in report.extensions)
    for item in report.extensions:
        agrees = judge(item, got[item.file])
        wrong += agrees.partition(":")[0] == "no"
        loads += got[item.file].code == load_child.OPENED
        if got[item.file].code != load_child.OPENED or agrees != "yes":
            said = str(got[item.file]).replace("|", "\\|")
            rows.append(f"| {subject} on {torch} | `{item.file}` | {item.verdict} | {said} | {agrees} |")
    counts = Counter(item.verdict for item in report.extensions)
    predicted = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    agreed = ", ".join(f"{number} {word}" for word, number in words.most_common())
    return (
        f"| {subject} | {torch} | **{report.verdict}** ({predicted}) | {loads} of {len(got)} open | {agreed} |",
        rows,
        wrong,
    )


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.loads", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", action="append", choices=list(PAIRS), help="only this one; several times if need be")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the throw-away folders go"
    )
    parser.add_argument("--free", type=int, default=25, metavar="GB", help="disk that has to stay free (default: 25)")
    given = parser.parse_args()
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        raise SystemExit(f"needs Python {PYTHON}: the wheels are for it")
    pairs: list[str] = []
    files: list[str] = []
    tables: list[str] = []
    wrong = 0
    for torch in given.torch or PAIRS:
        if lacking := room(given.folder, given.free + ROOM):
            print(f"torch {torch} is left out: {lacking}", file=sys.stderr)
            wrong += 1
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="builder-loads-", dir=given.folder) as name:
            base = Path(name) / "torch"
            asked = replace(settings.load(), cache=Path(name) / "cache")
            install(base, f"torch=={torch}")
            print(f"torch {torch} is installed, {time.monotonic() - began:.0f} s", file=sys.stderr)
            names = wanted(base)
            for line in PAIRS[torch]:
                if lacking := room(given.folder, given.free):
                    print(f"{line} is left out: {lacking}", file=sys.stderr)
                    wrong += 1
                    continue
                row, rows, bad = pair(base, torch, line, names, asked)
                pairs.append(row)
                files += rows
                wrong += bad
                print(row, file=sys.stderr)
            if torch in COMPARED:
                rows_ = list(remote(base, asked))
                wrong += sum(not line.split("|")[5].strip().startswith("0") for line in rows_)
                tables += [
                    f"\nBeside torch {torch}, installed:\n",
                    "| wheel | members | identical | marked | different |",
                ]
                tables += ["|---|---|---|---|---|", *rows_]
            print(f"torch {torch}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print("| release | torch | predicted | the loader | agrees |\n|---|---|---|---|---|")
    print("\n".join(pairs))
    print("\n| | file | predicted | the loader's words | agrees |\n|---|---|---|---|---|")
    print("\n".join(files))
    print("\n".join(tables))
    print(f"\n{wrong} of them wrong or left out", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
