"""`load`: each shared object opened with RTLD_NOW in a process of its own, after `import torch`, with the stub."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

from builder.smoke.child import Outcome, describe_end
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native, NativeFile
from builder.smoke.report import Result, count

# Seconds for one file. The slowest of the real stack, flash_ops with 1.7 GB, takes under 3 from a cold page cache.
FILE_TIMEOUT = 60.0
_ALL_TIMEOUT = 1200.0
_TORCH_FIRST = "`needed` and `symbols` say what torch lacks"


def check_load(native: Native, ledger: Ledger) -> Result:
    """Open each file in a fork of a process that has imported torch; report refusals, signals and timeouts by file.

    As many servers as there are cores share the files: forking a process with torch in it costs about 10 ms.
    """
    files = [file for file in native.shared_objects if native.tree.path(file.path).exists()]
    result = Result(0, len(native.shared_objects), "files")
    if not files:
        result.expected = len(files)
        result.detail = "no shared object in these wheels"
        ledger.settle("load", result, native.scope)
        return result
    assert native.stubs is not None
    if native.torch and native.observed.error:
        # Every file would be refused in torch's words, and every exception be told to fail no longer.
        because = native.observed.error.split("\n", 1)[0]
        result.expected = None
        result.add("error", "torch", "no file was opened: `import torch` fails", because=because, hint=_TORCH_FIRST)
        return result
    servers = min(os.cpu_count() or 1, 4, len(files))
    with ThreadPoolExecutor(servers) as pool:
        shares = [files[i::servers] for i in range(servers)]
        outcomes = list(pool.map(lambda share: _serve(native, share), shares))
    answers = {}
    for outcome in outcomes:
        for line in outcome.out.splitlines():
            answer = json.loads(line)
            answers[answer["path"]] = answer
    broken = [outcome for outcome in outcomes if outcome.code != 0]
    if broken:
        what = (
            "the process that imports torch and opens the files" if native.torch else "the process that opens the files"
        )
        result.add("error", "load", f"{what} {broken[0].ended}", because=broken[0].tail())
    for file in native.shared_objects:
        answer = answers.get(native.workspace.scrub(str(native.tree.path(file.path))))
        if answer is None:
            # A missing file is `needed`'s to report; a server that broke off has been reported above.
            result.looked_at += not broken
            continue
        result.looked_at += 1
        if answer["code"] == 0:
            continue
        _report(native, ledger, result, file, answer)
    after = (
        f"after `import torch` ({native.torch.version})" if native.torch else "in a bare python (no torch in the lock)"
    )
    result.detail = f"opened one process each, {after}"
    if native.stubs:
        result.detail += ", with a stub of " + ", ".join(
            f"{soname} ({count(number, 'function')})" for soname, number in native.stubs.items()
        )
    ledger.settle("load", result, native.scope)
    return result


def _serve(native: Native, files: list[NativeFile]) -> Outcome:
    command = native.workspace.python_command(
        "load_child.py", str(native.tree.site_packages), "torch" if native.torch else "", str(FILE_TIMEOUT)
    )
    jobs = [{"path": str(native.tree.path(file.path)), "first": native.companions(file)} for file in files]
    return native.workspace.run(command, timeout=_ALL_TIMEOUT, stdin="".join(json.dumps(job) + "\n" for job in jobs))


def _report(native: Native, ledger: Ledger, result: Result, file: NativeFile, answer: dict[str, object]) -> None:
    path, owner = file.path, file.owner
    code = answer["code"]
    said = native.workspace.scrub(str(answer["error"])).strip()
    if code == 3:
        what = said.replace(str(native.tree.site_packages) + "/", "").split("\n")[-1]
        message = f"`{path}` of {owner} does not load: {what}"
        because = ""
    else:
        assert code is None or isinstance(code, int)
        message = f"`{path}` of {owner} does not load: the process that opened it {describe_end(code)}"
        because = "\n".join(said.splitlines()[-4:])
    if ledger.excuses("load", owner.name, path, f"{message}\n{said}") is None:
        result.add("error", path, message, because=because, hint=_hint(code, said))


def _hint(code: object, said: str) -> str:
    if "cannot open shared object file" in said:
        return "`needed` says which library is missing, and where it can come from"
    if "undefined symbol" in said or "version `" in said:
        return "`symbols` says what it expects, and from whom"
    if code == 3:
        return ""
    return "all its symbols may resolve and its layout still be another's: it was most likely built for another torch"
