"""Processes of their own: a private, empty home, nothing that a working folder could shadow, nothing left behind."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from builder.smoke.report import Scrubber
from builder.smoke.tree import Tree

# Variables of the caller that would change what a child finds or writes.
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONPYCACHEPREFIX", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Outcome:
    """How a process ended. ``code`` is its exit status, negative for a signal, None when it ran out of time."""

    code: int | None
    out: str
    err: str

    @property
    def ended(self) -> str:
        """In words, for a message."""
        return describe_end(self.code)

    def tail(self, lines: int = 12) -> str:
        """The last lines of what it had to say, errors first."""
        text = self.err.strip() or self.out.strip()
        return "\n".join(text.splitlines()[-lines:])


def describe_end(code: int | None) -> str:
    """`ended with status 1`, `was ended by SIGSEGV`, `ran out of time`."""
    if code is None:
        return "ran out of time"
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with status {code}"


class Workspace:
    """A temporary folder that holds the stub driver and every cache a child may want to write; removed in the end.

    It works for a uid without a home or a name in the password database, on a read-only image with a writable `/tmp`.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.root = Path(tempfile.mkdtemp(prefix="smoke-"))
        for name in ("home", "cache", "tmp", "stub", "pycache", "work", "triton", "flashinfer", "inductor"):
            (self.root / name).mkdir()
        self.scrub = Scrubber(self.root)
        _link_bytecode(tree, self.root / "pycache")
        python = tree.prefix / "bin" / "python"
        self.python = str(python) if python.exists() else sys.executable

    def __enter__(self) -> Workspace:  # noqa: PYI034 - Self is Python 3.11's
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def stubs(self) -> Path:
        """Where the stub driver libraries lie: on children's LD_LIBRARY_PATH, nowhere else."""
        return self.root / "stub"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The caller's environment, less what shadows; every cache inside the workspace, and the stub to be found."""
        env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        places = [path for path in env.get("LD_LIBRARY_PATH", "").split(":") if path]
        env.update(
            HOME=str(self.root / "home"),
            TMPDIR=str(self.root / "tmp"),
            XDG_CACHE_HOME=str(self.root / "cache"),
            XDG_CONFIG_HOME=str(self.root / "cache"),
            TRITON_CACHE_DIR=str(self.root / "triton"),
            TRITON_HOME=str(self.root / "home"),
            FLASHINFER_WORKSPACE_BASE=str(self.root / "flashinfer"),
            TORCHINDUCTOR_CACHE_DIR=str(self.root / "inductor"),
            TORCH_EXTENSIONS_DIR=str(self.root / "cache"),
            CUDA_CACHE_PATH=str(self.root / "cache"),
            TVM_FFI_CACHE_DIR=str(self.root / "cache"),
            TILELANG_CACHE_DIR=str(self.root / "cache"),
            HF_HOME=str(self.root / "cache"),
            MPLCONFIGDIR=str(self.root / "cache"),
            HF_HUB_OFFLINE="1",
            PYTHONDONTWRITEBYTECODE="1",
            PYTHONHASHSEED="0",
            # torch and others ask for the user's name; an arbitrary uid has none in the password database.
            USER="smoke",
            LOGNAME="smoke",
            LD_LIBRARY_PATH=":".join([*places, str(self.stubs)]),
        )
        env.update(extra or {})
        return env

    def python_command(self, script: str, *arguments: str) -> list[str]:
        """Run ``script``, a file beside this one, isolated: no user site, no PYTHON* variables, no working folder.

        Children share one cache of bytecode in the workspace, so that one compiles for all what the image has none for.
        """
        return [
            self.python,
            "-I",
            "-X",
            f"pycache_prefix={self.root / 'pycache'}",
            str(Path(__file__).with_name(script)),
            *arguments,
        ]

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        extra: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Outcome:
        """Run to the end or ``timeout`` seconds, in a process group of its own that is then gone as a whole."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.root / "work",
            env=self.environment(extra),
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=no_core_files,  # noqa: PLW1509 - one system call, no lock
        )
        code: int | None = None
        try:
            out, err = process.communicate(stdin, timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
            out, err = process.communicate()
        finally:
            kill_group(process.pid)
        return Outcome(code, self.scrub(out), self.scrub(err))


def no_core_files() -> None:
    """A library that aborts must not leave a core file in the image."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def kill_group(leader: int) -> None:
    """End what is left of a process group that we started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def shorten(text: str, width: int = 400) -> str:
    """One line of at most ``width`` characters."""
    return textwrap.shorten(" ".join(text.split()), width, placeholder=" …")


def _link_bytecode(tree: Tree, cache: Path) -> None:
    """Let children use the image's bytecode and write what it lacks: with a cache prefix, Python looks there alone.

    `a/__pycache__/b.cpython-311.pyc` is looked for as PREFIX/…/a/b.cpython-311.pyc (PEP 3147, sys.pycache_prefix).
    """
    for folder, folders, files in os.walk(tree.site_packages):
        if os.path.basename(folder) != "__pycache__":
            continue
        folders.clear()
        place = cache / os.path.dirname(os.path.abspath(folder)).lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            if name.endswith(".pyc"):
                (place / name).symlink_to(f"{folder}/{name}")
