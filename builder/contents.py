"""Which content of a file came, where one name has had several: known by hash (facts/contents.yaml)."""

from __future__ import annotations

from builder import facts
from builder.facts import KnownContent


def known(file: str, sha256: str) -> KnownContent | None:
    """What is known of the content `sha256` of the wheel `file`; None for a content nobody recorded."""
    for fact in facts.load_facts(facts.ContentFact):
        if fact.wheel == file:
            return next((content for content in fact.contents if content.sha256 == sha256), None)
    return None


def described(file: str, sha256: str) -> str | None:
    """`content of 2026-01-26, index commit f959603`; None for a file that was never seen to be replaced."""
    if all(fact.wheel != file for fact in facts.load_facts(facts.ContentFact)):
        return None
    content = known(file, sha256)
    return f"content of {content.date}, index commit {content.commit}" if content else "a content that is not known"


def difference(file: str, got: str, wanted: str) -> str:
    """One line on a file whose sha256 is `got` where the lock pins `wanted`: which content each of them is."""
    came, pinned = known(file, got), known(file, wanted)
    if came and pinned:
        return (
            f"the file is the content of {came.date} (index commit {came.commit}), "
            f"the lock wants that of {pinned.date} ({pinned.commit})"
        )
    if came:
        return (
            f"the file is the content of {came.date} (index commit {came.commit}), the lock wants one that is not known"
        )
    if pinned:
        return (
            "the file is none of the contents that are known of this name, "
            f"the lock wants that of {pinned.date} (index commit {pinned.commit})"
        )
    return "the file is another one than the lock wants, and nothing is known of it"
