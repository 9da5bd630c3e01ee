"""The smoke test of an image on a host: the build's own, and kernels on its GPUs where they are asked for."""

from __future__ import annotations

from builder import smoking
from builder.engine import Engine
from builder.errors import BuildError
from builder.hosts.fanout import Reporter
from builder.hosts.records import Smoke
from builder.labels import LABEL
from builder.running import RunOptions, check_gpus, find_client, run_argv

Checks = list[dict[str, object]]


def smoke_on(engine: Engine, image: str, gpus: str, reporter: Reporter) -> tuple[Smoke, Checks]:
    """Run the tests in throw-away containers without network. ``gpus`` as for `builder run`, `none` for the build's own alone.

    Raises `BuildError` where a container cannot run.
    """
    output = engine.run(
        image,
        smoking.container_command("builder.smoke", "all"),
        environment={"PYTHONDONTWRITEBYTECODE": "1"},
        label=LABEL,
    )
    report = smoking.read_report(output, reporter.say)
    checks: Checks = list(report["checks"])
    if gpus == "none":
        return Smoke(ok=bool(report["ok"]), checks=len(checks)), checks
    options = RunOptions(
        image=image,
        command=tuple(smoking.container_command("builder.smoke.gpu")),
        gpus=check_gpus(gpus),
        ipc="private",
        network="none",
        user="",
        environment=("PYTHONDONTWRITEBYTECODE=1",),
    )
    words: list[str] = []
    try:
        ran = smoking.read_report(smoking.output_lines(run_argv(options, find_client()), engine, words), reporter.say)
    except smoking.NotStartedError as error:
        because = " ".join(" ".join(words).split())[:600]
        raise BuildError("the container did not start with the GPUs", because=because) from error
    checks += ran["checks"]
    names = tuple(str(gpu["name"]) for gpu in ran["gpus"])
    # Where nothing ran there is nothing to pass.
    ok = bool(report["ok"]) and bool(ran["ran"]) and bool(ran["ok"])
    return Smoke(ok=ok, gpus=names, checks=len(checks)), checks
