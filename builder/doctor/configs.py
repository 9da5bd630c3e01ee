"""What an image needs by its config: as a registry or a bundle has it, or as an engine tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builder.doctor.needs import Needs, of_image


def of_config(
    subject: str,
    config: Mapping[str, Any],
    manifest: Mapping[str, Any] | None = None,
    *,
    unpacked: int | None = None,
) -> Needs:
    """The needs of the image with this config, of which `manifest` tells the compressed bytes and ``unpacked`` the others.

    In both what a container is run with, its labels and its environment may be absent or null (OCI image specification,
    "Image JSON description").
    """
    inner = config.get("config") or {}
    environment = {name: value for name, _, value in (item.partition("=") for item in inner.get("Env") or ())}
    return of_image(
        subject,
        inner.get("Labels") or {},
        environment,
        platform=f"{config.get('os') or 'linux'}/{config.get('architecture') or 'amd64'}",
        compressed=sum(int(layer["size"]) for layer in manifest["layers"]) if manifest is not None else None,
        unpacked=unpacked,
    )


def of_inspected(subject: str, raw: Mapping[str, Any], *, unpacked: int | None = None) -> Needs:
    """The same of an image as an engine's API tells it: the same fields, other names."""
    config = {"config": raw.get("Config"), "os": raw.get("Os"), "architecture": raw.get("Architecture")}
    return of_config(subject, config, unpacked=unpacked)
