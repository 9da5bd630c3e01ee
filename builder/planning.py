"""`builder plan`: the layers, their bytes, and what a host that has another image would pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.files import pretty_size
from builder.layers import Layer, LayerPlan, plan_layers
from builder.lock import Base, check_current, lock_path, read_lock
from builder.matrix import load

# Layers with the compiler, flashinfer's sources, and headers that they include.
_COMPILED_FROM = ("torch", "kernels", "flashinfer")


@dataclass(frozen=True)
class Row:
    """A layer of the plan. ``bytes`` are compressed, as wheels; ``new`` says whether a host with the other image lacks it.

    ``uncounted`` are wheels whose sources state no size.
    """

    layer: str
    title: str
    wheels: int
    bytes: int
    new: bool
    differs: tuple[str, ...]
    uncounted: tuple[str, ...] = ()


def plan(path: Path, other: Path | None) -> list[Row]:
    """The rows of the plan of `path`; against the layers of `other` if one is given."""
    layers, system = _layers(path)
    had, other_system = _layers(other) if other else ({}, None)
    base = system[0]
    title = f"OS ({base.distribution} {base.release}, {len(base.packages)} packages)"
    rows = [Row("os", title, 0, 0, system != other_system, ())]
    for name, (layer, content) in layers.items():
        old, old_content = had.get(name, (None, None))
        rows.append(
            Row(
                name,
                layer.title,
                layer.count,
                layer.bytes,
                old_content != content,
                _differs(old, layer) if old else (),
                tuple(artefact.name for artefact in layer.artefacts if artefact.size is None),
            )
        )
    return rows


def _layers(path: Path) -> tuple[dict[str, tuple[Layer, tuple[Any, ...]]], tuple[Base, int]]:
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    planned = plan_layers(loaded.matrix, lock)
    layers = {layer.name: (layer, _content(layer, planned)) for layer in planned.layers}
    return layers, (lock.base, planned.epoch)


def _content(layer: Layer, planned: LayerPlan) -> tuple[Any, ...]:
    """What a layer's bytes depend on: its own files, where they are put, and the time that all of them carry.

    What is compiled depends on the sources and headers of the layers below, and on what it is compiled for.
    """
    sources = planned.artefacts if layer.targets else layer.artefacts
    files = tuple(
        (artefact.name, artefact.version, artefact.sha256)
        for artefact in sources
        if not layer.targets or artefact.layer in _COMPILED_FROM
    )
    return files, layer.bytecode, layer.cuda_home, layer.targets, planned.site_packages, planned.epoch


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
        }
        for row in rows
    ]
    return {
        "layers": listed,
        "bytes": sum(row.bytes for row in rows),
        "uncounted": [name for row in rows for name in row.uncounted],
        "bytes_to_pull": sum(row.bytes for row in rows if row.new),
    }


def as_text(rows: Sequence[Row]) -> str:
    """The plan for people."""
    width = max(len(row.title) for row in rows)
    lines = [f"{'layer':<{width}}  wheels  compressed  to pull"]
    for row in rows:
        size = pretty_size(row.bytes) if row.wheels else "-"
        lines.append(f"{row.title:<{width}}  {row.wheels:>6}  {size:>10}  {'yes' if row.new else 'no':>7}")
        lines += [f"  {line}" for line in row.differs]
    total, pull = sum(row.bytes for row in rows), sum(row.bytes for row in rows if row.new)
    lines.append(
        f"{'all wheels':<{width}}  {sum(r.wheels for r in rows):>6}  {pretty_size(total):>10}  {pretty_size(pull):>7}"
    )
    if uncounted := [name for row in rows for name in row.uncounted]:
        lines.append(f"not counted, since their sources state no size: {', '.join(uncounted)}")
    lines.append("bytes are those of the wheels; a registry's layers are compressed anew and about as large")
    return "\n".join(lines)
