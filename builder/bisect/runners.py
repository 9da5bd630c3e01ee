"""How a state is told good or bad: by the verdicts alone, in an environment on this machine, or in its image."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from uv import find_uv_bin

from builder.bisect.search import Result
from builder.display import note
from builder.elf import read_file
from builder.elf_image import ElfError
from builder.errors import BuilderError, BuildError, UnreachableError, UsageError
from builder.findings import Severity
from builder.ledger import smoke_facts
from builder.lock import Lock
from builder.matrix import LoadedMatrix
from builder.rules import Context, evaluate_rules
from builder.settings import Settings
from builder.smoke.stub import write_stub

if TYPE_CHECKING:
    from builder.engine import Engine

SKIP = 125
"""The exit status by which COMMAND says that it cannot tell, as git's bisection has it."""

INSTALL_LIMIT = 1800
"""Seconds that an environment may take to be made: a stack is five gigabytes the first time."""


class Runner(Protocol):
    """Tells of a lock whether it is good; why, in a few words."""

    def test(self, lock: Lock) -> tuple[Result, str]:
        """The result, and what decided it."""


DECLARED = frozenset({"conflict-stale", "override-mismatch"})
"""Rules on what a matrix declares: they tell of the lock that was made from it, and of no other."""


def errors(loaded: LoadedMatrix, lock: Lock) -> dict[tuple[str, str], str]:
    """What the rules call broken in a lock, judged with a matrix: rule and subject, with the message."""
    context = Context(loaded, datetime.now(UTC).date(), lock)
    return {
        (finding.rule, finding.subject): finding.message
        for finding in evaluate_rules(context)
        if finding.severity is Severity.ERROR and finding.rule not in DECLARED
    }


class Static:
    """By the rules: bad is a lock with an error that the bad stack has and the good one has not, each with its own matrix.

    What neither of the two has (wheels of two CUDA majors halfway between them) tells nothing of either: a skip.
    """

    def __init__(self, good_matrix: LoadedMatrix, good: Lock, bad_matrix: LoadedMatrix, bad: Lock) -> None:
        self._good_matrix, self._bad_matrix = good_matrix, bad_matrix
        fine, broken, exchanged = errors(good_matrix, good), errors(bad_matrix, bad), errors(bad_matrix, good)
        self._sought = broken.keys() - fine.keys() - exchanged.keys()
        self._known = fine.keys() | broken.keys()
        # The good stack's wheels have it with the other matrix, too: no package brings it.
        self._of_matrix = next((broken[key] for key in broken if key in exchanged and key not in fine), "")

    def test(self, lock: Lock) -> tuple[Result, str]:
        """Bad with the first of the bad stack's errors as the reason; a skip with an error that neither stack has."""
        found = errors(self._bad_matrix, lock)
        if new := [message for key, message in found.items() if key in self._sought]:
            return Result.BAD, new[0]
        # A state between the two has no matrix of its own: it is broken where it would be with either.
        with_good = errors(self._good_matrix, lock)
        if strange := [text for key, text in found.items() if key in with_good and key not in self._known]:
            return Result.SKIP, strange[0]
        if self._of_matrix:
            return Result.GOOD, f"no new error of a package; this one is of the bad stack's matrix: {self._of_matrix}"
        return Result.GOOD, "no new error"


class Environment:
    """COMMAND in a virtual environment on this machine, with the lock's wheels, by hash, and nothing else."""

    def __init__(self, folder: Path, command: Sequence[str], settings: Settings, limit: int) -> None:
        self._folder, self._command, self._settings, self._limit = folder, command, settings, limit

    def test(self, lock: Lock) -> tuple[Result, str]:
        """Good where COMMAND ends with 0, a skip with 125 or where the wheels do not install, else bad."""
        place = self._folder / "environment"
        environment = self._settings.child_environment()
        if not (place / "bin" / "python").exists():
            shutil.rmtree(place, ignore_errors=True)
            self._run([find_uv_bin(), "venv", "--quiet", "--python", lock.python, str(place)], environment)
        wanted = self._folder / "requirements.txt"
        lines = [
            f"{each.name}=={each.version} --hash=sha256:{each.sha256}" for each in lock.artefacts if each.url is None
        ]
        lines += [f"{each.name} @ {each.url} --hash=sha256:{each.sha256}" for each in lock.artefacts if each.url]
        wanted.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        argv = [find_uv_bin(), "pip", "sync", "--quiet", "--python", str(place / "bin" / "python"), "--no-build"]
        argv += ["--require-hashes", str(wanted)]
        note(f"installing {len(lock.artefacts)} wheels …")
        try:
            self._run(argv, environment)
        except BuildError as error:
            return Result.SKIP, f"does not install: {error.because.splitlines()[0] if error.because else error.what}"
        return self._command_in(place)

    def _command_in(self, place: Path) -> tuple[Result, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment["PATH"] = f"{place / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
        environment["VIRTUAL_ENV"] = str(place)
        if (stubs := self._stubs(place)) is not None:
            environment["LD_LIBRARY_PATH"] = f"{stubs}{os.pathsep}{environment.get('LD_LIBRARY_PATH', '')}".rstrip(
                os.pathsep
            )
        # Files and no pipes: what COMMAND leaves behind would keep these open. It is ended with COMMAND, for the next state's sake.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise BuildError(f"`{self._command[0]}` cannot be run", because=str(error)) from error
            try:
                status = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                return Result.BAD, f"did not end in {self._limit} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return judged(status, _end_of(err) or _end_of(out))

    def _stubs(self, place: Path) -> Path | None:
        """A folder with a stub of the driver's library, where this machine has no driver: as in the smoke test.

        It has every name that a native file of the environment takes from the driver, and nothing behind it. It is made for
        each state: other releases take other names.
        """
        if ctypes.util.find_library("cuda") is not None:
            return None
        folder = place.with_name("stubs")
        for soname, fact in smoke_facts()["driver_libraries"].items():
            pattern = re.compile(str(fact["symbols"]))
            names: set[str] = set()
            for path in sorted(place.glob("lib/python*/site-packages/**/*.so*")):
                if path.is_file() and not path.is_symlink():
                    with contextlib.suppress(ElfError, OSError):
                        elf = read_file(path)
                        if soname in elf.needed:
                            names |= {
                                each.name for each in elf.symbols if not each.defined and pattern.search(each.name)
                            }
            folder.mkdir(exist_ok=True)
            write_stub(folder / soname, soname, sorted(names))
        return folder

    def _run(self, argv: Sequence[str], environment: dict[str, str]) -> None:
        try:
            done = subprocess.run(
                argv, env=environment, capture_output=True, text=True, timeout=INSTALL_LIMIT, check=False
            )
        except subprocess.TimeoutExpired as error:
            because = f"not done after {INSTALL_LIMIT} s"
            raise BuildError("the environment could not be made", because=because) from error
        if done.returncode:
            raise BuildError("the environment could not be made", because=done.stderr.strip()[-1500:])


class Container:
    """COMMAND in the image of the lock, which is built for it; layers that did not change come from the build cache.

    It runs without network, in the current folder, which the container has read-only.
    """

    def __init__(self, loaded: LoadedMatrix, command: Sequence[str], settings: Settings) -> None:
        self._loaded, self._command, self._settings = loaded, command, settings
        self._told = False

    def test(self, lock: Lock) -> tuple[Result, str]:
        """As `Environment.test`; an image whose own smoke test fails is a skip: nothing was run in it."""
        from builder.bisect.images import build_lock
        from builder.engine import connect
        from builder.labels import LABEL, image_names
        from builder.running import HERE

        # Without an engine, or an index that answers, no state can be told: that says nothing of this one.
        connect().require()
        try:
            engine, image = build_lock(self._loaded, lock, self._settings)
        except UnreachableError:
            raise
        except BuilderError as error:
            return Result.SKIP, f"no image: {(error.because or error.what).splitlines()[0][:160]}"
        here = self._here(engine)
        words = ["sh", "-c", f'cd {HERE} && exec "$@"', "sh", *self._command] if here else list(self._command)
        lines: list[str] = []
        status = 0
        try:
            for item in engine.run(image, words, binds=here, label=LABEL):
                if isinstance(item, int):
                    status = item
                else:
                    lines.append(item)
        finally:
            # Its layers stay in the build cache; of a hundred images nobody wants the names.
            for name in image_names(lock.matrix, lock.digest):
                if engine.find(name) is not None:
                    engine.remove(name)
        return judged(status, "\n".join(lines))

    def _here(self, engine: Engine) -> dict[str, str]:
        """The current folder, if the container can have it and read it: else COMMAND does without, and that is said."""
        from builder.running import here_mount

        try:
            mount = here_mount("")
        except UsageError as error:
            why = error.what
        else:
            # An engine elsewhere has none of this machine's folders.
            if engine.info().local:
                return {mount.source: mount.target}
            why = "the engine is on another machine"
        if not self._told:
            self._told = True
            note(f"COMMAND does not see the current folder: {why}")
        return {}


def _end_of(file: BinaryIO) -> str:
    """The last of what was written to a file, as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
    return file.read().decode(errors="replace")


def judged(status: int, output: str) -> tuple[Result, str]:
    """What an exit status means, with the last line that was printed."""
    words = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    if status == 0:
        return Result.GOOD, "exit status 0"
    if status == SKIP:
        return Result.SKIP, "exit status 125"
    return Result.BAD, f"exit status {status}" + (f": {words[:200]}" if words else "")
