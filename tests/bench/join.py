"""How layers are joined: time, disk and reuse of each way, on each image store, with the real wheels of a matrix.

    python tests/bench/join.py [--matrix cu130-next] [--stores classic,containerd] [--ways one-step,runs,…]
                               [--engine-from forky]

Each store is an engine of its own (data root, socket, pid; host network, no bridge), unpacked by `make tools` and
removed at the end; `--engine-from` takes engine and buildx from another suite of the archive. An engine without a bridge
takes docker0 away from others: ours is started again at the end. The wheels are fetched once
and served from the loopback address, so that neither the index's speed nor a secret is in the numbers; the way
`runs-secret` mounts one on purpose. Prints the table of docs/measurements.md. Needs root, about 50 GB of disk.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from builder import archive, bootstrap
from builder.build import prepare
from builder.engine import find_buildx
from builder.layers import LayerPlan, plan_layers
from builder.osimage import locked_rootfs
from builder.settings import load as settings

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("docker.io", "docker-buildx", "containerd")


@dataclass(frozen=True)
class Result:
    """One build: seconds, and bytes that the disk holds more than before the first build of its way."""

    store: str
    way: str
    change: str
    seconds: float
    disk: int


class BenchEngine:
    """An engine with a data root of its own, stopped by pid. ``root`` is where its packages were unpacked."""

    def __init__(self, folder: Path, store: str, root: Path) -> None:
        self.folder, self.store, self.root = folder, store, root
        self.run = Path("/run") / f"bench-{store}-{os.getpid()}"
        self.host = f"unix://{self.run}/docker.sock"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self.run.mkdir(parents=True)
        config = self.folder / "daemon.json"
        config.write_text(json.dumps({"features": {"containerd-snapshotter": self.store == "containerd"}}))
        environment = bootstrap.tool_environment()
        # containerd and its shim have to be of the engine's own suite.
        environment["PATH"] = f"{self.root / 'usr/bin'}:{self.root / 'usr/sbin'}:{environment['PATH']}"
        argv = [str(self.root / "usr/sbin/dockerd"), "--config-file", str(config)]
        argv += ["--data-root", str(self.folder / "data"), "--exec-root", str(self.run), "--host", self.host]
        argv += ["--pidfile", str(self.folder / "pid"), "--bridge", "none", "--iptables=false"]
        log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, start_new_session=True)
        for _ in range(300):
            if bootstrap.engine_answers(self.run / "docker.sock"):
                return self
            time.sleep(0.2)
        raise SystemExit(f"the engine did not start: {self.folder / 'log'}")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        time.sleep(1)
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        for line in reversed(mounts):
            if line.split()[1].startswith(str(self.folder)):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.run, ignore_errors=True)


def used(path: Path) -> int:
    """Bytes used on the file system of `path`."""
    os.sync()
    return shutil.disk_usage(path).used


class Mirror:
    """The wheels of a lock on the loopback address: a folder of files, which is a page of links for an installer."""

    def __init__(self, folder: Path) -> None:
        handler = functools.partial(QuietHandler, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class QuietHandler(SimpleHTTPRequestHandler):
    """Says nothing of its requests."""

    def log_message(self, *_: object) -> None:
        pass


def fetch(plan: LayerPlan, folder: Path) -> None:
    """The wheels of the plan into a folder, by hash (`pip download`: names, versions and hashes of the lock)."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    listed = folder.with_suffix(".txt")
    listed.write_text("".join(text.text for layer in plan.layers for text in layer.lists))
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    argv += [
        "--no-cache-dir",
        "--dest",
        str(folder),
        "--requirement",
        str(listed),
        "--python-version",
        plan.lock.python,
    ]
    argv += [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
    argv += [f"--platform={old}_x86_64" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    subprocess.run(argv, env=bootstrap._pip_environment(), check=True)


def install(layers: list[str], epoch: int | None, mirror: str, *, secret: bool = False) -> str:
    """The RUN that installs the wheels of `layers`: the same in every way of joining, so that only that differs.

    Without an epoch it is what a person types, with no times fixed: the one step that everything is compared with.
    """
    finish = f"; python3 -P /mnt/tools/finish.py --epoch {epoch} --start /opt/.start /opt" if epoch else ""
    mounts = " ".join(f"--mount=type=bind,source=layers/{name},target=/mnt/layers/{name}" for name in layers)
    mounts += " --mount=type=secret,id=any,target=/mnt/secrets/any" if secret else ""
    files = " ".join(f"$(printf -- '-r %s ' /mnt/layers/{name}/*.txt)" for name in layers)
    return (
        "RUN --network=host --mount=type=tmpfs,target=/mnt --mount=type=bind,source=tools,target=/mnt/tools "
        f"{mounts} set -eu; touch /opt/.start; export TMPDIR=/opt/.tmp; mkdir /opt/.tmp; "
        "/mnt/tools/uv pip install -q --no-cache --python /opt/venv/bin/python --no-deps --require-hashes "
        f"--only-binary :all: --no-index --find-links {mirror} {files}; rm -rf /opt/.tmp{finish}\n"
    )


def dockerfile(way: str, plan: LayerPlan, mirror: str) -> str:
    """The Dockerfile of a way of joining."""
    names = [layer.name for layer in plan.layers]
    head = "FROM scratch AS os\nADD rootfs.tar /\n"
    python = "FROM os AS python\nRUN --network=none python3 -m venv --without-pip /opt/venv\n"
    if way == "one-step":
        return head + python + install(names, None, mirror)
    if way in ("runs", "runs-secret"):
        secret = way == "runs-secret"
        return head + python + "".join(install([name], plan.epoch, mirror, secret=secret) for name in names)
    link = "--link " if way == "copy-link" else ""
    stages = "".join(f"FROM python AS {name}\n{install([name], plan.epoch, mirror)}" for name in names)
    copies = "".join(f"COPY {link}--from={name} /opt/venv /opt/venv\n" for name in names)
    return head + python + stages + "FROM python\n" + copies


@dataclass(frozen=True)
class Bench:
    """What every build has: an engine, a client, a context, a plan, a mirror."""

    engine: BenchEngine
    buildx: tuple[str, ...]
    context: Path
    plan: LayerPlan
    mirror: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": self.engine.host, "BUILDX_BUILDER": "default"}

    def build(self, way: str, output: str) -> float:
        """Seconds of one build."""
        (self.context / "Dockerfile").write_text(dockerfile(way, self.plan, self.mirror))
        argv = [*self.buildx, "build", "--progress=plain", "--provenance=false", "--allow", "network.host"]
        argv += ["--secret", f"id=any,src={self.context / 'Dockerfile'}"]
        argv += ["--output", output] if output else []
        start = time.monotonic()
        done = subprocess.run(
            [*argv, str(self.context)], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{way} on {self.engine.store} failed:\n{done.stderr[-3000:]}")
        return time.monotonic() - start

    def measure(self, way: str, kind: str, output: str) -> list[Result]:
        """Cold, after a change of the top layer, after a change of the bottom layer."""
        store = f"{self.engine.store} {kind}".strip()
        before = used(self.engine.folder)
        results: list[Result] = []

        def take(change: str) -> None:
            seconds = self.build(way, output)
            result = Result(store, way, change, seconds, used(self.engine.folder) - before)
            results.append(result)
            print(f"{store:<24} {way:<11} {change:<7} {seconds:7.1f} s  {result.disk / 1e9:6.1f} GB", flush=True)

        take("cold")
        if way != "one-step":
            for change, layer in (("top", self.plan.layers[-1].name), ("bottom", self.plan.layers[0].name)):
                old = changed(self.context, layer)
                take(change)
                (self.context / "layers" / layer / "default.txt").write_text(old)
        return results


OUTPUTS = {
    "classic": {"": ""},
    "containerd": {
        "uncompressed": "type=image,name=bench,compression=uncompressed,force-compression=true,unpack=true",
        "zstd": "type=image,name=bench,compression=zstd,compression-level=1,force-compression=true,unpack=true",
    },
}


def changed(context: Path, layer: str) -> str:
    """Drop one small wheel from a layer's list; return the old text."""
    path = context / "layers" / layer / "default.txt"
    old = path.read_text()
    lines = old.splitlines(keepends=True)
    # A wheel of the layer that is small: what is measured is the joining, not the wheel.
    path.write_text("".join(lines[:-1]) if len(lines) > 1 else f"# changed\n{old}")
    return old


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--matrix", default="cu130-next")
    parser.add_argument("--stores", default="classic,containerd", help="STORE or STORE:EXPORT, as in containerd:zstd")
    parser.add_argument("--ways", default="one-step,runs,runs-secret,copy,copy-link")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="keep the wheels here for the next run")
    parser.add_argument("--engine-from", metavar="SUITE", help="take the engine from this suite of the archive")
    arguments = parser.parse_args()
    prepared = prepare(ROOT / "matrices" / f"{arguments.matrix}.yaml")
    # As the index has them: patched wheels are files of this machine, and change nothing here.
    plan = plan_layers(prepared.loaded.matrix, prepared.lock)
    rootfs = locked_rootfs(prepared.loaded.matrix, prepared.lock, settings())
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=archive.TOOLS) as temporary:
        folder = Path(temporary)
        root, buildx = archive.UNPACKED, find_buildx().argv
        if arguments.engine_from:
            root = folder / "engine"
            archive.Archive(arguments.engine_from).unpack(ENGINE, root)
            buildx = (str(root / "usr/libexec/docker/cli-plugins/docker-buildx"),)
        context = folder / "context"
        prepared.rendered.write(context)
        for layer in plan.layers:
            folder_of = context / "layers" / layer.name
            shutil.rmtree(folder_of)
            folder_of.mkdir()
            for listed in layer.lists:
                (folder_of / listed.name).write_text(listed.text)
        os.link(rootfs, context / "rootfs.tar")
        wheels = arguments.wheels or folder / "wheels"
        fetch(plan, wheels)
        with Mirror(wheels) as mirror:
            for named in arguments.stores.split(","):
                store, _, only = named.partition(":")
                for kind, output in OUTPUTS[store].items():
                    if only not in ("", kind):
                        continue
                    for way in arguments.ways.split(","):
                        if store == "containerd" and way == "copy":
                            continue
                        with BenchEngine(folder / f"{store}-{kind}-{way}", store, root) as engine:
                            results += Bench(engine, buildx, context, plan, mirror.url).measure(way, kind, output)
    if bootstrap.stop_engine():
        bootstrap.start_engine()
    table(results)
    return 0


def table(results: list[Result]) -> None:
    """The results as a Markdown table, with ratios to the one-step install of the same run."""
    base = next((r.seconds for r in results if r.way == "one-step" and r.change == "cold"), None)
    print("\n| store | join | change | seconds | × one step | disk, GB |\n|---|---|---|---|---|---|")
    for r in results:
        ratio = f"{r.seconds / base:.2f}" if base else "-"
        print(f"| {r.store} | {r.way} | {r.change} | {r.seconds:.1f} | {ratio} | {r.disk / 1e9:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
