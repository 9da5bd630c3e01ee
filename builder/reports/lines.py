"""A pasted text, line by line: without colour codes, quoting, code fences, HTML, log and container prefixes, shell prompts."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CHARACTERS = 4_000_000
"""A report is some kilobytes; a log of this size is read, what follows is not."""

MAX_LINE = 2_000
"""Characters of a line: what a field needs stands at its beginning. It bounds the time of every pattern."""

MAX_LINES = 100_000

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,20}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060\ufeff]")
_QUOTE = re.compile(r"^(?:\s{0,3}>\s?){1,5}")
_TAG = re.compile(
    r"</?(?:details|summary|pre|code|br|p|b|i|em|strong|table|tr|td|th|div|span|h[1-6])\b[^<>]{0,200}>", re.IGNORECASE
)
_COMMENT = re.compile(r"<!--.{0,1000}?-->")
# `llm0-1  | `, `[pod/x/y] `, `sglang-1 | `: compose and kubectl put them before every line.
_CONTAINER = re.compile(r"^(?:[\w.-]{1,60}-\d{1,3}\s{1,4}\|\s|\[pod/[\w./-]{1,200}\]\s)")
# `2026-01-12 01:09:14,123 `, `[2026-01-12T01:09:14Z] `, `(EngineCore pid=79) ERROR 01-12 01:09:14 [core.py:708] `
_TIMESTAMP = re.compile(
    r"^\s{0,4}\[?(?:\d{4}-\d\d-\d\d|\d\d-\d\d)[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?(?: TP\d{1,3}\b| DP\d{1,3}\b| PP\d{1,3}\b| EP\d{1,3}\b){0,4}\]?:?\s{1,4}"
)
_PROCESS = re.compile(r"^\s{0,4}\((?:[\w ]{1,40}) ?pid=\d{1,10}(?:, ip=[^)\s]{1,60})?\)\s{1,4}")
_LEVEL = re.compile(
    r"^\s{0,4}(?:TRACE|DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b:?\s{1,4}(?:\d\d-\d\d \d\d:\d\d:\d\d\s{1,4})?(?:\[[\w.]{1,60}:\d{1,6}\]\s{0,4})?"
)
# `root@host:/path# `, `(venv) user@host:~$ `, `$ `, `PS C:\> `, `>>> `
_INSTALLED = "Successfully installed"
"""What pip ends with: one line of every package, which may be longer than `MAX_LINE`."""
_PROMPT = re.compile(
    r"^\s{0,4}(?:\([\w. -]{1,60}\)\s{0,3}){0,3}(?:[\w.-]{1,60}@[\w.-]{1,120}(?::|\s)[^#$%]{0,200}[#$%]|[$%]|>>>|PS [A-Z]:[^>]{0,200}>)\s{1,4}"
)


@dataclass(frozen=True)
class Line:
    """A line. ``number`` counts from 1 in the text as given; ``prompt`` says that it is what somebody typed."""

    number: int
    text: str
    prompt: bool = False


def clean(text: str) -> Iterator[Line]:
    """The lines of a text that say something, without what tools and forums put around them."""
    commented = False
    for number, raw in _folded(text[:MAX_CHARACTERS]):
        # Full-width colons and blanks of hand-typed tables become the plain ones.
        line = plain(unicodedata.normalize("NFKC", raw[:MAX_LINE])[:MAX_LINE])
        line = _COMMENT.sub(" ", line)
        if commented:
            _head, closed, line = line.partition("-->")
            if not closed:
                continue
            commented = False
        if "<!--" in line:
            line, commented = line.partition("<!--")[0], True
        line = _TAG.sub(" ", _QUOTE.sub("", line))
        if line.strip().startswith(("```", "~~~")):
            continue
        line, prompt = _without_prefixes(line)
        line = line.rstrip()
        if line.strip():
            yield Line(number, line, prompt)


def plain(text: str) -> str:
    """The text without the escapes of terminals and other control characters; tabs and line ends stay."""
    return _CONTROL.sub("", _ANSI.sub("", text))


def _folded(text: str) -> Iterator[tuple[int, str]]:
    """The lines as they are, with their numbers; pip's last one in pieces, each of which says what it is."""
    for number, raw in enumerate(text.split("\n")[:MAX_LINES], 1):
        head, said, rest = raw.partition(_INSTALLED)
        if not said or len(raw) <= MAX_LINE or len(head) > MAX_LINE // 4:
            yield number, raw
            continue
        for piece in textwrap.wrap(rest, MAX_LINE // 2, break_on_hyphens=False):
            yield number, f"{head}{said} {piece}"


def _without_prefixes(line: str) -> tuple[str, bool]:
    line = _CONTAINER.sub("", line, count=1)
    for _ in range(4):
        before = line
        for pattern in (_TIMESTAMP, _PROCESS, _LEVEL):
            line = pattern.sub("", line, count=1)
        if line == before:
            break
    without = _PROMPT.sub("", line, count=1)
    return without, without != line
