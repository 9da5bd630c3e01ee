"""`imports`: the server's modules import as on a machine without a GPU, each in a process of its own."""

from __future__ import annotations

import json
import os
import re

from builder.smoke.child import Outcome, describe_end, shorten
from builder.smoke.cuda import home_environment
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Result, count, not_applicable, some

_TIMEOUT = 900.0
# Lines of a traceback in a finding.
_LINES = 8


def check_imports(native: Native, ledger: Ledger) -> Result:
    """Each module of the spec imports without a GPU: on the path that a CPU takes."""
    modules = native.spec.imports
    if not modules:
        return not_applicable("the spec names no module to import", "modules")
    result = Result(0, len(modules), "modules", ", ".join(modules))
    outcome, answers = _serve(native)
    left_out: set[str] = set()
    failures: dict[str, str] = {}
    for module in modules:
        answer = answers.get(module)
        if answer is None:
            continue
        result.looked_at += 1
        said = native.workspace.scrub(str(answer["said"])).strip()
        for pattern in native.spec.facts.get("swallowed_imports", ()):
            left_out.update(match[0] for match in re.findall(str(pattern), said, re.MULTILINE))
        code = answer["code"]
        assert code is None or isinstance(code, int)
        if code == 0:
            continue
        if code != 3:
            said = f"{said}\nthe process that imports it {describe_end(code)}"
        failures[module] = said
    report_modules(native, ledger, result, "imports", failures, "")
    if outcome.code != 0:
        result.add("error", "imports", f"the process that imports {outcome.ended}", because=outcome.tail())
    if left_out:
        result.detail += f"; {count(len(left_out), 'model')} left out on the CPU path (see imports-faked)"
    ledger.settle("imports", result, native.scope)
    return result


def _serve(native: Native) -> tuple[Outcome, dict[str, dict[str, object]]]:
    warm = [str(module) for module in native.spec.facts.get("warm_imports", ())]
    workers = str(os.cpu_count() or 1)
    site_packages = str(native.tree.site_packages)
    command = native.workspace.python_command("import_child.py", site_packages, workers, *warm)
    assert native.stubs is not None
    modules = "".join(f"{module}\n" for module in native.spec.imports)
    environment = home_environment(native.spec)
    outcome = native.workspace.run(command, timeout=_TIMEOUT, stdin=modules, extra=environment)
    answers: dict[str, dict[str, object]] = {}
    for line in outcome.out.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            answers[answer["module"]] = answer
    return outcome, answers


def report_modules(
    native: Native, ledger: Ledger, result: Result, check: str, failures: dict[str, str], capability: str
) -> None:
    """Modules that did not import, and what was said: the end of a traceback, or how the process ended.

    Modules that fail at the same place with the same words are one finding.
    """
    on = f" as on GPU {capability}" if capability else ""
    groups: dict[tuple[str, ...], list[str]] = {}
    for module, said in failures.items():
        lines = [line.replace(f"{native.tree.site_packages}/", "") for line in said.splitlines() if line.strip()]
        last = shorten(lines[-1] if lines else "it says nothing", 300)
        if not excused(native, ledger, check, module, f"`import {module}`{on} fails: {last}\n{said}", capability):
            groups.setdefault((last, *lines[-3:-1]), []).append(module)
    for (last, *_), modules in groups.items():
        said = failures[modules[0]]
        lines = [line.replace(f"{native.tree.site_packages}/", "") for line in said.splitlines() if line.strip()]
        rest = f", and so {'does' if len(modules) == 2 else 'do'} {some(modules[1:], 8)}" if len(modules) > 1 else ""
        result.add(
            "error",
            modules[0],
            f"`import {modules[0]}`{on} fails: {last}{rest}",
            because="\n".join(lines[-_LINES - 1 : -1]),
            hint=hint(native, said),
        )


def excused(native: Native, ledger: Ledger, check: str, module: str, words: str, capability: str) -> bool:
    """Whether the ledger names this failure; its entries name the module's file."""
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        owners = native.tree.owners.get(path)
        if owners and ledger.excuses(check, owners[-1][0].name, path, words, capability or None):
            return True
    return False


def hint(native: Native, said: str) -> str:
    """What a traceback tells a user to do: what is missing, or whose code raised."""
    if match := re.search(r"No module named '([^']+)'", said):
        return f"no wheel of the lock brings `{match.group(1)}`, or the file was removed: see `record`"
    if "cannot open shared object file" in said or "undefined symbol" in said:
        return "the native part's `needed`, `symbols` and `load` name the file"
    frames = re.findall(r'^ *File "([^"<]+)", line', said, re.MULTILINE)
    owners = [native.tree.owner(frame) for frame in frames]
    owner = owners[-1] if owners else None
    if owner is None or owner.name in native.scope:
        return ""
    raised = f"`{native.tree.relative(frames[-1])}` of {owner} raised it"
    callers = [i for i, item in enumerate(owners) if item is not None and item is not owner]
    if not callers:
        return raised
    caller = f"`{native.tree.relative(frames[callers[-1]])}` of {owners[callers[-1]]}"
    return f"{raised}, called from {caller}: these versions do not go together"
