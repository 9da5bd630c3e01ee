"""`make standin`: build `cu130` with stand-ins for the four wheels that cannot be reached, the whole path of it.

Makes the wheels, serves them on loopback as an index, and runs what a user runs: `builder build`, with that index as the
mirror. `--pin` writes the hashes of the wheels into the matrix instead (its lock is then made by `builder lock`).
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename
from ruamel.yaml import YAML

from builder import settings
from builder.cache import file_sha256
from builder.display import note
from builder.errors import BuilderError
from builder.fetch import fetch_artefact
from builder.lock import Artefact
from builder.matrix import load_matrix
from builder.origins import DirectFile
from tests.standin.relabel import relabel

HERE = Path(__file__).resolve().parent
MATRIX = HERE / "cu130-standin.yaml"


ABSENT = """

# Not in this build, which stands in for another (tests/standin/originals.yaml).
def _stand_in(name):
    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{{name}} is a stand-in's: this image has no such kernel")

    return absent


for _name in {names!r}:
    globals()[_name] = _stand_in(_name)
"""


def original(entry: dict[str, Any]) -> Artefact:
    """An entry of originals.yaml as the lock has its wheels."""
    name, version = parse_wheel_filename(entry["file"])[:2]
    pinned = {"file": entry["file"], "sha256": entry["sha256"], "size": None}
    said = {"version": str(version), "metadata_version": str(version)}
    return Artefact(name=name, **said, **pinned, index="default", url=None, requires=(), layer="torch")  # type: ignore[arg-type]


def make(folder: Path) -> dict[str, str]:
    """Write the four wheels into ``folder``, and an index over them; file → sha256."""
    site = settings.load()
    files: dict[str, DirectFile] = {file.name: file for file in load_matrix(MATRIX).files}
    entries = YAML(typ="safe", pure=True).load((HERE / "originals.yaml").read_text(encoding="utf-8"))["originals"]
    made = {}
    for entry in entries:
        wanted = files[entry["stands_for"]]
        target = folder / "simple" / wanted.name / wanted.filename
        source = fetch_artefact(original(entry), site)
        relabel(
            source,
            target,
            metadata_version=wanted.metadata_version or wanted.pinned_version,
            requires=wanted.requires,
            appended={"sgl_kernel/__init__.py": ABSENT.format(names=entry["absent"])} if "absent" in entry else {},
        )
        made[wanted.filename] = sha256 = file_sha256(target)
        page = f'<!DOCTYPE html>\n<a href="{wanted.url.rsplit("/", 1)[1]}#sha256={sha256}">{wanted.filename}</a>\n'
        (target.parent / "index.html").write_text(page, encoding="utf-8")
        note(f"{entry['file']} stands in for {wanted.filename}")
    return made


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder on loopback; its URL."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/simple"
        finally:
            server.shutdown()


def pin(made: dict[str, str]) -> None:
    """Write the hashes of the wheels into the matrix."""
    text = MATRIX.read_text(encoding="utf-8")
    for file in load_matrix(MATRIX).files:
        text = re.sub(
            rf"(- name: {canonicalize_name(file.name)}\n(?:    .*\n)*?    sha256: )\w+",
            rf"\g<1>{made[file.filename]}",
            text,
        )
    MATRIX.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """The exit status of `builder build`; further arguments are handed to it."""
    with tempfile.TemporaryDirectory(prefix="builder-standin-") as temporary:
        made = make(Path(temporary))
        if arguments == ["--pin"]:
            pin(made)
            return 0
        with served(Path(temporary)) as url:
            command = [sys.executable, "-m", "builder", "build", str(MATRIX), "--index", f"standin={url}", *arguments]
            return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except BuilderError as error:
        print(error, file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
