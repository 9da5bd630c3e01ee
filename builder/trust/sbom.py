"""The software bill of materials of an image: CycloneDX 1.6, from its lock and what was patched. Deterministic: no time in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.license import DisjunctiveLicense, License
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from builder import __version__
from builder.files import sha256_hex
from builder.labels import LABEL
from builder.lock import Artefact, Base, Lock, OsPackage
from builder.trust.proof import FOLDER, Licences, Proof

_SPACE: Final = uuid.UUID("6ed5bbdf-02aa-5a3b-9ce0-70a1f1a7d3c5")
"""Of the serial numbers, which are derived from what they number."""


def sbom(proof: Proof, image: str, labels: Mapping[str, str], licences: Licences | None = None) -> dict[str, Any]:
    """The SBOM of the image whose config digest is `image`, as JSON.

    One component for each wheel as installed and each package of the OS. A patched wheel has the upstream one as its
    ancestor, and the sha256 of what was changed.
    """
    lock = proof.lock
    root = _root(proof, image, labels)
    known = licences or {}
    wheels = {str(item["name"]): _wheel(item, proof, known) for item in proof.installed}
    system = [_os_package(package, lock.base) for package in lock.base.packages]
    tool = Component(type=ComponentType.APPLICATION, name="sglang-stack-builder", version=__version__)
    bom = Bom(
        components=[*wheels.values(), *system],
        serial_number=uuid.uuid5(_SPACE, f"{image} {lock.digest} {proof.digests.get('patches.json', '')}"),
        metadata=BomMetaData(component=root, tools=ToolRepository(components=[tool])),
    )
    bom.register_dependency(root, [*wheels.values(), *system])
    for name, component in wheels.items():
        artefact = lock.by_name.get(name)
        if artefact is not None:
            bom.register_dependency(component, [wheels[other] for other in _requires(artefact) if other in wheels])
    made: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    # The library always sets one.
    del made["metadata"]["timestamp"]
    return made


def wheels_in(document: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name → (version, sha256) of the wheels that an SBOM names. Raises ValueError, KeyError or the like for a damaged one."""
    found = {}
    for component in document["components"]:
        if not str(component.get("purl", "")).startswith("pkg:pypi/"):
            continue
        sha256 = next(item["content"] for item in component["hashes"] if item["alg"] == "SHA-256")
        if component["name"] in found:
            raise ValueError(f"{component['name']} is there twice")
        found[str(component["name"])] = (str(component["version"]), str(sha256))
    return found


def packages_in(document: Mapping[str, Any]) -> dict[str, str]:
    """Name → version of the packages of the OS that an SBOM names. Raises KeyError or the like for a damaged one."""
    rows = [item for item in document["components"] if str(item.get("purl", "")).startswith("pkg:deb/")]
    return {str(item["name"]): str(item["version"]) for item in rows}


def image_in(document: Mapping[str, Any]) -> str:
    """The config digest that an SBOM is of."""
    hashes = document["metadata"]["component"]["hashes"]
    return next(f"sha256:{item['content']}" for item in hashes if item["alg"] == "SHA-256")


def _root(proof: Proof, image: str, labels: Mapping[str, str]) -> Component:
    properties = {
        "lock": proof.lock.digest,
        "inputs": labels.get(f"{LABEL}.inputs", ""),
        "cuda": labels.get(f"{LABEL}.cuda", ""),
        "gpus": labels.get(f"{LABEL}.gpus", ""),
        "as-of": proof.lock.as_of,
        "patches.diff": proof.digests.get("patches.diff", ""),
    }
    return Component(
        type=ComponentType.CONTAINER,
        name=f"{LABEL}/{proof.lock.matrix}",
        version=proof.lock.digest[:12],
        bom_ref=image,
        hashes=[_sha256(image.removeprefix("sha256:"))],
        properties=_properties(properties),
    )


def _wheel(item: Mapping[str, str], proof: Proof, licences: Licences) -> Component:
    locked = proof.lock.by_name.get(item["name"])
    purl = _purl("pypi", None, item["name"], item["version"], file_name=item["file"])
    patched = locked is not None and item["sha256"] != locked.sha256
    report = next((r for r in proof.reports if r.get("package") == item["name"]), None)
    # A local file has no address: the one in the lock is the ancestor's.
    links = [] if patched or locked is None else _links(locked)
    return Component(
        type=ComponentType.LIBRARY,
        name=item["name"],
        version=item["version"],
        purl=purl,
        bom_ref=str(purl),
        hashes=[_sha256(item["sha256"])],
        licenses=_chosen(licences.get(item["name"], ())),
        external_references=links,
        properties=_properties({"layer": item.get("layer", ""), "index": "" if patched else _index(locked)}),
        pedigree=_pedigree(locked, report) if patched and locked is not None else None,
    )


def _chosen(words: Iterable[str]) -> list[License]:
    """Licences by name, or one expression: CycloneDX allows an expression alone only."""
    made = [LicenseFactory().make_from_string(word) for word in dict.fromkeys(word.strip() for word in words if word)]
    named: list[License] = [item for item in made if isinstance(item, DisjunctiveLicense)]
    return named or made[:1]


def _pedigree(locked: Artefact, report: Mapping[str, Any] | None) -> Pedigree:
    purl = _purl("pypi", None, locked.name, locked.version, file_name=locked.file)
    ancestor = Component(
        type=ComponentType.LIBRARY,
        name=locked.name,
        version=locked.version,
        purl=purl,
        bom_ref=str(purl),
        hashes=[_sha256(locked.sha256)],
        external_references=_links(locked),
        properties=_properties({"index": _index(locked)}),
    )
    return Pedigree(ancestors=[ancestor], patches=_patches(report), notes=_notes(report))


def _patches(report: Mapping[str, Any] | None) -> list[Patch]:
    """The diff of all that was changed, and the user's own ones, each by its sha256: the text is in the image."""
    if report is None:
        return []
    whole = "".join(str(item["diff"]) for item in report["files"])
    digests = [sha256_hex(whole.encode(errors="surrogateescape"))] + [str(item["sha256"]) for item in report["diffs"]]
    return [Patch(type=PatchClassification.UNOFFICIAL, diff=Diff(url=XsUri(f"urn:sha256:{d}"))) for d in digests]


def _notes(report: Mapping[str, Any] | None) -> str | None:
    if report is None:
        return None
    sites = sorted({str(site["id"]) for site in report["sites"] if site["before"] == "needed"})
    files = [str(item["file"]) for item in report["diffs"]]
    sets = ", ".join(str(name) for name in report["sets"])
    parts = [f"sets: {sets}" if sets else "", f"sites: {' '.join(sites)}" if sites else ""]
    parts += [f"diffs: {', '.join(files)}" if files else "", f"the text is in the image: /{FOLDER}/patches.diff"]
    return "; ".join(filter(None, parts))


def _os_package(package: OsPackage, base: Base) -> Component:
    purl = _purl(
        "deb", base.distribution, package.name, package.version, arch=package.architecture, distro=base.release
    )
    return Component(
        type=ComponentType.LIBRARY, name=package.name, version=package.version, purl=purl, bom_ref=str(purl)
    )


def purls(lock: Lock) -> list[tuple[str, str, str]]:
    """(purl, name, sha256) of all that a lock pins, wheels as upstream made them; "" where it pins no hash."""
    rows = [(str(_purl("pypi", None, a.name, a.version, file_name=a.file)), a.file, a.sha256) for a in lock.artefacts]
    for package in lock.base.packages:
        at = {"arch": package.architecture, "distro": lock.base.release}
        rows.append((str(_purl("deb", lock.base.distribution, package.name, package.version, **at)), package.name, ""))
    return rows


def _purl(kind: str, namespace: str | None, name: str, version: str, **qualifiers: str) -> PackageURL:
    return PackageURL(type=kind, namespace=namespace, name=name, version=version, qualifiers=qualifiers)


def _links(artefact: Artefact) -> list[ExternalReference]:
    if artefact.url is None:
        return []
    parts = urlsplit(artefact.url)
    # A user name and password may stand before the host; a token, in what comes after the path.
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return [ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(plain))]


def _index(locked: Artefact | None) -> str:
    return locked.index or "" if locked is not None else ""


def _requires(artefact: Artefact) -> list[str]:
    names: list[str] = []
    for text in artefact.requires:
        try:
            names.append(canonicalize_name(Requirement(text).name))
        except InvalidRequirement:
            continue
    return names


def _sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value)


def _properties(values: Mapping[str, str]) -> list[Property]:
    return [Property(name=f"{LABEL}:{name}", value=value) for name, value in values.items() if value]


def components(document: Mapping[str, Any]) -> int:
    """How many components an SBOM names."""
    return len(document["components"])
