"""How layers are joined: time, disk and reuse of each way, on each image store, with the real wheels of a matrix.

    python tests/bench/join.py [--matrix cu130-next] [--stores classic,containerd] [--ways one-step,runs,copy,copy-link]

Each store is an engine of its own (data root, socket, pid; host network, no bridge), unpacked by `make tools` and
removed at the end. Prints the table of docs/measurements.md. Needs root, the package index, about 50 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from builder import bootstrap
from builder.build import prepare
from builder.engine import find_buildx
from builder.layers import LayerPlan
from builder.osimage import locked_rootfs
from builder.settings import load as settings

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "builder" / "smoke"


@dataclass(frozen=True)
class Result:
    """One build: seconds, and bytes that the disk holds more than before the first build of its way."""

    store: str
    way: str
    change: str
    seconds: float
    disk: int


class BenchEngine:
    """An engine with a data root of its own, stopped by pid."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder, self.store = folder, store
        self.run = Path("/run") / f"bench-{store}-{os.getpid()}"
        self.host = f"unix://{self.run}/docker.sock"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self.run.mkdir(parents=True)
        config = self.folder / "daemon.json"
        config.write_text(json.dumps({"features": {"containerd-snapshotter": self.store == "containerd"}}))
        argv = [str(bootstrap.UNPACKED / "usr/sbin/dockerd"), "--config-file", str(config)]
        argv += ["--data-root", str(self.folder / "data"), "--exec-root", str(self.run), "--host", self.host]
        argv += ["--pidfile", str(self.folder / "pid"), "--bridge", "none", "--iptables=false"]
        log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(
            argv, stdout=log, stderr=log, env=bootstrap.tool_environment(), start_new_session=True
        )
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


def install(layers: list[str], epoch: int | None) -> str:
    """The RUN that installs the wheels of `layers`: the same in every way of joining, so that only that differs.

    Without an epoch it is what a person types, with no times fixed: the one step that everything is compared with.
    """
    finish = f"; python3 -P /mnt/tools/finish.py --epoch {epoch} --start /opt/.start /opt" if epoch else ""
    mounts = " ".join(f"--mount=type=bind,source=layers/{name},target=/mnt/layers/{name}" for name in layers)
    files = " ".join(f"$(printf -- '-r %s ' /mnt/layers/{name}/*.txt)" for name in layers)
    return (
        "RUN --network=host --mount=type=tmpfs,target=/mnt --mount=type=bind,source=tools,target=/mnt/tools "
        f"{mounts} --mount=type=secret,id=ca,target=/mnt/secrets/ca "
        "set -eu; touch /opt/.start; export TMPDIR=/opt/.tmp; mkdir /opt/.tmp; "
        "if [ -s /mnt/secrets/ca ]; then export SSL_CERT_FILE=/mnt/secrets/ca; fi; "
        "/mnt/tools/uv pip install -q --no-cache --python /opt/venv/bin/python --no-deps --require-hashes "
        f"--only-binary :all: {files}; rm -rf /opt/.tmp{finish}\n"
    )


def dockerfile(way: str, plan: LayerPlan) -> str:
    """The Dockerfile of a way of joining."""
    names = [layer.name for layer in plan.layers]
    head = "FROM scratch AS os\nADD rootfs.tar /\n"
    python = "FROM os AS python\nRUN --network=none python3 -m venv --without-pip /opt/venv\n"
    if way == "one-step":
        return head + python + install(names, None)
    if way == "runs":
        return head + python + "".join(install([name], plan.epoch) for name in names)
    link = "--link " if way == "copy-link" else ""
    stages = "".join(f"FROM python AS {name}\n{install([name], plan.epoch)}" for name in names)
    copies = "".join(f"COPY {link}--from={name} /opt/venv /opt/venv\n" for name in names)
    return head + python + stages + "FROM python\n" + copies


def build(engine: BenchEngine, context: Path, way: str, plan: LayerPlan, output: str) -> float:
    """Seconds of one build."""
    (context / "Dockerfile").write_text(dockerfile(way, plan))
    argv = [*find_buildx().argv, "build", "--progress=plain", "--provenance=false", "--allow", "network.host"]
    ca = settings().ca
    argv += ["--secret", f"id=ca,src={ca}"] if ca else []
    argv += ["--output", output] if output else []
    environment = {**os.environ, "DOCKER_HOST": engine.host, "BUILDX_BUILDER": "default"}
    start = time.monotonic()
    done = subprocess.run([*argv, str(context)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} on {engine.store} failed:\n{done.stderr[-3000:]}")
    return time.monotonic() - start


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


def measure(engine: BenchEngine, context: Path, way: str, plan: LayerPlan, kind: str, output: str) -> list[Result]:
    """Cold, after a change of the top layer, after a change of the bottom layer."""
    store = f"{engine.store} {kind}".strip()
    before = used(engine.folder)
    results: list[Result] = []

    def take(change: str) -> None:
        seconds = build(engine, context, way, plan, output)
        result = Result(store, way, change, seconds, used(engine.folder) - before)
        results.append(result)
        print(f"{store:<24} {way:<10} {change:<7} {seconds:7.1f} s  {result.disk / 1e9:6.1f} GB", flush=True)

    take("cold")
    if way != "one-step":
        for change, layer in (("top", plan.layers[-1].name), ("bottom", plan.layers[0].name)):
            old = changed(context, layer)
            take(change)
            (context / "layers" / layer / "default.txt").write_text(old)
    argv = [*find_buildx().argv, "prune", "--all", "--force"]
    environment = {**os.environ, "DOCKER_HOST": engine.host, "BUILDX_BUILDER": "default"}
    docker = shutil.which("docker") or str(bootstrap.UNPACKED / "usr/bin/docker")
    for command in ([docker, "image", "prune", "--all", "--force"], argv):
        subprocess.run(command, env=environment, capture_output=True, check=False)
    return results


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--matrix", default="cu130-next")
    parser.add_argument("--stores", default="classic,containerd")
    parser.add_argument("--ways", default="one-step,runs,copy,copy-link")
    arguments = parser.parse_args()
    prepared = prepare(ROOT / "matrices" / f"{arguments.matrix}.yaml")
    plan = prepared.rendered.plan
    rootfs = locked_rootfs(prepared.loaded.matrix, prepared.lock, settings())
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=bootstrap.TOOLS) as temporary:
        context = Path(temporary) / "context"
        prepared.rendered.write(context)
        os.link(rootfs, context / "rootfs.tar")
        for store in arguments.stores.split(","):
            for kind, output in OUTPUTS[store].items():
                for way in arguments.ways.split(","):
                    if store == "containerd" and way == "copy":
                        continue
                    with BenchEngine(Path(temporary) / f"{store}-{kind}-{way}", store) as engine:
                        results += measure(engine, context, way, plan, kind, output)
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
