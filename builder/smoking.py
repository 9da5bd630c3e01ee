"""`builder smoke IMAGE`: the smoke test of a finished image, run again in a throw-away container."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from builder.display import note
from builder.engine import Engine, connect
from builder.errors import BuildError, UsageError
from builder.labels import LABEL

# The test in the image writes its report to stdout, after this line, so that no folder has to be shared or writable.
MARK = "----- smoke.json -----"


def smoke(reference: str, *, user: str | None) -> dict[str, Any]:
    """Run both parts on `reference`, as `user` if given; the report, with the image's id in it.

    Raises `UsageError` for an image that is not ours, `BuildError` if the container cannot run.
    """
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
    data = _run(engine, image.id, user)
    data["image"] = image.id
    return data


def _run(engine: Engine, image: str, user: str | None) -> dict[str, Any]:
    script = (
        "import runpy, sys, tempfile, os\n"
        "folder = tempfile.mkdtemp(); out = os.path.join(folder, 'smoke.json')\n"
        "sys.argv = ['smoke', 'all', '--spec', '/opt/sglang-stack/spec.json', '--out', out]\n"
        "sys.path.insert(0, '/opt/sglang-stack')\n"
        "os.environ['PYTHONPATH'] = '/opt/sglang-stack'\n"
        "code = 1\ntry:\n    runpy.run_module('builder.smoke', run_name='__main__')\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print({MARK!r}); print(open(out).read()); sys.exit(code)\n"
    )
    lines: list[str] = []
    status = 1
    seen = False
    output: Iterator[str | int] = engine.run(
        image, ["python3", "-P", "-c", script], user=user, environment={"PYTHONDONTWRITEBYTECODE": "1"}, label=LABEL
    )
    for item in output:
        if isinstance(item, int):
            status = item
        elif item == MARK:
            seen = True
        elif seen:
            lines.append(item)
        else:
            note(item)
    if not seen or status not in (0, 3):
        raise BuildError("the smoke test could not run in the image", because=f"its container ended with {status}")
    try:
        report: dict[str, Any] = json.loads("\n".join(lines))
    except ValueError as error:
        raise BuildError("the smoke test's report is damaged", because=str(error)) from error
    return report


def as_text(data: dict[str, Any]) -> str:
    """The verdict; each check was printed while it ran."""
    failed = [check["name"] for check in data["checks"] if not check["ok"]]
    verdict = f"FAILED: {', '.join(failed)}" if failed else f"ok, {len(data['checks'])} checks"
    return f"{data['matrix']}: {verdict} (image {data['image'][:19]}, no GPU was used)"
