"""Would the loader accept each native file: `needed` (libraries) and `symbols` (names, versions), from files alone."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterable

from builder.elf import Symbol
from builder.smoke.ledger import Ledger
from builder.smoke.loader import Closure, Loader, Object
from builder.smoke.native import Native, NativeFile
from builder.smoke.report import Result, count, some

_NUMBER = re.compile(r"\d+")

_LOOKED = (
    "it is not loaded by `import torch`, and in no folder of RPATH, RUNPATH or LD_LIBRARY_PATH, "
    "the loader's cache or the default folders"
)


def check_needed(native: Native, ledger: Ledger) -> Result:
    """Each DT_NEEDED of each ELF file is found, in the order in which the loader searches."""
    files, programs = native.shared_objects, native.programs
    result = Result(0, len(files), "files")
    _report_import(native, result)
    needed = 0
    for file, loader in _with_loaders(native):
        if file.elf is None:
            _report_unreadable(file, result, ledger)
            continue
        result.looked_at += file in files
        needed += len(file.elf.needed)
        closure = loader.closure(native.tree.path(file.path))
        missing = _missing(native, file, closure)
        if not missing:
            continue
        message = f"`{file.path}` of {file.owner} needs {some(missing, 12)}, which nothing in the image provides"
        if ledger.excuses("needed", file.owner.name, file.path, message) is None:
            because, hint = _about_missing(native, missing)
            result.add("error", file.path, message, because=because, hint=hint)
    result.looked_at += sum(1 for file in files if file.elf is None)
    host = sorted(name for name in native.drivers if name in native.stubs)
    result.detail = count(needed, "needed library", "needed libraries") + (
        f", {count(len(programs), 'program')} too" if programs else ""
    )
    if host:
        result.detail += f"; the host's driver brings {', '.join(host)}"
    ledger.settle("needed", result, native.scope)
    return result


def _with_loaders(native: Native) -> Iterable[tuple[NativeFile, Loader]]:
    for file in native.shared_objects:
        yield file, native.loader_for(file)
    for file in native.programs:
        yield file, native.bare_loader


def _report_import(native: Native, result: Result) -> None:
    if native.torch and native.observed.error:
        first, *rest = native.observed.error.split("\n")
        result.add(
            "error",
            "torch",
            f"`import torch` fails: {first}",
            because="\n".join(rest) or "other files are looked at as if its libraries had been loaded",
            hint="the findings about torch's own files say why",
        )


def _report_unreadable(file: NativeFile, result: Result, ledger: Ledger) -> None:
    message = f"`{file.path}` of {file.owner} {file.trouble}"
    if ledger.excuses("needed", file.owner.name, file.path, message) is None:
        hint = "build again from the lock: RECORD names what the wheel installed"
        result.add("error", file.path, message, hint=hint)


def _missing(native: Native, file: NativeFile, closure: Closure) -> list[str]:
    """Needed names not found: by the file itself, or by a file that no wheel brings (nobody else reports it)."""
    root = closure.objects[0]
    names = {
        name
        for name, item in closure.missing
        if name not in native.drivers and (item is root or native.tree.owner(item.path) is None)
    }
    return sorted(names)


def _about_missing(native: Native, missing: list[str]) -> tuple[str, str]:
    because, hints = [], []
    packages, sonames = native.spec.fact("os_packages"), native.spec.fact("cuda_sonames")
    elsewhere = {path.rsplit("/", 1)[-1]: path for path in native.tree.owners}
    for name in missing:
        stem, _, number = name.partition(".so.")
        majors = sonames.get(f"{stem}.so", {})
        major = majors.get(number.split(".")[0]) if isinstance(majors, dict) else None
        if name in packages:
            hints.append(f"`{name}` is in the OS package `{packages[name]}`: add it to the base's packages")
        elif major and native.spec.cuda_major not in (major if isinstance(major, list) else [major]):
            wanted = major if not isinstance(major, list) else major[0]
            because.append(f"`{name}` is CUDA {wanted}'s, the stack is CUDA {native.spec.cuda_major}")
            hints.append(f"take this package's build for CUDA {native.spec.cuda_major}")
        elif name in elsewhere:
            because.append(f"{native.describe(elsewhere[name])} has that name, but the loader does not look there")
    because = because or [_LOOKED]
    hints = hints or ["add the wheel or the OS package that has it, or name the file in builder/facts/exceptions.yaml"]
    return "\n".join(dict.fromkeys(because)), "\n".join(dict.fromkeys(hints))


def check_symbols(native: Native, ledger: Ledger) -> Result:
    """Each strong undefined symbol, under its version, has a definition in the scope in which the loader looks."""
    files = native.shared_objects
    result = Result(0, None, "symbols")
    looked = unjudged = incomplete = versions = 0
    unresolved: list[tuple[NativeFile, list[Symbol], Closure]] = []
    for file, loader in _with_loaders(native):
        if file.elf is None:
            continue  # `needed` reports it
        looked += file in files
        closure = loader.closure(native.tree.path(file.path))
        scope = loader.scope(closure)
        absent_versions = _absent_versions(native, file, closure)
        versions += len(file.elf.verneed)
        if absent_versions:
            _report_versions(native, file, absent_versions, result, ledger)
        gone = {(library, version) for library, version, _ in absent_versions}
        bad = []
        for symbol in file.elf.undefined_strong:
            result.looked_at += 1
            if (symbol.library, symbol.version) not in gone and not _resolved(symbol, scope):
                bad.append(symbol)
        missing = [name for name, _ in closure.missing if name not in native.drivers]
        if missing and bad:
            # They may be in the missing library: only what is certainly another object's counts.
            certain = [symbol for symbol in bad if _owner_pattern(native, symbol.name) and not _in_any(native, missing)]
            unjudged += len(bad) - len(certain)
            incomplete += 1
            bad = certain
        if bad:
            unresolved.append((file, bad, closure))
    _report_symbols(native, unresolved, result, ledger)
    there = sum(1 for file in files if file.elf is not None)
    result.detail = f"in {looked:,} of {count(len(files), 'shared object')}, {count(versions, 'symbol version')}"
    if unjudged:
        result.detail += (
            f"; {count(unjudged, 'symbol')} of {count(incomplete, 'file')} may be in libraries that are missing"
        )
    if looked != there:
        result.add("error", "symbols", f"looked into {looked} of {there} shared objects")
    ledger.settle("symbols", result, native.scope)
    return result


def _resolved(symbol: Symbol, scope: Iterable[Object]) -> bool:
    return any(item.has(symbol.name, symbol.version) for item in scope)


def _in_any(native: Native, missing: list[str]) -> bool:
    """Whether torch's own libraries are among the missing: then nothing can be said about torch's names either."""
    return any(name.startswith(("libtorch", "libc10")) for name in missing)


def _absent_versions(native: Native, file: NativeFile, closure: Closure) -> list[tuple[str, str, Object]]:
    """(library, version, object) where the library that was found does not define the version."""
    assert file.elf is not None
    by_name = {item.name: item for item in closure.objects}
    absent = []
    for library, version in file.elf.verneed:
        item = by_name.get(library)
        if item is not None and library not in native.drivers and item.elf.verdef and version not in item.elf.verdef:
            absent.append((library, version, item))
    return absent


def _report_versions(
    native: Native, file: NativeFile, absent: list[tuple[str, str, Object]], result: Result, ledger: Ledger
) -> None:
    for library, version, item in absent:
        message = f"`{file.path}` of {file.owner} needs version `{version}` of `{library}`, which is not there"
        if ledger.excuses("symbols", file.owner.name, file.path, message):
            continue
        family = version.rpartition("_")[0]
        have = [v for v in item.elf.verdef if v.rpartition("_")[0] == family and v.rpartition("_")[2][:1].isdigit()]
        newest = max(have, key=version_key, default="none of that family")
        result.add(
            "error",
            file.path,
            message,
            because=f"the newest that {native.describe(item)} has is {newest}: the file was built for a newer system",
            hint="take a newer base, or a build of this package for an older one (see the wheel's manylinux tag)",
        )


def version_key(version: str) -> list[int]:
    """The numbers in a symbol version, to be compared: `GLIBC_2.36` is [2, 36]."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _report_symbols(
    native: Native,
    unresolved: list[tuple[NativeFile, list[Symbol], Closure]],
    result: Result,
    ledger: Ledger,
) -> None:
    plain = demangle(sorted({symbol.name for _, symbols, _ in unresolved for symbol in symbols}))
    index: dict[str, list[str]] = {}
    for file, symbols, _ in unresolved:
        shown = [plain[symbol.name] for symbol in symbols]
        owner = next((name for s in symbols if (name := _owner_pattern(native, s.name))), None)
        provider = native.tree.by_name.get(owner) if owner else None
        lacks = f"{provider} does not export" if provider else "no library in its scope exports"
        rest = f" and {count(len(shown) - 1, 'more symbol')}" if len(shown) > 1 else ""
        message = f"`{file.path}` of {file.owner} needs `{shown[0]}`{rest}, which {lacks}"
        words = "\n".join([message, *shown, *(symbol.name for symbol in symbols)])
        if ledger.excuses("symbols", file.owner.name, file.path, words):
            continue
        because = []
        if provider and provider.name != file.owner.name:
            because.append(f"this file was built for another {provider.shown}")
        if not index:
            there = [*native.loader.global_scope, *native.loader.loaded.values()]
            index = _by_base([*there, *(item for _, _, closure in unresolved for item in closure.objects)])
        for symbol in symbols[:3]:
            if near := nearest(symbol.name, index):
                instead = f", for `{plain[symbol.name]}`" if symbol is not symbols[0] else ""
                because.append(f"the nearest name there is: `{demangle([near])[near]}`{instead}")
        because += [f"also: {some(shown[1:], 4)}"] if rest else []
        hint = (
            f"take the version of {file.owner.shown} that was built for {provider}"
            if provider
            else "a library that it needs is of another version, or the file expects to be loaded by another one"
        )
        result.add("error", file.path, message, because="\n".join(because), hint=hint)


def _owner_pattern(native: Native, name: str) -> str | None:
    """Which distribution a symbol belongs to by its name (facts: `symbol_owners`)."""
    for distribution, patterns in native.spec.fact("symbol_owners").items():
        if any(re.search(str(pattern), name) for pattern in patterns):
            return str(distribution)
    return None


def base_name(mangled: str) -> str | None:
    """`c10::SymInt::sym_ne` of an Itanium-mangled function, without its parameters; None for what is not one."""
    parts, _, at = _qualified(mangled)
    if mangled[at : at + 1] in ("C", "D") and parts:
        parts.append(("~" if mangled[at] == "D" else "") + parts[-1])
    return "::".join(parts) or None


def _qualified(mangled: str) -> tuple[list[str], int, int]:
    """The parts of an Itanium-mangled name's qualified name, and where in it they begin and end."""
    match = re.match(r"_Z(?:N[rVK]*[RO]?)?", mangled)
    at, parts = match.end() if match else 0, []
    first = at
    while match and (length := _NUMBER.match(mangled, at)):
        start = length.end()
        at = start + int(length.group())
        parts.append(mangled[start:at])
    return parts, first, at


def qualified_prefixes(mangled: str) -> list[str]:
    """How mangled names begin that have the same qualified name, whatever their qualifiers and parameters."""
    _, first, end = _qualified(mangled)
    return [f"{start}{mangled[first:end]}" for start in ("_ZN", "_ZNK", "_Z")] if end > first else []


def _by_base(objects: Iterable[Object]) -> dict[str, list[str]]:
    index: dict[str, list[str]] = {}
    seen: set[str] = set()
    for item in objects:
        if item.path in seen:
            continue
        seen.add(item.path)
        for name in item.exports:
            if base := base_name(name):
                index.setdefault(base, []).append(name)
    return index


def nearest(name: str, index: dict[str, list[str]]) -> str | None:
    """The exported name with the same qualified name and the most similar parameters."""
    base = base_name(name)
    # The two spellings of std::string count as one: which of them it is does not make a parameter list another one.
    candidates = {_old_string(item): item for item in sorted(set(index.get(base, ())))} if base else {}
    found = difflib.get_close_matches(_old_string(name), list(candidates), 1, 0.0)
    return candidates[found[0]] if found else None


def _old_string(mangled: str) -> str:
    return mangled.replace("NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE", "Ss")


def demangle(names: list[str]) -> dict[str, str]:
    """C++ names as c++filt prints them; without c++filt, the qualified name alone."""
    tool = shutil.which("c++filt")
    if tool and names:
        process = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=False)
        lines = process.stdout.splitlines()
        if process.returncode == 0 and len(lines) == len(names):
            return dict(zip(names, lines, strict=True))
    return {name: base_name(name) or name for name in names}
