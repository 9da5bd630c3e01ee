"""Made-up checks for the GPU part's tests: they need no GPU and no torch, and behave as real ones can."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from builder.smoke.gpu_case import SAFE, Look, Skip


def holds(look: Look) -> None:
    look.true("it is", True)
    look.equal("a pair", (1, 2), [1, 2])
    look.say(f"sees {os.environ['CUDA_VISIBLE_DEVICES']}")


def differs(look: Look) -> None:
    look.true("holds", True)
    look.equal("a list", [1, 2, 3], [1, 2, 4])
    look.true("a bound", False, "off by 3")
    look.true("bare", False)


def raises(look: Look) -> None:
    look.true("before", True)
    raise RuntimeError(
        "CUDA error: no kernel image is available for execution on the device\n"
        "Search for `cudaErrorNoKernelImageForDevice' in the documentation for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    )


def parts(look: Look) -> None:
    with look.each("the first"):
        raise ValueError("broken on purpose")
    with look.each("the second"):
        look.true("it is looked at all the same", True)
    with look.each("the third"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    look.true("not come to", True)


def aborts(look: Look) -> None:
    print("terminate called after throwing", flush=True)
    os.abort()


def faults(look: Look) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(look: Look) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["MADE_NOTE"]).write_text(str(child.pid), encoding="utf-8")
    time.sleep(600)


def skips(look: Look) -> None:
    raise Skip("not on this GPU")


def skips_late(look: Look) -> None:
    look.true("wrong", False, "already")
    raise Skip("too late")


def silent(look: Look) -> None:
    """Compares nothing."""


def safe(look: Look) -> None:
    for name, value in SAFE.items():
        look.equal(name, os.environ.get(name), value)
    look.equal("what it is told", (look.jit, look.compiled), ("none", ("one",)))


def ranked(look: Look) -> None:
    look.true("two", look.ranks == 2, look.ranks)
    look.equal("all of them", os.environ["CUDA_VISIBLE_DEVICES"], "4,GPU-made")
    Path(f"{look.meet}{look.rank}").touch()
    other = Path(f"{look.meet}{1 - look.rank}")
    began = time.monotonic()
    while not other.exists() and time.monotonic() < began + 20:
        time.sleep(0.02)
    look.true("they meet", other.exists())
    look.say("two ranks")


def ranked_badly(look: Look) -> None:
    look.true("the first alone", look.rank == 0, "no")
