"""Our reader of fat binaries against NVIDIA's cuobjdump: the same table, how long, how much memory.

    python -m tests.bench.arch FILE.so… [--cuobjdump PATH] [--runs 5]
    python -m tests.bench.arch --fuzz SECONDS

cuobjdump is Triton's (Triton's wheel has it; it is read by byte ranges, 1.3 MB) unless one is named. It has no suffix for a target
that its CUDA release does not know: what it prints as sm_100 may be sm_100, sm_100a or sm_100f. Times are wall time, the best of the
runs, the file in the page cache; memory is the peak of a process of its own, Python's 10 MB among it. Prints the table of docs/arch.md.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from builder import settings
from builder.fatbin import scan_file
from builder.fatbin_stream import scan_stream
from builder.patches.releases import Releases

TRITON = "3.6.0"
_SCAN = """\
import sys, time
from builder.fatbin import scan_file
began = time.perf_counter()
scan_file(sys.argv[1])
took = time.perf_counter() - began
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(took, peak)
"""


def main() -> int:
    """Measure, or damage files for a while."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.arch", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.so")
    parser.add_argument("--cuobjdump", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fuzz", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    if arguments.fuzz:
        from tests.unit.fatbin_made import fuzz

        count, slowest, took = fuzz(1 << 40, arguments.fuzz, seed=int(time.time()))
        print(f"{count:,} damaged files in {took:.0f} s, the slowest {slowest:.2f} s: an answer or FatbinError each")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tool = arguments.cuobjdump or triton_tool(Path(folder))
        version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
        print(f"cuobjdump {re.findall(r'V([0-9.]+)', version)[0]}, Python {sys.version.split()[0]}")
        print(
            "| file | containers, images | same table | scan | cuobjdump | ratio | scan, peak | cuobjdump, peak | as a stream |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        return max([measure(file, tool, arguments.runs) for file in arguments.files], default=0)


def measure(file: Path, tool: Path, runs: int) -> int:
    """A row of the table; 1 where the two differ."""
    containers = scan_file(file)
    ours = [image for each in containers for image in each.images]
    listed = [theirs(file, tool) for _ in range(runs)]
    same = compare(
        [image.name for image in ours if image.kind == "cubin"],
        [image.name for image in ours if image.kind == "ptx"],
        listed[0][0],
    )
    scanned = [scan(file) for _ in range(runs)]
    began = time.perf_counter()
    if streamed(file) != containers:
        same = "**the stream differs**"
    stream = time.perf_counter() - began
    took, peak = min(one for one, _ in scanned), max(one for _, one in scanned)
    their, high = min(one[1] for one in listed), max(one[2] for one in listed)
    print(
        f"| {file.name}, {file.stat().st_size / 1e6:,.0f} MB | {len(containers)}, {len(ours)} | {same} | {took * 1e3:.1f} ms | "
        f"{their * 1e3:,.0f} ms | {their / took:.0f} | {peak:.0f} MB | {high:,.0f} MB | {stream:.2f} s |"
    )
    return int(same.startswith("**"))


def theirs(file: Path, tool: Path) -> tuple[list[str], float, float]:
    """What cuobjdump lists, in order; seconds; the most memory in MB."""
    with tempfile.TemporaryFile("w+") as out:
        began = time.perf_counter()
        process = subprocess.Popen([tool, "--list-elf", "--list-ptx", str(file)], stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        found = re.findall(r"^(?:ELF|PTX) file +\d+: .*\.(sm_\d+[af]?)\.(cubin|ptx)$", out.read(), flags=re.MULTILINE)
    return (
        [name if kind == "cubin" else name.replace("sm_", "compute_") for name, kind in found],
        took,
        usage.ru_maxrss / 1e3,
    )


def compare(cubins: list[str], ptx: list[str], listed: list[str]) -> str:
    """Whether the tables are the same, image by image: cubins in order, then PTX in order."""
    mine, other = [*cubins, *ptx], sorted(listed, key=lambda name: name.startswith("compute_"))
    if len(mine) != len(other):
        return f"**{len(other)} images in theirs**"
    bare = sum(a != b and re.sub("[af]$", "", a) == b for a, b in zip(mine, other, strict=True))
    differ = sum(b not in (a, re.sub("[af]$", "", a)) for a, b in zip(mine, other, strict=True))
    if differ:
        return f"**{differ} images differ**"
    return "yes" + (f", {bare} without their suffix in theirs" if bare else "")


def scan(file: Path) -> tuple[float, float]:
    """Seconds of a scan in a process of its own, and the most memory in MB."""
    done = subprocess.run([sys.executable, "-c", _SCAN, str(file)], capture_output=True, text=True, check=True)
    took, peak = done.stdout.split()
    return float(took), float(peak) / 1e3


def streamed(file: Path) -> object:
    """The same, as it comes out of a wheel."""
    with file.open("rb") as opened:
        return scan_stream(iter(lambda: opened.read(1 << 20), b""))


def triton_tool(folder: Path) -> Path:
    """Triton's cuobjdump."""
    wheel = Releases(settings.load()).release("triton", TRITON)
    (member,) = [name for name in wheel.entries if name.endswith("/bin/cuobjdump")]
    path = folder / "cuobjdump"
    path.write_bytes(wheel.read(member))
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    sys.exit(main())
