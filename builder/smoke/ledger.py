"""Known exceptions (design, decision 9): what may fail, in which words; and what no longer does.

A failure that an entry names passes and is listed; anything else fails; an entry that applies but whose file is absent
or no longer fails is a failure itself, so that the ledger cannot outlive its reasons. Of a package with a file for each
CUDA or torch (`builder.smoke.variants`) those that it does not open may fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property

from builder.smoke.report import Result, count
from builder.smoke.spec import Spec
from builder.smoke.tree import Tree


class Ledger:
    """The entries of one spec, and which of them were used on which file."""

    def __init__(self, spec: Spec, tree: Tree) -> None:
        self._entries = spec.exceptions
        torch = spec.locked("torch")
        self._releases = {"cuda": spec.cuda_version, "torch": torch.version if torch else ""}
        self._variants = [known for known in spec.variants if self._releases[known.by]]
        self._tree = tree
        self._used: set[tuple[str, str, str, str | None]] = set()

    def excuses(self, check: str, distribution: str, file: str, words: str, gpu: str | None = None) -> str | None:
        """The id of the entry that names this failure, or None: then it is a failure.

        ``words`` is all that the check has to say about it; ``gpu`` the target's capability, where the check has
        targets.
        """
        for entry in self._entries:
            if (
                check in entry.checks
                and entry.distribution == distribution
                and (entry.gpu is None or gpu is None or entry.gpu == gpu)
                and fnmatchcase(file, entry.file)
                and entry.words in words
            ):
                self._used.add((entry.id, check, file, gpu))
                return entry.id
        if file in self._never_opened.get(distribution, ()):
            found = f"{distribution}-variants"
            self._used.add((found, check, file, gpu))
            return found
        return None

    @cached_property
    def _never_opened(self) -> dict[str, frozenset[str]]:
        """Files for another CUDA or torch by distribution; they may load all the same, so none of them has to fail."""
        found: dict[str, frozenset[str]] = {}
        for known in self._variants:
            others = known.others(self._files(known.distribution), self._releases[known.by])
            found[known.distribution] = found.get(known.distribution, frozenset()) | others
        return found

    def _files(self, name: str) -> list[str]:
        distribution = self._tree.by_name.get(name)
        return [item.path for item in distribution.entries] if distribution else []

    def settle(self, check: str, result: Result, scope: Iterable[str], gpus: Iterable[str] = ()) -> None:
        """After a check: list the entries it used, and report those that apply but no longer fail.

        ``scope`` are the normalised names of the distributions that the check looked at; ``gpus`` the targets it ran
        for.
        """
        names, targets = frozenset(scope), list(gpus)
        for entry in self._entries:
            if check not in entry.checks or entry.distribution not in names:
                continue
            distribution = self._tree.by_name.get(entry.distribution)
            if distribution is None:
                continue  # `installed` says so
            rounds: list[str | None] = [gpu for gpu in targets if entry.gpu in (None, gpu)] if targets else [None]
            files = [item.path for item in distribution.entries if fnmatchcase(item.path, entry.file)]
            if not files:
                result.add(
                    "error",
                    entry.id,
                    f"exception `{entry.id}` names `{entry.file}`, which {distribution} does not have: remove it",
                    rule="exception",
                    hint="the entry is in builder/facts/exceptions.yaml",
                )
            for file in files:
                for gpu in rounds:
                    if (entry.id, check, file, gpu) in self._used:
                        result.exceptions.add(entry.id)
                        continue
                    target = f" for GPU {gpu}" if gpu else ""
                    result.add(
                        "error",
                        entry.id,
                        f"exception `{entry.id}` no longer fails: remove it",
                        rule="exception",
                        because=f"`{file}` of {distribution} passes `{check}`{target}, "
                        f"or fails it in other words than `{entry.words}`",
                        hint="the entry is in builder/facts/exceptions.yaml; narrow its `file`, `versions` or "
                        "`checks`, or take it out",
                    )
        self._settle_variants(check, result, names)
        if result.exceptions:
            result.detail += f"; {count(len(result.exceptions), 'known exception')}"

    def _settle_variants(self, check: str, result: Result, names: frozenset[str]) -> None:
        for known in self._variants:
            if known.distribution not in names or known.distribution not in self._tree.by_name:
                continue
            result.exceptions.update(
                used for used, by, *_ in self._used if (used, by) == (f"{known.distribution}-variants", check)
            )
            release = self._releases[known.by]
            group = known.group(self._files(known.distribution))
            opened = known.opened(group, release)
            if check == "needed" and known.required and opened not in group.values():
                result.add(
                    "error",
                    opened,
                    f"{self._tree.by_name[known.distribution]} has no file for {known.title} {release}: {known.without}",
                    rule="variants",
                    because=f"it has files for {', '.join(sorted(group)) or 'none'}",
                    hint=f"take a release of {known.distribution} that has one",
                )
