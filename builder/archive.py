"""The distribution's archive: packages fetched through the machine's own apt configuration, unpacked into ``.tools/``.

Standard library only, and no import from the rest of the package: `builder.bootstrap` runs it on the system's Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TOOLS = Path(os.environ.get("BUILDER_TOOLS", Path(__file__).resolve().parent.parent / ".tools"))
UNPACKED = TOOLS / "root"

EXIT_ENGINE = 6


class SetupError(Exception):
    """The machine cannot be set up: what happened, why, and what the user can do.

    Raised by every function here and in `builder.bootstrap` that runs a program; ``main`` there prints it and exits with
    ``code``.
    """

    def __init__(self, what: str, because: str, hint: str, code: int = EXIT_ENGINE) -> None:
        super().__init__(what)
        self.what, self.because, self.hint, self.code = what, because, hint, code


def say(message: str) -> None:
    """Progress goes to stderr, as in every verb."""
    print(message, file=sys.stderr, flush=True)


def os_release() -> dict[str, str]:
    """`/etc/os-release` as a mapping; empty where there is none."""
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {key: value.strip().strip('"') for key, value in pairs}


def run(argv: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program and return its stdout; a failure is a `SetupError` with its last words."""
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SetupError(
            f"`{argv[0]}` was not found", str(error), "this set-up needs Debian's or Ubuntu's apt and dpkg"
        ) from error
    if done.returncode:
        tail = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise SetupError(
            f"`{' '.join(argv[:2])} …` exited with {done.returncode}",
            tail,
            "see that the machine's apt sources can be reached: `apt-get update`",
        )
    return done.stdout


class Archive:
    """The distribution's archive, read through a private apt state below ``.tools/apt``.

    ``release`` other than the host's keeps the mirror and changes the suite; its packages are only ever unpacked.
    """

    def __init__(self, release: str | None = None) -> None:
        self.host = os_release().get("VERSION_CODENAME", "")
        self.release = release or self.host
        self.directory = TOOLS / "apt" / self.release
        self._ready = False

    def _options(self) -> list[str]:
        directory = self.directory
        options = {
            "Dir::State::lists": directory / "lists",
            "Dir::Cache": directory / "cache",
            "Dir::Cache::archives": directory / "cache" / "archives",
            "APT::Sandbox::User": "root",
            "Dpkg::Use-Pty": "0",
            "Acquire::Retries": "3",
        }
        if self.release != self.host:
            options["Dir::Etc::sourcelist"] = directory / "foreign.list"
            options["Dir::Etc::sourceparts"] = Path("/dev/null")
        return [part for key, value in options.items() for part in ("-o", f"{key}={value}")]

    def prepare(self) -> None:
        """Fetch the package lists once a run (into ``.tools``; the system's own lists are not touched)."""
        if self._ready:
            return
        for name in ("lists/partial", "cache/archives/partial"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        if self.release != self.host:
            (self.directory / "foreign.list").write_text(self._foreign_sources(), encoding="utf-8")
        run(["apt-get", *self._options(), "-qq", "update"])
        self._ready = True

    def suites(self) -> list[tuple[str, str]]:
        """(suite, URI) of every suite with a `main` that the sources name, `-updates` and `-security` among them.

        apt lists only what it has fetched: it is asked after `prepare`, since the system's own lists may be old or none.
        """
        self.prepare()
        listed = run(
            [
                "apt-get",
                *self._options(),
                "indextargets",
                "--format",
                "$(CREATED_BY)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)",
            ]
        )
        rows = (line.split("|", 3) for line in listed.splitlines())
        found = [(suite, uri) for created, suite, part, uri in rows if created == "Packages" and part == "main"]
        return list(dict.fromkeys(found))

    def _foreign_sources(self) -> str:
        # apt itself says where the host gets its release from: the mirror is the site's, never ours.
        for suite, uri in Archive(self.host).suites():
            if suite == self.host:
                keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
                return f"deb [signed-by={keyring}] {uri} {self.release} main\n"
        raise SetupError(
            f"no apt source for `{self.host}` main was found",
            "the engine's packages are taken from the mirror that the machine already uses",
            "add the release's main component to the apt sources, or install a Docker Engine 23 or newer",
        )

    def missing(self, names: Sequence[str]) -> list[str]:
        """The packages that apt would install for `names` here: themselves and the dependencies the host lacks."""
        self.prepare()
        out = run(["apt-get", *self._options(), "-qq", "-s", "install", "--no-install-recommends", *names])
        return [line.split()[1] for line in out.splitlines() if line.startswith("Inst ")]

    def unpack(self, names: Sequence[str], target: Path | None = None) -> None:
        """Download `names` (signature and hash checked by apt) and unpack them below ``.tools/root``, or `target`."""
        wanted = [name for name in names if target is not None or not self._stamp(name).exists()]
        if not wanted:
            return
        self.prepare()
        downloads = self.directory / "debs"
        downloads.mkdir(parents=True, exist_ok=True)
        say(f"unpacking into {target or TOOLS}: {' '.join(wanted)} (from {self.release})")
        run(["apt-get", *self._options(), "-qq", "download", *wanted], cwd=downloads)
        (target or UNPACKED).mkdir(parents=True, exist_ok=True)
        for name in wanted:
            for deb in sorted(downloads.glob(f"{name.split(':')[0]}_*.deb")):
                run(["dpkg-deb", "-x", str(deb), str(target or UNPACKED)])
                deb.unlink()
            if target is None:
                self._stamp(name).touch()

    def _stamp(self, name: str) -> Path:
        stamps = self.directory / "unpacked"
        stamps.mkdir(parents=True, exist_ok=True)
        return stamps / name.replace("/", "_")
