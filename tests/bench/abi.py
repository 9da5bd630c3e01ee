"""What a verdict of `builder abi` costs, beside a real installation and import of the same two releases, in one run.

    python -m tests.bench.abi [--runs 3] [--before DIR] [--install] [--requests] [--folder DIR]

Each way is the command line in a process of its own with an empty cache (but for the warm ones), the interpreter's start with it:
the shipped tables left out, with them, again, and `--find torch`. `--before` is another checkout, measured in the same rounds.
`--install` adds `uv pip install --target` of the two with all that they require (5 GB of downloads, 10 GB of disk, removed) and
`import torch, sgl_kernel`, which on a machine without a driver ends where libcuda.so.1 is missing.
`--requests` says instead where the bytes of one question go, with nothing kept and the shipped tables: each part of the wheels
that was asked for, and what of it lies in which member. It is read in this process, so its time says nothing.
Bytes are those of wheels; with them, in brackets, the index's pages. CPU is user and system time of the process. Wall time on a
machine with other work says little: the least of the runs is printed, and the least CPU beside it. Prints the table of docs/abi.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import requests
from uv import find_uv_bin

from builder import cli, settings
from builder.members import Members
from builder.remote import RangedFile

ROOT = Path(__file__).resolve().parents[2]
PINS = ("sgl-kernel==0.3.21", "torch==2.9.1")
# Without tables; counts what comes besides wheels, and how many requests that takes.
_ASK = """\
import contextlib, io, json, sys, requests
requests_send, told = requests.Session.send, {"pages": 0, "requests": 0}
def send(self, request, **named):
    answer = requests_send(self, request, **named)
    told["requests"] += 1
    if "Range" not in request.headers:
        told["pages"] += len(answer.content)
    return answer
requests.Session.send = send
if sys.argv[1] == "without":
    from builder.abi import tables
    tables.wheels = lambda *_: []
from builder import cli
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
    cli.main(["abi", *sys.argv[2:], "--json"])
said = json.loads(out.getvalue())
print(json.dumps({"verdict": said["verdict"], "read": said["bytes_read"], "total": said["bytes_total"], **told}))
"""


@dataclass(frozen=True)
class Cost:
    """What one process took: seconds, CPU seconds; bytes of wheels and of pages, requests."""

    wall: float
    cpu: float
    read: int
    total: int
    pages: int
    requests: int

    def row(self, what: str) -> str:
        """A line of the table."""
        took = f"{self.wall:.2f} | {self.cpu:.2f}"
        if not self.total:
            return f"| {what} | {self.read / 1e6:,.0f} MB | | {took} |"
        part = f"{self.read / 1e6:.2f} MB (and {self.pages / 1e6:.2f}) of {self.total / 1e9:.2f} GB"
        return f"| {what} | {part} | {self.requests} | {took} |"


def spent(
    argv: Sequence[str], environment: dict[str, str], where: Path, check: bool = True
) -> tuple[float, float, str]:
    """Wall and CPU seconds of a process and its children, and what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(argv, env=environment, cwd=where, capture_output=True, text=True, timeout=1800, check=check)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, done.stdout or done.stderr


def ask(root: Path, cache: Path, way: str, words: Sequence[str]) -> Cost:
    """One question in a process of its own."""
    environment = {**os.environ, "BUILDER_CACHE": str(cache), "PYTHONPATH": str(root)}
    wall, cpu, out = spent([sys.executable, "-c", _ASK, way, *words], environment, root)
    said = json.loads(out)
    return Cost(wall, cpu, said["read"], said["total"], said["pages"], said["requests"])


def best(found: Sequence[Cost]) -> Cost:
    """The least of each: other work only adds to it."""
    return replace(found[0], wall=min(cost.wall for cost in found), cpu=min(cost.cpu for cost in found))


def rounds(roots: dict[str, Path], runs: int, folder: Path) -> list[str]:
    """Every way of every checkout, one after the other, several times."""
    find = (PINS[0], "--find", "torch")
    found: dict[tuple[str, str], list[Cost]] = {}
    for _ in range(runs):
        for name, root in roots.items():
            cache = Path(tempfile.mkdtemp(dir=folder))
            for what, way, words, fresh in (
                ("cold, tables left out", "without", PINS, True),
                ("cold", "with", PINS, True),
                ("again", "with", PINS, False),
                ("`--find torch`, cold", "with", find, True),
                ("`--find torch` again", "with", find, False),
            ):
                if fresh:
                    shutil.rmtree(cache)
                    cache.mkdir()
                cost = ask(root, cache, way, words)
                found.setdefault((what, name), []).append(cost)
                print(f"{name} {what}: {cost}", file=sys.stderr)
            shutil.rmtree(cache)
    order = sorted(found, key=lambda key: [*dict.fromkeys(what for what, _ in found)].index(key[0]))
    return [best(found[key]).row(", ".join(filter(None, key))) for key in order]


@dataclass
class Part:
    """What of a member was asked for: compressed bytes, those of its beginning and its end that were looked at, requests."""

    start: int
    packed: int
    head: int
    tail: int
    how: str
    asked: int = 0
    requests: int = 0


def traced(folder: Path) -> list[str]:
    """A question with nothing kept, in this process: its bytes by what they are."""
    ranges: list[tuple[int, int]] = []
    pages: list[tuple[str, int]] = []
    parts: dict[str, Part] = {}
    directories: list[int] = []
    get, send, steps = RangedFile._get, requests.Session.send, Members._steps

    def got(self: RangedFile, value: str, most: int) -> tuple[int, bytes, int]:
        start, data, size = get(self, value, most)
        ranges.append((start, start + len(data)))
        return start, data, size

    def sent(self: requests.Session, request: requests.PreparedRequest, **named: Any) -> requests.Response:
        answer = send(self, request, **named)
        if "Range" not in request.headers:
            pages.append((urlsplit(request.url or "").path.rstrip("/").rpartition("/")[2], len(answer.content)))
        return answer

    def stepped(self: Members, info: zipfile.ZipInfo) -> Generator[Any, None, Any]:
        made = steps(self, info)
        spans: list[tuple[int, int]] = []
        try:
            while True:
                asked = next(made)
                spans += asked
                yield asked
        except StopIteration as stop:
            middle = info.header_offset + info.compress_size // 2
            head = max(end for start, end in spans if start < middle) - info.header_offset
            behind = [span for span in spans if span[0] >= middle]
            tail = behind[0][1] - min(start for start, _ in behind) if behind else 0
            parts[info.filename] = Part(info.header_offset, info.compress_size, head, tail, stop.value.how)
            directories.append(self._directory.start)
            return stop.value

    with (
        mock.patch.multiple(RangedFile, _get=got),
        mock.patch.multiple(Members, _steps=stepped),
        mock.patch.multiple(requests.Session, send=sent),
        mock.patch.dict(os.environ, BUILDER_CACHE=str(folder)),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        cli.main(["abi", *PINS, "--json"])
    return lines_of(ranges, pages, parts, directories[0])


def lines_of(
    ranges: Sequence[tuple[int, int]], pages: Sequence[tuple[str, int]], parts: Mapping[str, Part], directory: int
) -> list[str]:
    """The table of `traced`; a range belongs to the member that it begins in, or to the wheel's directory."""
    order = sorted(parts.values(), key=lambda part: part.start)
    behind, count = 0, 0
    for start, end in ranges:
        count += start >= directory
        behind += max(0, end - max(start, directory))
        for part, after in zip(order, [*(other.start for other in order[1:]), directory], strict=True):
            inside = min(end, after) - max(start, part.start)
            part.asked += max(0, inside)
            part.requests += part.start <= start < after
    rows = [
        f"| `{name}` | {part.packed:,} | {part.how} | {part.head:,} | {part.tail:,} | {part.asked:,} | {part.requests} |"
        for name, part in sorted(parts.items(), key=lambda item: -item[1].asked)
    ]
    rows.append(f"| the wheel's directory and its end | | | | | {behind:,} | {count} |")
    total = sum(end - start for start, end in ranges)
    rows.append(f"| all of the wheel | | | | | {total:,} | {len(ranges)} |")
    rows += [f"| page of {name} | | | | | {size:,} | 1 |" for name, size in sorted(pages)]
    return [
        "| | compressed | read in | beginning | end | bytes that came | requests |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def installed(folder: Path) -> list[str]:
    """A real installation, and an import."""
    site, cache = folder / "site", folder / "uv"
    argv = [find_uv_bin(), "pip", "install", "--quiet", "--target", str(site), "--cache-dir", str(cache)]
    argv += ["--python", sys.executable, "--link-mode", "hardlink", *PINS]
    wall, cpu, _ = spent(argv, settings.load().child_environment(), folder)
    size = sum(path.lstat().st_size for path in site.rglob("*") if path.is_file())
    rows = [Cost(wall, cpu, size, 0, 0, 0).row("`uv pip install` (bytes on disk)")]
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    environment = {"PATH": os.defpath, "PYTHONPATH": str(site)}
    wall, cpu, said = spent([python, "-c", "import torch, sgl_kernel"], environment, folder, check=False)
    print(f"import: {said.strip().splitlines()[-1:]}", file=sys.stderr)
    return [*rows, Cost(wall, cpu, 0, 0, 0, 0).row("`import torch, sgl_kernel`")]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.abi", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, for a comparison")
    parser.add_argument("--install", action="store_true", help="a real installation as well")
    parser.add_argument("--requests", action="store_true", help="only where the bytes go")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for what is thrown away")
    given = parser.parse_args()
    roots = {"": ROOT} if given.before is None else {"before": given.before.resolve(), "now": ROOT}
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="builder-bench-", dir=given.folder) as folder:
        if given.requests:
            print("\n".join(traced(Path(folder))))
            return 0
        rows = rounds(roots, given.runs, Path(folder))
        if given.install:
            rows += installed(Path(folder))
    print("| | bytes of wheels (and of the index's pages) | requests | s | CPU s |\n|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
