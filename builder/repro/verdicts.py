"""The verdicts that read wheels, as findings: `abi` on the pins that the index has, `arch` on the kernels, patch sites."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from builder.agree import KERNELS
from builder.findings import Finding, Severity
from builder.reports.model import Report
from builder.repro.model import Reconstruction
from builder.repro.predict import Ask
from builder.settings import Settings

if TYPE_CHECKING:
    from builder.archreport import Library

MOST = 25
"""Packages that `abi` is asked about at once; each costs some requests."""


def asks(report: Report, made: Reconstruction, settings: Settings, base: str) -> dict[str, Ask]:
    """What can be asked of this stack."""
    found: dict[str, Ask] = {}
    pins = {name: pin.version for name, pin in made.pins.items() if pin.version == pin.wanted and pin.file is None}
    torch, other = made.pins.get("torch"), ""
    if torch is not None and "torch" not in pins:
        # The nearest that can be read: what it says is said of it.
        pins["torch"] = torch.version
        other = f"torch {torch.version}, in the place of {torch.wanted}" if torch.instead else ""
    if "torch" in pins and len(pins) > 1:
        found["abi"] = lambda: list(link_findings(_judged(pins, made, settings, base), other))
    sglang, flashinfer = pins.get("sglang"), pins.get("flashinfer-python")
    if sglang is not None or flashinfer is not None:
        missing = {
            f"{each.parts['owner']}.{each.parts['attribute']}"
            for each in report.symptoms
            if each.kind == "missing-attribute"
        }
        found["patches"] = lambda: list(site_findings(sglang, flashinfer, settings, missing))
    kernels = {name: pins[name] for name in KERNELS if name in pins}
    if kernels and any(fact.name.startswith("capability.") for fact in report.facts.values()):
        found["arch"] = lambda: list(gpu_findings(kernels, made, settings, report.value("driver")))
    return found


def _judged(pins: Mapping[str, str], made: Reconstruction, settings: Settings, base: str) -> Mapping[str, Any]:
    from builder.abi.report import as_json
    from builder.abi.verb import ask

    first = ("torch", *KERNELS, "torchvision", "torchaudio", "torchao", "flashinfer-python")
    # What is of torch's CUDA comes with it, and its Python bindings link to nothing of the stack; those of another CUDA are
    # what may be there besides.
    other = "12" if made.cuda.startswith("13") else "13"
    asked_of = [name for name in pins if not name.startswith(("nvidia-", "cuda-")) or name.endswith(f"-cu{other}")]
    names = sorted(asked_of, key=lambda name: (first.index(name) if name in first else len(first), name))[:MOST]
    report = ask([f"{name}=={pins[name]}" for name in names], settings, python=made.python, base=base, find=None)
    return as_json(report)


def link_findings(said: Mapping[str, Any], beside: str = "") -> Iterator[Finding]:
    """One finding a distribution that cannot load, out of the JSON of `builder abi`.

    ``beside`` says that it was judged beside another torch than the report's.
    """
    broken: dict[str, list[Mapping[str, Any]]] = {}
    for extension in said.get("extensions", ()):
        if extension["verdict"] == "broken" and not extension["by_design"]:
            broken.setdefault(extension["distribution"], []).append(extension)
    for distribution, extensions in broken.items():
        symbols = {m["symbol"]: m for e in extensions for m in e["missing_symbols"]}
        libraries = sorted({name for e in extensions for name in e["missing_libraries"]})
        versions = sorted({name for e in extensions for name in e["missing_versions"]})
        words = [f"no `{name}`" for name in [*libraries, *versions]]
        if symbols:
            first = next(iter(symbols.values()))
            more = f" and {len(symbols) - 1} more" if len(symbols) > 1 else ""
            nearest = f"; nearest: `{first['nearest']}`" if first["nearest"] else ""
            words.append(f"no `{first['demangled']}`{more}{nearest}")
        fits = said.get("fitting")
        yield Finding(
            rule="links-broken",
            severity=Severity.ERROR,
            subject=distribution.split(" ")[0],
            message=f"{distribution} does not load" + (f" beside {beside}" if beside else ""),
            because=", ".join(words),
            hint=f"as far as names tell, these fit: {', '.join(fits)}" if fits else "",
            source="the wheels themselves: `builder abi`",
            evidence={
                "files": [extension["file"] for extension in extensions],
                "symbols": sorted(symbols),
                "libraries": libraries,
                "versions": versions,
            },
        )


def gpu_findings(
    kernels: Mapping[str, str], made: Reconstruction, settings: Settings, driver: str | None
) -> Sequence[Finding]:
    """Whether the kernels have code for the report's GPUs: from the shipped table where it has the release, else the wheel."""
    from builder.archreport import evaluate
    from builder.archverb import asked, look
    from builder.errors import UsageError

    try:
        question = asked(made.gpus, driver, None)
    except UsageError:
        question = asked(made.gpus, None, None)
    known = [library for name, version in kernels.items() for library in _shipped(name, version)]
    unread = [f"{name}=={kernels[name]}" for name in kernels if name not in {each.distribution for each in known}]
    found = [*evaluate(known, question), *(look(unread, question, settings).findings if unread else ())]
    return [finding for finding in found if finding.severity is not Severity.NOTE]


def _shipped(name: str, version: str) -> Iterator[Library]:
    """The files with GPU code of a release that the shipped table has."""
    from builder.arch import EVERYWHERE
    from builder.archreport import Library
    from builder.archverb import loadings
    from builder.static.gpucode import releases_with_code

    code = dict(releases_with_code(name)).get(version)
    known = {loading.file: loading for loading in loadings(name, version)}
    for member, containers in (code.members if code is not None else {}).items():
        yield Library(member, "", name, version, "", containers, known.get(member, EVERYWHERE))


def site_findings(
    sglang: str | None, flashinfer: str | None, settings: Settings, missing: AbstractSet[str] = frozenset()
) -> Iterator[Finding]:
    """What the patch sets would change in these releases: each site that is needed is something that the release lacks.

    ``missing`` are the attributes that errors speak of, as in `Class.attribute`: the sites of the file in which one is added
    are a finding of their own, those that add it first.
    """
    from builder.patches.listing import as_json, named_releases, release_listing
    from builder.patches.releases import Releases

    releases = named_releases(None, sglang, flashinfer, diff=False)
    listed = as_json(release_listing(releases, Releases(settings)))["sites"]
    yield from needed_findings([site for site in listed if site["state"] == "needed"], missing)


def needed_findings(sites: Sequence[Mapping[str, Any]], missing: AbstractSet[str]) -> Iterator[Finding]:
    """One finding a release out of the sites of `builder patches` that are needed, and one more for what errors speak of."""

    def adds(site: Mapping[str, Any]) -> list[str]:
        return [name for name in sorted(missing) if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", str(site["what"]))]

    files = {site["file"] for site in sites if adds(site)}
    needed: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for site in sorted(sites, key=lambda site: not adds(site)):
        needed.setdefault((f"{site['package']} {site['version']}", site["file"] in files), []).append(site)
    for (release, _), of_release in needed.items():
        sets = ", ".join(
            f"{name}: {{}}" for name in dict.fromkeys(site["set"].partition("-")[0] for site in of_release)
        )
        yield Finding(
            rule="patch-needed",
            severity=Severity.NOTE,
            subject=of_release[0]["package"],
            message=f"{release} lacks what the patch sites {', '.join(site['id'] for site in of_release)} add",
            because="; ".join(dict.fromkeys(str(site["what"]) for site in of_release)),
            hint=f"`patches: {{{sets}}}` in a matrix bakes them in",
            source="docs/patches.md",
            evidence={
                "sites": [site["id"] for site in of_release],
                "files": sorted({site["file"] for site in of_release}),
                "adds": [name for site in of_release for name in adds(site)],
            },
        )
