"""`python -m tests.gpu_container --carry FOLDER --out FOLDER`: the builder, an engine and a GPU, on one machine.

An engine is started out of what `prepare` has written, with `runtime.py` in the place of NVIDIA's container toolkit; an image is
made of the machine's own system, CUDA and torch with the wheels of `kernels-NN`; then the builder is asked what a user asks. Needs
root, torch and nvcc; no network. Everything that it makes lies in temporary folders. Exit status: 0 where all is as it should be, 3 where not.

With `bundle-NN` among what is carried the image is a real one: it is verified, loaded and tested by `builder load`, and needs no torch here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu_container import CUDA_HOME, KERNELS, runtime
from tests.gpu_kernels.carry import join, unpack

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "sglang-stack:gpu-container"
USER = "10001:10001"
RUNNING = "a-server"
SYSTEM = ("usr", "etc", "bin", "sbin", "lib", "lib64")
"""What of the machine the image has, beside this Python's own folder."""
LEFT_OUT = ("usr/local/nvidia", "usr/share/doc", "usr/local/cuda*/nsight*", "libcu[bfrs]*_static.a", "libnpp*_static.a")
"""Above all the driver's files: what a container finds of them, the engine's runtime has put there."""
SMOKE_SECONDS, QUICK_SECONDS = 420, 90


@dataclass
class Step:
    """A question to the builder, and what came of it. ``wrong`` is empty where it is as it should be."""

    title: str
    argv: list[str]
    status: int
    seconds: float
    out: str
    err: str
    wrong: list[str] = field(default_factory=list)


class Bench:
    """Runs the steps and keeps them; each is written down as soon as it has ended."""

    def __init__(self, out: Path, environment: dict[str, str]) -> None:
        self.out, self.environment = out, environment
        self.steps: list[Step] = []

    def ask(
        self,
        title: str,
        *words: str,
        status: int,
        seconds: float = QUICK_SECONDS,
        look: Callable[[str, str], list[str]] | None = None,
    ) -> str:
        """Run the builder with these words; it has to end with ``status``, and ``look`` says what is wrong with its output."""
        began = time.monotonic()
        argv = [sys.executable, "-m", "builder", *words]
        try:
            done = subprocess.run(
                argv, cwd=self.out, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            code, out, err = 124, _text(late.stdout), _text(late.stderr)
        wrong = [] if code == status else [f"exit status {code}, not {status}"]
        if look is not None and not wrong:
            wrong += look(out, err)
        step = Step(title, ["builder", *words], code, round(time.monotonic() - began, 1), out, err, wrong)
        self.steps.append(step)
        print(
            f"{'ok' if not wrong else 'WRONG'}  {title}: {' '.join(step.argv)} ({code}, {step.seconds} s)", flush=True
        )
        for text in (*wrong, *((out + err).splitlines()[-25:] if wrong else ())):
            print(f"    {text}", flush=True)
        (self.out / "steps.json").write_text(
            json.dumps([vars(step) for step in self.steps], indent=1), encoding="utf-8"
        )
        return out


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""


def make_image(
    docker: Callable[..., Any], client: Sequence[str], scratch: Path, plan: Path, environment: dict[str, str]
) -> float:
    """Import the image; the seconds that it took."""
    began = time.monotonic()
    shutil.copytree(plan / "opt/sglang-stack", scratch / "opt/sglang-stack")
    links = scratch / "opt/links"
    links.mkdir(parents=True)
    # CUDA's own folder has no libcuda.so to link with: it comes with the driver, when a container starts.
    (links / "libcuda.so").symlink_to(f"{runtime.LIBRARIES}/libcuda.so.1")
    for found in sorted(Path(CUDA_HOME, "lib64").glob("libcudart.so.1[0-9]"))[:1]:
        (links / "libcudart.so").symlink_to(found)
    for name in ("tmp", "run", "var/tmp", "proc", "sys", "dev", "root"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (scratch / name).chmod(0o1777)
    labels = json.loads((plan / "labels.json").read_text(encoding="utf-8"))
    changes = [f"LABEL {json.dumps(key)}={json.dumps(value)}" for key, value in labels.items()]
    python = Path(sys.executable).parent
    changes += [
        f"ENV PATH={python}:{CUDA_HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "ENV LIBRARY_PATH=/opt/links",
        "ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        f"USER {USER}",
    ]
    there = [name for name in SYSTEM if (Path("/") / name).exists()]
    if not sys.prefix.startswith("/usr"):
        there.append(sys.prefix.lstrip("/"))
    tar = ["tar", "-cf", "-", *(f"--exclude={name}" for name in LEFT_OUT), "-C", "/", *there]
    tar += [
        "-C",
        str(scratch),
        *sorted(path.name for path in scratch.iterdir() if path.name != "opt"),
        "opt/sglang-stack",
        "opt/links",
        "opt/kernels",
    ]
    argv = [*client, "import", *(part for change in changes for part in ("--change", change)), "-", IMAGE]
    packing = subprocess.Popen(tar, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    subprocess.run(argv, stdin=packing.stdout, env=environment, check=True, stdout=subprocess.DEVNULL)
    packing.wait()
    return time.monotonic() - began


def load_bundle(bench: Bench, docker: Callable[..., Any], pieces: Sequence[Path], place: Path) -> str:
    """Load the bundle as a user does, with the smoke test of the build; the name of its image. Raises `SystemExit` where it is not loaded."""
    bundle = place / "carried.bundle"
    join(list(pieces), bundle)
    argv = ["load", str(bundle), "--pub", str(place / "engine/cosign.pub"), "--json"]
    bench.ask("a bundle is loaded and tested", *argv, status=0, seconds=SMOKE_SECONDS)
    bundle.unlink()
    if bench.steps[-1].wrong:
        raise SystemExit(3)
    argv = ["images", "--filter", "label=sglang-stack=image", "--format", "{{.Repository}}:{{.Tag}}"]
    return str(min(docker(*argv).stdout.split(), key=len))


def looked_at_gpu(out: str, _: str) -> list[str]:
    """What is wrong with a report of `smoke --gpus --json`."""
    data = json.loads(out)
    failed = [
        f"{check['name']}: {check['detail']}" for check in data["checks"] if not check["ok"] and not check["skipped"]
    ]
    kernels = [check["name"] for check in data["checks"] if check["ok"] and check["name"].startswith("sgl-")]
    record = data["record"] or {}
    wrong = failed + ([] if kernels else ["no kernel of sgl_kernel ran"])
    wrong += [] if record.get("image") == data["image"] else ["the record is of another image"]
    return wrong + ([] if record.get("verdict") == "ok" else ["the record does not say ok"])


def has(*words: str) -> Callable[[str, str], list[str]]:
    """All of these stand in what was printed."""
    return lambda out, err: [f"`{word}` is not said" for word in words if word not in out + err]


def gpu_names() -> list[str]:
    """The GPUs that the driver names. Raises `OSError` and `subprocess.CalledProcessError` where there is none."""
    argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()


def steps(bench: Bench, only: Sequence[str], image: str) -> None:
    """What a user asks on a host with a GPU."""
    gpus = gpu_names()
    code = (
        "import torch; assert torch.cuda.is_available(); x = torch.arange(1024., device='cuda');"
        "print(torch.cuda.get_device_name(0), int((x + x).sum())); raise SystemExit(42)"
    )
    none = "import torch; print('visible:', torch.cuda.device_count())"
    todo: dict[str, Callable[[], Any]] = {
        "host": lambda: bench.ask("this host", "doctor", "--json", status=0, look=has(*gpus)),
        "doctor": lambda: bench.ask("this host against the image", "doctor", image, status=0),
        "run": lambda: bench.ask(
            "a program on the GPU", "run", image, "--", "python3", "-c", code, status=42, look=has("1047552")
        ),
        "none": lambda: bench.ask(
            "without a GPU",
            "run",
            "--gpus",
            "none",
            image,
            "--",
            "python3",
            "-c",
            none,
            status=0,
            look=has("visible: 0"),
        ),
        "absent": lambda: bench.ask(
            "a GPU that is not there", "smoke", image, "--gpus", "device=7", status=6, look=has("unknown device")
        ),
        "live": lambda: bench.ask(
            "what a running container is", "repro", "--live", RUNNING, "--report-only", status=0, look=has(*gpus)
        ),
        "smoke": lambda: bench.ask(
            "kernels", "smoke", image, "--gpus", "all", "--json", status=0, seconds=SMOKE_SECONDS, look=looked_at_gpu
        ),
    }
    for name, step in todo.items():
        if not only or name in only:
            step()


def main(arguments: Sequence[str] | None = None) -> int:
    """Everything, in one report."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_container", description=__doc__)
    parser.add_argument(
        "--carry", type=Path, required=True, help="what `python -m tests.gpu_container.prepare` has written"
    )
    parser.add_argument("--out", type=Path, required=True, help="where steps.json goes")
    parser.add_argument("--data", type=Path, help="where the engine keeps its data (a temporary folder)")
    parser.add_argument("--only", action="append", default=[], help="only this step; may be given again")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.data, ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        unpack(sorted(given.carry.glob("engine-[0-9]*")), place / "engine")
        tree = place / "image"
        site = tree / KERNELS.lstrip("/")
        if sorted(given.carry.glob("kernels-[0-9]*")):
            unpack(sorted(given.carry.glob("kernels-[0-9]*")), site)
        site.mkdir(parents=True, exist_ok=True)
        tools = place / "engine/tools"
        programs = tools / "root/usr/bin"
        (programs / runtime.HOOK).write_text("#!/bin/sh\nexit 0\n")
        wrapper = programs / "nvidia-container-runtime"
        wrapper.write_text(
            f'#!/bin/sh\nexport STAND_IN_RUNC="{programs}/runc" STAND_IN_CACHE="{place}/ld.so.cache"\n'
            f'exec "{sys.executable}" "{runtime.__file__}" "$@"\n'
        )
        for path in programs.iterdir():
            path.chmod(0o755)
        os.environ["BUILDER_TOOLS"] = str(tools)
        sys.path.insert(0, str(place / "engine/packages"))
        # Only now: what they import has just been unpacked.
        from builder import bootstrap
        from tests.image.engines import SecondEngine

        config = {"userland-proxy": False, "runtimes": {"nvidia": {"path": str(wrapper)}}, "default-runtime": "nvidia"}
        with SecondEngine(place / "dockerd", data=place / "data", config=config) as host:
            environment = {
                **bootstrap.tool_environment(),
                "DOCKER_HOST": host.address,
                "PYTHONPATH": f"{ROOT}:{place / 'engine/packages'}",
                "XDG_CACHE_HOME": str(place / "cache"),
                "XDG_CONFIG_HOME": str(place / "config"),
            }
            print(f"engine after {time.monotonic() - began:.0f} s", flush=True)
            client = [str(bootstrap.find_program("docker"))]
            bench = Bench(given.out.resolve(), environment)
            if bundled := sorted(given.carry.glob("bundle-[0-9]*")):
                image = load_bundle(bench, host.docker, bundled, place)
            else:
                image = IMAGE
                took = make_image(host.docker, client, tree, given.carry / "image-plan", environment)
                size = host.docker("image", "inspect", "--format", "{{.Size}}", image).stdout.strip()
                print(f"image: {int(size) / 1e9:.1f} GB, imported in {took:.0f} s", flush=True)
            with (place / "ld.so.cache.new").open("wb") as cache:
                argv = [*client, "run", "--rm", "--gpus", "all", "--network", "none", "--user", "0"]
                argv += ["--entrypoint", "sh", image, "-c", "/sbin/ldconfig && cat /etc/ld.so.cache"]
                subprocess.run(argv, env=environment, check=True, stdout=cache)
            (place / "ld.so.cache.new").rename(place / "ld.so.cache")
            # A container of somebody's, to be looked at while it runs.
            host.docker("run", "--detach", "--name", RUNNING, "--gpus", "all", image, "sleep", "900")
            steps(bench, given.only, image)
    bad = [step.title for step in bench.steps if step.wrong]
    print(
        f"{len(bench.steps)} steps, {len(bad)} wrong{': ' if bad else ''}{', '.join(bad)}; {time.monotonic() - began:.0f} s"
    )
    return 3 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
