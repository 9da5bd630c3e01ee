"""The verbs; no logic. Heavy imports stay inside the verbs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import __version__
from builder.errors import BuilderError, ExitCode, UsageError

if TYPE_CHECKING:
    from builder.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
MATRICES = ROOT / "matrices"

Verb = Callable[[argparse.Namespace], int]


def _path(arguments: argparse.Namespace) -> Path:
    from builder.matrix import find_matrix

    path = find_matrix(arguments.matrix, MATRICES)
    # As the user would write it: messages say `matrices/x.yaml:12`.
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


def _site(arguments: argparse.Namespace) -> Settings:
    """The settings, with what `--index` and `--wheels` say."""
    from builder.settings import load, with_options

    site = with_options(load(), arguments.index, arguments.wheels)
    # Without a matrix the default index is all that there is a use for.
    if arguments.index and arguments.matrix is None:
        for option in arguments.index:
            if not option.startswith("default="):
                raise UsageError(f"`--index {option.partition('=')[0]}=…` without MATRIX", hint="`--index default=URL`")
    elif arguments.index:
        from builder.fetch import require_used
        from builder.matrix import load as load_matrix

        require_used(site, arguments.index, load_matrix(_path(arguments)).matrix)
    return site


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _list(arguments: argparse.Namespace) -> int:
    from builder.inventory import as_text, inventory

    rows = inventory(MATRICES)
    _print_json({"matrices": rows}) if arguments.json else print(as_text(rows))
    return ExitCode.OK


def _check(arguments: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from builder.findings import exit_code
    from builder.lock import check_current, lock_path, read_lock
    from builder.matrix import load
    from builder.rules import Context, evaluate_rules

    path = _path(arguments)
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    findings = evaluate_rules(Context(loaded, datetime.now(UTC).date(), lock))
    code = exit_code(findings)
    if arguments.json:
        shown = [finding.model_dump(mode="json") for finding in findings]
        _print_json({"ok": code == ExitCode.OK, "matrix": loaded.matrix.name, "findings": shown})
    else:
        for finding in findings:
            print(finding)
        from builder.rules import RULES

        verdict = "fine" if code == ExitCode.OK else "broken"
        print(f"{loaded.matrix.name}: {verdict}, {len(RULES)} rules over {len(lock.artefacts)} wheels")
    return code


def _lock(arguments: argparse.Namespace) -> int:
    path = _path(arguments)
    if arguments.wheels and not arguments.repin:
        hint = "a resolution fetches no wheels; they are looked at with `--repin PACKAGE`"
        raise UsageError("`--wheels` without `--repin`", hint=hint)
    site = _site(arguments)
    if arguments.repin:
        from builder.repin import repin

        report = repin(path, arguments.repin, site)
        _print_json(report.as_json()) if arguments.json else print(report.as_text(arguments.matrix))
        return report.exit_code
    from builder.locking import check_lock, make_lock

    if arguments.check:
        lines = check_lock(path, site)
        if arguments.json:
            _print_json({"ok": not lines, "drift": lines})
        else:
            print("\n".join(lines) if lines else f"{path}: the lock is current")
        return ExitCode.LOCK if lines else ExitCode.OK
    lock, lines = make_lock(path, site, as_of=arguments.as_of)
    if arguments.json:
        _print_json({"ok": True, "lock": lock.digest, "artefacts": len(lock.artefacts), "drift": lines})
    else:
        print("\n".join([*lines, f"{lock.matrix}: {len(lock.artefacts)} wheels, lock {lock.digest[:12]}"]))
    return ExitCode.OK


def _render(arguments: argparse.Namespace) -> int:
    from builder.rendering import render_verb

    print(render_verb(_path(arguments), diff=arguments.diff), end="")
    return ExitCode.OK


def _build(arguments: argparse.Namespace) -> int:
    from builder.engine import connect
    from builder.noop import recall, remember

    site = _site(arguments)
    asked = Path(arguments.matrix) if arguments.matrix.endswith(".yaml") else MATRICES / f"{arguments.matrix}.yaml"
    # What is wrong with the matrix is said first: an engine that does not answer is left to the whole way.
    engine = None
    with contextlib.suppress(BuilderError):
        engine = connect() if asked.is_file() and not arguments.no_cache else None
    known = recall(asked, site.cache, engine) if engine is not None else None
    if known is None:
        from builder.build import make
        from builder.summary import as_json, as_text

        prepared, engine, image, built = make(_path(arguments), site, no_cache=arguments.no_cache)
        data = as_json(engine, prepared, image, built=built)
        text = as_text(data, prepared)
        diffs = [diff.file for diff in prepared.loaded.matrix.patches.diffs]
        remember(prepared.loaded.path, site.cache, prepared.rendered.digest, data, text, diffs)
    else:
        data, text = known
    assert engine is not None
    if arguments.tag:
        engine.tag(data["image"]["id"], arguments.tag)
    if arguments.json:
        _print_json(data)
    else:
        print(text)
        if not data["built"]:
            print(f"\nnothing changed: {data['image']['names'][1]} is the image of these inputs")
    return ExitCode.OK


def _plan(arguments: argparse.Namespace) -> int:
    from builder.matrix import find_matrix
    from builder.planning import as_json, as_text, plan

    other = find_matrix(arguments.other, MATRICES) if arguments.other else None
    rows = plan(_path(arguments), other)
    _print_json(as_json(rows)) if arguments.json else print(as_text(rows))
    return ExitCode.OK


def _patches(arguments: argparse.Namespace) -> int:
    from builder.patches.listing import as_json, as_text, listing, named_releases, release_listing
    from builder.patches.releases import Releases

    releases = named_releases(arguments.matrix, arguments.sglang, arguments.flashinfer, diff=arguments.diff)
    opener = Releases(_site(arguments))
    if arguments.models:
        from builder.patches.targets import targets

        table = targets(releases or _path(arguments), opener)
        _print_json(table.as_json()) if arguments.json else print(table.as_text())
        return ExitCode.OK
    found = release_listing(releases, opener) if releases else listing(_path(arguments), opener)
    if arguments.json:
        _print_json(as_json(found) | ({"diff": found.diff} if arguments.diff else {}))
    elif arguments.diff:
        print(found.diff, end="")
    else:
        print(as_text(found))
    return ExitCode.OK if found.ok else ExitCode.FINDINGS


def _abi(arguments: argparse.Namespace) -> int:
    import time
    from dataclasses import replace

    from builder.abi.answers import recall, remember

    began, site = time.monotonic(), _site(arguments)
    question = (arguments.requirements, arguments.python, arguments.base, site)
    answer = recall(*question) if arguments.find is None else None
    if answer is None:
        from builder.abi.report import answer_of
        from builder.abi.verb import ask

        lines, python, base, _ = question
        report = ask(lines, site, python=python, base=base, find=arguments.find)
        answer = answer_of(report)
        if report.lasting:
            remember(answer, *question)
    said = {**answer.said, "seconds": round(time.monotonic() - began, 3)}
    _print_json(said) if arguments.json else print(replace(answer, said=said).as_text())
    bad = said["verdict"] == "broken" or (arguments.strict and said["verdict"] == "uncertain")
    return ExitCode.FINDINGS if bad else ExitCode.OK


def _arch(arguments: argparse.Namespace) -> int:
    from builder.archreport import as_json, as_text
    from builder.archverb import asked, look

    question = asked(arguments.gpu, arguments.driver, arguments.cuda_driver)
    report = look(arguments.subjects, question, _site(arguments))
    _print_json(as_json(report)) if arguments.json else print(as_text(report))
    return report.exit_code


def _smoke(arguments: argparse.Namespace) -> int:
    from builder.smoking import as_text, smoke

    data = smoke(arguments.image, user=arguments.user)
    if arguments.json:
        _print_json(data)
    else:
        print(as_text(data))
    return ExitCode.OK if data["ok"] else ExitCode.FINDINGS


def _run(arguments: argparse.Namespace) -> int:
    from builder.running import as_shell, execute, find_client, prepare, run_argv

    options, engine = prepare(arguments, MATRICES)
    # What is printed finds the client by its name, as a shell does.
    argv = run_argv(options, "docker" if arguments.dry_run else find_client())
    if arguments.json:
        _print_json({"argv": argv, "docker_host": engine.host, "image": options.image})
        return ExitCode.OK
    if arguments.dry_run:
        print(as_shell(argv, engine.host))
        return ExitCode.OK
    return execute(argv, engine, gpus=options.gpus != "none")


def _prune(arguments: argparse.Namespace) -> int:
    from builder.pruning import prune

    data = prune(yes=arguments.yes, keep=arguments.keep)
    if arguments.json:
        _print_json(data)
    else:
        print(data["text"])
    return ExitCode.OK


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="builder", description="Proven container images for SGLang stacks.")
    top.add_argument("--version", action="version", version=f"builder {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Verb, summary: str, *, matrix: bool = True) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=summary, description=summary)
        if matrix:
            made.add_argument("matrix", metavar="MATRIX", help="a name in matrices/, or a path to a file of your own")
        made.add_argument("--json", action="store_true", help="the report as JSON on stdout")
        made.set_defaults(run=run)
        return made

    verb("list", _list, "the matrices, with their stacks and states", matrix=False)
    verb("check", _check, "every rule on the matrix and its lock; exit status 3 if one finds an error")
    lock = verb("lock", _lock, "resolve the matrix into its lock file")
    which = lock.add_mutually_exclusive_group()
    which.add_argument(
        "--check", action="store_true", help="change nothing, say what drifted; exit status 4 if anything did"
    )
    which.add_argument("--as-of", metavar="DATE", help="set the matrix's date (YYYY-MM-DD) first")
    which.add_argument(
        "--repin", metavar="PACKAGE", help="take the content that a replaced file has now, into the matrix and the lock"
    )
    _sources(lock, "with --repin: a folder in which its wheel is looked for first")
    render = verb("render", _render, "print the Dockerfile")
    render.add_argument("--diff", action="store_true", help="print what differs from the Dockerfile of the last build")
    build = verb("build", _build, "build, prove and tag the image")
    build.add_argument(
        "--tag", action="append", default=[], metavar="T", help="a further name for the image", type=_tag
    )
    build.add_argument("--no-cache", action="store_true", help="build every layer again")
    _sources(build, "a folder in which wheels that are on no index are looked for first")
    plan = verb("plan", _plan, "the layers and their bytes, and what a host would pull")
    plan.add_argument("--from", dest="other", metavar="OTHER", help="a matrix whose image the host has")
    about = "the state of every patch site; exit status 3 if one is of no known shape"
    patches = verb("patches", _patches, about, matrix=False)
    patches.usage = "builder patches (MATRIX | [--sglang V] [--flashinfer V]) [options]"
    patches.add_argument("matrix", metavar="MATRIX", nargs="?", help="a matrix whose lock says which releases")
    patches.add_argument("--sglang", metavar="V", help="a release of sglang, instead of a matrix")
    patches.add_argument("--flashinfer", metavar="V", help="a release of flashinfer, instead of a matrix")
    shown = patches.add_mutually_exclusive_group()
    shown.add_argument("--models", action="store_true", help="which model classes can be EAGLE-3 targets, and why not")
    shown.add_argument("--diff", action="store_true", help="print what the matrix's patches change, as a unified diff")
    _sources(patches, "a folder in which wheels are looked for first")
    about = "whether the native files of these releases fit together; exit status 3 if not"
    abi = verb("abi", _abi, about, matrix=False)
    abi.set_defaults(matrix=None)
    abi.add_argument("requirements", metavar="REQUIREMENT", nargs="+", help="as in sgl-kernel==0.3.21 torch==2.9.1")
    abi.add_argument("--python", default="3.11", metavar="V", help="the Python that they are for (default: 3.11)")
    abi.add_argument("--base", default="bookworm", metavar="B", help="bookworm (the default), jammy or noble")
    abi.add_argument("--find", metavar="PACKAGE", help="which releases of PACKAGE fit; torch or 'torch>=2.9'")
    abi.add_argument("--strict", action="store_true", help="exit status 3 for what is uncertain, too")
    _sources(abi, "a folder in which wheels are looked for first")
    about = "which GPUs compiled code is for; exit status 3 if a file that --gpu would load has none for it"
    arch = verb("arch", _arch, about, matrix=False)
    arch.set_defaults(matrix=None)
    arch.add_argument(
        "subjects",
        metavar="FILE|REQUIREMENT",
        nargs="+",
        help="FILE.so, FILE.whl, or a release as in sgl-kernel==0.3.21",
    )
    arch.add_argument("--gpu", action="append", default=[], metavar="CC", help="a compute capability, as in 12.0")
    driver = arch.add_mutually_exclusive_group()
    driver.add_argument("--driver", metavar="V", help="the driver, as in 580.159.04: PTX that it does not know is none")
    driver.add_argument(
        "--cuda-driver", metavar="V", help="the same by the CUDA version that nvidia-smi names, as in 13.0"
    )
    _sources(arch, "a folder in which wheels are looked for first")
    smoke = verb("smoke", _smoke, "run the smoke test again on a built image", matrix=False)
    smoke.add_argument("image", metavar="IMAGE", help="an image of this builder")
    smoke.add_argument("--user", metavar="UID[:GID]", help="as this user instead of the image's own", type=_user)
    run = verb("run", _run, "run COMMAND in the image, on GPUs; the exit status is COMMAND's", matrix=False)
    run.usage = "builder run MATRIX|IMAGE [options] [-- COMMAND …]"
    run.add_argument("target", metavar="MATRIX|IMAGE", help="a matrix whose image is built, or an image of ours")
    run.set_defaults(command=[])
    each: dict[str, Any] = {"action": "append", "default": []}
    run.add_argument("--dry-run", action="store_true", help="print the docker command and run nothing")
    run.add_argument("--gpus", default="all", metavar="G", help="all (the default), none, a count, or device=0,1")
    run.add_argument("--model", **each, type=Path, metavar="DIR", help="a model's folder, read-only as /models/NAME")
    run.add_argument("--hf-cache", type=Path, metavar="DIR", help="the model hub's cache, for models named by their id")
    run.add_argument("--publish", **each, metavar="PORT", help="a port, on loopback unless an address is given")
    run.add_argument("--env", **each, metavar="K[=V]", help="an environment variable; K alone hands on its value here")
    run.add_argument("--nccl-p2p", choices=("on", "off"), default="on", help="off: GPUs exchange data through memory")
    run.add_argument("--network", default="", metavar="N", help="host, none or a network's name (default: docker's)")
    run.add_argument("--ipc", choices=("host", "private"), default="host", help="whose shared memory (default: host)")
    run.add_argument("--shm-size", default="", metavar="S", help="size of /dev/shm with --ipc private (default: 32g)")
    run.add_argument("--cache", default="", metavar="V", help="the volume for compiled kernels, or none")
    run.add_argument("--user", metavar="UID[:GID]", help="as this user instead of the image's own", type=_user)
    run.add_argument("--name", default="", help="the container's name")
    run.add_argument("-i", "--interactive", action="store_true", help="hand on standard input")
    prune = verb("prune", _prune, "what this builder keeps on this machine: images, build cache, files", matrix=False)
    prune.add_argument("--yes", action="store_true", help="free it (without this, it is only shown)")
    prune.add_argument("--keep", action="append", default=[], metavar="MATRIX", help="keep the image of this matrix")
    return top


def _sources(verb: argparse.ArgumentParser, wheels: str) -> None:
    """The options that say where files come from; `_site` reads them."""
    index = "another URL for an index of the matrix, or a mirror of its direct files; `default` is the default index"
    verb.add_argument("--index", action="append", default=[], metavar="NAME=URL", help=index)
    verb.add_argument("--wheels", action="append", default=[], metavar="DIR", help=wheels)


def _tag(value: str) -> str:
    import re

    if not re.fullmatch(
        r"([a-z0-9.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?", value
    ):
        raise argparse.ArgumentTypeError(f"`{value}` is not an image name: NAME or NAME:TAG")
    return value if ":" in value.rsplit("/", 1)[-1] else f"{value}:latest"


def _command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ours and, for `run`, COMMAND: all that is after the first `--`, which argparse would take apart."""
    if argv[:1] != ["run"] or "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _user(value: str) -> str:
    import re

    if not re.fullmatch(r"\d{1,9}(:\d{1,9})?", value):
        raise argparse.ArgumentTypeError(f"`{value}` is not UID or UID:GID")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; errors go to stderr with the exit code of their class."""
    words, command = _command(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(words)
    if command:
        arguments.command = command
    run: Verb = arguments.run
    try:
        return int(run(arguments))
    except BuilderError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: nothing was tagged", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): no traceback, and none from the interpreter's own flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.UNFORESEEN)
