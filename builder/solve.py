"""One build on BuildKit: its live display, the image it made, or the error that names why it failed."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from pathlib import Path

from builder.display import Display, Progress, Stage
from builder.engine import BuildRequest, Buildx, Engine, Image, run_buildx
from builder.errors import BuilderError, BuildError, IntegrityError


def solve(engine: Engine, buildx: Buildx, request: BuildRequest, stages: list[Stage]) -> Image:
    """Run a build and show it; the image it made, untagged unless the request has tags. Raises the error of `failure`."""
    progress = Progress(stages)
    with tempfile.TemporaryDirectory(prefix="builder-") as temporary:
        metadata = Path(temporary) / "metadata.json"
        events = run_buildx(engine, buildx, request, metadata)
        status, words = 1, ""
        with Display(progress) as display, contextlib.closing(events):
            for event in events:
                if "exit" in event:
                    status, words = event["exit"], event["stderr"]
                else:
                    display.feed(event)
        if status:
            raise failure(progress, words)
        made = json.loads(metadata.read_text(encoding="utf-8"))
    # The classic store names an image by its config, the containerd store by its manifest.
    for key in ("containerimage.digest", "containerimage.config.digest"):
        if (digest := made.get(key)) and (image := engine.find(digest)) is not None:
            return image
    raise BuildError("the build ended without an image", because=words[-500:])


def failure(progress: Progress, words: str) -> BuilderError:
    """The error of a failed build: which stage, the words that name the cause, what to do."""
    if progress.failed is None:
        return BuildError("the build failed", because=words[-1500:] or "buildx gave no reason")
    stage, error = progress.failed
    log = [line for line in progress.failed_log if line.strip()]
    text = "\n".join(log)
    if "no space left on device" in (text + error).lower():
        return BuildError("the disk is full", because=_tail(log) or error, hint="free space: `builder prune --yes`")
    if "Hash mismatch" in text:
        return IntegrityError(
            f"a file is not the one that the lock pins (stage `{stage}`)",
            because=_from(log, "Hash mismatch"),
            hint="the index, or something between it and here, serves other bytes under this name; nothing was installed",
        )
    if stage.startswith("proof"):
        return BuildError(
            "the smoke test failed: there is no image",
            because="\n".join(finding_lines(log)) or _tail(log),
            hint="each error above names its cause; the layers stay in the build cache",
        )
    return BuildError(f"stage `{stage}` failed", because=_tail(log) or error, hint=_hint(text))


def _hint(text: str) -> str:
    if re.search(r"certificate|UnknownIssuer", text):
        return "name the site's certificate authority: BUILDER_CA=/path/to/ca.pem"
    if re.search(r"dns error|error sending request|timed out|Connect", text):
        return 'the build cannot reach the package index; mirrors and proxies: README, "Mirrors and authorities"'
    return ""


def _tail(lines: list[str], count: int = 15) -> str:
    return "\n".join(lines[-count:])


def finding_lines(lines: list[str]) -> list[str]:
    """The findings among a smoke test's lines: `error:` with its `because:` and `hint:`, less the checks between them."""
    kept = []
    inside = False
    for line in lines:
        words = line.split()
        if words and words[0] in ("error:", "because:", "hint:", "at:", "source:"):
            inside = True
        elif len(words) > 1 and (words[1] in ("ok", "FAILED", "-") or words[:2] == ["smoke", "test"]):
            inside = False
        if inside:
            kept.append(line.strip() if words[0] == "error:" else f"  {line.strip()}")
    return kept


def _from(lines: list[str], mark: str) -> str:
    start = next((number for number, line in enumerate(lines) if mark in line), None)
    return "" if start is None else "\n".join(lines[start : start + 60])
