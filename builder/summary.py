"""What a finished build tells: what the image is, its layers, what was checked, how to run it."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

from builder import bootstrap
from builder.build import Prepared
from builder.engine import Engine, Image
from builder.files import pretty_size
from builder.layers import ORDER
from builder.render import LABEL

SMOKE_PATH = "/opt/sglang-stack/smoke.json"


def layer_rows(engine: Engine, prepared: Prepared, image: Image) -> list[tuple[str, int, str]]:
    """(title, bytes unpacked, diff ID) for each layer of the image, from the bottom."""
    titles = {layer.name: f"{layer.title} ({layer.count} wheels)" for layer in prepared.rendered.plan.layers}
    rows = []
    for layer in engine.layers(image.id):
        rows.append((_title(layer.created_by, titles), layer.size, layer.diff_id))
    return rows


def _title(created_by: str, titles: dict[str, str]) -> str:
    for name in ORDER:
        if f"source=layers/{name}," in created_by:
            return titles.get(name, name)
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
    return re.sub(r"\s+", " ", created_by)[:40]


def as_json(engine: Engine, prepared: Prepared, image: Image, *, built: bool) -> dict[str, Any]:
    """The summary as data."""
    smoke = json.loads(engine.read_file(image.id, SMOKE_PATH))
    return {
        "ok": bool(smoke["ok"]),
        "matrix": prepared.loaded.matrix.name,
        "lock": prepared.lock.digest,
        "built": built,
        "image": {"id": image.id, "names": list(prepared.names), "size": image.size},
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
    lines += [f"  {', '.join(versions)}"] if versions else []
    gpus = f"for compute capability {', '.join(matrix.gpus)}"
    lines += [f"  CUDA {matrix.cuda.version}, Python {lock.python}, {lock.base.distribution} {lock.base.release}, {gpus}"]
    lines += [f"  also named {names[0]} (lock {lock.digest[:12]})", ""]
    width = max(len(row["title"]) for row in data["layers"])
    lines.append(f"layers{'':{max(0, width - 4)}}     size  diff ID")
    for row in data["layers"]:
        lines.append(f"  {row['title']:<{width}}  {pretty_size(row['bytes']):>9}  {row['diff_id'][7:19]}")
    wide = max((len(check["name"]) for check in data["checks"]), default=0)
    checks = data["checks"]
    lines += ["", f"smoke test: {len(checks)} checks passed, without a GPU" if data["ok"] else "smoke test: FAILED"]
    for check in checks:
        state = "ok" if check["ok"] else "FAILED"
        looked = f"{check['looked_at']:,} {check.get('unit', '')}"
        excepted = check.get("exceptions") or ()
        by_design = f"; {len(excepted)} known exceptions" if excepted else ""
        lines.append(f"  {state:<3} {check['name']:<{wide}}  {looked:<16} {check['detail']}{by_design}".rstrip())
    docker = "docker" if shutil.which("docker") else str(bootstrap.UNPACKED / "usr/bin/docker")
    lines += ["", "run it:", f"  {docker} run --rm {names[1]}                # what it is"]
    if lock.version_of("sglang"):
        lines += [f"  {docker} run --rm --gpus all --ipc host {names[1]} python3 -m sglang.launch_server --help"]
    return "\n".join(lines)


def label() -> str:
    """The label by which images of ours are found."""
    return LABEL
