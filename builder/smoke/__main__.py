"""`python -m builder.smoke PART --spec SPEC.json --out OUT.json [--native NATIVE.json]`.

PART is `native` (every layer but sglang's, which may not be there yet), `sglang` (that layer; takes the native part's
checks from NATIVE.json to make the whole `smoke.json`) or `all`. Exit status: 0 all checks passed, 3 one failed, 2 a
wrong command line or spec, 1 anything unforeseen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from builder.smoke import compilers, cuda, imports, install, link, load, patched
from builder.smoke.baked import check_baked
from builder.smoke.behaviour import check_behaviour
from builder.smoke.child import Workspace
from builder.smoke.faked import Faked, check_gated_imports, check_imports_faked
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Reporter, Result, document, write_json
from builder.smoke.spec import Spec, SpecError, read_spec
from builder.smoke.tree import Tree

PARTS = ("native", "sglang", "all")
_OK, _FAILED, _USAGE = 0, 3, 2


def run_native(spec: Spec, tree: Tree, workspace: Workspace, reporter: Reporter, only: frozenset[str]) -> None:
    """Every check that does not depend on the sglang layer."""
    scope = spec.names(sglang=False)
    ledger = Ledger(spec, tree)
    native = Native(spec, tree, workspace, scope)
    _run_all(
        reporter,
        "native",
        only,
        {
            "installed": lambda: install.check_installed(spec, tree, native=True),
            "record": lambda: install.check_record(spec, tree, native=True),
            "ownership": lambda: install.check_ownership(spec, tree, native=True),
            "cuda-major": lambda: cuda.check_cuda_major(native, ledger),
            "compiler-coherent": lambda: cuda.check_compiler(spec, tree, workspace),
            "needed": lambda: link.check_needed(native, ledger),
            "symbols": lambda: link.check_symbols(native, ledger),
            "load": lambda: load.check_load(native, ledger),
            "nvcc": lambda: compilers.check_nvcc(spec, workspace),
            "triton": lambda: compilers.check_triton(native, ledger),
            "flashinfer": lambda: compilers.check_flashinfer(native),
            **({"baked": lambda: check_baked(native)} if spec.compiled else {}),
        },
    )


def run_sglang(spec: Spec, tree: Tree, workspace: Workspace, reporter: Reporter, only: frozenset[str]) -> None:
    """The checks of the sglang layer, on an image that is otherwise whole."""
    scope = spec.names(sglang=True)
    ledger = Ledger(spec, tree)
    native = Native(spec, tree, workspace, scope)
    faked = Faked(native)
    _run_all(
        reporter,
        "sglang",
        only,
        {
            "installed": lambda: install.check_installed(spec, tree, native=False),
            "record": lambda: install.check_record(spec, tree, native=False),
            "ownership": lambda: install.check_ownership(spec, tree, native=False),
            **(
                {"patches": lambda: patched.check_patches(spec), "behaviour": lambda: check_behaviour(native)}
                if spec.patches
                else {}
            ),
            "needed": lambda: link.check_needed(native, ledger),
            "symbols": lambda: link.check_symbols(native, ledger),
            "load": lambda: load.check_load(native, ledger),
            "imports": lambda: imports.check_imports(native, ledger),
            "imports-faked": lambda: check_imports_faked(faked, ledger),
            "gated-imports": lambda: check_gated_imports(faked, ledger),
        },
    )


def _run_all(reporter: Reporter, part: str, only: frozenset[str], checks: dict[str, Callable[[], Result]]) -> None:
    for name, check in checks.items():
        if not only or name in only:
            reporter.run(name, part, check)


def read_native(path: Path, spec: Spec) -> list[dict[str, Any]]:
    """The checks of an earlier native part. Raises SpecError when it is of another lock or cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        checks = list(data["checks"])
        lock = data["lock"]
    except OSError as error:
        raise SpecError(f"cannot read the native part: {error.strerror}: {path}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"the native part is not a smoke report: {path}") from error
    if lock != spec.native_lock:
        raise SpecError(f"the native part is of another lock: {lock[:12]}, the spec's is {spec.native_lock[:12]}")
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part, write its report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m builder.smoke", description="ABI smoke test of an SGLang stack")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--spec", required=True, type=Path, help="what the image must be (JSON)")
    parser.add_argument("--out", required=True, type=Path, help="where to write the report (JSON)")
    parser.add_argument("--native", type=Path, help="the native part's report, to put in front (part `sglang` only)")
    parser.add_argument("--timings", action="store_true", help="print how long each check took")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run only this check (repeatable)")
    options = parser.parse_args(arguments)
    try:
        if options.native and options.part != "sglang":
            raise SpecError("--native goes with the part `sglang`")
        spec = read_spec(options.spec)
        earlier = read_native(options.native, spec) if options.native else []
        if not spec.site_packages.is_dir():
            raise SpecError(f"spec.site_packages is not a folder: {spec.site_packages}")
        if not os.access(options.out.parent, os.W_OK):
            raise SpecError(f"cannot write the report: {options.out.parent} is not writable")
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    reporter = Reporter(timings=options.timings)
    tree = Tree.read(spec.site_packages)
    only = frozenset(options.only)
    with Workspace(tree) as workspace:
        if options.part in ("native", "all"):
            run_native(spec, tree, workspace, reporter, only)
        if options.part in ("sglang", "all"):
            run_sglang(spec, tree, workspace, reporter, only)
    checks = [*earlier, *(check.as_json() for check in reporter.checks)]
    report = document(spec.matrix, spec.lock, checks)
    write_json(options.out, report)
    failed = [check["name"] for check in checks if not check["ok"]]
    summary = f"{len(checks)} checks, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else "")
    reporter.say(f"smoke test of {spec.matrix} ({spec.lock[:12]}): {summary}")
    return _OK if report["ok"] else _FAILED


if __name__ == "__main__":
    raise SystemExit(main())
