"""Matrix → artefacts, by `uv pip compile`: what is asked, for which target, as of which date."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from builder import facts
from builder.errors import LockError, UnreachableError
from builder.index import RemoteWheel, confined, fetch_metadata, offers
from builder.lock import Artefact, Resolver
from builder.matrix import Matrix
from builder.origins import DirectFile
from builder.settings import Settings, redact
from builder.tags import markers, wheel_tags

# uv's own words: a resolution that does not exist, else an index that does not answer.
_NO_RESOLUTION = "No solution found"
_UNREACHABLE = (
    "error sending request",
    "Failed to fetch",
    "dns error",
    "tcp connect error",
    "(Connect)",
    "timed out",
    "error decoding response body",
    "end of file before message length reached",
    "HTTP status server error",
)


def uv_version() -> str:
    """The version of the uv that resolves and installs."""
    return subprocess.run([find_uv_bin(), "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def glibc_of(matrix: Matrix) -> tuple[int, int]:
    """The C library of the matrix's OS release. Raises `LockError` for a release no fact covers."""
    for fact in facts.load_facts(facts.DistributionFact):
        if (fact.distribution, fact.release) == (matrix.base.distribution, matrix.base.release) and fact.glibc:
            major, minor = fact.glibc.split(".")[:2]
            return int(major), int(minor)
    raise LockError(
        f"the C library of {matrix.base.distribution} {matrix.base.release} is not known",
        because="it decides which wheels install",
        hint="add the release to builder/facts/distributions.yaml, with its source",
    )


def target_tags(matrix: Matrix) -> list[Tag]:
    """The wheel tags of the target, best first: CPython of the matrix, glibc of its OS."""
    return wheel_tags(matrix.python, *glibc_of(matrix))


def marker_environment(matrix: Matrix) -> dict[str, str]:
    """The values of PEP 508's markers in the image; nothing of the machine that resolves."""
    return markers(matrix.python)


def requirements(matrix: Matrix) -> list[str]:
    """What is asked for: the stack, the compiler's parts and the extras, each pinned."""
    lines = [f"{name}=={version}" for name, version in matrix.stack.pins().items()]
    lines += [f"{name}=={version}" for name, version in matrix.cuda.compiler.items()]
    lines += list(matrix.extras)
    return sorted(lines)


def resolve(matrix: Matrix, settings: Settings) -> tuple[list[Artefact], Resolver]:
    """Every wheel of the stack, as of the matrix's date, sorted by name.

    Raises `LockError` if there is no resolution or a package has no wheel for the target, `UnreachableError` if the
    index does not answer.
    """
    packages = _compile(matrix, settings)
    files = {str(canonicalize_name(file.name)): file for file in matrix.files}
    ranks = {tag: rank for rank, tag in enumerate(target_tags(matrix))}
    chosen: list[tuple[str, str, dict[str, Any]]] = []
    missing = []
    _require_files(files, packages)
    for package in packages:
        name, version = str(canonicalize_name(package["name"])), package["version"]
        if name in files:
            continue
        wheel = _best(package.get("wheels", ()), ranks)
        if wheel is None:
            missing.append(f"{name} {version}")
        else:
            chosen.append((name, version, wheel))
    if missing:
        raise LockError(
            f"no wheel for Python {matrix.python} on {matrix.platform}: {', '.join(missing)}",
            because="a build installs wheels only, it compiles nothing",
            hint="pin a release that has one under `extras`",
        )
    if unhashed := [f"{name} {version}" for name, version, wheel in chosen if "sha256" not in wheel.get("hashes", ())]:
        raise LockError(
            f"no sha256 is known of: {', '.join(unhashed)}",
            because="the index does not state one, and a lock pins files by it",
            hint="take it from another index, or name the file and its sha256 under `files`",
        )
    _require_indexes(matrix, settings, {name: wheel["hashes"]["sha256"] for name, _, wheel in chosen})
    remote = [RemoteWheel(n, v, _file_name(w), w["url"], w["hashes"]["sha256"]) for n, v, w in chosen]
    texts = fetch_metadata(remote, settings)
    environment = marker_environment(matrix)
    parsed = [HeaderParser().parsestr(text) for text in texts]
    stated = {
        name: headers.get_all("Requires-Dist") or [] for (name, _, _), headers in zip(chosen, parsed, strict=True)
    }
    stated |= {name: list(file.requires) for name, file in files.items()}
    extras = requested_extras(requirements(matrix), stated, environment)
    artefacts = []
    for (name, version, wheel), headers in zip(chosen, parsed, strict=True):
        artefacts.append(
            Artefact(
                name=name,
                version=version,
                metadata_version=headers["Version"].strip(),
                file=_file_name(wheel),
                sha256=wheel["hashes"]["sha256"],
                size=wheel.get("size"),
                index=_index_of(name, matrix),
                url=None,
                requires=tuple(_requires(stated[name], environment, extras.get(name, ()))),
                layer=facts.layer_of(name),
            )
        )
    artefacts += [_direct(file, environment, extras.get(name, ())) for name, file in files.items()]
    return sorted(artefacts, key=lambda artefact: artefact.name), Resolver(name="uv", version=uv_version())


def _require_files(files: Mapping[str, DirectFile], packages: Iterable[Mapping[str, Any]]) -> None:
    """Raise `LockError` for a direct file that the resolution does not use: the lock would lack it, or lie."""
    resolved = {str(canonicalize_name(package["name"])): str(package["version"]) for package in packages}
    for name, file in files.items():
        got = resolved.get(name)
        if got == file.pinned_version:
            continue
        because = f"the resolution has {name} {got}" if got else f"nothing in the stack requires {name}"
        raise LockError(
            f"the file of `{name} {file.pinned_version}` is not used",
            because=because,
            hint=f"pin `{name}=={file.pinned_version}` under `extras`, or remove the entry under `files`",
        )


def _require_indexes(matrix: Matrix, settings: Settings, chosen: Mapping[str, str]) -> None:
    """Raise `LockError` for a package that is to come from an index of the matrix and is not on it.

    uv would take it from the default index then: another build of the same package, as a rule.
    """
    for key, index in matrix.indexes.items():
        url = settings.indexes.get(key, index.url)
        for name in sorted(set(index.packages) & set(chosen)):
            if not offers(url, name, chosen[name], settings):
                raise LockError(
                    f"`{name}` is not on the index `{key}`",
                    where=redact(url),
                    because="the default index has it, and `indexes` says that it comes from this one",
                    hint=f"remove it from `indexes.{key}.packages`, or pin a version that the index has",
                )


def _compile(matrix: Matrix, settings: Settings) -> list[dict[str, Any]]:
    major, minor = glibc_of(matrix)
    minor = facts.resolver_glibc(minor)
    sources = {name: (settings.indexes.get(name, index.url), index.packages) for name, index in matrix.indexes.items()}
    with tempfile.TemporaryDirectory(prefix="builder-lock-") as temporary, confined(sources) as doors:
        folder = Path(temporary)
        asked, overrides, output = folder / "requirements.in", folder / "overrides.txt", folder / "pylock.toml"
        asked.write_text("".join(f"{line}\n" for line in requirements(matrix)), encoding="utf-8")
        lines = [f"{override.package}=={override.ours}\n" for override in matrix.overrides]
        overrides.write_text("".join(lines), encoding="utf-8")
        argv = [find_uv_bin(), "pip", "compile", str(asked), "--format", "pylock.toml", "--output-file", str(output)]
        argv += ["--quiet", "--no-header", "--no-build", "--prerelease", "disallow", "--python", sys.executable]
        argv += ["--python-version", matrix.python, "--python-platform", f"x86_64-manylinux_{major}_{minor}"]
        argv += ["--exclude-newer", f"{matrix.as_of}T00:00:00Z", "--overrides", str(overrides)]
        for name in matrix.prereleases:
            argv += ["--prerelease-package", f"{name}=allow"]
        environment = settings.child_environment()
        if matrix.files:
            argv += _files_arguments(matrix.files, folder, environment)
        if doors:
            environment["UV_INDEX"] = " ".join(f"{name}={url}" for name, url in doors.items())
            for variable in ("no_proxy", "NO_PROXY"):
                environment[variable] = ",".join(filter(None, [environment.get(variable), "127.0.0.1"]))
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            words = redact(done.stderr.replace(f"{folder}/", ""))
            for name, url in doors.items():
                words = words.replace(url, redact(sources[name][0]).rstrip("/"))
            _raise(matrix, words)
        packages: list[dict[str, Any]] = tomllib.loads(output.read_text(encoding="utf-8")).get("packages", [])
        return packages


def _files_arguments(files: Iterable[DirectFile], folder: Path, environment: dict[str, str]) -> list[str]:
    # uv takes direct files from a local page of links and their METADATA from a configuration file, and downloads
    # nothing (facts/stacks.md, section 1).
    page = folder / "links.html"
    links = "".join(f'<a href="{file.url}#sha256={file.sha256}">{file.filename}</a>\n' for file in files)
    page.write_text(f"<!DOCTYPE html>\n{links}", encoding="utf-8")
    config = folder / "uv.toml"
    entries = []
    for file in files:
        # A JSON string is a TOML string too, quotes in a marker and all.
        entries.append(
            "[[dependency-metadata]]\n"
            f"name = {json.dumps(file.name)}\nversion = {json.dumps(file.pinned_version)}\n"
            f"requires-dist = {json.dumps(file.requires)}\n"
        )
    config.write_text("".join(entries), encoding="utf-8")
    environment.pop("UV_NO_CONFIG", None)
    return ["--find-links", str(page), "--config-file", str(config)]


class UnnamedPrereleaseError(LockError):
    """No resolution, as a package of which a pre-release is required is not named under `prereleases`."""

    packages: tuple[str, ...] = ()
    """Those that the resolver's reasons name."""


def _raise(matrix: Matrix, words: str) -> None:
    text = "\n".join(words.strip().splitlines()[-25:])
    if _NO_RESOLUTION not in words and any(sign in words for sign in _UNREACHABLE):
        hint = 'see that it can be reached; mirror and certificate authority: README, "Mirrors and authorities"'
        if "certificate" in words or "UnknownIssuer" in words:
            hint = "name the site's certificate authority: BUILDER_CA=/path/to/ca.pem"
        raise UnreachableError("the package index does not answer", because=text, hint=hint)
    what = f"`{matrix.name}` has no resolution as of {matrix.as_of}"
    hint = _override(matrix, words) or (
        "an upstream pin that the stack breaks on purpose is declared under `overrides`, with its reason"
    )
    # What uv itself advises then is an option of its own: every pre-release there is, or a compiler's work.
    if "pre-releases weren't enabled" in words:
        named = sorted(_asked_before_release(words) - set(matrix.prereleases))
        hint = "a package of which a pre-release may be taken is named under `prereleases`"
        error = UnnamedPrereleaseError(
            what, because=text.partition("\n\nhint:")[0], hint=": ".join([hint, *filter(None, [", ".join(named)])])
        )
        error.packages = tuple(named)
        raise error
    if "building from source is disabled" in words:
        hint = "a build installs wheels only, it compiles nothing: pin a release that has a wheel under `extras`"
        text = text.partition("\n\nhint:")[0]
    raise LockError(what, because=text, hint=hint)


_DEPENDS = re.compile(
    r"(?:all versions of )?([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:[=<>][^\s]+)? depends? on "
    r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:\{[^}]*\})?([=<>!~]=?[^\s,]+(?:,[=<>!~]=?[^\s,]+)*)"
)
"""A step of uv's proof: `sglang>=0.5.9 depends on cuda-python==12.9`, `all versions of middle depend on leaf<2`."""


def _asked_before_release(words: str) -> set[str]:
    """The packages of which uv's proof has a requirement that names a pre-release: `flash-attn-4>=4.0.0b9`."""
    found: set[str] = set()
    for _, name, specifier in _DEPENDS.findall(words):
        with contextlib.suppress(InvalidSpecifier):
            if SpecifierSet(specifier).prereleases:
                found.add(canonicalize_name(name))
    return found


def _override(matrix: Matrix, words: str) -> str:
    """The override that breaks a pin which uv's proof rests on: one that contradicts the matrix, else an exact one."""
    pins = {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for requirement in map(Requirement, requirements(matrix))
    }
    declared = {canonicalize_name(override.package) for override in matrix.overrides}
    exact = ""
    for who, package, specifier in _DEPENDS.findall(words):
        owner, name = canonicalize_name(who), canonicalize_name(package)
        if owner not in pins or name in declared:
            continue
        ours = pins.get(name)
        entry = f'add `{{package: {name}, pin: "{specifier}", ours: {ours or "VERSION"}, because: …, source: …}}` to `overrides`'
        text = f"where {owner}'s requirement `{name}{specifier}` is to be broken on purpose, {entry}"
        if ours is not None and not SpecifierSet(specifier).contains(ours, prereleases=True):
            return text
        if ours is None and re.fullmatch(r"==[^*,]+", specifier):
            exact = exact or f"{text}; VERSION is a release that the others allow"
    return exact


def _best(wheels: Iterable[dict[str, Any]], ranks: Mapping[Tag, int]) -> dict[str, Any] | None:
    """The wheel of the best tag; of two, the one with the higher build number, as installers do."""
    best: tuple[tuple[int, Any], dict[str, Any]] | None = None
    for wheel in wheels:
        try:
            _, _, build, tags = parse_wheel_filename(_file_name(wheel))
        except InvalidWheelFilename:
            continue
        rank = min((ranks[tag] for tag in tags if tag in ranks), default=None)
        if rank is None:
            continue
        order = (-rank, build or (-1, ""))
        if best is None or order > best[0]:
            best = (order, wheel)
    return best[1] if best else None


def _file_name(wheel: Mapping[str, Any]) -> str:
    return unquote(str(wheel.get("name") or wheel["url"].split("#", 1)[0].rsplit("/", 1)[-1]))


def _index_of(name: str, matrix: Matrix) -> str:
    return next((key for key, index in matrix.indexes.items() if name in index.packages), "default")


def requested_extras(
    asked: Iterable[str], stated: Mapping[str, Iterable[str]], environment: Mapping[str, str]
) -> dict[str, set[str]]:
    """Which extras of each package are asked for, by the matrix or by another package in the lock: to a fixpoint.

    `cuda-toolkit` states its pins under extras, and torch asks for those: without them the pins would go unchecked.
    """
    extras: dict[str, set[str]] = {}
    lines = list(asked)
    while True:
        before = sum(map(len, extras.values()))
        for requirement in map(Requirement, lines):
            if requirement.extras:
                extras.setdefault(canonicalize_name(requirement.name), set()).update(requirement.extras)
        if extras and sum(map(len, extras.values())) == before:
            return extras
        lines = [line for name, items in stated.items() for line in _requires(items, environment, extras.get(name, ()))]
        if not extras and not any(Requirement(line).extras for line in lines):
            return extras


def _requires(lines: Iterable[str], environment: Mapping[str, str], extras: Iterable[str] = ()) -> list[str]:
    """The requirements that hold for the target with these extras, without their markers, sorted."""
    kept = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            # Old METADATA has lines that PEP 508 refuses; an installer skips or repairs them, nobody relies on them.
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in ("", *sorted(extras))):
            requirement.marker = None
            kept.append(str(requirement))
    return sorted(dict.fromkeys(kept))


def _direct(file: DirectFile, environment: Mapping[str, str], extras: Iterable[str]) -> Artefact:
    name = canonicalize_name(file.name)
    return Artefact(
        name=name,
        version=file.pinned_version,
        metadata_version=file.metadata_version or file.pinned_version,
        file=file.filename,
        sha256=file.sha256,
        size=file.size,
        index=None,
        url=file.url,
        requires=tuple(_requires(file.requires, environment, extras)),
        layer=facts.layer_of(name),
    )
