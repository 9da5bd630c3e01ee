"""The server's modules import: `imports` as on a machine without a GPU, `imports-faked` as on each GPU target."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from builder.smoke.child import Outcome, describe_end, shorten
from builder.smoke.cuda import home_environment
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Result, count, not_applicable

_TIMEOUT = 900.0
# Lines of a traceback in a finding.
_LINES = 8


def _serve(native: Native, modules: Sequence[str], capability: str) -> tuple[Outcome, dict[str, dict[str, object]]]:
    warm = [str(module) for module in native.spec.facts.get("warm_imports", ())]
    command = native.workspace.python_command(
        "import_child.py", str(native.tree.site_packages), capability, str(os.cpu_count() or 1), *warm
    )
    assert native.stubs is not None
    outcome = native.workspace.run(
        command,
        timeout=_TIMEOUT,
        stdin="".join(f"{module}\n" for module in modules),
        extra=home_environment(native.spec),
    )
    answers: dict[str, dict[str, object]] = {}
    for line in outcome.out.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            answers[answer["module"]] = answer
    return outcome, answers


def check_imports(native: Native, ledger: Ledger) -> Result:
    """Each module of the spec imports without a GPU, in a process of its own."""
    modules = native.spec.imports
    if not modules:
        return not_applicable("the spec names no module to import", "modules")
    result = Result(0, len(modules), "modules")
    swallowed = _import_all(native, ledger, result, "imports", modules, "")
    result.detail = ", ".join(modules)
    if swallowed:
        result.detail += f"; {count(swallowed, 'model')} left out on the CPU path (see imports-faked)"
    ledger.settle("imports", result, native.scope)
    return result


def check_imports_faked(native: Native, ledger: Ledger) -> Result:
    """The same with a GPU of each target faked, and all models at once: a model whose import error sglang swallows fails."""
    spec = native.spec
    registries = tuple(str(module) for module in spec.facts.get("registries", ()))
    modules = (*spec.imports, *(module for module in registries if module not in spec.imports))
    if not spec.gpus or not modules:
        return not_applicable("the matrix names no GPU target" if modules else "no module to import", "modules")
    result = Result(0, len(modules) * len(spec.gpus), "modules")
    for gpu in spec.gpus:
        _import_all(native, ledger, result, "imports-faked", modules, gpu.capability)
    targets = ", ".join(gpu.capability for gpu in spec.gpus)
    result.detail = f"{count(len(modules), 'module')} as on {targets}"
    ledger.settle("imports-faked", result, native.scope, [gpu.capability for gpu in spec.gpus])
    return result


def _import_all(
    native: Native, ledger: Ledger, result: Result, check: str, modules: Sequence[str], capability: str
) -> int:
    """Import them, report what was raised, and return how many import errors sglang swallowed (reported when faked)."""
    outcome, answers = _serve(native, modules, capability)
    on = f" as on GPU {capability}" if capability else ""
    swallowed: dict[str, str] = {}
    for module in modules:
        answer = answers.get(module)
        if answer is None:
            continue
        result.looked_at += 1
        said = native.workspace.scrub(str(answer["said"])).strip()
        for pattern in native.spec.facts.get("swallowed_imports", ()):
            swallowed.update(re.findall(str(pattern), said, re.MULTILINE))
        code = answer["code"]
        if code == 0:
            continue
        assert code is None or isinstance(code, int)
        lines = [line.replace(f"{native.tree.site_packages}/", "") for line in said.splitlines() if line.strip()]
        if code == 3:
            text = f"`import {module}`{on} fails: {shorten(lines[-1] if lines else 'it says nothing', 300)}"
            because = "\n".join(lines[-_LINES - 1 : -1])
        else:
            text = f"`import {module}`{on}: the process {describe_end(code)}"
            because = "\n".join(lines[-_LINES:])
        if not _excused(native, ledger, check, module, f"{text}\n{said}", capability):
            result.add("error", module, text, because=because, hint=_hint(said))
    if outcome.code != 0:
        result.add("error", check, f"the process that imports{on} {outcome.ended}", because=outcome.tail())
    for module, error in sorted(swallowed.items()):
        if not capability:
            continue
        text = f"sglang leaves out `{module}`{on}: {shorten(error, 300)}"
        if not _excused(native, ledger, check, module, text, capability):
            result.add(
                "error",
                module,
                text,
                because="sglang swallows a model's import error and goes on without the model",
                hint="a server would say that the architecture is not supported",
            )
    return len(swallowed)


def _excused(native: Native, ledger: Ledger, check: str, module: str, words: str, capability: str) -> bool:
    """Ledger entries name the module's file."""
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        owners = native.tree.owners.get(path)
        if owners and ledger.excuses(check, owners[-1][0].name, path, words, capability or None):
            return True
    return False


def _hint(said: str) -> str:
    if match := re.search(r"No module named '([^']+)'", said):
        return f"no wheel of the lock brings `{match.group(1)}`, or the file was removed: see `record`"
    if "cannot open shared object file" in said or "undefined symbol" in said:
        return "the native part's `needed`, `symbols` and `load` name the file"
    return ""
