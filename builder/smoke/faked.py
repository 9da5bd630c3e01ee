"""sglang with a GPU faked: `imports-faked` (its server and all models), `gated-imports` (what CUDA gates hide).

Both come from one process for each target, which imports as one server process would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from builder.smoke.child import Outcome, shorten
from builder.smoke.cuda import home_environment
from builder.smoke.gates import GatedImport, find, words_of
from builder.smoke.imports import excused, hint, report_modules
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Finding, Result, count, not_applicable
from builder.smoke.spec import Gpu

_TIMEOUT = 900.0
# Targets that are looked at side by side.
_AT_ONCE = 2


@dataclass(frozen=True)
class Resolved:
    """What one target's process found: errors by (module, name), modules that only work alone, and what was printed."""

    gpu: Gpu
    outcome: Outcome
    failures: dict[tuple[str, str], str]
    alone: tuple[str, ...]
    said: str


class Faked:
    """The runs for all targets, made once, and the gated imports of the sglang layer's files."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self.trouble: list[Finding] = []

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The spec's strict imports, and the modules that import all models."""
        registries = [str(module) for module in self.native.spec.facts.get("registries", ())]
        return tuple(dict.fromkeys([*self.native.spec.imports, *registries]))

    @cached_property
    def files(self) -> list[str]:
        """Python files of the sglang layer, less those that the facts leave out."""
        leave_out = [str(glob) for glob in self.native.spec.fact("gated").get("leave_out", ())]
        return sorted(
            path
            for path, owners in self.native.tree.owners.items()
            if path.endswith(".py")
            and owners[-1][0].name in self.native.scope
            and not any(fnmatchcase(path, glob) for glob in leave_out)
        )

    @cached_property
    def gated(self) -> list[GatedImport]:
        """The gated imports of all files; files that cannot be parsed go into ``trouble``."""
        words, found = words_of(self.native.spec.fact("gated")), []
        for file in self.files:
            what, why = "", ""
            try:
                # Some files start with a byte order mark.
                found += find(self.native.tree.path(file).read_text(encoding="utf-8-sig"), file, words)
            except FileNotFoundError:
                what, why = f"`{file}` is missing, so its gated imports are unknown", "see `record`"
            except (SyntaxError, UnicodeDecodeError) as error:
                what = f"`{file}` cannot be parsed: {error}"
            if what:
                self.trouble.append(Finding("", "error", file, what, hint=why))
        return found

    @cached_property
    def runs(self) -> list[Resolved]:
        """One process for each target."""
        pairs = [(module, "") for module in self.modules]
        pairs += sorted({(item.module, item.name) for item in self.gated} - set(pairs))
        assert self.native.stubs is not None
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda gpu: self._resolve(pairs, gpu), self.native.spec.gpus))

    def _resolve(self, pairs: Sequence[tuple[str, str]], gpu: Gpu) -> Resolved:
        native = self.native
        warm = [str(module) for module in native.spec.facts.get("warm_imports", ())]
        site_packages = str(native.tree.site_packages)
        command = native.workspace.python_command("resolve_child.py", site_packages, gpu.capability, *warm)
        environment = home_environment(native.spec)
        outcome = native.workspace.run(command, timeout=_TIMEOUT, stdin=json.dumps(pairs), extra=environment)
        for line in outcome.out.splitlines():
            if line.startswith('{"failures"'):
                answer = json.loads(line)
                failures = {(module, name): error for module, name, error in answer["failures"]}
                return Resolved(gpu, outcome, failures, tuple(answer["alone"]), native.workspace.scrub(answer["said"]))
        return Resolved(gpu, outcome if outcome.code != 0 else Outcome(1, outcome.out, outcome.err), {}, (), "")


def check_imports_faked(faked: Faked, ledger: Ledger) -> Result:
    """The spec's modules and all models import with a GPU of each target faked.

    A model whose import error sglang swallows fails too.
    """
    native = faked.native
    if not native.spec.gpus or not faked.modules:
        return not_applicable("the matrix names no GPU target" if faked.modules else "no module to import", "modules")
    result = Result(0, len(faked.modules) * len(native.spec.gpus), "modules")
    for run in faked.runs:
        if run.outcome.code != 0:
            result.add(
                "error",
                run.gpu.capability,
                f"the process that imports as on GPU {run.gpu.capability} {run.outcome.ended}",
                because=run.outcome.tail(),
            )
            continue
        result.looked_at += len(faked.modules)
        failures = {module: run.failures[module, ""] for module in faked.modules if (module, "") in run.failures}
        report_modules(native, ledger, result, "imports-faked", failures, run.gpu.capability)
        _report_swallowed(native, ledger, result, run)
    result.detail = f"{count(len(faked.modules), 'module')} as on {_targets(native)}"
    ledger.settle("imports-faked", result, native.scope, [gpu.capability for gpu in native.spec.gpus])
    return result


def _targets(native: Native) -> str:
    return ", ".join(gpu.capability for gpu in native.spec.gpus)


def _report_swallowed(native: Native, ledger: Ledger, result: Result, run: Resolved) -> None:
    swallowed: dict[str, str] = {}
    for pattern in native.spec.facts.get("swallowed_imports", ()):
        swallowed.update(re.findall(str(pattern), run.said, re.MULTILINE))
    for module, error in sorted(swallowed.items()):
        text = f"sglang leaves out `{module}` as on GPU {run.gpu.capability}: {shorten(error, 300)}"
        if not excused(native, ledger, "imports-faked", module, text, run.gpu.capability):
            result.add(
                "error",
                module,
                text,
                because="sglang swallows a model's import error and goes on without the model",
                hint="a server would say that the architecture is not supported",
            )


def check_gated_imports(faked: Faked, ledger: Ledger) -> Result:
    """Each import of the sglang layer that a CUDA gate hides resolves, module and name, with each target faked."""
    native = faked.native
    if not native.spec.fact("gated") or not native.spec.gpus:
        return not_applicable(
            "the facts know no gates" if native.spec.gpus else "the matrix names no GPU target", "imports"
        )
    result = Result(0, None, "imports")
    found = faked.gated
    result.findings += faked.trouble
    if not found and not faked.trouble:
        files = count(len(faked.files), "file")
        return not_applicable(f"{files} of the sglang layer have no import behind a CUDA gate", "imports")
    result.expected = len(found)
    for run in faked.runs:
        if run.outcome.code != 0:
            result.expected = None
            result.add(
                "error",
                run.gpu.capability,
                f"the process that resolves them as on GPU {run.gpu.capability} {run.outcome.ended}",
                because=run.outcome.tail(),
            )
            continue
        result.looked_at = len(found)
        for item in found:
            if error := run.failures.get((item.module, item.name)):
                _report_gated(native, ledger, result, item, error, run.gpu)
        for module in run.alone:
            result.add(
                "note",
                module,
                f"`import {module}` as on GPU {run.gpu.capability} fails after other imports, and works alone",
                because="what it finds depends on what was imported before",
            )
    parsed = len(faked.files) - len(faked.trouble)
    where = count(len({item.file for item in found}), "file")
    result.detail = f"in {where} (of {parsed:,} parsed), resolved as on {_targets(native)}"
    ledger.settle("gated-imports", result, native.scope, [gpu.capability for gpu in native.spec.gpus])
    return result


def _report_gated(native: Native, ledger: Ledger, result: Result, item: GatedImport, error: str, gpu: Gpu) -> None:
    owner = native.tree.owners[item.file][-1][0]
    lines = [line.replace(f"{native.tree.site_packages}/", "") for line in error.splitlines() if line.strip()]
    message = f"`{item}` at {item.where} fails as on GPU {gpu.capability}: {shorten(lines[-1], 300)}"
    if ledger.excuses("gated-imports", owner.name, item.file, f"{message}\n{error}", gpu.capability):
        return
    top = item.module.split(".")[0]
    there = any(path.startswith(f"{top}/") or path == f"{top}.py" for path in native.tree.owners)
    optional = item.guarded and not there and f"No module named '{top}" in error
    result.add(
        "note" if optional else "error",
        item.where,
        message,
        because="\n".join(lines[-5:-1]),
        hint=f"{top} is not in the lock, and the import is optional" if optional else hint(native, error),
    )
