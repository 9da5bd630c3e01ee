"""`python -m builder.smoke.gpu --spec SPEC.json --out OUT.json`: kernels with known results on every GPU that is visible.

Each check (`gpu_case.CASES`) is a process of its own, on one GPU, within its limit: a fault or a hang takes no other with it. GPUs
are looked at side by side, the checks of one GPU after each other, and those of several GPUs last. Standard library only.

Exit status: 0 where something ran and nothing failed, 3 where a check failed or none ran, 2 for a wrong command line or spec.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder.smoke.child import Outcome, Workspace, shorten
from builder.smoke.cuda import home_environment
from builder.smoke.gpu_case import CASES, SAFE, Case
from builder.smoke.gpu_words import meaning
from builder.smoke.report import count, write_json
from builder.smoke.spec import Spec, SpecError, read_spec
from builder.smoke.tree import Tree

SCHEMA = 1
_OK, _FAILED, _USAGE = 0, 3, 2
_LOOK_TIMEOUT = 120.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# What torch appends to CUDA's words.
_FOR_DEBUGGERS = ("Search for `cudaError", "CUDA kernel errors", "For debugging consider", "Compile with `TORCH_USE")


@dataclass
class Machine:
    """What the driver says (`gpu_device.look`); ``visible`` are the values of CUDA_VISIBLE_DEVICES for each GPU."""

    driver: str = ""
    cuda: str = ""
    gpus: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    visible: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Given:
    """What the children are told of the image: `jit` and `compiled` of its spec, and what a compiler needs."""

    jit: str = "nvcc"
    compiled: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def machine(workspace: Workspace) -> Machine:
    """Ask the driver, in a child: a driver that hangs is no GPU."""
    listed = [item for item in os.environ.get(_VISIBLE, "").split(",") if item]
    # Children lose the variable (`Workspace.environment`); here it has to hold.
    extra = {_VISIBLE: os.environ[_VISIBLE]} if _VISIBLE in os.environ else {}
    outcome = workspace.run(workspace.python_command("gpu_device.py"), timeout=_LOOK_TIMEOUT, extra=extra)
    try:
        found = json.loads(outcome.out)
    except ValueError:
        return Machine(error=f"the process that asked the driver {outcome.ended}: {shorten(outcome.tail())}")
    visible = [listed[gpu["index"]] if gpu["index"] < len(listed) else str(gpu["index"]) for gpu in found["gpus"]]
    return Machine(found["driver"], found["cuda"], found["gpus"], found["error"], visible)


class Runner:
    """Runs checks and keeps what they found. ``say`` gets a line for each as soon as it has ended."""

    def __init__(
        self,
        workspace: Workspace,
        machine: Machine,
        given: Given,
        say: Callable[[str], None],
        cases: Sequence[Case] = CASES,
    ) -> None:
        self.workspace, self.machine, self.given, self._say = workspace, machine, given, say
        self.cases = cases
        self.checks: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def run(self) -> list[dict[str, Any]]:
        """All checks, in the order of their GPUs and cases."""
        single = [case for case in self.cases if not case.ranks]
        together = [case for case in self.cases if case.ranks]
        if not self.machine.gpus:
            why = f"no GPU: {self.machine.error or 'the driver names none'}"
            self._say(f"{count(len(self.cases), 'check')} SKIPPED: {why}")
            self.checks = [_check(case, None, skipped=why) for case in self.cases]
            return self.checks
        with ThreadPoolExecutor(len(self.machine.gpus)) as pool:
            list(pool.map(lambda gpu: self._lane(single, gpu), self.machine.gpus))
        for case in together:
            self._keep(self.several(case))
        order = {case.name: place for place, case in enumerate(self.cases)}
        self.checks.sort(key=lambda check: (check["gpu"] is None, check["gpu"] or 0, order[check["name"]]))
        return self.checks

    def _lane(self, cases: Sequence[Case], gpu: Mapping[str, Any]) -> None:
        for case in cases:
            self._keep(self.one(case, gpu))

    def one(self, case: Case, gpu: Mapping[str, Any]) -> dict[str, Any]:
        """A check on one GPU, which is the only one that its process sees."""
        outcome = self._child(case, {}, {_VISIBLE: self.machine.visible[gpu["index"]]})
        return judged(case, gpu["index"], [outcome], self._covers(gpu))

    def several(self, case: Case) -> dict[str, Any]:
        """A check with a process for each GPU; each sees all of them."""
        number = len(self.machine.gpus)
        if number < 2:
            return _check(case, None, skipped="it takes two GPUs, and one is visible")
        with tempfile.TemporaryDirectory(dir=self.workspace.root) as folder, ThreadPoolExecutor(number) as pool:
            shared = {"ranks": number, "meet": f"{folder}/meet"}
            extra = {_VISIBLE: ",".join(self.machine.visible)}
            outcomes = list(pool.map(lambda rank: self._child(case, {"rank": rank, **shared}, extra), range(number)))
        return judged(case, None, outcomes, self._covers(self.machine.gpus[0]))

    def _child(self, case: Case, request: Mapping[str, Any], extra: Mapping[str, str]) -> Outcome:
        site_packages = str(self.workspace.tree.site_packages)
        return self.workspace.run(
            self.workspace.python_command("gpu_child.py", site_packages, case.run),
            timeout=case.limit,
            extra={**self.given.environment, **SAFE, **extra},
            stdin=json.dumps({"jit": self.given.jit, "compiled": self.given.compiled, **request}),
        )

    def _covers(self, gpu: Mapping[str, Any]) -> Callable[[str], dict[str, Any] | None]:
        return lambda file: covered(self.workspace.tree.site_packages / file, gpu["capability"])

    def _keep(self, check: dict[str, Any]) -> None:
        with self._lock:
            self.checks.append(check)
            self._say(line(check))


def covered(file: Path, capability: str) -> dict[str, Any] | None:
    """What the rules of `builder arch` say of a file on a device: {"covered", "of", "by"}; None where it cannot be said."""
    try:
        from builder import arch
        from builder.fatbin import FatbinError, read_file
    except ImportError:
        # An image of an older builder has the readers alone.
        return None
    try:
        found = arch.cover(read_file(file), arch.pair(capability))
    except (OSError, ValueError, FatbinError):
        return None
    return {"covered": found.covered, "of": found.of, "by": dict(found.by)}


def _check(case: Case, gpu: int | None, **rest: Any) -> dict[str, Any]:
    """A check's shape. ``ok`` is True of what ran and held, and of nothing else."""
    return {
        "name": case.name,
        "gpu": gpu,
        "ok": False,
        "looked_at": 0,
        "detail": "",
        "skipped": None,
        "files": [],
        "predicted": None,
        **rest,
    }


def judged(
    case: Case, gpu: int | None, outcomes: Sequence[Outcome], covers: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any]:
    """What the processes of a check said, as one check: it holds where all came to their end and every comparison holds."""
    said = [_events(outcome.out) for outcome in outcomes]
    files = sorted(
        {file for events in said for event in events if event["event"] == "mapped" for file in event["files"]}
    )
    own = [file for file in files if case.library and Path(file).name.split(".")[0] == case.library]
    predicted = {file: found for file in own if (found := covers(file)) is not None and found["of"]}
    looked = 0
    trouble: list[str] = []
    words: list[str] = []
    skipped: list[str] = []
    for rank, (outcome, events) in enumerate(zip(outcomes, said, strict=True)):
        who = f"rank {rank}: " if len(outcomes) > 1 else ""
        end = next((event for event in events if event["event"] == "end"), None)
        if end is None:
            trouble.append(f"{who}its process {outcome.ended}: {outcome.tail() or 'it said nothing'}")
            continue
        looked += end["looked_at"]
        trouble += [f"{who}{item}" for item in end["wrong"]]
        if end["error"]:
            trouble.append(f"{who}{_last(end['error'])}")
        if end["skipped"]:
            skipped.append(f"{who}{end['skipped']}")
        words += [item for item in end["said"] if item not in words]
    base: dict[str, Any] = {"looked_at": looked, "files": own, "predicted": predicted or None}
    if skipped and not trouble:
        return _check(case, gpu, **base, skipped="; ".join(dict.fromkeys(skipped)))
    if not trouble and not looked:
        trouble.append("it compared nothing")
    if not trouble:
        return _check(case, gpu, **base, ok=True, detail="; ".join([count(looked, "comparison"), *words]))
    told = "\n".join(trouble[:6]) + (f"\nand {len(trouble) - 6} more" if len(trouble) > 6 else "")
    because = meaning("\n".join([*trouble, *(outcome.err[-4000:] for outcome in outcomes)]))
    return _check(case, gpu, **base, detail=told, because=because)


def _events(out: str) -> list[dict[str, Any]]:
    found = []
    for text in out.splitlines():
        if text.startswith('{"event"'):
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return found


def _last(error: str) -> str:
    """An exception's own words, without what CUDA appends for those who debug it, and where it was raised."""
    lines = [text for text in error.strip().splitlines() if text.strip()]
    start = max((place for place, text in enumerate(lines) if text.lstrip().startswith("File ")), default=-1)
    place = lines[start].strip().removeprefix("File ").split("/")[-1] if start >= 0 else ""
    words = [text for text in lines[start + 1 :] if not text.startswith(" ")] or lines[-1:]
    words = [text for text in words if not text.startswith(_FOR_DEBUGGERS)]
    return shorten(" ".join(words), 700) + (f" ({place.replace(chr(34), '')})" if place else "")


def line(check: Mapping[str, Any]) -> str:
    """A check for people: what, on which GPU, how it went."""
    where = "all" if check["gpu"] is None else f"GPU {check['gpu']}"
    state = "ok" if check["ok"] else "SKIPPED" if check["skipped"] else "FAILED"
    first, *rest = str(check["skipped"] or check["detail"]).split("\n")
    lines = [f"{check['name']:<20} {where:<6} {state:<7} {first}", *(f"  {text}" for text in rest)]
    if check.get("because"):
        lines.append(f"  because: {check['because']}")
    predicted = check["predicted"] or {}
    if not check["ok"] and not check["skipped"]:
        lines += [
            f"  predicted: {file} has code for this GPU in {found['covered']} of {found['of']} containers"
            for file, found in predicted.items()
        ]
    return "\n".join(lines)


def summed(checks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict over checks: `ok` where something ran and nothing failed, `skipped` where nothing ran."""
    rows = list(checks)
    failed = [row for row in rows if not row["ok"] and not row["skipped"]]
    skipped = [row for row in rows if row["skipped"]]
    ran = len(rows) - len(skipped)
    verdict = "failed" if failed else "ok" if ran else "skipped"
    return {
        "ok": verdict == "ok",
        "verdict": verdict,
        "ran": ran,
        "failed": len(failed),
        "skipped": len(skipped),
    }


def document(
    spec: Spec | None, found: Machine, versions: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The whole report: a contract; fields may be added, never renamed."""
    return {
        "schema": SCHEMA,
        **summed(checks),
        "matrix": spec.matrix if spec else None,
        "lock": spec.lock if spec else None,
        "driver": found.driver or None,
        "cuda_driver": found.cuda or None,
        "torch": dict(versions) or None,
        "gpus": found.gpus,
        "checks": list(checks),
    }


def unlooked(why: str) -> dict[str, Any]:
    """The report of a place where no check could be started: all of them skipped."""
    return document(None, Machine(error=why), {}, [_check(case, None, skipped=why) for case in CASES])


def look(
    workspace: Workspace,
    given: Given,
    say: Callable[[str], None],
    *,
    spec: Spec | None = None,
    cases: Sequence[Case] = CASES,
) -> dict[str, Any]:
    """Run the checks on what is visible, and report."""
    found = machine(workspace)
    for gpu in found.gpus:
        say(f"GPU {gpu['index']}: {gpu['name']}, compute capability {gpu['capability']}, {gpu['memory'] / 1e9:.0f} GB")
    if found.gpus:
        say(f"driver {found.driver or 'of unknown version'}, for CUDA up to {found.cuda}")
    say_targets(spec, found, say)
    runner = Runner(workspace, found, given, say, cases)
    versions: dict[str, Any] = {}
    if found.gpus:
        about = runner._child(Case("torch", "gpu_torch:devices"), {}, {_VISIBLE: ",".join(found.visible)})
        versions = next((event for event in _events(about.out) if event["event"] == "torch"), {})
        versions.pop("event", None)
    report = document(spec, found, versions, runner.run())
    say(verdict(report))
    if not report["ran"]:
        # A log's reader may see stdout alone, a terminal's may not: both have to know.
        print(verdict(report), file=sys.stderr, flush=True)
    return report


def say_targets(spec: Spec | None, found: Machine, say: Callable[[str], None]) -> None:
    """Mark each GPU with whether the image is for it (``target``, None without a spec), and say so where it is not."""
    targets = [gpu.capability for gpu in spec.gpus] if spec else []
    for gpu in found.gpus:
        gpu["target"] = gpu["capability"] in targets if spec else None
        if gpu["target"] is False:
            say(f"GPU {gpu['index']}: this image is for {', '.join(targets) or 'no GPU'}, and that is none of them")


def verdict(report: Mapping[str, Any]) -> str:
    """One line; where nothing ran it says so first."""
    numbers = f"{report['ran']} ran, {report['failed']} failed, {report['skipped']} skipped"
    if report["verdict"] == "skipped":
        return f"NO GPU CHECK RAN: {numbers}; this is not a pass"
    failed = list(
        dict.fromkeys(check["name"] for check in report["checks"] if not check["ok"] and not check["skipped"])
    )
    return f"GPU checks: {numbers}" + (f": {', '.join(failed)}" if failed else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, write the report, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m builder.smoke.gpu", description="Kernels on the GPUs that are visible"
    )
    parser.add_argument("--spec", required=True, type=Path, help="what the image is (JSON)")
    parser.add_argument("--out", required=True, type=Path, help="where to write the report (JSON)")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run only this check (repeatable)")
    options = parser.parse_args(arguments)
    names = [case.name for case in CASES]
    if unknown := [name for name in options.only if name not in names]:
        parser.error(f"no check is called {', '.join(unknown)}; there are {', '.join(names)}")
    try:
        spec = read_spec(options.spec)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    environment = home_environment(spec) if spec.cuda_jit == "nvcc" else {}
    with Workspace(Tree.read(spec.site_packages)) as workspace:
        report = look(
            workspace,
            Given(spec.cuda_jit, spec.compiled, environment),
            lambda text: print(text, flush=True),
            spec=spec,
            cases=[case for case in CASES if not options.only or case.name in options.only],
        )
    write_json(options.out, report)
    return _OK if report["ok"] else _FAILED


if __name__ == "__main__":
    raise SystemExit(main())
