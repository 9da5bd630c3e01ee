"""Does what was patched do what it is for: `behaviour`. In the image, without a GPU, in a process of its own.

`patches` holds the text of each file against what was patched; here the installed code is run, on made-up devices, and
upstream's file (the patch's diff taken back) beside it, so that a case that cannot tell the two apart fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from builder.smoke import behaviour_base, behaviour_capture, behaviour_fusion, behaviour_symm
from builder.smoke.behaviour_case import Case
from builder.smoke.child import shorten
from builder.smoke.cuda import home_environment
from builder.smoke.native import Native
from builder.smoke.patched import reverse
from builder.smoke.report import Result, count, not_applicable
from builder.smoke.spec import Spec

CASES: tuple[Case, ...] = (
    *behaviour_base.CASES,
    *behaviour_symm.CASES,
    *behaviour_fusion.CASES,
    *behaviour_capture.CASES,
)
"""Every case there is; one for a site of another set goes into a module of its own, and here."""

# Seconds; importing sglang's models is nearly all of it.
_TIMEOUT = 600.0
# The sets are for compute capability 12.x; this stands in where the matrix has no such target.
_CAPABILITY, _ARCH = "12.0", "12.0a"


def check_behaviour(native: Native) -> Result:
    """Run each case whose sites the image has, patched or (where the case is for those too) as upstream's own."""
    spec = native.spec
    sites, patched = _sites(spec)
    chosen = [case for case in CASES if (patched if case.ours else sites) >= set(case.sites)]
    if not chosen:
        return not_applicable("no patch site of this stack has a case", "cases")
    result = Result(0, len(chosen), "cases")
    try:
        before = dict(_before(spec))
    except (OSError, ValueError) as error:
        result.expected = None
        result.add("error", "behaviour", f"upstream's files cannot be had: {error}", hint="see `patches`")
        return result
    target = next(((gpu.capability, gpu.flashinfer) for gpu in spec.gpus if gpu.pair[0] == 12), (_CAPABILITY, _ARCH))
    request = {
        "capability": target[0],
        "arch": target[1],
        "sites": sorted(sites),
        "patched": sorted(patched),
        "before": before,
        "file_of": {site["id"]: site["file"] for report in spec.patches for site in report["sites"]},
        "cases": [case.name for case in chosen],
    }
    assert native.stubs is not None
    outcome = native.workspace.run(
        native.workspace.python_command("behaviour_child.py", str(native.tree.site_packages)),
        timeout=_TIMEOUT,
        stdin=json.dumps(request),
        extra={**home_environment(spec), "FLASHINFER_CUDA_ARCH_LIST": target[1]},
    )
    answers = {}
    for line in outcome.out.splitlines():
        if line.startswith('{"case"'):
            answer = json.loads(line)
            answers[answer["case"]] = answer
    if outcome.code != 0:
        result.expected = None
        result.add("error", "behaviour", f"the process that runs the cases {outcome.ended}", because=outcome.tail())
    comparisons = 0
    for case in chosen:
        if case.name in answers:
            result.looked_at += 1
            comparisons += int(answers[case.name]["comparisons"])
            _report(native, result, case, answers[case.name])
    proven = {site for case in chosen for site in case.sites}
    result.detail = f"{count(comparisons, 'comparison')} for {' '.join(s for s in _in_order(spec) if s in proven)}"
    if left := [site for site in _in_order(spec) if site in sites - proven]:
        result.detail += f"; no case for {' '.join(left)}"
    return result


def _report(native: Native, result: Result, case: Case, answer: Mapping[str, Any]) -> None:
    subject = " ".join(case.sites)
    for what, expected, got in answer["wrong"]:
        result.add(
            "error",
            subject,
            f"{shorten(what, 200)}: {shorten(native.workspace.scrub(got))}",
            because=f"it has to be: {shorten(native.workspace.scrub(expected))}; case: {case.name}",
        )
    if answer["error"]:
        lines = native.workspace.scrub(answer["error"]).strip().splitlines()
        result.add(
            "error",
            subject,
            f"the case `{case.name}` broke off: {shorten(lines[-1], 300)}",
            because="\n".join(line.replace(f"{native.tree.site_packages}/", "") for line in lines[-9:-1]),
        )
    elif not answer["comparisons"]:
        result.add("error", subject, f"the case `{case.name}` compared nothing")


def _sites(spec: Spec) -> tuple[frozenset[str], frozenset[str]]:
    """Sites that hold in every file that they are in, and those of them that were patched."""
    rows = [site for report in spec.patches for site in report["sites"]]
    open_ = {site["id"] for site in rows if site["after"] != "native"}
    held = frozenset(site["id"] for site in rows) - open_
    return held, frozenset(site["id"] for site in rows if site["before"] != "native") & held


def _in_order(spec: Spec) -> list[str]:
    """The sites as the reports have them, each once."""
    return list(dict.fromkeys(site["id"] for report in spec.patches for site in report["sites"]))


def _before(spec: Spec) -> Iterator[tuple[str, str]]:
    """Upstream's text of each file of the reports. Raises OSError or ValueError."""
    for report in spec.patches:
        for item in report["files"]:
            data = (spec.site_packages / item["file"]).read_bytes()
            yield item["file"], (reverse(item["diff"], data) if item["diff"] else data).decode("utf-8-sig")
