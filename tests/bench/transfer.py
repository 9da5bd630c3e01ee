"""What a push and a pull move, against what `builder plan` says: a whole image, another patch level of sglang, another patch.

    python -m tests.bench.transfer [--matrix cu130-next] [--sglang 0.5.15] [--steps full,sglang,patch] [--packing 1,3,9]

The image of the matrix has to be in the engine (`make image`); the other two are built here from copies of the matrix. A
registry on loopback and an engine of its own as the host; bytes are those of the registry's access log. Each step is
predicted by `builder plan` before it is pushed: from the facts alone, and with what earlier pushes of this run recorded.
`--packing` packs every layer of the image anew with gzip and zstd at these levels: bytes and CPU seconds. Prints the tables of
docs/measurements.md, and the entries of builder/facts/transfer.yaml. Needs root and 20 GB of disk; all of it is gone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from builder.build import build_image, prepare
from builder.engine import Engine, Image, connect, find_buildx
from builder.facts import load_facts
from builder.lock import lock_path, read_lock, write_lock
from builder.locking import resolve_lock
from builder.matrix import load
from builder.planning import Row, plan
from builder.registry.client import RegistryClient
from builder.registry.predict import Blob, contents
from builder.registry.pull import Remote, bytes_to_pull, known_layers, pull_image, read_remote
from builder.registry.reference import Reference
from builder.registry.transport import push_image
from builder.settings import Settings
from builder.settings import load as load_settings
from tests.image.engines import Registry, SecondEngine

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Moved:
    """One step. Bytes of layers; ``wheel`` are those of the changed wheel, 0 where nothing of it changed."""

    step: str
    predicted: int
    foreseen: int
    pushed: int
    pulled: int
    wheel: int
    push_seconds: float
    pull_seconds: float

    def line(self) -> str:
        """A row of the table."""
        off = 100 * (self.predicted - self.pulled) / self.pulled if self.pulled else 0.0
        ratio = f"{self.pulled / self.wheel:.2f}" if self.wheel else ""
        cells = (
            self.step,
            f"{self.predicted:,}",
            f"{self.pushed:,}",
            f"{self.pulled:,}",
            f"{off:+.1f} %",
            f"{self.foreseen:,}",
        )
        return "| " + " | ".join((*cells, ratio, f"{self.push_seconds:.0f} s", f"{self.pull_seconds:.0f} s")) + " |"


HEAD = (
    "| step | predicted from facts | pushed | pulled | off | asked of the manifest | × wheel | push | pull |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def say(line: str) -> None:
    print(line, flush=True)


class Bench:
    """Registry, host and what was recorded so far."""

    def __init__(
        self, registry: Registry, host: SecondEngine, engine: Engine, settings: Settings, folder: Path
    ) -> None:
        self.registry, self.engine, self.settings, self.folder = registry, engine, settings, folder
        self.host = host.engine()
        self.reference = Reference.parse(f"{registry.address}/bench/sglang-stack")
        self.client = RegistryClient(self.reference, settings)

    def logged(self, since: int) -> tuple[int, int]:
        """Bytes of layers uploaded and downloaded since a line of the access log: finished uploads, answers to GET."""
        seen = self.registry.requests()[since:]
        up = sum(self.client.head_blob(r.blob) or 0 for r in seen if r.blob and r.method == "PUT")
        down = sum(r.bytes for r in seen if r.blob and r.method == "GET")
        return up, down

    def step(
        self, name: str, path: Path, image: Image, before: Path | None, package: str = ""
    ) -> tuple[Moved, Remote, list[Row]]:
        """Predict, push to the registry, pull onto the host."""
        # What the step before printed may have become facts by now.
        load_facts.cache_clear()
        rows = plan(path, before)
        predicted = sum(row.predicted_bytes for row in rows if row.pulled)
        since, began = len(self.registry.requests()), time.monotonic()
        push_image(self.engine, image.id, self.reference.with_tag(name), say)
        pushed_in = time.monotonic() - began
        up, _ = self.logged(since)
        digest, _ = self.client.image(name)
        remote = read_remote(self.client, digest)
        foreseen = bytes_to_pull(remote, known_layers(self.host))
        since, began = len(self.registry.requests()), time.monotonic()
        pull_image(self.host, self.reference, digest, say, remote=remote)
        pulled_in = time.monotonic() - began
        _, down = self.logged(since)
        wheel = (read_lock(lock_path(path)).by_name[package].size or 0) if package else 0
        return Moved(name, predicted, foreseen, up, down, wheel, pushed_in, pulled_in), remote, rows


def copied(folder: Path, matrix: Path, name: str, change: tuple[str, str], settings: Settings) -> Path:
    """A copy of a matrix with one edit (a regular expression and what it becomes), locked on the same OS packages."""
    text, count = re.subn(*change, matrix.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    if not count:
        raise SystemExit(f"{matrix} has nothing like {change[0]}")
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    write_lock(resolve_lock(load(path), settings, read_lock(lock_path(matrix)).base), lock_path(path))
    return path


def facts(rows: list[Row], engine: Engine, image: Image, remote: Remote, path: Path) -> list[str]:
    """The entries of facts/transfer.yaml for an image that was pushed."""
    blobs = [Blob(diff_id, digest, size) for digest, diff_id, size in remote.layers]
    became = contents(rows, engine.layers(image.id), blobs)
    lock = read_lock(lock_path(path))
    lines = []
    for row in rows:
        amount = row.bytes or (len(lock.base.packages) if row.layer == "os" else 1)
        if row.layer == "compiled":
            amount = len(load(path).matrix.gpus)
        size = sum(blob.bytes for blob in became.get(row.key, ()))
        lines += [f"  - layer: {row.layer}", f"    amount: {amount}", f"    compressed: {size}"]
    return lines


def packing(registry: Registry, remote: Remote, levels: list[int]) -> list[str]:
    """Layers packed anew from the registry's storage, small ones first: for each way its bytes, CPU to pack and to unpack.

    Layers under a megabyte are left out. One thread a layer, as an engine packs them.
    """
    ways = {"gzip -6": ["gzip", "-6"], **{f"zstd -{level}": ["zstd", f"-{level}", "-T1", "-q"] for level in levels}}
    lines = [f"| as pushed | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    say("\n".join(lines))
    for digest, _, size in sorted(remote.layers, key=lambda row: row[2]):
        if size < 1_000_000:
            continue
        cells = [f"{size:,}"]
        for argv in ways.values():
            made, pack, unpack = _packed(registry, digest, argv)
            cells.append(f"{made / size:.3f}, {pack:.1f} s, {unpack:.1f} s")
        lines.append(f"| {' | '.join(cells)} |")
        say(lines[-1])
    return lines


def _packed(registry: Registry, digest: str, argv: list[str]) -> tuple[int, float, float]:
    with tempfile.NamedTemporaryFile(dir=registry.folder) as packed, registry.blob_path(digest).open("rb") as source:
        opened = subprocess.Popen(["gzip", "-dc"], stdin=source, stdout=subprocess.PIPE)
        assert opened.stdout is not None
        packer = subprocess.Popen(argv, stdin=opened.stdout, stdout=packed)
        opened.stdout.close()
        # Of each child alone: the one that unpacks runs at the same time.
        _, _, used = os.wait4(packer.pid, 0)
        opened.wait()
        size = Path(packed.name).stat().st_size
        with Path(packed.name).open("rb") as again:
            reader = subprocess.Popen([argv[0], "-dc"], stdin=again, stdout=subprocess.DEVNULL)
            _, _, unpacked = os.wait4(reader.pid, 0)
    return size, used.ru_utime + used.ru_stime, unpacked.ru_utime + unpacked.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrix", default="cu130-next")
    parser.add_argument("--sglang", default="0.5.15", help="the other patch level")
    parser.add_argument(
        "--patch", default="s/symm_mem: opt-in/symm_mem: off/", help="the other patch: an edit of the matrix"
    )
    parser.add_argument("--steps", default="full,sglang,patch")
    parser.add_argument("--packing", default="", help="levels of zstd, as in 1,3,9")
    parser.add_argument("--folder", type=Path, default=None, help="where registry and host are for the time being")
    arguments = parser.parse_args()
    matrix, settings, engine = ROOT / "matrices" / f"{arguments.matrix}.yaml", load_settings(), connect()
    steps = arguments.steps.split(",")
    folder = Path(tempfile.mkdtemp(prefix="transfer-", dir=arguments.folder))
    names: list[str] = []
    lines: list[str] = []
    try:
        with Registry(folder / "registry") as registry, SecondEngine(folder / "host") as host:
            bench = Bench(registry, host, engine, settings, folder)
            image = engine.find(f"sglang-stack:{arguments.matrix}")
            if image is None:
                raise SystemExit(f"the engine has no image of {arguments.matrix}: `make image`")
            moved, remote, rows = bench.step("full", matrix, image, None)
            names.append(str(bench.reference.with_tag("full")))
            lines += [HEAD, moved.line()]
            say("\n".join([*lines, *facts(rows, engine, image, remote, matrix)]))
            _, old, new, _ = arguments.patch.split("/")
            changes = {"sglang": (r"^(\s+sglang:).*", rf"\1 {arguments.sglang}"), "patch": (old, new)}
            for step in steps[1:] if steps[0] == "full" else steps:
                path = copied(folder, matrix, f"{arguments.matrix}-{step}", changes[step], settings)
                prepared = prepare(path)
                other = build_image(prepared, engine, find_buildx(), settings)
                names += prepared.names
                moved, _, _ = bench.step(step, path, other, matrix, "sglang")
                names.append(str(bench.reference.with_tag(step)))
                lines.append(moved.line())
                say("\n".join(lines))
            if arguments.packing:
                packing(registry, remote, [int(level) for level in arguments.packing.split(",")])
            say("\n".join(lines))
    finally:
        for name in names:
            with contextlib.suppress(Exception):
                engine.remove(name)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
