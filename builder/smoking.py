"""`builder smoke IMAGE`: the tests of a finished image, in a throw-away container: what the build ran, or kernels on GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from builder import __version__
from builder.display import note
from builder.engine import Engine, Image, connect
from builder.errors import BuildError, UsageError
from builder.labels import LABEL
from builder.running import NOT_STARTED, RunOptions, check_gpus, find_client, run_argv
from builder.smoke.gpu import unlooked, verdict

# The test in the image writes its report to stdout, after this line, so that no folder has to be shared or writable.
MARK = "----- smoke.json -----"

RECORD_SCHEMA = 1
"""Of what `record` makes; docs/gpu.md."""

_NO_PART = 4
"""How the script ends where the image has no GPU part."""

_SCRIPT = """\
import importlib.util, os, runpy, sys, tempfile
folder = tempfile.mkdtemp(); out = os.path.join(folder, 'smoke.json')
sys.path.insert(0, '/opt/sglang-stack')
os.environ['PYTHONPATH'] = '/opt/sglang-stack'
module, *arguments = {words!r}
if importlib.util.find_spec(module) is None: sys.exit({no_part})
sys.argv = ['smoke', *arguments, '--spec', '/opt/sglang-stack/spec.json', '--out', out]
code = 1
try:
    runpy.run_module(module, run_name='__main__')
except SystemExit as end:
    code = end.code
print({mark!r}); print(open(out).read()); sys.exit(code)
"""


def smoke(reference: str, *, user: str | None) -> dict[str, Any]:
    """Run both parts of the build's test on `reference`, as `user` if given; the report, with the image's id in it.

    Raises `UsageError` for an image that is not ours, `BuildError` if the container cannot run.
    """
    engine, image = _ours(reference)
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    output = engine.run(
        image.id, container_command("builder.smoke", "all"), user=user, environment=environment, label=LABEL
    )
    data = read_report(output)
    data["image"] = image.id
    return data


def smoke_gpus(reference: str, *, user: str | None, gpus: str) -> dict[str, Any]:
    """Run kernels with known results on the GPUs that `--gpus` names; the report, with the image's id and the record in it.

    Where the engine has no GPU to give, every check is skipped, and nothing is a pass. Raises `UsageError` for an image that is
    not ours or a wrong ``gpus``, `BuildError` if the container cannot run.
    """
    if check_gpus(gpus) == "none":
        raise UsageError("`--gpus none` asks for no GPU", hint="leave it out: the build's own test needs none")
    engine, image = _ours(reference)
    options = RunOptions(
        image=image.id,
        command=tuple(container_command("builder.smoke.gpu")),
        gpus=gpus,
        ipc="private",
        network="none",
        user=user or "",
        environment=("PYTHONDONTWRITEBYTECODE=1",),
    )
    words: list[str] = []
    try:
        data = read_report(output_lines(run_argv(options, find_client()), engine, words))
    except NotStartedError as error:
        said = " ".join(" ".join(words).split())
        if engine.gpu_runtimes():
            raise BuildError(
                "the container did not start with the GPUs",
                where=engine.host,
                because=said[:600],
                hint="`builder doctor IMAGE` says what this host can run",
            ) from error
        data = unlooked("the engine has no GPU runtime: it lists no runtime and no device of NVIDIA")
        note(verdict(data))
    data["image"] = image.id
    data["record"] = record(data)
    return data


def record(data: dict[str, Any]) -> dict[str, Any] | None:
    """What is kept of a run: bound to the image, its lock, the driver and the GPUs' kind; None where nothing ran.

    No UUID, host or path: the name and compute capability of each GPU, and how many of a kind.
    """
    if not data["ran"]:
        return None
    kinds = Counter((gpu["name"], gpu["capability"]) for gpu in data["gpus"])
    return {
        "schema": RECORD_SCHEMA,
        "image": data["image"],
        "lock": data["lock"],
        "matrix": data["matrix"],
        "driver": data["driver"],
        "cuda_driver": data["cuda_driver"],
        "gpus": [
            {"name": name, "capability": capability, "count": count}
            for (name, capability), count in sorted(kinds.items())
        ],
        "verdict": data["verdict"],
        "ran": _names(check for check in data["checks"] if not check["skipped"]),
        "failed": _names(check for check in data["checks"] if not check["skipped"] and not check["ok"]),
        "skipped": {check["name"]: check["skipped"] for check in data["checks"] if check["skipped"]},
        "date": datetime.now(UTC).date().isoformat(),
        "builder": __version__,
    }


def _names(checks: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(check["name"] for check in checks))


def _ours(reference: str) -> tuple[Engine, Image]:
    engine = connect()
    image = engine.find(reference)
    if image is None:
        raise UsageError(f"there is no image `{reference}`", where=engine.host, hint="see `builder list`")
    if image.labels.get(LABEL) != "image":
        raise UsageError(
            f"`{reference}` is not an image of this builder",
            because=f"it has no label `{LABEL}=image`",
            hint="the test needs the lock that the image was built from",
        )
    return engine, image


def container_command(*words: str) -> list[str]:
    return ["python3", "-P", "-c", _SCRIPT.format(words=words, no_part=_NO_PART, mark=MARK)]


class NotStartedError(Exception):
    """docker did not start the container."""


def output_lines(argv: list[str], engine: Engine, words: list[str]) -> Iterator[str | int]:
    """The container's output, then its exit status; what docker itself says, and the container's stderr, go to ``words``.

    Raises `NotStartedError`. The container ends with this generator.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "DOCKER_HOST": engine.host},
        text=True,
        errors="replace",
    )
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=_keep, args=(process.stderr, words), daemon=True)
    reader.start()
    try:
        for text in process.stdout:
            yield text.rstrip("\n")
        status = process.wait()
        reader.join(10)
        if status == NOT_STARTED:
            raise NotStartedError
        yield status
    finally:
        if process.poll() is None:
            # The client hands it on, and `--rm` removes the container.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def _keep(stream: Iterable[str], words: list[str]) -> None:
    for text in stream:
        words.append(text.rstrip("\n"))
        del words[:-40]


def read_report(output: Iterator[str | int], say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """The report that a container printed; ``say`` is told the lines before it. Raises `BuildError`."""
    lines: list[str] = []
    status = 1
    seen = False
    for item in output:
        if isinstance(item, int):
            status = item
        elif item == MARK:
            seen = True
        elif seen:
            lines.append(item)
        else:
            (say or note)(item)
    if not seen and status == _NO_PART:
        raise BuildError(
            "the image has no GPU checks",
            because="it was built by a builder that had none",
            hint="build it again: `builder build MATRIX`",
        )
    if not seen or status not in (0, 3):
        raise BuildError("the smoke test could not run in the image", because=f"its container ended with {status}")
    try:
        report: dict[str, Any] = json.loads("\n".join(lines))
    except ValueError as error:
        raise BuildError("the smoke test's report is damaged", because=str(error)) from error
    return report


def as_text(data: dict[str, Any]) -> str:
    """The verdict; each check was printed while it ran."""
    image = f"image {data['image'][:19]}"
    if "verdict" in data:
        kinds = Counter(f"{gpu['name']} ({gpu['capability']})" for gpu in data["gpus"])
        gpus = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())) or "no GPU"
        driver = f", driver {data['driver']}" if data["driver"] else ""
        return f"{data['matrix'] or 'image'}: {verdict(data)} ({image}, {gpus}{driver})"
    failed = [check["name"] for check in data["checks"] if not check["ok"]]
    verdict_words = f"FAILED: {', '.join(failed)}" if failed else f"ok, {len(data['checks'])} checks"
    return f"{data['matrix']}: {verdict_words} ({image}, no GPU was used)"
