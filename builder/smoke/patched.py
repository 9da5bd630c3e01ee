"""Are the patches in what is installed: `patches`. Standard library only; the host checks what it patched by the same code.

What a site has to be (its post-condition) is said here once more, apart from the code that finds and edits it in
`builder/patches`: that code can be wrong about a release, and then this says so.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builder.smoke import post_base, post_capture, post_fusion, post_multimodal, post_symm
from builder.smoke.report import Result, count
from builder.smoke.spec import Spec
from builder.smoke.syntax import WrongError

POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {
    **post_base.POSTCONDITIONS,
    **post_symm.POSTCONDITIONS,
    **post_fusion.POSTCONDITIONS,
    **post_capture.POSTCONDITIONS,
    **post_multimodal.POSTCONDITIONS,
}


def verify_installed(site_packages: Path, report: Mapping[str, Any]) -> list[str]:
    """What is wrong with the files of one package's report, one line each: nothing where all is as it was patched.

    Every file has the sha256 that it had when it was patched, with its diff taken back it has upstream's, and every site
    that the release has meets its post-condition.
    """
    wrong: list[str] = []
    for item in report["files"]:
        try:
            data = (site_packages / item["file"]).read_bytes()
        except OSError as error:
            wrong.append(f"`{item['file']}` cannot be read: {error.strerror}")
            continue
        if hashlib.sha256(data).hexdigest() != item["after"]:
            wrong.append(f"`{item['file']}` is not as it was patched: its sha256 is not {item['after'][:12]}…")
            continue
        if item["diff"]:
            try:
                before = hashlib.sha256(reverse(item["diff"], data)).hexdigest()
            except ValueError as error:
                wrong.append(f"the diff of `{item['file']}` does not fit: {error}")
                continue
            if before != item["before"]:
                wrong.append(f"the diff of `{item['file']}` does not lead back to upstream's file")
    for site in report["sites"]:
        if site["after"] != "native":
            continue
        try:
            trouble = check_site(site["id"], (site_packages / site["file"]).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            trouble = f"it cannot be read ({type(error).__name__})"
        if trouble:
            wrong.append(f"{site['id']} does not hold in `{site['file']}`: {trouble}")
    return wrong


def check_patches(spec: Spec) -> Result:
    """Every report of the spec, against what is installed."""
    sites = [site for report in spec.patches for site in report["sites"]]
    result = Result(sum(len(report["files"]) for report in spec.patches) + len(sites), None, "files and sites")
    for report in spec.patches:
        for line in verify_installed(spec.site_packages, report):
            result.add("error", report["package"], line, hint="build again from the lock")
    changed = [
        f"{report['package']} {report['patched_version']}"
        for report in spec.patches
        if any(item["diff"] for item in report["files"])
    ]
    native = sum(1 for site in sites if site["before"] == "native")
    result.detail = f"{', '.join(changed) or 'nothing'} patched, {count(native, 'site')} native"
    return result


def reverse(diff: str, after: bytes) -> bytes:
    """The file from which the unified ``diff`` led to ``after``. Raises ValueError where it does not lead there."""
    lines = _with_ends(after)
    old: list[bytes] = []
    at = 0
    # Without the two lines that name the file.
    rows = _with_ends(diff.encode())[2:]
    for i, row in enumerate(rows):
        kind, text = row[:1], row[1:]
        if i + 1 < len(rows) and rows[i + 1][:1] == b"\\":
            text = text[:-1]  # the file ends there, without the end of a line
        if kind == b"@":
            start, _, length = row.split(b"+", 1)[1].split(b" ", 1)[0].partition(b",")
            to = int(start) - (length != b"0")
            old += lines[at:to]
            at = to
        elif kind in (b" ", b"+"):
            if at >= len(lines) or lines[at] != text:
                raise ValueError(f"line {at + 1} of the file is not the diff's")
            old += [text] if kind == b" " else []
            at += 1
        elif kind == b"-":
            old.append(text)
    return b"".join([*old, *lines[at:]])


def _with_ends(data: bytes) -> list[bytes]:
    """Lines with their ends; the last one has none where the data ends without."""
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def check_site(site: str, text: str) -> str:
    """What is wrong with the site in a file's text, or nothing."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"the file does not parse: {error.msg}, line {error.lineno}"
    try:
        POSTCONDITIONS[site](tree)
    except WrongError as error:
        return str(error)
    return ""
