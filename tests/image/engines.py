"""A registry and further engines for image tests, all on the loopback address, all stopped by pid.

    with Registry(tmp_path / "registry") as registry, SecondEngine(tmp_path / "host") as host:
        host.docker("pull", f"{registry.address}/stack@sha256:…")     # the docker client, as a user runs it
        host.engine()                                                 # a builder.engine.Engine, closed at the end
        registry.kill(); registry.start()                             # SIGKILL; again on the same port, with the same data
        host.kill(); host.start()                                     # the same for dockerd
        registry.requests()                                           # the access log, one `Request` a line
        host.address                                                  # unix:///…, which is a HOST of `builder pull`

* `Registry` is Debian's `docker-registry` (`make tools`) with a data folder, a port and an access log of its own.
* `SecondEngine` is dockerd out of `.tools` with its own data-root, exec-root, pidfile and socket. Its containers have no network (`--network none`). Several run beside each other, and
  beside the first engine, which notices nothing: each gets a bridge of its own name, since an engine that is started with `"bridge": "none"` takes docker0 away from all others. Needs root.
  ``store="containerd"`` for the other image store; ``data=FOLDER`` puts the data-root elsewhere (`small_disk`).
* `small_disk(folder, bytes)` is a file system of that size (tmpfs: it takes memory).
* `Throttle(port)` is a proxy in front of a registry that lets through so many bytes a second, counts them, and can cut every connection.
* `tiny_image(buildx.argv, host.address, folder, name, …)` makes an image of random layers in a second or two; it can be run, and no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from builder import bootstrap
from builder.engine import Engine

_ANSWER_SECONDS = 60
_LINE = re.compile(r'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[0-9.]+" (?P<status>\d{3}) (?P<bytes>\d+)')


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM, seconds: float = 30) -> None:
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---------------------------------------------------------------------------------------------------- registry


@dataclass(frozen=True)
class Request:
    """A line of the access log. ``bytes`` are those of the answer's body."""

    method: str
    path: str
    status: int
    bytes: int

    @property
    def blob(self) -> str:
        """The digest of the blob that was read (GET) or whose upload was finished (PUT); empty for anything else."""
        if (
            self.method == "GET"
            and self.status in (200, 206)
            and (found := re.search(r"/blobs/(sha256:\w+)", self.path))
        ):
            return found[1]
        found = re.search(r"/blobs/uploads/.*digest=(sha256(?::|%3A)\w+)", self.path)
        return found[1].replace("%3A", ":") if found and self.method == "PUT" and self.status == 201 else ""


class Registry:
    """A real registry on loopback. A context manager; ``folder`` is made.

    ``htpasswd`` (a file) makes it ask for basic authentication; ``tls`` are the files of certificate and key.
    """

    def __init__(self, folder: Path, *, htpasswd: Path | None = None, tls: tuple[Path, Path] | None = None) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._htpasswd, self._tls = htpasswd, tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        """Where it keeps blobs and manifests."""
        return self.folder / "data"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        http: dict[str, object] = {"addr": self.address}
        if self._tls:
            http["tls"] = {"certificate": str(self._tls[0]), "key": str(self._tls[1])}
        config: dict[str, object] = {
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": str(self.data)}, "delete": {"enabled": True}},
            "http": http,
            "log": {"level": "error"},
        }
        if self._htpasswd:
            config["auth"] = {"htpasswd": {"realm": "registry", "path": str(self._htpasswd)}}
        # JSON is YAML.
        (self.folder / "config.yml").write_text(json.dumps(config), encoding="utf-8")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            _end(self._process)

    def start(self) -> None:
        """Start it, on the port and with the data that it has; its log goes on."""
        program = bootstrap.find_program("docker-registry")
        assert program is not None, "the registry comes with `make tools`"
        with (self.folder / "access.log").open("ab") as log:
            argv = [program, "serve", str(self.folder / "config.yml")]
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        for _ in range(_ANSWER_SECONDS * 10):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, (self.folder / "access.log").read_text(encoding="utf-8")[-2000:]
            time.sleep(0.1)
        raise AssertionError("the registry did not start")

    def kill(self) -> None:
        """SIGKILL, as when its machine goes down."""
        assert self._process is not None
        _end(self._process, signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing comes."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def requests(self) -> list[Request]:
        """The access log so far."""
        lines = (self.folder / "access.log").read_text(encoding="utf-8", errors="replace").splitlines()
        found = (_LINE.search(line) for line in lines)
        return [Request(m["method"], m["path"], int(m["status"]), int(m["bytes"])) for m in found if m]

    def blob_path(self, digest: str) -> Path:
        """The file of a blob in the registry's storage."""
        algorithm, _, value = digest.partition(":")
        return self.data / "docker/registry/v2/blobs" / algorithm / value[:2] / value / "data"


# ------------------------------------------------------------------------------------------------------ engine


def _bridge(name: str, number: int) -> None:
    """Make a bridge with an address of its own (198.18.0.0/15 is for tests), as `ip link add … type bridge` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x89A0, name.encode() + b"\0")  # SIOCBRADDBR
        # Another test run may be under way: the process decides the network.
        at = (os.getpid() * 16 + number) % 512
        for request, address in (
            (0x8916, f"198.{18 + at // 256}.{at % 256}.1"),
            (0x891C, "255.255.255.0"),
        ):  # and netmask
            family = struct.pack("H2x4s8x", socket.AF_INET, socket.inet_aton(address))
            fcntl.ioctl(control, request, struct.pack("16s16s", name.encode(), family))
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", name.encode(), 0x1))  # up


def _no_bridge(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control, contextlib.suppress(OSError):
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", name.encode(), 0))  # down
        fcntl.ioctl(control, 0x89A1, name.encode() + b"\0")  # SIOCBRDELBR


_COUNT = iter(range(1, 200))


class SecondEngine:
    """An engine that acts as a host. A context manager: everything of it is gone at the end, ``folder`` too."""

    def __init__(
        self,
        folder: Path,
        store: str = "classic",
        *,
        data: Path | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.folder, self.store = folder, store
        self._data, self._config = data or folder / "data", dict(config or {})
        self._number = next(_COUNT)
        # containerd puts sockets below it, whose paths end at 107 bytes.
        self._run = Path("/run") / f"sglang-test-{os.getpid()}-{self._number}"
        self._bridge = f"sgt{os.getpid() % 1000000}-{self._number}"
        self._process: subprocess.Popen[bytes] | None = None
        self._engines: list[Engine] = []

    @property
    def socket(self) -> Path:
        return self._run / "docker.sock"

    @property
    def address(self) -> str:
        """`unix:///…`: `DOCKER_HOST`, and a HOST."""
        return f"unix://{self.socket}"

    @property
    def data(self) -> Path:
        """Its data-root."""
        return self._data

    @property
    def log(self) -> str:
        """What dockerd said so far."""
        return (self.folder / "dockerd.log").read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        for folder in (self.folder, self._data, self._run):
            folder.mkdir(parents=True, exist_ok=True)
        _bridge(self._bridge, self._number)
        config = {"features": {"containerd-snapshotter": self.store == "containerd"}, **self._config}
        (self.folder / "daemon.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        """Start dockerd, with the data that it has, and wait until it answers."""
        dockerd = bootstrap.find_program("dockerd")
        assert dockerd is not None, "the engine comes with `make tools`"
        argv = [dockerd, "--config-file", str(self.folder / "daemon.json"), "--host", self.address]
        argv += ["--data-root", str(self._data), "--exec-root", str(self._run / "exec")]
        argv += ["--pidfile", str(self._run / "docker.pid"), "--bridge", self._bridge]
        argv += ["--iptables=false", "--ip-forward=false", "--ip-masq=false"]
        (self._run / "docker.pid").unlink(missing_ok=True)
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=bootstrap.tool_environment()
            )
        for _ in range(_ANSWER_SECONDS * 5):
            if bootstrap.engine_answers(self.socket):
                return
            assert self._process.poll() is None, f"the second engine ended:\n{self.log[-3000:]}"
            time.sleep(0.2)
        raise AssertionError(f"the second engine did not start:\n{self.log[-3000:]}")

    def kill(self) -> None:
        """SIGKILL of dockerd; its containerd stays, as it does for a user."""
        assert self._process is not None
        _end(self._process, signal.SIGKILL)

    def stop(self) -> None:
        """Stop dockerd in order; `start` starts it again."""
        assert self._process is not None
        _end(self._process)

    def engine(self) -> Engine:
        """A connection to it, closed at the end."""
        self._engines.append(Engine(self.address))
        return self._engines[-1]

    def docker(self, *arguments: str, check: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run the docker client against it."""
        program = bootstrap.find_program("docker")
        assert program is not None, "the docker client comes with `make tools`"
        environment = {**bootstrap.tool_environment(), "DOCKER_HOST": self.address}
        done = subprocess.run(
            [program, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=timeout
        )
        assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.close()
        if self._process is not None:
            _end(self._process)
        # After a SIGKILL of dockerd nobody ends its containerd.
        self._end_left()
        _no_bridge(self._bridge)
        for line in reversed(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()):
            target = line.split()[1]
            if target.startswith((f"{self.folder}/", f"{self._data}/", f"{self._run}/")):
                subprocess.run(["umount", "-l", target], check=False)
        for folder in (self._data, self.folder, self._run):
            shutil.rmtree(folder, ignore_errors=True)

    def _end_left(self) -> None:
        for _ in range(100):
            left = [pid for pid in _processes() if str(self._run) in pid[1]]
            if not left:
                return
            for pid, _command in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if _ < 50 else signal.SIGKILL)
            time.sleep(0.1)


def _processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command.split(" ")[0].rpartition("/")[2] in ("containerd", "containerd-shim-runc-v2"):
                    yield int(entry.name), command


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes at `folder`, gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


# ------------------------------------------------------------------------------------------------------- proxy


class Throttle:
    """A TCP proxy on loopback to `port` that passes `rate` bytes a second each way. A context manager.

    ``up`` and ``down`` count the bytes to and from the server. `cut` breaks every connection off and refuses new ones,
    until `mend`.
    """

    def __init__(self, port: int, rate: int = 20_000_000) -> None:
        self.rate, self.up, self.down = rate, 0, 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        self._lock, self._is_cut, self._closed = threading.Lock(), False, False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        """Break all connections off; new ones are closed at once."""
        with self._lock:
            self._is_cut = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._is_cut = False

    def wait_for(self, count: Callable[[], int], at_least: int, seconds: float = 60) -> None:
        """Wait until `count()` is at least that."""
        end = time.monotonic() + seconds
        while count() < at_least:
            assert time.monotonic() < end, f"{count()} of {at_least} bytes after {seconds} s"
            time.sleep(0.02)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                cut = self._is_cut
            try:
                far = None if cut else socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                far = None
            if far is None:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for source, sink, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(len(data) / self.rate)
                sink.sendall(data)
                with self._lock:
                    if up:
                        self.up += len(data)
                    else:
                        self.down += len(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source, sink}


# ------------------------------------------------------------------------------------------------------- image


def program(status: int) -> bytes:
    """A static program for x86-64 Linux that ends with `status`, and does nothing else: 1 segment, 12 bytes of code."""
    code = struct.pack("<BIBI2s", 0xBF, status, 0xB8, 60, b"\x0f\x05")  # mov edi, status; mov eax, 60 (exit); syscall
    head = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    at = 0x400000
    head += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, at + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, at, at, 120 + len(code), 120 + len(code), 0x1000)
    return head + segment + code


def tiny_image(
    buildx: Sequence[str],
    host: str,
    folder: Path,
    name: str,
    *,
    sizes: Sequence[int] = (4_000_000, 4_000_000, 4_000_000, 4_000_000),
    seed: int = 0,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Build an image of layers of so many random bytes each, from the bottom, and a top layer with a program.

    Run, it ends with status ``seed``, which is under 256. The program and the layer below it are that seed's own; the others
    are the same whatever it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["FROM scratch", *(f"LABEL {key}={json.dumps(value)}" for key, value in (labels or {}).items())]
    for number, size in enumerate((*sizes, 0)):
        own = number >= len(sizes) - 1
        content = random.Random(f"{seed if own else 'below'} {number}").randbytes(size) if size else program(seed)
        file = folder / f"file{number}"
        file.write_bytes(content)
        file.chmod(0o755)
        # BuildKit's client sends a file again only where its size or its time is another.
        os.utime(file, (0, seed if own else 0))
        lines.append(f"COPY file{number} /file{number}")
    (folder / "Dockerfile").write_text("\n".join([*lines, f'CMD ["/file{len(sizes)}"]', ""]), encoding="utf-8")
    environment = {**bootstrap.tool_environment(), "DOCKER_HOST": host, "BUILDX_BUILDER": "default"}
    argv = [*buildx, "build", "--provenance=false", "--tag", name, str(folder)]
    subprocess.run(argv, env=environment, check=True, capture_output=True)
