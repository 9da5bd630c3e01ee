"""`builder plan`: the layers, their bytes, and what a host that has another image would pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder.files import canonical_json, pretty_size, sha256_hex
from builder.layers import Layer, LayerPlan, plan_layers
from builder.lock import check_current, lock_path, read_lock
from builder.matrix import Matrix, load
from builder.registry.predict import Blob, Sizes, estimate

# Layers with the compiler, flashinfer's sources, and headers that they include.
_COMPILED_FROM = ("torch", "kernels", "flashinfer")


@dataclass(frozen=True)
class Row:
    """A layer of the plan. ``bytes`` are those of its wheels; ``new`` says whether a host with the other image lacks it.

    ``predicted_bytes`` are those that a push or pull of the layer moves: known from an earlier push of the same content
    (``known``, then with the ``blobs`` that it became), else predicted; 0 where there is nothing to predict from.
    ``above_new`` says that a layer below it is new: a host with the classic image store pulls it then, whatever is in it.
    ``uncounted`` are wheels whose sources state no size. ``key`` is the sha256 of what decides the content.
    """

    layer: str
    title: str
    wheels: int
    bytes: int
    new: bool
    differs: tuple[str, ...]
    uncounted: tuple[str, ...] = ()
    predicted_bytes: int = 0
    known: bool = False
    above_new: bool = False
    blobs: tuple[Blob, ...] = ()
    key: str = ""

    @property
    def pulled(self) -> bool:
        """Whether a host with the classic store pulls it; one with the containerd store pulls what is ``new``."""
        return self.new or self.above_new

    @property
    def diff_ids(self) -> tuple[str, ...]:
        """The diff IDs of the layers that it became; none where they are not known."""
        return tuple(blob.diff_id for blob in self.blobs)


@dataclass(frozen=True)
class _Content:
    """What decides the bytes of a row, and what its size follows (`TransferFact.amount`)."""

    title: str
    decides: object
    amount: int
    layer: Layer | None = None

    @property
    def key(self) -> str:
        return sha256_hex(canonical_json(self.decides))


def plan(path: Path, other: Path | None, sizes: Sizes | None = None) -> list[Row]:
    """The rows of the plan of `path`; against the layers of `other` if one is given. `sizes` are known from earlier pushes."""
    wanted = _contents(path)
    had = _contents(other) if other else {}
    rows = [_row(name, content, had.get(name), sizes or Sizes()) for name, content in wanted.items()]
    lowest = next((number for number, row in enumerate(rows) if row.new), len(rows))
    return [replace(row, above_new=number > lowest) for number, row in enumerate(rows)]


def _row(name: str, content: _Content, old: _Content | None, sizes: Sizes) -> Row:
    layer = content.layer
    known = sizes.get(content.key)
    return Row(
        layer=name,
        title=content.title,
        wheels=layer.count if layer else 0,
        bytes=layer.bytes if layer else 0,
        new=old is None or old.key != content.key,
        differs=_differs(old.layer, layer) if layer and old and old.layer else (),
        uncounted=tuple(item.name for item in layer.artefacts if item.size is None) if layer else (),
        predicted_bytes=sum(blob.bytes for blob in known) if known else estimate(name, content.amount),
        known=bool(known),
        blobs=known,
        key=content.key,
    )


def _contents(path: Path) -> dict[str, _Content]:
    """Every row of an image from the bottom, by name."""
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    planned = plan_layers(loaded.matrix, lock)
    packages = len(lock.base.packages)
    system = ["os", lock.base.model_dump(mode="json"), planned.epoch]
    python = [[package.name, package.version] for package in lock.base.packages if "python3" in package.name]
    rows = {
        "os": _Content(f"OS ({lock.base.distribution} {lock.base.release}, {packages} packages)", system, packages),
        "python": _Content("Python environment", ["python", lock.python, python, planned.epoch], 1),
    }
    for layer in planned.layers:
        amount = len(layer.targets) if layer.targets else layer.bytes
        rows[layer.name] = _Content(layer.title, _decides(layer, planned), amount, layer)
    # The proof has the lock, the report of the smoke test and the diffs in it.
    below = [content.key for content in rows.values()]
    asked = loaded.matrix.patches.model_dump(mode="json")
    rows["proof"] = _Content("proof", ["proof", lock.digest, asked, below], 1)
    return rows


def _decides(layer: Layer, planned: LayerPlan) -> list[Any]:
    """What a layer's bytes depend on: its own files and their patches, where they are put, and the time that all carry.

    What is compiled depends on the sources and headers of the layers below, and on what it is compiled for.
    """
    sources = planned.artefacts if layer.targets else layer.artefacts
    files = [
        [artefact.name, artefact.version, artefact.sha256, *_patches(planned.matrix, artefact.name)]
        for artefact in sources
        if not layer.targets or artefact.layer in _COMPILED_FROM
    ]
    place = [planned.site_packages, planned.epoch]
    return [layer.name, files, list(layer.bytecode), layer.cuda_home, list(layer.targets), *place]


def _patches(matrix: Matrix, package: str) -> list[str]:
    """The patch sets that look at a package, and the user's diffs of it by their sha256."""
    from builder.patches.apply import SETS, asked

    sets = [name for name in asked(matrix.patches) if any(site.package == package for site in SETS[name])]
    return [*sets, *(item.sha256 for item in matrix.patches.diffs if item.package == package)]


def _differs(old: Layer, new: Layer) -> tuple[str, ...]:
    before = {artefact.name: artefact for artefact in old.artefacts}
    after = {artefact.name: artefact for artefact in new.artefacts}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"{name} {before[name].version} is gone")
        elif name not in before:
            lines.append(f"{name} {after[name].version} is new")
        elif before[name].version != after[name].version:
            lines.append(f"{name} {before[name].version} → {after[name].version}")
        elif before[name].sha256 != after[name].sha256:
            lines.append(f"{name} {after[name].version} is another file")
    return tuple(lines)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The plan as data."""
    listed = [
        {
            "layer": row.layer,
            "title": row.title,
            "wheels": row.wheels,
            "bytes": row.bytes,
            "new": row.new,
            "differs": list(row.differs),
            "predicted_bytes": row.predicted_bytes,
            "known": row.known,
            "pulled": row.pulled,
        }
        for row in rows
    ]
    return {
        "layers": listed,
        "bytes": sum(row.bytes for row in rows),
        "uncounted": [name for row in rows for name in row.uncounted],
        "bytes_to_pull": sum(row.bytes for row in rows if row.new),
        "predicted_bytes": sum(row.predicted_bytes for row in rows),
        "predicted_to_pull": sum(row.predicted_bytes for row in rows if row.pulled),
        "predicted_to_pull_containerd": sum(row.predicted_bytes for row in rows if row.new),
    }


def as_text(rows: Sequence[Row]) -> str:
    """The plan for people."""
    width = max(len(row.title) for row in rows)
    lines = [f"{'layer':<{width}}  wheels  their bytes  as a layer    to pull"]
    for row in rows:
        size = pretty_size(row.bytes) if row.wheels else "-"
        packed = _packed(row)
        pull = packed if row.pulled else "-"
        lines.append(f"{row.title:<{width}}  {row.wheels:>6}  {size:>11}  {packed:>10}  {pull:>9}")
        lines += [f"  {line}" for line in row.differs]
    data = as_json(rows)
    about = "" if all(row.known for row in rows) else "~"
    pulled = "" if all(row.known for row in rows if row.pulled) else "~"
    wheels, total = sum(row.wheels for row in rows), f"{about}{pretty_size(data['predicted_bytes'])}"
    pull = f"{pulled}{pretty_size(data['predicted_to_pull'])}"
    lines.append(f"{'all':<{width}}  {wheels:>6}  {pretty_size(data['bytes']):>11}  {total:>10}  {pull:>9}")
    alone = data["predicted_to_pull_containerd"]
    if alone != data["predicted_to_pull"]:
        lines.append(
            "the classic image store tells a layer by all below it, and pulls every layer above a new one; "
            f"the containerd store pulls {pulled}{pretty_size(alone)}"
        )
    if data["uncounted"]:
        lines.append(f"not counted, since their sources state no size: {', '.join(data['uncounted'])}")
    if about:
        lines.append(
            "~ is predicted from what such layers became when they were measured; the others were pushed before"
        )
    return "\n".join(lines)


def _packed(row: Row) -> str:
    if not row.predicted_bytes:
        return "?"
    return f"{'' if row.known else '~'}{pretty_size(row.predicted_bytes)}"
