"""`python -m tests.gpu.rank …` is one rank of a scenario; the driver (`tests.gpu`) starts it. Needs torch where the scenario does."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

STORE_SECONDS = 40
"""How long a rank waits in torch's store for one that does not come; sglang has torch's own, 10 minutes."""


@dataclass
class Context:
    """What a scenario gets to know, and where it says what it found."""

    rank: int
    ranks: int
    port: int
    release: str
    carry: Path
    scratch: Path
    out: Path
    warnings: list[str] = field(default_factory=list)

    def say(self, kind: str, **values: Any) -> None:
        """Add a line to what this rank says."""
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def check(self, name: str, ok: bool, detail: object = "") -> None:
        """An assertion; the scenario goes on, so that all ranks still come to every collective."""
        self.say("check", name=name, ok=bool(ok), detail=str(detail)[:2000])

    def note(self, name: str, value: object) -> None:
        """Something that is measured and not judged."""
        self.say("note", name=name, value=str(value)[:2000])

    def standin(self, *names: str) -> None:
        """What is not the real thing."""
        self.say("standins", names=list(names))

    def warned(self, text: str) -> list[str]:
        """The warnings of this rank that have ``text``."""
        return [item for item in self.warnings if text in item]


@dataclass(frozen=True)
class World:
    """The groups as sglang makes them: NCCL for the devices, gloo for the CPUs."""

    device: Any
    device_group: Any
    cpu_group: Any


class _Listener(logging.Handler):
    def __init__(self, context: Context) -> None:
        super().__init__(logging.WARNING)
        self.context = context

    def emit(self, record: logging.LogRecord) -> None:
        self.context.warnings.append(record.getMessage())


def start(context: Context) -> World:
    """Join the other ranks. Whoever waits for one that does not come gives up after less than a scenario's limit."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]

    torch.cuda.set_device(context.rank)
    device = torch.device(f"cuda:{context.rank}")
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{context.port}",
        rank=context.rank,
        world_size=context.ranks,
        timeout=timedelta(seconds=STORE_SECONDS),
    )
    ranks = list(range(context.ranks))
    device_group = dist.new_group(ranks, backend="nccl")
    # As in sglang the CPU group waits longer than the store does.
    cpu_group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=3 * STORE_SECONDS))
    return World(device, device_group, cpu_group)


def fake_capability(context: Context, major: int = 12) -> None:
    """Let torch say another compute capability than the device has."""
    import torch

    torch.cuda.get_device_capability = lambda device=None: (major, 0)
    context.standin(f"torch.cuda.get_device_capability: says {major}.0, whatever the device")


def gathered(world: World, value: Any, ranks: int) -> list[Any]:
    """``value`` of every rank."""
    import torch.distributed as dist

    values = [None] * ranks
    dist.all_gather_object(values, value, group=world.cpu_group)
    return values


@contextlib.contextmanager
def timed(context: Context, name: str) -> Iterator[None]:
    """Note how long something takes."""
    before = time.monotonic()
    yield
    context.note(name, f"{time.monotonic() - before:.1f} s")


def main(arguments: list[str]) -> int:
    """Run one rank; 1 where the scenario raises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="module:function")
    for name in ("rank", "ranks", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--release", required=True)
    for name in ("carry", "scratch", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args(arguments)
    context = Context(given.rank, given.ranks, given.port, given.release, given.carry, given.scratch, given.out)
    logging.getLogger().addHandler(_Listener(context))
    module, _, function = given.run.partition(":")
    try:
        getattr(importlib.import_module(module), function)(context)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said
        traceback.print_exc()
        context.check("runs to its end", False, f"{type(error).__name__}: {error}")
        return 1
    context.say("end")
    return 0


if __name__ == "__main__":
    import os

    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Groups of which a rank has failed may wait at exit for what does not come.
    os._exit(code)
