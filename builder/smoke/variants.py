"""Packages with a file for each CUDA, or each torch, of which their Python code opens the one of the torch beside it, and no other.

What is known of them is data (`facts/variants.yaml`); this is the rule, for the wheels alone and for an image.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Variants:
    """The files of one package.

    ``path`` has `{cuda}` where a file's name has its CUDA (`130` for 13.0), or `{torch}` where it has its torch (`29` for
    2.9); `*` is anything within a name. ``near``: where the very one is not there, another of the same major is opened,
    the nearest before, else after.
    ``required``: whether the package needs the file that it would open; ``without`` is what follows where it is not there.
    ``elsewhere`` are globs of files for other devices.
    """

    distribution: str
    path: str
    near: bool
    required: bool
    elsewhere: tuple[str, ...]
    without: str

    @property
    def by(self) -> str:
        """What the files differ by: `cuda` or `torch`."""
        return "cuda" if "{cuda}" in self.path else "torch"

    @property
    def title(self) -> str:
        """The same, in words that a release follows."""
        return {"cuda": "CUDA", "torch": "torch"}[self.by]

    def group(self, files: Iterable[str]) -> dict[str, str]:
        """Of these files those for one release each: its number → the file."""
        before, _, behind = (_pattern(part) for part in self.path.partition(f"{{{self.by}}}"))
        pattern = re.compile(before + r"(\d+)" + behind)
        return {found[1]: file for file in files if (found := pattern.fullmatch(file))}

    def opened(self, group: Mapping[str, str], release: str) -> str:
        """The file that the package opens beside ``release`` (`13.0`), whether it is there or not."""
        major, minor = release.split(".")[:2]
        number = major + minor
        if self.near and number not in group:
            same = sorted(
                (int(other.removeprefix(major)), other) for other in group if re.fullmatch(rf"{major}\d", other)
            )
            before = [other for each, other in same if each < int(minor)]
            after = [other for each, other in same if each > int(minor)]
            number = next(iter([*before[-1:], *after]), number)
        return group.get(number) or self.path.replace(f"{{{self.by}}}", number)

    def others(self, files: Iterable[str], release: str) -> frozenset[str]:
        """Of these files those that are never opened beside ``release``."""
        listed = list(files)
        group = self.group(listed)
        opened = self.opened(group, release)
        elsewhere = {file for file in listed if any(fnmatchcase(file, glob) for glob in self.elsewhere)}
        return frozenset(elsewhere | set(group.values())) - {opened}


def _pattern(path: str) -> str:
    return re.escape(path).replace(r"\*", "[^/]*")
