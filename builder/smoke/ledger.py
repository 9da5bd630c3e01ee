"""Known exceptions (design, decision 9): what may fail, in which words; and what no longer does.

A failure that an entry names passes and is listed; anything else fails; an entry that applies but whose file is absent
or no longer fails is a failure itself, so that the ledger cannot outlive its reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from builder.smoke.report import Result, count
from builder.smoke.spec import ExceptionEntry
from builder.smoke.tree import Tree


class Ledger:
    """The entries of one spec, and which of them were used on which file."""

    def __init__(self, entries: Iterable[ExceptionEntry], tree: Tree) -> None:
        self._entries = tuple(entries)
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
        return None

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
        if result.exceptions:
            result.detail += f"; {count(len(result.exceptions), 'known exception')}"
