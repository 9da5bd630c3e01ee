"""`builder repro --bundle`: what another needs to see the same: facts, matrix, lock, verdicts, the command. Nothing personal.

The pasted report itself is not in it: what was read of it is.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

from builder.files import write_atomic
from builder.lock import lock_path
from builder.repro.matrixtext import variables
from builder.repro.verb import Answer, as_json, as_text


def write_bundle(path: Path, answer: Answer) -> None:
    """Write a .tar.gz whose bytes depend on what is in it alone."""
    name = answer.made.name
    # Where the checkout lies on this machine may say whose it is.
    told = replace(answer, written=answer.written and Path("matrices") / answer.written.name)
    files = {
        "facts.json": json.dumps(as_json(told), indent=2, ensure_ascii=False) + "\n",
        "report.txt": as_text(told) + "\n",
        "environment": "".join(f"{name}={value}\n" for name, value in variables(answer.report).items()),
        "README.txt": _readme(answer),
    }
    if answer.unreached is None:
        files[f"matrices/{name}.yaml"] = answer.made.text
    if answer.written is not None and lock_path(answer.written).is_file():
        files[f"matrices/{name}.lock.json"] = lock_path(answer.written).read_text(encoding="utf-8")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, text in sorted(files.items()):
            data = text.encode()
            entry = tarfile.TarInfo(f"{name}/{member}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    write_atomic(path, gzip.compress(packed.getvalue(), mtime=0))


def _readme(answer: Answer) -> str:
    name = answer.made.name
    if answer.unreached is not None:
        return (
            "What `builder repro` read of a bug report. There is no matrix: the package index did not answer.\n\n"
            "facts.json has every value with its line in the report; report.txt the same for people.\n"
        )
    return (
        f"The stack of a bug report, as `builder repro` made it.\n\n"
        f"    cp matrices/{name}.* CHECKOUT/matrices/\n"
        f"    builder lock {name}          # where there is no {name}.lock.json beside it\n"
        f"    make image MATRIX={name}\n"
        f"    builder run {name} --record runs -- COMMAND\n\n"
        f"facts.json has every value with its line in the report; report.txt the same for people.\n"
    )
