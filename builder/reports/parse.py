"""A text → a `Report`: every recogniser over every line, what they say of one field joined, what follows from it inferred."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from builder.reports import forms
from builder.reports.fields import keyed
from builder.reports.lines import Line, clean
from builder.reports.model import Conflict, Fact, Origin, Report
from builder.reports.packages import packages
from builder.reports.smi import smi
from builder.reports.symptoms import symptoms

# A report of the environment itself before what a person typed, that before what follows from a traceback.
_TRUST = ("builder", "check_env", "collect_env", "nvidia-smi", "packages", "conda", "table", "environment", "error")

ASKED = ("python", "driver", "gpu.0", "capability.0", "os", "libc", "arch", "package.torch", "package.sglang")
"""What a report should say: what it does not is told as unknown."""


def parse(text: str) -> Report:
    """What a pasted text says. Any text will do; nothing is raised."""
    lines = list(clean(text))
    found = [*keyed(lines), *packages(lines), *smi(lines), *_of_errors(lines)]
    facts, conflicts = _joined(found)
    facts = _inferred(facts)
    for name in ASKED:
        if name not in facts and not (name in ("gpu.0", "capability.0") and _any_gpu(facts, name)):
            facts[name] = Fact(name, "", Origin.UNKNOWN, because="no line says it")
    return Report(
        facts=dict(sorted(facts.items(), key=_order)),
        symptoms=tuple(symptoms(lines)),
        conflicts=tuple(conflicts),
        sources=tuple(dict.fromkeys(fact.source for fact in found)),
        notes=tuple(_notes(facts, lines)),
    )


def _any_gpu(facts: Mapping[str, Fact], name: str) -> bool:
    return any(other.startswith(name.partition(".")[0] + ".") for other in facts)


def _order(item: tuple[str, Fact]) -> tuple[int, str]:
    group = item[0].partition(".")[0]
    ranks = ("os", "arch", "libc", "image", "python", "driver", "driver_cuda", "cuda", "nvcc", "gpu", "capability")
    return (ranks.index(group) if group in ranks else len(ranks) + (group == "env"), item[0])


def _joined(found: Iterable[Fact]) -> tuple[dict[str, Fact], list[Conflict]]:
    """One fact a name; where values differ, the more trusted report's, of equals the later line's, and both are kept."""
    by_name: dict[str, list[Fact]] = defaultdict(list)
    for fact in found:
        by_name[fact.name].append(fact)
    facts, conflicts = {}, []
    for name, several in by_name.items():
        if name.startswith("package."):
            several = _specific(several, "+")
        elif name == "python":
            several = _specific(several, ".")
        values = {fact.value for fact in several}
        best = min(several, key=lambda fact: (_TRUST.index(fact.source), fact.absent, -fact.line))
        facts[name] = best
        if len(values) > 1:
            once = tuple({fact.value: fact for fact in several}.values())
            because = f"{best.source} is taken before {', '.join(sorted({f.source for f in once} - {best.source}))}"
            if len({fact.source for fact in once}) == 1:
                because = "of two alike the later line is taken"
            conflicts.append(Conflict(name, once, best, because))
    return facts, conflicts


def _specific(facts: list[Fact], mark: str) -> list[Fact]:
    """Without those that say less of the same: `2.9.1` beside `2.9.1+cu130`, `3.10` beside `3.10.12` contradict nothing.

    ``mark`` is what the longer value goes on with.
    """
    kept = [
        fact
        for fact in facts
        if fact.absent or not any(other.value.startswith(f"{fact.value}{mark}") for other in facts)
    ]
    return kept or facts


_TRACE = (
    (re.compile(r"python(3\.\d{1,2})/(?:site|dist)-packages"), "python", lambda found: found[1]),
    (re.compile(r"cpython-3(\d{1,2})-(?:x86_64|aarch64)"), "python", lambda found: f"3.{found[1]}"),
    (re.compile(r"cpython-3\d{1,2}-(x86_64|aarch64)-linux-gnu"), "arch", lambda found: found[1]),
    (re.compile(r"(?:^|[^\w])(/sgl-workspace)/"), "install", lambda found: "sglang's own image"),
    (re.compile(r"python3\.\d{1,2}/(dist-packages)"), "install", lambda found: "a distribution's or NGC's Python"),
    (re.compile(r"(/opt/conda)/|/(?:mini|ana)conda3?/"), "install", lambda found: "conda"),
    (re.compile(r"[Cc]ompute capability: (\d{2,3})\b"), "capability.0", lambda found: forms.capability(found[1]) or ""),
    (re.compile(r"Found GPU0 (NVIDIA .{3,60}?) which is of"), "gpu.0", lambda found: forms.gpu(found[1]) or ""),
    (
        re.compile(r"which is of (?:cuda|compute) capability (?:sm_)?(\d{1,2}\.\d|\d{2,3})", re.IGNORECASE),
        "capability.0",
        lambda found: forms.capability(found[1]) or "",
    ),
    (re.compile(r"found version (\d{4,5})\)"), "driver_cuda", lambda found: forms.cuda_number(found[1]) or ""),
)


def _of_errors(lines: Sequence[Line]) -> Iterator[Fact]:
    """What tracebacks say by the way: Python's version in paths, the device in warnings."""
    for line in lines:
        for pattern, name, value in _TRACE:
            found = pattern.search(line.text)
            if found and (made := value(found)):
                yield Fact(name, made, Origin.INFERRED, line.number, "error", "from an error's text")


def _inferred(facts: dict[str, Fact]) -> dict[str, Fact]:
    """What follows from what is stated."""
    made = dict(facts)
    for name in [name for name in facts if name.startswith("gpu.")]:
        fact, product = facts[name], forms.product(facts[name].value)
        if product is None:
            continue
        capability = name.replace("gpu.", "capability.", 1)
        if capability not in made:
            made[capability] = Fact(
                capability, product.capability, Origin.INFERRED, fact.line, because=f"{fact.value} has it"
            )
        if product.machine is not None and "arch" not in made:
            because = f"{fact.value} comes with such a processor"
            made["arch"] = Fact("arch", product.machine, Origin.INFERRED, fact.line, because=because)
    torch = facts.get("package.torch")
    cuda = made.get("torch_cuda")
    if torch is not None and cuda is not None and cuda.origin is Origin.INFERRED and cuda.line != torch.line:
        # Of another torch than the one that is gone by.
        del made["torch_cuda"]
    if torch is not None and "torch_cuda" not in made and (found := re.search(r"\+cu(\d{2})(\d)$", torch.value)):
        because = f"torch's local version is cu{found[1]}{found[2]}"
        made["torch_cuda"] = Fact("torch_cuda", f"{found[1]}.{found[2]}", Origin.INFERRED, torch.line, because=because)
    return made


def _notes(facts: Mapping[str, Fact], lines: Sequence[Line]) -> Iterator[str]:
    """What a reader has to know of the report itself."""
    names = {fact.value for name, fact in facts.items() if name.startswith("capability.")}
    if len(names) > 1:
        yield f"GPUs of several compute capabilities: {', '.join(sorted(names))}"
    driver = facts.get("driver")
    known = facts.get("os")
    if driver is not None and re.match(r"5[0-9]{2}\.\d{2}$", driver.value) and (known is None or not known.value):
        yield f"driver {driver.value} may be Windows' number: WSL"
    torch = facts.get("package.torch")
    if torch is not None and forms.is_unreleased(torch.value):
        vendor = ", a vendor's build" if ".nv" in torch.value else ", a nightly or a commit"
        yield f"torch {torch.value} is on no index{vendor}"
    if any("your output of" in line.text.lower() for line in lines):
        yield "the place for the report was left as the form has it"
