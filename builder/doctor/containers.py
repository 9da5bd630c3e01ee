"""What runs containers, and NVIDIA's toolkit for them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from builder.doctor import engines
from builder.doctor.facts import CdiSpec, Engine, Present, PresentImage, Toolkit
from builder.doctor.transcript import Part, Reader, first, json_of

_LIBCUDA = re.compile(r"libcuda\.so\.([1-9]\d{2}\.\d{1,4}(?:\.\d{1,4})?)", re.ASCII)


def engine(reader: Reader) -> Engine | None:
    daemon = json_of(reader.part("daemon").text)
    for name in ("docker", "docker_socket"):
        part = reader.part(name)
        if info := json_of(part.text):
            found = engines.of_docker(info, json_of(reader.part("docker_version").text), daemon)
            if found is not None:
                return found
    if (info := json_of(reader.part("podman").text)) and (found := engines.of_podman(info)) is not None:
        return found
    docker, podman = reader.part("docker"), reader.part("podman")
    if docker.status == "missing" and "docker" in reader.about("socket"):
        why = "the engine has a socket, and there is neither a docker client nor `curl` to ask it"
    elif docker.status == "missing" and podman.status == "missing":
        why = "neither `docker` nor `podman` is installed"
    elif docker.status not in ("missing", "absent"):
        info = json_of(docker.text)
        errors = info.get("ServerErrors") if isinstance(info.get("ServerErrors"), list) else None
        # A client may print what it knows of itself first; the reason is a line of words then.
        said = [str(error) for error in errors or ()] or [line for line in docker.lines if not line.startswith("{")]
        if "{" in docker.text and not first(said):
            why = "the engine does not answer"
        else:
            why = Part(docker.status, tuple(said)).why("docker info")
    else:
        why = podman.why("podman info")
    reader.unknown["engine"] = why
    return None


def toolkit(reader: Reader) -> Toolkit:
    version = None
    for name in ("toolkit", "toolkit_cli"):
        if match := re.search(
            r"(?:version:?) v?([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}[\w.~-]{0,20})", reader.part(name).text
        ):
            version = match[1]
            break
    words = [line.split(" ")[0] for line in reader.lines("about")]
    installed: bool | None = None
    if version or "hook" in words or "runtime" in words:
        installed = True
    elif reader.part("toolkit").status == reader.part("toolkit_cli").status == "missing":
        installed = False
    mode = next(
        (
            m[1]
            for line in reader.lines("runtime_config")
            if (m := re.fullmatch(r'\s*mode\s*=\s*"([a-z-]{1,20})"\s*', line))
        ),
        None,
    )
    why = (
        "NVIDIA's container toolkit is not installed"
        if installed is False
        else reader.part("toolkit").why("nvidia-ctk")
    )
    return Toolkit(
        installed=installed,
        version=reader.or_unknown("toolkit.version", version, why),
        cdi_specs=tuple(_specs(reader.lines("cdi"))) if "cdi" in reader.found else None,
        mode=mode,
    )


def _specs(lines: Sequence[str]) -> Iterator[CdiSpec]:
    blocks: list[tuple[str, list[str]]] = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "file":
            blocks.append((rest, []))
        elif blocks:
            blocks[-1][1].append(line)
    for file, inside in blocks:
        text = "\n".join(inside)
        if "nvidia" not in text and "nvidia" not in file:
            continue
        kind = re.search(r"kind\"?:\s*\"?([a-z0-9./_-]{1,60})", text)
        names = re.findall(r"^line[\s-]*\"?name\"?:\s*\"?([\w:.-]{1,80}?)\"?,?\s*$", text, re.MULTILINE)
        # A device may be named by its UUID, which is nobody's business.
        shown = dict.fromkeys(name for name in names if not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}", name))
        driver = _LIBCUDA.search(text) or re.search(
            r"libnvidia-ml\.so\.([1-9]\d{2}\.\d{1,4}(?:\.\d{1,4})?)", text, re.ASCII
        )
        missing = tuple(line[8:][:200] for line in inside if line.startswith("missing /"))
        prefix = f"{kind[1]}=" if kind else ""
        yield CdiSpec(
            file=file[:200],
            devices=tuple(f"{prefix}{name}" for name in shown),
            driver=driver[1] if driver else None,
            missing=missing,
        )


def present(reader: Reader) -> Present:
    part = reader.part("images")
    if part.status != "0":
        return Present()
    found = []
    for line in part.lines:
        if match := re.fullmatch(r"(sha256:[0-9a-f]{64}) ([0-9a-f]{64})? ?(\[.*\])", line.strip()):
            layers = re.findall(r"sha256:[0-9a-f]{64}", match[3])
            found.append(PresentImage(id=match[1], lock=match[2], layers=tuple(layers)))
    return Present(images=tuple(found))
