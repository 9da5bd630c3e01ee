"""Mutated environment reports: no exception, nothing personal of the originals in what comes out, bounded time.

`python -m tests.reports --count 100000` prints how many, how long, and the slowest; exit status 1 if anything got out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from builder.reports.parse import parse

DATA = Path(__file__).parent / "unit" / "reports_data"

PERSONAL = (
    "alice",
    "gpu-node-7",
    "10.11.12.13",
    "fe80::dead",
    "mlx5_",
    "enp5s0f1np1",
    "8f3c2f0e",
    "sk-",
    "/home",
    "acmecorp",
    "SN-0042",
)
"""What the originals have of people and places."""

_LINES = (
    "alice@gpu-node-7:~$ nvidia-smi",
    "Hostname: gpu-node-7.acmecorp.example",
    "IP: 10.11.12.13 fe80::dead:beef",
    "  NIC0: mlx5_7",
    "GPU 0: NVIDIA H200 (UUID: GPU-8f3c2f0e-1111-2222-3333-444455556666)",
    "CUDA_HOME: /home/alice/cuda",
    "NCCL_SOCKET_IFNAME=enp5s0f1np1",
    "HF_TOKEN=sk-alicesecret",
    "Serial: SN-0042",
    'File "/home/alice/acmecorp/serve.py", line 3',
    "torch @ file:///home/alice/torch.whl",
    "sglang==0.5.9+acmecorp.alice",
    "Driver Version: 580.95.05 /home/alice",
    "OSError: /home/alice/lib/libnvrtc.so.12: cannot open shared object file",
)


def planted(text: str) -> str:
    """A report with more that is personal in it."""
    lines = text.splitlines()
    for number, line in enumerate(_LINES):
        lines.insert((number * 7) % (len(lines) + 1), line)
    return "\n".join(lines)


def mutated(texts: Sequence[str], seed: int) -> str:
    """A text made of these: lines taken out, doubled, joined, cut, characters exchanged, two reports in one."""
    chance = random.Random(seed)
    lines = chance.choice(texts).splitlines()
    if chance.random() < 0.3:
        lines += chance.choice(texts).splitlines()
    for _ in range(chance.randint(1, 12)):
        if not lines:
            break
        at = chance.randrange(len(lines))
        kind = chance.randrange(8)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, lines[chance.randrange(len(lines))])
        elif kind == 2 and at + 1 < len(lines):
            lines[at : at + 2] = [lines[at] + chance.choice(("", " ", ": ", "\t", "|")) + lines[at + 1]]
        elif kind == 3 and lines[at]:
            cut = chance.randrange(len(lines[at]))
            lines[at] = lines[at][:cut]
        elif kind == 4 and lines[at]:
            place = chance.randrange(len(lines[at]))
            character = chr(chance.choice((0, 9, 27, 34, 58, 61, 124, 0x200B, 0xFF1A, chance.randrange(32, 0x300))))
            # Nothing is inserted into what is personal: a name with a hole in it is no longer that name.
            lines[at] = lines[at][:place] + character + lines[at][place:]
        elif kind == 5:
            lines[at] = chance.choice(("> ", "llm0-1  | ", "| ", "[pip3] ", "- ", "GPU 0: ", "```", "<b>")) + lines[at]
        elif kind == 6:
            chance.shuffle(lines)
        else:
            lines[at] = lines[at].replace(":", chance.choice((" :", "：", "=", "")))
    return "\n".join(lines)


def main() -> int:
    """Run the mutations; what got out, if anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.reports", description="Mutated environment reports.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    texts = [planted(path.read_text(encoding="utf-8")) for path in sorted(DATA.iterdir())]
    began, slowest, facts = time.monotonic(), 0.0, 0
    for number in range(given.count):
        text = mutated(texts, given.seed + number)
        # Of the processor: other work on the machine is not its own.
        start = time.process_time()
        report = parse(text)
        slowest = max(slowest, time.process_time() - start)
        facts += len(report.facts)
        out = json.dumps(
            [fact.as_json() for fact in report.facts.values()]
            + [symptom.as_json() for symptom in report.symptoms]
            + [conflict.as_json() for conflict in report.conflicts]
            + list(report.notes)
        )
        if leaked := [word for word in PERSONAL if word in out]:
            print(f"seed {given.seed + number}: {leaked} in {out}", file=sys.stderr)
            return 1
    seconds = time.monotonic() - began
    print(f"{given.count:,} mutated reports, no exception, nothing personal, {facts / given.count:.0f} facts each")
    print(
        f"{seconds:.0f} s, {1000 * seconds / given.count:.1f} ms each, the slowest {1000 * slowest:.0f} ms of processor time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
