"""What a finished build tells: what the image is, its layers, what was checked, how to run it."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

from builder import archive
from builder.build import Prepared
from builder.engine import Engine, Image
from builder.files import pretty_size
from builder.render import stand_in_words

SMOKE_PATH = "/opt/sglang-stack/smoke.json"
ABOUT_PATH = "/opt/sglang-stack/about.json"


def layer_rows(engine: Engine, prepared: Prepared, image: Image) -> list[tuple[str, int, str]]:
    """(title, bytes unpacked, diff ID) for each layer of the image, from the bottom."""
    titles = {
        layer.name: f"{layer.title} ({layer.count} wheels)" if layer.artefacts else layer.title
        for layer in prepared.rendered.plan.layers
    }
    rows = []
    for layer in engine.layers(image.id):
        rows.append((_title(layer.created_by, titles), layer.size, layer.diff_id))
    return rows


def _title(created_by: str, titles: dict[str, str]) -> str:
    for name, title in titles.items():
        if f"layer={name};" in created_by:
            return title
    if "rootfs.tar" in created_by or "apt-get" in created_by:
        return "OS"
    if "-m venv" in created_by:
        return "Python environment"
    if "/mnt/passed" in created_by:
        return "proof"
    if "/etc/passwd" in created_by:
        return "OS: user and folders"
    if "WORKDIR" in created_by:
        return "working folder"
    return re.sub(r"\s+", " ", created_by)[:40] or "of the base image"


def as_json(engine: Engine, prepared: Prepared, image: Image, *, built: bool) -> dict[str, Any]:
    """The summary as data."""
    smoke = json.loads(engine.read_file(image.id, SMOKE_PATH))
    return {
        "ok": bool(smoke["ok"]),
        "matrix": prepared.loaded.matrix.name,
        "lock": prepared.lock.digest,
        "built": built,
        "image": {"id": image.id, "names": list(prepared.names), "size": image.size},
        "patches": json.loads(engine.read_file(image.id, ABOUT_PATH))["patches"],
        "layers": [{"title": t, "bytes": b, "diff_id": d} for t, b, d in layer_rows(engine, prepared, image)],
        "checks": smoke["checks"],
        "findings": [finding.model_dump(mode="json") for finding in prepared.findings],
    }


def as_text(data: dict[str, Any], prepared: Prepared) -> str:
    """The summary for people."""
    matrix, lock = prepared.loaded.matrix, prepared.lock
    versions = [f"{name} {lock.version_of(name)}" for name in matrix.stack.pins()]
    names = data["image"]["names"]
    lines = ["", f"{names[1]}  {pretty_size(data['image']['size'])}", f"  {matrix.summary}"]
    lines += [f"  {words}"] if (words := stand_in_words(matrix)) else []
    lines += [f"  {', '.join(versions)}"] if versions else []
    gpus = f"for compute capability {', '.join(matrix.gpus)}"
    lines += [
        f"  CUDA {matrix.cuda.version}, Python {lock.python}, {lock.base.distribution} {lock.base.release}, {gpus}"
    ]
    lines += [f"  patches: {line}" for line in data["patches"]]
    lines += [f"  also named {names[0]} (lock {lock.digest[:12]})", ""]
    width = max(len(row["title"]) for row in data["layers"])
    lines.append(f"layers{'':{max(0, width - 4)}}     size  diff ID")
    for row in data["layers"]:
        lines.append(f"  {row['title']:<{width}}  {pretty_size(row['bytes']):>9}  {row['diff_id'][7:19]}")
    lines += ["", *check_lines(data["checks"])]
    docker = "docker" if shutil.which("docker") else str(archive.UNPACKED / "usr/bin/docker")
    lines += ["", "run it:", f"  {docker} run --rm {names[1]}                # what it is"]
    if lock.version_of("sglang"):
        lines += [f"  {docker} run --rm --gpus all --ipc host {names[1]} python3 -m sglang.launch_server --help"]
    return "\n".join(lines)


def check_lines(checks: list[dict[str, Any]]) -> list[str]:
    """A line for each check, by part: state, how much it looked at, what it found."""
    applied = [check for check in checks if not check["detail"].startswith("not applicable")]
    failed = sum(not check["ok"] for check in checks)
    verdict = f"{failed} FAILED" if failed else "all passed"
    beside = f", {len(checks) - len(applied)} not applicable" if len(applied) < len(checks) else ""
    lines = [f"smoke test: {len(applied)} checks, {verdict}{beside}, without a GPU"]
    wide = max((len(check["name"]) for check in checks), default=0)
    for part in dict.fromkeys(check["part"] for check in checks):
        lines.append(f"  {part} part")
        for check in checks:
            if check["part"] != part:
                continue
            state = "FAILED" if not check["ok"] else "ok" if check in applied else "-"
            looked = f"{check['looked_at']:,} {check['unit']}" if check in applied else ""
            lines.append(f"    {state:<6} {check['name']:<{wide}}  {looked:<17} {check['detail']}".rstrip())
    return lines
