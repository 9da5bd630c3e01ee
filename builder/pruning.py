"""`builder prune`: what we made on this machine, by our own labels and folders; with --yes, free it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builder.engine import Buildx, Engine, connect, find_buildx
from builder.errors import BuilderError, UsageError
from builder.files import pretty_size
from builder.labels import LABEL, PARTIAL_LABEL
from builder.matrix import list_matrices
from builder.nearest import nearest
from builder.settings import load as settings

# What our steps look like in the build cache: every installing step makes the start mark, the smoke test is ours, and the
# OS is added in one stage. A record that is none of these may be somebody else's and stays.
_OUR_STEPS = re.compile(
    r"mount / from exec .*(?:touch /opt/\.start;|PYTHONPATH=/mnt/smoke )|\[archive 1/1\] ADD rootfs\.tar /$"
)


def prune(*, yes: bool, keep: Sequence[str], matrices: Path) -> dict[str, Any]:
    """What is kept and, with `yes`, was freed: images, volumes, build cache records, cache folders (bytes where known).

    ``keep`` has matrices, by name or file; ``matrices`` is the folder of those that have a name. What could not be looked at or
    removed is said under ``problems`` and does not stop the rest. Raises `UsageError`, before anything is removed, for a matrix
    to keep that there is not.
    """
    keep = [Path(name).stem if name.endswith((".yaml", ".yml")) else name for name in keep]
    images: list[dict[str, Any]] = []
    volumes: list[str] = []
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    engine, built = None, list[str]()
    try:
        engine = connect()
        built = [image.labels.get(f"{LABEL}.matrix", "") for image in engine.ours(LABEL)]
    except BuilderError as error:
        engine = None
        problems.append(error.what)
    _require_there(keep, [path.stem for path in list_matrices(matrices)], built, looked=engine is not None)
    if engine is not None:
        try:
            images, volumes = _images(engine, keep), _volumes(engine, keep)
            if yes:
                images = [image for image in images if _remove(engine, image, problems)]
                volumes = [name for name in volumes if _remove_volume(engine, name, problems)]
            buildx = find_buildx()
            records = _records(engine, buildx)
            if yes:
                _prune_records(engine, buildx, [record["id"] for record in records])
        except BuilderError as error:
            problems.append(error.what)
    folders = _folders(settings().cache)
    if yes:
        for folder in folders:
            shutil.rmtree(folder["path"], ignore_errors=True)
    data = {
        "freed": yes,
        "images": images,
        "volumes": volumes,
        "build_cache": records,
        "folders": folders,
        "problems": problems,
    }
    return data | {"text": _text(data)}


def _require_there(keep: Sequence[str], matrices: Sequence[str], built: Sequence[str], *, looked: bool) -> None:
    """Raise `UsageError` for a name that no matrix and no image has: it is a slip, and would remove what was meant."""
    there = sorted({*matrices, *built} - {""})
    for name in keep:
        if name in there:
            continue
        near = nearest(name, there)
        because = f"there are {', '.join(f'`{each}`' for each in there)}" if there else "there is none"
        because += "" if looked else "; no engine answers, whose images could not be looked at"
        raise UsageError(
            f"`--keep {name[:100]}`: there is no such matrix, and no image of one",
            because=because,
            hint=f"did you mean `{near}`" if near else "`builder list` shows the matrices",
        )


def _remove(engine: Engine, image: Mapping[str, Any], problems: list[str]) -> bool:
    try:
        for name in image["names"] or [image["id"]]:
            engine.remove(name)
    except BuilderError as error:
        problems.append(f"{', '.join(image['names']) or image['id'][:19]} stays: {error.because or error.what}")
        return False
    return True


def _images(engine: Engine, keep: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"id": image.id, "names": list(image.tags), "bytes": image.size}
        for image in engine.ours(LABEL)
        if image.labels.get(f"{LABEL}.matrix") not in keep and not (keep and image.labels[LABEL] == "base")
    ] + [
        {"id": image.id, "names": list(image.tags), "bytes": image.size}
        for image in engine.ours(PARTIAL_LABEL)
        if LABEL not in image.labels
    ]


def _volumes(engine: Engine, keep: Sequence[str]) -> list[str]:
    """The volumes that `builder run` made; those of kept images stay, which are named by the image's id."""
    kept = [image for image in engine.ours(LABEL) if image.labels.get(f"{LABEL}.matrix") in keep]
    ids = [image.id.removeprefix("sha256:")[:12] for image in kept]
    return [name for name in engine.volumes(f"{LABEL}=cache") if not any(part in name for part in ids)]


def _remove_volume(engine: Engine, name: str, problems: list[str]) -> bool:
    try:
        engine.remove_volume(name)
    except BuilderError as error:
        problems.append(f"{name} stays: {error.because or error.what}")
        return False
    return True


def _records(engine: Engine, buildx: Buildx) -> list[dict[str, Any]]:
    environment = {**os.environ, "DOCKER_HOST": engine.host, "BUILDX_BUILDER": "default"}
    argv = [*buildx.argv, "du", "--verbose"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    found = []
    parents: dict[str, list[str]] = {}
    for block in done.stdout.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z ]+):[ \t]+(.*)$", block, flags=re.MULTILINE))
        what = fields.get("Description", "")
        if "ID" not in fields:
            continue
        parents[fields["ID"]] = re.findall(r"\w+", fields.get("Parents") or fields.get("Parent") or "")
        if _OUR_STEPS.match(what):
            found.append({"id": fields["ID"], "bytes": _bytes(fields.get("Size", "0B")), "what": what[:80]})
    # A record with children cannot be removed: the farthest from the root come first.
    return sorted(found, key=lambda record: -_depth(record["id"], parents))


def _depth(identifier: str, parents: Mapping[str, Sequence[str]]) -> int:
    """How many records lie below this one, along its longest line."""
    level, seen = [identifier], 0
    # Bounded: what an engine says is not trusted to have no circle.
    while level and seen <= len(parents):
        level = [parent for each in level for parent in parents.get(each, ())]
        seen += 1
    return seen


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?i?B).*", text)
    if match is None:
        return 0
    base = 1024 if "i" in match[2] else 1000
    factor: int = base ** "BKMGT".index(match[2][0].upper())
    return round(float(match[1]) * factor)


def _prune_records(engine: Engine, buildx: Buildx, ids: list[str]) -> None:
    environment = {**os.environ, "DOCKER_HOST": engine.host, "BUILDX_BUILDER": "default"}
    for identifier in ids:
        argv = [*buildx.argv, "prune", "--all", "--force", "--filter", f"id={identifier}"]
        subprocess.run(argv, env=environment, capture_output=True, check=False)


def _folders(cache: Path) -> list[dict[str, Any]]:
    names = {
        "rootfs": "bootstrapped OS file systems",
        "contexts": "build contexts",
        "metadata": "METADATA of wheels",
        "wheels": "wheels that were fetched",
        "patched": "wheels that were patched",
        "ranges": "parts of wheels that were looked at",
        "releases": "what an index said of releases",
        "arch": "GPU images of shared objects",
        "native": "what shared objects need and export",
        "abi": "answers of `builder abi`",
        "gpucode": "GPU images of wheels",
        "static": "what `builder check` found in wheels",
        "apt": "the archive's indexes",
    }
    rows = []
    for name, what in names.items():
        folder = cache / name
        if folder.is_dir():
            total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            rows.append({"path": str(folder), "what": what, "bytes": total})
    return rows


def _text(data: Mapping[str, Any]) -> str:
    lines = [f"engine: {problem}" for problem in data["problems"]]
    for image in data["images"]:
        lines.append(f"image   {pretty_size(image['bytes']):>9}  {', '.join(image['names']) or image['id'][:19]}")
    lines += [f"volume  {'':>9}  {name} (kernels that servers compiled)" for name in data["volumes"]]
    cached = sum(record["bytes"] for record in data["build_cache"])
    if data["build_cache"]:
        count = len(data["build_cache"])
        lines.append(f"cache   {pretty_size(cached):>9}  {count} records of the build cache, shared with the images")
    for folder in data["folders"]:
        lines.append(f"files   {pretty_size(folder['bytes']):>9}  {folder['path']} ({folder['what']})")
    if not (data["images"] or data["volumes"] or data["build_cache"] or data["folders"]):
        return "\n".join([*lines, "nothing of ours is on this machine" if not lines else "no files of ours are here"])
    lines.append("freed" if data["freed"] else "nothing was removed; free it: `builder prune --yes`")
    return "\n".join(lines)
