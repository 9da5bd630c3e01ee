"""The command line: verbs, options, errors and exit statuses. What a verb does is in `builder.verbs`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builder import __version__, verbs
from builder.errors import BuilderError, BuildError, ExitCode, UsageError
from builder.interrupts import forget, remembered
from builder.verbs import Verb


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="builder", description="Proven container images for SGLang stacks.")
    top.add_argument("--version", action="version", version=f"builder {__version__}")
    choices = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Verb, summary: str, *, matrix: bool = True) -> argparse.ArgumentParser:
        made = choices.add_parser(name, help=summary, description=summary)
        if matrix:
            made.add_argument("matrix", metavar="MATRIX", help="a name in matrices/, or a path to a file of your own")
        made.add_argument("--json", action="store_true", help="the report as JSON on stdout")
        made.set_defaults(run=run)
        return made

    verb("list", verbs.do_list, "the matrices, with their stacks and states", matrix=False)
    check = verb(
        "check", verbs.do_check, "everything that can be known about the lock; exit status 3 if something is broken"
    )
    check.add_argument(
        "--no-wheels",
        dest="look",
        action="store_false",
        help="the rules alone: no wheel is looked at, nothing is fetched",
    )
    check.add_argument("--strict", action="store_true", help="exit status 3 for what is uncertain, too")
    _sources(check, "a folder in which wheels are looked for first")
    check.add_argument("--driver", metavar="V", help="whether that driver of a host is enough, as in 580.159.04")
    check.add_argument(
        "--cuda-driver", metavar="V", help="with --driver: the CUDA version that nvidia-smi names there, as in 13.0"
    )
    lock = verb("lock", verbs.do_lock, "resolve the matrix into its lock file")
    which = lock.add_mutually_exclusive_group()
    which.add_argument(
        "--check", action="store_true", help="change nothing, say what drifted; exit status 4 if anything did"
    )
    which.add_argument("--as-of", metavar="DATE", help="set the matrix's date (YYYY-MM-DD) first")
    which.add_argument(
        "--repin", metavar="PACKAGE", help="take the content that a replaced file has now, into the matrix and the lock"
    )
    _sources(lock, "with --repin: a folder in which its wheel is looked for first")
    render = verb("render", verbs.do_render, "print the Dockerfile")
    render.add_argument("--diff", action="store_true", help="print what differs from the Dockerfile of the last build")
    build = verb("build", verbs.do_build, "build, prove and tag the image")
    build.add_argument(
        "--tag", action="append", default=[], metavar="T", help="a further name for the image", type=_tag
    )
    build.add_argument("--no-cache", action="store_true", help="build every layer again")
    _sources(build, "a folder in which wheels that are on no index are looked for first")
    plan = verb("plan", verbs.do_plan, "the layers and their bytes, and what a host would pull")
    plan.add_argument("--from", dest="other", metavar="OTHER", help="a matrix whose image the host has")
    push = verb(
        "push", verbs.do_push, "push the image of a matrix into a registry, signed, with its SBOM and provenance"
    )
    push.add_argument("--to", metavar="REGISTRY/NAME", help="where it goes (default: `registry` in config.toml)")
    push.add_argument("--key", metavar="FILE", help="cosign's private key (default: `key` in config.toml)")
    push.add_argument(
        "--moving-tag", action="store_true", help="let the tag MATRIX name it, too, once all was read back and verified"
    )
    push.add_argument("--compression", choices=("gzip", "zstd"), default="gzip", help="of its layers (default: gzip)")
    push.add_argument("--plain-http", action="store_true", help="no TLS; on the loopback address that need not be said")
    about = "the state of every patch site; exit status 3 if one is of no known shape"
    patches = verb("patches", verbs.do_patches, about, matrix=False)
    patches.usage = "builder patches (MATRIX | [--sglang V] [--flashinfer V]) [options]"
    patches.add_argument("matrix", metavar="MATRIX", nargs="?", help="a matrix whose lock says which releases")
    patches.add_argument("--sglang", metavar="V", help="a release of sglang, instead of a matrix")
    patches.add_argument("--flashinfer", metavar="V", help="a release of flashinfer, instead of a matrix")
    shown = patches.add_mutually_exclusive_group()
    shown.add_argument("--models", action="store_true", help="which model classes can be EAGLE-3 targets, and why not")
    shown.add_argument("--diff", action="store_true", help="print what the matrix's patches change, as a unified diff")
    _sources(patches, "a folder in which wheels are looked for first")
    about = "whether the native files of these releases fit together; exit status 3 if not"
    abi = verb("abi", verbs.do_abi, about, matrix=False)
    abi.set_defaults(matrix=None)
    abi.usage = "builder abi (REQUIREMENT… | --symbol SYMBOL) [options]"
    abi.add_argument("requirements", metavar="REQUIREMENT", nargs="*", help="as in sgl-kernel==0.3.21 torch==2.9.1")
    abi.add_argument("--python", default="3.11", metavar="V", help="the Python that they are for (default: 3.11)")
    abi.add_argument(
        "--base",
        default="bookworm",
        metavar="B",
        help="bookworm (the default), bullseye, trixie, focal, jammy, noble, el8 or el9",
    )
    abi.add_argument("--platform", default="linux/amd64", metavar="P", help="linux/amd64 (the default) or linux/arm64")
    abi.add_argument("--find", metavar="PACKAGE", help="which releases of PACKAGE fit; torch or 'torch>=2.9'")
    about = "which torch releases export a name that a loader did not find; without REQUIREMENT"
    abi.add_argument("--symbol", metavar="SYMBOL", help=about)
    abi.add_argument("--strict", action="store_true", help="exit status 3 for what is uncertain, too")
    _sources(abi, "a folder in which wheels are looked for first")
    about = "which GPUs compiled code is for; exit status 3 if a file that --gpu would load has none for it"
    arch = verb("arch", verbs.do_arch, about, matrix=False)
    arch.set_defaults(matrix=None)
    arch.add_argument(
        "subjects",
        metavar="FILE|REQUIREMENT",
        nargs="+",
        help="FILE.so, FILE.whl, or a release as in sgl-kernel==0.3.21",
    )
    arch.add_argument(
        "--platform", default="linux/amd64", metavar="P", help="of releases: linux/amd64 (the default) or linux/arm64"
    )
    arch.add_argument("--gpu", action="append", default=[], metavar="CC", help="a compute capability, as in 12.0")
    driver = arch.add_mutually_exclusive_group()
    driver.add_argument("--driver", metavar="V", help="the driver, as in 580.159.04: PTX that it does not know is none")
    driver.add_argument(
        "--cuda-driver", metavar="V", help="the same by the CUDA version that nvidia-smi names, as in 13.0"
    )
    _sources(arch, "a folder in which wheels are looked for first")
    smoke = verb("smoke", verbs.do_smoke, "run the smoke test again on a built image, or kernels on GPUs", matrix=False)
    smoke.add_argument("image", metavar="IMAGE", help="an image of this builder")
    smoke.add_argument("--user", metavar="UID[:GID]", help="as this user instead of the image's own", type=_user)
    gpus = "kernels with known results on these GPUs, instead: all, a count, or device=0,1; exit status 3 if none ran"
    smoke.add_argument("--gpus", metavar="G", help=gpus)
    run = verb("run", verbs.do_run, "run COMMAND in the image, on GPUs; the exit status is COMMAND's", matrix=False)
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
    run.add_argument("--here", action="store_true", help="COMMAND's working folder is this one, read-only")
    run.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="keep command, output and exit status in DIR/TIME-LOCK; no terminal then",
    )
    run.add_argument("-i", "--interactive", action="store_true", help="hand on standard input")
    about = "an environment report → its facts, the matrix they make, and why it fails"
    repro = verb("repro", verbs.do_repro, about, matrix=False)
    repro.set_defaults(matrix=None)
    repro.add_argument("report", metavar="REPORT", nargs="?", help="a file with the report, or - for standard input")
    repro.add_argument("--write", metavar="NAME", help="write the matrix as matrices/NAME.yaml")
    repro.add_argument(
        "--date", metavar="DATE", help="the day of the report (default: the day after the newest package in it)"
    )
    repro.add_argument(
        "--live",
        metavar="CONTAINER|IMAGE",
        nargs="?",
        const="",
        help="this machine, a running container or an image instead of a report",
    )
    repro.add_argument("--report-only", action="store_true", help="with --live: print the report itself, to be pasted")
    repro.add_argument("--no-wheels", action="store_true", help="read no wheels: rules and facts alone")
    repro.add_argument("--bundle", metavar="FILE", help="write facts, matrix and verdicts as one .tar.gz, to hand on")
    _sources(repro, "a folder in which wheels are looked for first")
    diff = verb("diff", verbs.do_diff, "what differs between two stacks, most suspicious first", matrix=False)
    diff.set_defaults(matrix=None)
    sides = "a matrix, a lock file, an image, a container, or `live` for this machine"
    diff.add_argument("a", metavar="A", help=sides)
    diff.add_argument("b", metavar="B", help="the same")
    diff.add_argument("--no-wheels", action="store_true", help="read no wheels: versions, rules and facts alone")
    _sources(diff, "a folder in which wheels are looked for first")
    about = "which change between a good and a bad stack breaks COMMAND"
    bisect = verb("bisect", verbs.do_bisect, about, matrix=False)
    bisect.usage = "builder bisect GOOD BAD [options] [-- COMMAND …]"
    bisect.set_defaults(matrix=None, command=[])
    bisect.add_argument("good", metavar="GOOD", help="a matrix on whose stack COMMAND succeeds")
    bisect.add_argument("bad", metavar="BAD", help="a matrix on whose stack it fails")
    bisect.add_argument("--static", action="store_true", help="by the verdicts alone: nothing is built or run")
    bisect.add_argument("--within", metavar="PACKAGE", help="over the releases of one package between the two")
    bisect.add_argument("--log", metavar="DIR", type=Path, help="where it is noted down (default: bisect-GOOD-BAD)")
    bisect.add_argument("--host", action="store_true", help="run COMMAND here with each lock, instead of in its image")
    _sources(bisect, "a folder in which wheels are looked for first")
    about = "what a host can run, and why not; exit status 3 if it cannot"
    doctor = verb("doctor", verbs.do_doctor, about, matrix=False)
    doctor.add_argument(
        "subject", metavar="MATRIX|IMAGE", nargs="?", help="what should run there (default: the host by itself)"
    )
    doctor.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="ssh://[user@]host, context:NAME … (default: this one)",
    )
    doctor.add_argument("--facts", type=Path, metavar="FILE", help="facts of a host, as --collect printed them")
    doctor.add_argument(
        "--collect", action="store_true", help="print the facts, without anything personal, and judge nothing"
    )
    doctor.add_argument("--strict", action="store_true", help="exit status 3 for what is uncertain, too")
    doctor.add_argument("--plain-http", action="store_true", help="the registry of IMAGE does not speak TLS")
    about = "is this image what it is called: signature, lock, SBOM, provenance, contents; exit status 7 if not"
    verify = verb("verify", verbs.do_verify, about, matrix=False)
    verify.add_argument("image", metavar="IMAGE", help="REGISTRY/NAME:TAG, a bundle's file, or an image of the engine")
    verify.add_argument("--pub", metavar="FILE", help="the public key that has to have signed it")
    verify.add_argument("--signed-as", default="", metavar="NAME", help="REGISTRY/NAME that it was copied from")
    verify.add_argument("--plain-http", action="store_true", help="the registry speaks HTTP without TLS")
    bundle = verb("bundle", verbs.do_bundle, "the image, signed, with all that proves it, as one file")
    bundle.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write")
    bundle.add_argument("--key", metavar="FILE", help="the private key to sign with; its password: COSIGN_PASSWORD")
    bundle.add_argument("--from", dest="source", metavar="REGISTRY/NAME", help="out of a registry, as signed there")
    bundle.add_argument("--pub", metavar="FILE", help="with --from: the public key that has to have signed it")
    bundle.add_argument("--plain-http", action="store_true", help="the registry speaks HTTP without TLS")
    load = verb("load", verbs.do_load, "verify a bundle, load it, run its smoke test, give it its names", matrix=False)
    load.add_argument("file", metavar="FILE", help="what `builder bundle` wrote")
    load.add_argument("--pub", metavar="FILE", help="the public key that has to have signed it")
    _onto_hosts(load)
    pull = verb("pull", verbs.do_pull, "verify the image of a matrix and bring it onto hosts: pulled, tested, tagged")
    about = "the registry it is in (default: `registry` in config.toml)"
    pull.add_argument("--from", dest="source", metavar="REGISTRY/NAME", help=about)
    pull.add_argument("--pub", metavar="FILE", help="the public key that has to have signed it")
    pull.add_argument("--plain-http", action="store_true", help="no TLS; on the loopback address that need not be said")
    _onto_hosts(pull)
    hosts = verb("hosts", verbs.do_hosts, "what was put on which host", matrix=False)
    hosts.add_argument("--forget", metavar="NAME", help="remove the records of this host; nothing is changed on it")
    bake = verb(
        "bake", verbs.do_bake, "build, prove and tag several images in one run, on any buildx builder", matrix=False
    )
    bake.add_argument("matrices", metavar="MATRIX", nargs="*", help="which (default: all in matrices/)")
    bake.add_argument("--builder", metavar="NAME", help="a builder of buildx, or a Docker context")
    about = "REGISTRY/NAME in which each matrix keeps a build cache; or `inline`, in the images themselves"
    bake.add_argument("--cache-to", metavar="REF", default="", help=about)
    bake.add_argument("--cache-from", metavar="REF", action="append", default=[], help="REGISTRY/NAME with caches")
    bake.add_argument("--push", metavar="REF", help="REGISTRY/NAME to which what was built is pushed, as `push` does")
    bake.add_argument("--key", type=Path, metavar="FILE", help="with --push: the key to sign with")
    bake.add_argument("--plain-http", action="store_true", help="with --push: the registry does not speak TLS")
    bake.add_argument("--print", dest="show", action="store_true", help="print the bake file and build nothing")
    _sources(bake, "a folder in which wheels that are on no index are looked for first")
    prune = verb(
        "prune", verbs.do_prune, "what this builder keeps on this machine: images, build cache, files", matrix=False
    )
    prune.add_argument("--yes", action="store_true", help="free it (without this, it is only shown)")
    prune.add_argument("--keep", action="append", default=[], metavar="MATRIX", help="keep the image of this matrix")
    return top


def _onto_hosts(verb: argparse.ArgumentParser) -> None:
    """The options of the verbs that bring an image onto hosts."""
    forms = "ssh://[user@]host[:port], context:NAME, tcp://host:2376, unix:///path or local (default: `hosts` in config.toml)"
    verb.add_argument("--host", action="append", default=[], metavar="HOST", help=forms)
    verb.add_argument("--jobs", type=_count, default=4, metavar="N", help="hosts at a time (default: 4)")
    verb.add_argument(
        "--no-smoke", dest="smoke", action="store_false", help="tag it without running its smoke test there"
    )
    verb.add_argument("--gpus", default="none", metavar="G", help="run kernels on these GPUs, too: all, or device=0,1")
    verb.add_argument("--anyway", action="store_true", help="go on where doctor says that the host cannot run it")
    verb.add_argument("--dry-run", action="store_true", help="say what each host would get, and change nothing")


def _count(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 64:
        raise argparse.ArgumentTypeError(f"`{value}` is not a number from 1 to 64")
    return int(value)


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
    """Ours and, for `run` and `bisect`, COMMAND: all that is after the first `--`, which argparse would take apart."""
    if argv[:1] not in (["run"], ["bisect"]) or "--" not in argv:
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
        with remembered():
            status = int(run(arguments))
        # Here, where what keeps it from being written is still told as an error. Without a stdout (`>&-`) it does nothing.
        print(end="", flush=True)
    except BuilderError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        forget()
        print("interrupted: what was not finished is not tagged", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): no traceback, and none from the interpreter's own flush.
        _drop_output()
        return int(ExitCode.UNFORESEEN)
    except OSError as error:
        told = _told(error)
        if told is None:
            raise
        # Standard error may be on the disk that is full.
        with contextlib.suppress(OSError):
            print(told, file=sys.stderr)
        return int(told.exit_code)
    return status


def _drop_output() -> None:
    """Let what standard output still holds go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: OSError) -> BuilderError | None:
    """The error for what any verb may meet: a disk that is full or a quota that is used up, a word too long to name a file."""
    because = error.strerror or str(error)
    if error.errno == errno.ENAMETOOLONG:
        name = str(error.filename or "")
        return UsageError(
            "a name is too long for a file", where=name[:60] + ("…" if len(name) > 60 else ""), because=because
        )
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = str(error.filename or "")
    try:
        print(end="", flush=True)
    except OSError:
        where = "standard output"
        _drop_output()
    hint = "free space there, or name another place; `builder prune --yes` frees what is the builder's own"
    return BuildError("the disk is full", where=where, because=because, hint=hint)
