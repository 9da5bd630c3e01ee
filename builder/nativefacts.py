"""What a link verdict needs of one shared object, whatever it was read from. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from builder.elf import Elf

FORMAT = 1
"""Of `ElfFacts.as_json`. Raised when something else is read, too: what was kept under another number is read again."""

SONAME, NEEDED, PATHS = "soname", "needed libraries", "search paths"
UNDEFINED, EXPORTED = "undefined symbols", "exported names"
VERNEED, VERDEF = "needed versions", "defined versions"
PARTS = (SONAME, NEEDED, PATHS, UNDEFINED, EXPORTED, VERNEED, VERDEF)
"""What may be uncertain, in the words of `ElfFacts.uncertain`."""


class Undefined(NamedTuple):
    """A symbol that another object has to define; ``library`` is the file that a versioned one is expected in."""

    name: str
    version: str | None
    library: str | None
    weak: bool


@dataclass(frozen=True)
class ElfFacts:
    """The dynamic-linking facts of one ELF64 file.

    ``machine`` and ``type`` are as in `builder.elf.Elf`, ``bits`` is the ELF class. ``needed``, ``verneed`` (file,
    version) and ``verdef`` are in file order; ``undefined`` is sorted. ``exported`` pairs a version (None first:
    unversioned) with the sorted names that are defined under it: most libraries have all their names under one.

    ``uncertain`` names the fields, in words of `PARTS`, of which more or something else may be true than is said here:
    of names, those that stand here are right, and others may lack; libraries and paths that are named there were
    recognised among the file's strings, without the table that says what they are.
    """

    machine: str
    type: str
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    undefined: tuple[Undefined, ...] = ()
    exported: tuple[tuple[str | None, tuple[str, ...]], ...] = ()
    verneed: tuple[tuple[str, str], ...] = ()
    verdef: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    bits: int = 64

    @property
    def complete(self) -> bool:
        """Whether every field is known for certain."""
        return not self.uncertain

    @cached_property
    def exports(self) -> dict[str, tuple[str | None, ...]]:
        """Exported names with the versions that they are exported under (None: unversioned)."""
        found: dict[str, tuple[str | None, ...]] = {}
        for version, names in self.exported:
            if not found:
                found = dict.fromkeys(names, (version,))
                continue
            for name in names:
                found[name] = (*found.get(name, ()), version)
        return found

    def has(self, name: str, version: str | None = None) -> bool:
        """Whether a reference to ``name`` under ``version`` binds here.

        An object without version definitions satisfies any version; an unversioned reference takes any definition.
        False is proof only where `EXPORTED` is not uncertain.
        """
        versions = self.exports.get(name)
        return versions is not None and (version is None or version in versions or not self.verdef)

    def as_json(self) -> dict[str, Any]:
        """JSON, compact: what is empty is left out, names are grouped by their version. One spelling for one value."""
        groups: dict[tuple[str | None, str | None, bool], list[str]] = {}
        for name, version, library, weak in self.undefined:
            groups.setdefault((library, version, weak), []).append(name)
        order = sorted(groups, key=lambda key: tuple((part is not None, str(part or "")) for part in key))
        said: dict[str, Any] = {
            "format": FORMAT,
            "machine": self.machine,
            "type": self.type,
            "soname": self.soname,
            "needed": list(self.needed),
            "rpath": list(self.rpath),
            "runpath": list(self.runpath),
            "undefined": [[*key, groups[key]] for key in order],
            "exported": [[version, list(names)] for version, names in self.exported],
            "verneed": [list(pair) for pair in self.verneed],
            "verdef": list(self.verdef),
            "uncertain": list(self.uncertain),
        }
        return {key: value for key, value in said.items() if value not in (None, [])}

    @classmethod
    def from_json(cls, said: Any) -> ElfFacts:
        """The value that `as_json` said. Raises `ValueError` for anything else, other formats included."""
        try:
            if said["format"] != FORMAT:
                raise ValueError(f"facts of format {said['format']}, not {FORMAT}")
            undefined = [
                Undefined(_text(name), _maybe(version), _maybe(library), bool(weak))
                for library, version, weak, names in said.get("undefined", ())
                for name in names
            ]
            made = cls(
                machine=_text(said["machine"]),
                type=_text(said["type"]),
                soname=_maybe(said.get("soname")),
                needed=_texts(said.get("needed", ())),
                rpath=_texts(said.get("rpath", ())),
                runpath=_texts(said.get("runpath", ())),
                undefined=tuple(sorted(undefined, key=_undefined_key)),
                exported=tuple((_maybe(version), _texts(names)) for version, names in said.get("exported", ())),
                verneed=tuple((_text(library), _text(version)) for library, version in said.get("verneed", ())),
                verdef=_texts(said.get("verdef", ())),
                uncertain=_texts(said.get("uncertain", ())),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the facts of a native file: {error!r}") from error
        if not set(made.uncertain) <= set(PARTS):
            raise ValueError(f"not the facts of a native file: uncertain are {', '.join(made.uncertain)}")
        return made


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _maybe(value: Any) -> str | None:
    return None if value is None else _text(value)


def _texts(values: Any) -> tuple[str, ...]:
    found = tuple(values)
    # Half a million names: one look at the set of types instead of one at each name.
    if not set(map(type, found)) <= {str}:
        raise TypeError(values)
    return found


def _undefined_key(symbol: Undefined) -> tuple[str, str, str, bool]:
    return symbol.name, symbol.version or "", symbol.library or "", symbol.weak


def sorted_undefined(symbols: Iterable[Undefined]) -> tuple[Undefined, ...]:
    """Each once, in the order of `ElfFacts.undefined`."""
    return tuple(sorted(set(symbols), key=_undefined_key))


def grouped(exports: dict[str | None, list[str]]) -> tuple[tuple[str | None, tuple[str, ...]], ...]:
    """Names by version, as `ElfFacts.exported` has them."""
    order = sorted(exports, key=lambda version: (version is not None, version or ""))
    return tuple((version, tuple(sorted(set(exports[version])))) for version in order)


def facts_of(file: Elf) -> ElfFacts:
    """The facts of a file that `builder.elf.read` read."""
    exports: dict[str | None, list[str]] = {}
    for symbol in file.exported:
        exports.setdefault(symbol.version, []).append(symbol.name)
    return ElfFacts(
        machine=file.machine,
        type=file.type,
        soname=file.soname,
        needed=file.needed,
        rpath=file.rpath,
        runpath=file.runpath,
        undefined=sorted_undefined(
            Undefined(symbol.name, symbol.version, symbol.library, symbol.weak)
            for symbol in (*file.undefined_strong, *file.undefined_weak)
        ),
        exported=grouped(exports),
        verneed=file.verneed,
        verdef=file.verdef,
        uncertain=() if file.gnu_hash_ok is not False else (EXPORTED,),
    )
