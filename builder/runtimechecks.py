"""`python -m builder.runtimechecks`: read what sglang asserts of other packages when it starts, out of its wheels.

    python -m builder.runtimechecks [--from 0.4.6] [--write]

It reads one file of each release on the index, by byte ranges, and prints `facts/runtime-checks.yaml`, or writes it. A new
release is a change of that file. A condition of an assertion that is of no known form ends it: what it means has to be
said here first.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from builder import settings
from builder.display import note
from builder.download import project_page
from builder.facts import RuntimeCheckFact
from builder.files import write_atomic
from builder.patches.releases import Releases

PACKAGE = "sglang"
MEMBER = "sglang/srt/entrypoints/engine.py"
FIRST = "0.4.6"

_CALL = "assert_pkg_version"
_SKIP = re.compile(r"not get_bool_env_var\('([A-Z][A-Z0-9_]*)'\)")

_HEAD = f"""\
# yaml-language-server: $schema=facts.schema.json#/$defs/{RuntimeCheckFact.file}
# What sglang asserts of other packages when it starts (`{_CALL}`), where there is CUDA. Read in the wheels of every release and
# pre-release on the default index; written by `python -m builder.runtimechecks --write`, and not by hand.
facts:
"""


@dataclass(frozen=True)
class Check:
    """One assertion: ``requires`` has to be there, ``minimum`` or later; ``when`` and ``skip`` as in `RuntimeCheckFact`."""

    requires: str
    minimum: str
    when: str = "always"
    skip: str | None = None


def checks(text: str) -> list[Check]:
    """The assertions in a Python file, in their order. Raises `ValueError` for a condition of no known form."""
    return list(_calls(ast.parse(text), ()))


def _calls(node: ast.AST, tests: tuple[ast.expr, ...]) -> Iterator[Check]:
    for child in ast.iter_child_nodes(node):
        inside = tests
        if isinstance(node, ast.If) and child in node.body:
            inside = (*tests, node.test)
        elif isinstance(node, ast.If) and child in node.orelse:
            inside = (*tests, ast.UnaryOp(ast.Not(), node.test))
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == _CALL:
            package, minimum = (ast.literal_eval(argument) for argument in child.args[:2])
            yield _conditioned(Check(canonicalize_name(package), str(Version(minimum))), inside)
        yield from _calls(child, inside)


def _conditioned(check: Check, tests: Sequence[ast.expr]) -> Check:
    for test in tests:
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        for part in map(ast.unparse, parts):
            if found := _SKIP.fullmatch(part):
                check = replace(check, skip=found[1])
            elif "'flashinfer'" in part and "not " not in part:
                check = replace(check, when="flashinfer")
            elif part != "_is_cuda":
                raise ValueError(f"an assertion on {check.requires} under a condition that is not known: `{part}`")
    return check


def rows(found: Mapping[str, Sequence[Check]]) -> list[tuple[str, Check]]:
    """Ranges of releases that assert the same, with what that is: of releases in their order, the oldest first."""
    releases = list(found)
    made: list[tuple[str, Check]] = []
    for package in dict.fromkeys(check.requires for each in found.values() for check in each):
        runs: list[tuple[list[str], Check]] = []
        before = ""
        for release in releases:
            for check in found[release]:
                if check.requires != package:
                    continue
                if runs and runs[-1][1] == check and runs[-1][0][-1] == before:
                    runs[-1][0].append(release)
                else:
                    runs.append(([release], check))
            before = release
        made += [(f"=={run[0]}" if len(run) == 1 else f">={run[0]},<={run[-1]}", check) for run, check in runs]
    return made


def as_yaml(found: Mapping[str, Sequence[Check]]) -> str:
    """The file of facts."""
    lines = []
    for versions, check in rows(found):
        skip = f", skip: {check.skip}" if check.skip else ""
        lines.append(
            f'  - {{package: {PACKAGE}, versions: "{versions}", requires: {check.requires}, minimum: "{check.minimum}", '
            f"when: {check.when}{skip}, source: {MEMBER}}}\n"
        )
    return _HEAD + "".join(lines)


def releases(first: str, site: settings.Settings) -> list[str]:
    """The releases of sglang with a wheel, pre-releases included, from ``first`` on, the oldest first."""
    known: set[Version] = set()
    for package in project_page(PACKAGE, site):
        try:
            if package.package_type == "wheel" and package.version:
                known.add(Version(package.version))
        except InvalidVersion:
            continue
    return [str(version) for version in sorted(known) if version >= Version(first)]


def main() -> None:
    """Print the file of facts, or write it."""
    parser = argparse.ArgumentParser(prog="python -m builder.runtimechecks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--from", dest="first", default=FIRST, metavar="VERSION", help="the first release")
    parser.add_argument("--write", action="store_true", help="write builder/facts/runtime-checks.yaml")
    arguments = parser.parse_args()
    site = settings.load()
    opener = Releases(site)
    found: dict[str, list[Check]] = {}
    for release in releases(arguments.first, site):
        note(f"{PACKAGE} {release} …")
        found[release] = checks(opener.release(PACKAGE, release).read(MEMBER).decode())
    text = as_yaml(found)
    if arguments.write:
        write_atomic(Path(str(resources.files("builder.facts"))) / f"{RuntimeCheckFact.file}.yaml", text)
    else:
        print(text, end="")
    note(f"{len(found)} releases, {opener.traffic.bytes_read:,} bytes read")


if __name__ == "__main__":
    main()
