"""Set up what a bare Debian or Ubuntu machine lacks: a virtual environment, an engine, an archive bootstrapper.

Standard library only, and of the package `builder.archive` alone: it runs on the system's Python before the
virtual environment exists (``make venv`` calls it by path). Packages come from the distribution's archive through
the machine's own apt configuration (mirror, proxy, certificate authority, signatures), are unpacked into ``.tools/``
and never installed: the system's apt sources, package database and files stay as they are.

The only things written outside ``.tools/`` while an engine of ours runs are its socket and its exec-root under /run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    # By path the package is not found but for this, and its folder comes first: `bisect` would not be the standard library's.
    sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "builder")]

from builder import archive
from builder.archive import Archive, SetupError, say

ENGINE = archive.TOOLS / "engine"
DEFAULT_SOCKET = Path("/var/run/docker.sock")

# Unix socket paths end at 107 bytes and containerd puts its own below the exec-root: keep it short, one per checkout.
EXEC_ROOT = Path("/run") / ("sglang-stack-" + hashlib.sha256(str(archive.TOOLS).encode()).hexdigest()[:8])

# A release whose own engine is too old takes it from a newer one (facts/engine.md: Debian 12 has Engine 20.10 without
# buildx; 13's binaries run unpacked, except runc, which wants a newer libc). Everything else is the release's own.
ENGINE_FROM = {"bookworm": "trixie"}
ENGINE_PACKAGES = {
    "bookworm": ("docker.io", "docker-cli", "docker-buildx", "containerd"),
    "trixie": ("docker.io", "docker-cli", "docker-buildx", "containerd"),
    "noble": ("docker.io", "docker-buildx", "containerd"),
}
ENGINE_NATIVE = ("runc", "iptables")
BASE_PACKAGES = ("mmdebstrap",)
REGISTRY_PACKAGES = ("docker-registry",)
# cosign 2.5 is a package of Debian 13, a program without libraries; Debian 12 and Ubuntu 24.04 have none.
COSIGN_FROM = {"bookworm": "trixie", "trixie": "trixie"}


def require_debian(what: str) -> str:
    """The host's code name, or the error that says which hosts `what` can be set up on."""
    codename = archive.os_release().get("VERSION_CODENAME", "")
    if codename not in ENGINE_PACKAGES or shutil.which("apt-get") is None:
        system = archive.os_release().get("PRETTY_NAME", sys.platform)
        raise SetupError(
            f"{what} cannot be set up on `{system}`",
            f"this is done from the distribution's archive, on {', '.join(sorted(ENGINE_PACKAGES))} only",
            "install a Docker Engine 23 or newer with buildx, start it, and run the command again",
        )
    return codename


def require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise SetupError(
            f"{what} needs root",
            f"this is uid {os.geteuid()}, and a Docker Engine is a system service",
            "run as root once (`sudo make engine`), or install a Docker Engine and join its group",
        )


def library_path() -> str:
    """Folders of ``.tools`` with shared libraries, for `LD_LIBRARY_PATH` of the programs unpacked there."""
    folders = [
        archive.UNPACKED / "usr/lib/x86_64-linux-gnu",
        archive.UNPACKED / "lib/x86_64-linux-gnu",
        archive.UNPACKED / "usr/lib",
    ]
    return ":".join(str(folder) for folder in folders if folder.is_dir())


def tool_environment() -> dict[str, str]:
    """The environment that programs from ``.tools`` run in; empty additions where nothing was unpacked."""
    env = dict(os.environ)
    programs = [archive.UNPACKED / part for part in ("usr/bin", "usr/sbin", "sbin", "bin")]
    # The system's own programs come first: only what the host lacks is taken from .tools.
    env["PATH"] = ":".join([env.get("PATH", os.defpath), *(str(p) for p in programs if p.is_dir())])
    if library_path():
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [env.get("LD_LIBRARY_PATH"), library_path()]))
        env["XTABLES_LIBDIR"] = str(archive.UNPACKED / "usr/lib/x86_64-linux-gnu/xtables")
        patterns = ("usr/share/perl5", "usr/share/perl/*", "usr/lib/x86_64-linux-gnu/perl/*")
        perl = [str(path) for pattern in patterns for path in sorted(archive.UNPACKED.glob(pattern))]
        if perl and shutil.which("perl") is None:
            env["PERL5LIB"] = ":".join(perl)
    return env


# ----------------------------------------------------------------------------------------------- the engine


def engine_answers(path: Path) -> bool:
    """Whether a Docker Engine answers a ping on the unix socket `path`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b"200 OK" in connection.recv(256)
    except OSError:
        return False


def engine_pid() -> int | None:
    """The pid of the engine that this checkout started, if it still runs."""
    try:
        pid = int((ENGINE / "docker.pid").read_text(encoding="utf-8"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"dockerd" in command and str(ENGINE).encode() in command else None


def our_socket() -> Path:
    """Where our engine listens: recorded at its start, so that every later command finds the same place."""
    try:
        return Path((ENGINE / "socket").read_text(encoding="utf-8").strip())
    except OSError:
        return EXEC_ROOT / "docker.sock"


def engine_host() -> str | None:
    """`DOCKER_HOST` to use: the user's own, a running engine at the default place, or ours; None if none answers."""
    if os.environ.get("DOCKER_HOST"):
        return os.environ["DOCKER_HOST"]
    if engine_pid() is not None and engine_answers(our_socket()):
        return f"unix://{our_socket()}"
    if engine_answers(DEFAULT_SOCKET):
        return f"unix://{DEFAULT_SOCKET}"
    return None


def engine_installed() -> str | None:
    """The path of a `dockerd` that the system has, if any: then it is the user's to start, not ours to replace."""
    return shutil.which("dockerd", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin")


def setup_engine(store: str = "") -> str:
    """Use the running engine, or unpack and start one; return its address (`unix://…`).

    `store` is ``classic`` or ``containerd`` for an engine of ours (default: classic, see docs/measurements.md).
    Raises `SetupError` where there is none and none may or can be set up.
    """
    if (host := engine_host()) is not None:
        return host
    if os.environ.get("ENGINE") == "none":
        raise SetupError(
            "no Docker Engine answers", "`ENGINE=none` forbids to set one up", "start one, or run without `ENGINE=none`"
        )
    if (installed := engine_installed()) is not None and os.environ.get("ENGINE") != "own":
        raise SetupError(
            "the Docker Engine does not answer",
            f"`{installed}` is installed but nothing listens on {DEFAULT_SOCKET}",
            "start it (`systemctl start docker`), name its address in `DOCKER_HOST`, or leave it and use one in .tools: `ENGINE=own`",
        )
    release = require_debian("a Docker Engine")
    require_root("a Docker Engine")
    say(f"no Docker Engine is installed: setting one up in {archive.TOOLS} (remove it with `make clean-tools`)")
    unpack_engine(release)
    return start_engine(store)


def unpack_engine(release: str) -> None:
    """Unpack the engine, its client and buildx, and what they need that the host lacks."""
    source = ENGINE_FROM.get(release, release)
    native = Archive(release)
    names = list(ENGINE_PACKAGES[release])
    if source == release:
        native.unpack([*dict.fromkeys([*native.missing([*names, *ENGINE_NATIVE])])])
    else:
        Archive(source).unpack(names)
        native.unpack(native.missing(ENGINE_NATIVE))


def start_engine(store: str = "") -> str:
    """Start our engine in the background and wait until it answers; return its address."""
    for folder in (ENGINE / "data", EXEC_ROOT):
        folder.mkdir(parents=True, exist_ok=True)
    # The default address if nobody has it, so that a plain `docker run` finds the image.
    listen = DEFAULT_SOCKET if not DEFAULT_SOCKET.exists() or not _in_use(DEFAULT_SOCKET) else EXEC_ROOT / "docker.sock"
    (ENGINE / "socket").write_text(f"{listen}\n", encoding="utf-8")
    config = ENGINE / "daemon.json"
    features = {"containerd-snapshotter": store == "containerd"}
    # The engine's own limit is a tenth of the disk: on a small one it would drop a stack's layers right after the build.
    limits = {"gc": {"enabled": True, "defaultKeepStorage": "40GB"}}
    config.write_text(json.dumps({"features": features, "builder": limits}) + "\n", encoding="utf-8")
    argv = [
        str(archive.UNPACKED / "usr/sbin/dockerd"),
        *("--config-file", str(config)),
        *("--data-root", str(ENGINE / "data")),
        *("--exec-root", str(EXEC_ROOT)),
        *("--pidfile", str(ENGINE / "docker.pid")),
        *("--host", f"unix://{listen}"),
    ]
    choose_iptables()
    log = ENGINE / "dockerd.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=tool_environment(), start_new_session=True
        )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if engine_answers(listen):
            say(f"engine: pid {process.pid}, socket {listen}, data in {ENGINE / 'data'}")
            return f"unix://{listen}"
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
    raise SetupError("the Docker Engine did not start", tail, f"read {log}")


def choose_iptables() -> None:
    """Give the unpacked iptables its plain names: the package's alternatives are set by an install script.

    The nf_tables variant is the distribution's default; the legacy one serves kernels that lack it.
    """
    if (archive.UNPACKED / "usr/sbin/iptables").exists() or find_program("iptables") is not None:
        return
    folder = archive.UNPACKED / "usr/sbin"
    words = ""
    for variant in ("nft", "legacy"):
        probe = [str(folder / f"iptables-{variant}"), "-t", "nat", "-L", "-n"]
        done = subprocess.run(probe, env=tool_environment(), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            for name in ("iptables", "ip6tables"):
                (folder / name).symlink_to(f"{name}-{variant}")
            return
        words = done.stderr.strip()
    raise SetupError("`iptables` does not work here", words, "the engine's network needs a kernel with NAT")


def _in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def stop_engine(timeout: float = 60) -> bool:
    """Stop the engine of this checkout by its pid and wait for its end; False if none runs. Its data stay."""
    pid = engine_pid()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while engine_pid() is not None:
        if time.monotonic() > deadline:
            raise SetupError(
                f"the engine (pid {pid}) did not stop", f"waited {timeout:.0f} s", f"read {ENGINE}/dockerd.log"
            )
        time.sleep(0.2)
    for leftover in (our_socket(), EXEC_ROOT):
        with contextlib.suppress(OSError):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return True


def clean() -> None:
    """Stop our engine and remove everything that was unpacked or stored below ``.tools``."""
    # An engine leaves its bridge behind; it is ours if the engine was, and nobody else's runs.
    if stop_engine() and shutil.which("ip") is not None and not engine_answers(DEFAULT_SOCKET):
        subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)
    for mounted in _mounts_below(archive.TOOLS):
        archive.run(["umount", "-l", mounted])
    shutil.rmtree(archive.TOOLS, ignore_errors=True)


def _mounts_below(folder: Path) -> Iterator[str]:
    for line in reversed(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()):
        target = line.split()[1].replace("\\040", " ")
        if target.startswith(f"{folder}/"):
            yield target


# ------------------------------------------------------------------------------------ other programs, the venv


def find_program(name: str) -> str | None:
    """A program of the system, else of ``.tools``."""
    return shutil.which(name, path=tool_environment()["PATH"])


def setup_packages(names: Sequence[str]) -> None:
    """Unpack packages of the host's release (and the dependencies it lacks) into ``.tools``."""
    release = require_debian(", ".join(names))
    native = Archive(release)
    native.unpack(native.missing(names))


def setup_cosign() -> None:
    """Unpack `cosign`, unless the system or ``.tools`` has it. Raises `SetupError` where no archive of ours has it."""
    if find_program("cosign") is not None:
        return
    release = require_debian("cosign")
    if release not in COSIGN_FROM:
        raise SetupError(
            f"`cosign` is no package of `{release}`",
            f"it is taken from Debian's archive, on {', '.join(sorted(COSIGN_FROM))} only",
            "put a cosign 2 on the PATH, as its project releases it",
        )
    Archive(COSIGN_FROM[release]).unpack(["cosign"])


def make_venv(target: Path, requirements: Path) -> None:
    """A virtual environment with the pinned `requirements`, also where the distribution left out `ensurepip`."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file runs on the Python of the machine)
        found = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(
            f"Python {found} is too old",
            "the builder needs Python 3.11 or newer",
            "set `PYTHON=/path/to/python3.11`",
            2,
        )
    stamp = target / ".requirements.sha256"
    digest = hashlib.sha256(requirements.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8").strip() == digest:
        return
    say(f"making the virtual environment in {target}")
    python = target / "bin" / "python"
    try:
        import ensurepip  # noqa: F401

        archive.run([sys.executable, "-m", "venv", "--clear", str(target)])
        pip = [str(python), "-m", "pip"]
    except ImportError:
        archive.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(target)])
        pip = [str(python), *_distribution_pip()]
    quiet = ["--quiet", "--disable-pip-version-check"]
    archive.run(
        [*pip, "install", *quiet, "--require-hashes", "--no-deps", "-r", str(requirements)], env=_pip_environment()
    )
    archive.run(
        [*pip, "install", *quiet, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
        env=_pip_environment(),
    )
    stamp.write_text(digest + "\n", encoding="utf-8")


def _distribution_pip() -> list[str]:
    # Debian splits ensurepip off; its wheel of pip runs as it is (a wheel is a zip file with a __main__).
    release = require_debian("a virtual environment without `ensurepip`")
    pattern = "usr/share/python-wheels/pip-*.whl"
    if not (wheels := [*Path("/").glob(pattern), *archive.UNPACKED.glob(pattern)]):
        Archive(release).unpack(["python3-pip-whl"])
        wheels = [*archive.UNPACKED.glob(pattern)]
    return [f"{wheels[0]}/pip"]


def _pip_environment() -> dict[str, str]:
    # A constraint or find-links meant for other projects must not decide which of our pinned files is taken.
    return {key: value for key, value in os.environ.items() if key not in ("PIP_CONSTRAINT", "PIP_FIND_LINKS")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bootstrap", description=__doc__.splitlines()[0] if __doc__ else None)
    verbs = parser.add_subparsers(dest="verb", required=True)
    venv = verbs.add_parser("venv", help="make or refresh the virtual environment")
    venv.add_argument("--target", type=Path, default=ROOT / ".venv")
    venv.add_argument("--requirements", type=Path, default=ROOT / "requirements" / "dev.txt")
    engine = verbs.add_parser("engine", help="use the running engine, or set one up and start it")
    engine.add_argument("--store", choices=("classic", "containerd"), default="")
    verbs.add_parser("stop", help="stop the engine that this checkout started")
    verbs.add_parser("tools", help="unpack what the tests need: engine, buildx, registry, mmdebstrap, cosign")
    verbs.add_parser("clean", help="stop our engine and remove .tools")
    arguments = parser.parse_args(argv)
    try:
        if arguments.verb == "venv":
            make_venv(arguments.target, arguments.requirements)
        elif arguments.verb == "engine":
            print(setup_engine(arguments.store))
        elif arguments.verb == "stop":
            say("engine stopped" if stop_engine() else "no engine of this checkout runs")
        elif arguments.verb == "tools":
            release = require_debian("the tests' tools")
            if engine_installed() is None:
                unpack_engine(release)
            setup_packages([*BASE_PACKAGES, *REGISTRY_PACKAGES])
            try:
                setup_cosign()
            except SetupError as error:
                # Where there is none the rest is of use all the same: tests that need it say that they did not run.
                say(f"note: {error.what}: {error.hint}")
        elif arguments.verb == "clean":
            clean()
    except SetupError as error:
        say(f"error: {error.what}\n  because: {error.because}\n  hint: {error.hint}")
        return error.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
