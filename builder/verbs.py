"""What each verb does with its command line; no logic. Heavy imports stay inside the verbs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

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


def do_list(arguments: argparse.Namespace) -> int:
    from builder.inventory import as_text, inventory

    rows = inventory(MATRICES)
    _print_json({"matrices": rows}) if arguments.json else print(as_text(rows))
    return ExitCode.OK


def do_check(arguments: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from builder.lock import check_current, lock_path, read_lock
    from builder.matrix import load
    from builder.rules import Context
    from builder.static.check import check

    path, site = _path(arguments), _site(arguments)
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    checked = check(
        Context(loaded, datetime.now(UTC).date(), lock, arguments.driver, arguments.cuda_driver),
        lock,
        site,
        wheels=arguments.look,
    )
    _print_json(checked.as_json(strict=arguments.strict)) if arguments.json else print(checked.as_text())
    return checked.exit_code(strict=arguments.strict)


def do_lock(arguments: argparse.Namespace) -> int:
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


def do_render(arguments: argparse.Namespace) -> int:
    from builder.rendering import render_verb

    path = _path(arguments)
    text = render_verb(path, diff=arguments.diff)
    if arguments.json:
        _print_json({"matrix": path.stem, "diff" if arguments.diff else "dockerfile": text})
    else:
        print(text, end="")
    return ExitCode.OK


def do_build(arguments: argparse.Namespace) -> int:
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


def do_plan(arguments: argparse.Namespace) -> int:
    from builder.matrix import find_matrix
    from builder.planning import as_json, as_text, plan
    from builder.registry.predict import Sizes
    from builder.settings import load

    other = find_matrix(arguments.other, MATRICES) if arguments.other else None
    rows = plan(_path(arguments), other, Sizes.of(load().cache))
    _print_json(as_json(rows)) if arguments.json else print(as_text(rows))
    return ExitCode.OK


def do_push(arguments: argparse.Namespace) -> int:
    from builder.registry.push import as_text, push
    from builder.settings import load

    data = push(
        _path(arguments),
        arguments.to,
        load(),
        key=arguments.key,
        moving_tag=arguments.moving_tag,
        compression=arguments.compression,
        plain_http=arguments.plain_http,
    )
    _print_json(data) if arguments.json else print(as_text(data))
    return ExitCode.OK


def do_patches(arguments: argparse.Namespace) -> int:
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


def do_abi(arguments: argparse.Namespace) -> int:
    if arguments.symbol is not None:
        return _symbol(arguments)
    if not arguments.requirements:
        raise UsageError("nothing to judge", hint="`builder abi sgl-kernel==0.3.21 torch==2.9.1`, or `--symbol SYMBOL`")
    import time
    from dataclasses import replace

    from builder.abi.answers import Asked

    began, site = time.monotonic(), _site(arguments)
    lines, python, base = arguments.requirements, arguments.python, arguments.base
    asked = Asked(lines, python, base, site, arguments.find, arguments.platform)
    answer = asked.recall(now := time.time())
    if answer is None:
        from builder.abi.report import answer_of
        from builder.abi.verb import ask

        report = ask(lines, site, python=python, base=base, find=arguments.find, platform=arguments.platform)
        answer = answer_of(report, now)
        if report.lasting:
            asked.remember(answer, now)
    said = {**answer.said, "seconds": round(time.monotonic() - began, 3)}
    _print_json(said) if arguments.json else print(replace(answer, said=said).as_text())
    bad = said["verdict"] == "broken" or (arguments.strict and said["verdict"] == "uncertain")
    return ExitCode.FINDINGS if bad else ExitCode.OK


def _symbol(arguments: argparse.Namespace) -> int:
    from builder.abi.symbol import look_up

    if arguments.requirements or arguments.find:
        raise UsageError("`--symbol` goes without REQUIREMENT", hint="the shipped tables say which torch exports it")
    report = look_up(arguments.symbol)
    _print_json(report.as_json()) if arguments.json else print(report.as_text())
    return ExitCode.OK


def do_arch(arguments: argparse.Namespace) -> int:
    from builder.archreport import as_json, as_text
    from builder.archverb import asked, look

    question = asked(arguments.gpu, arguments.driver, arguments.cuda_driver)
    report = look(arguments.subjects, question, _site(arguments), arguments.platform)
    _print_json(as_json(report)) if arguments.json else print(as_text(report))
    return report.exit_code


def do_smoke(arguments: argparse.Namespace) -> int:
    from builder.smoking import as_text, smoke, smoke_gpus

    if arguments.gpus is None:
        data = smoke(arguments.image, user=arguments.user)
    else:
        data = smoke_gpus(arguments.image, user=arguments.user, gpus=arguments.gpus)
    if arguments.json:
        _print_json(data)
    else:
        print(as_text(data))
    return ExitCode.OK if data["ok"] else ExitCode.FINDINGS


def do_run(arguments: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from builder.display import note
    from builder.running import as_shell, execute, find_client, prepare, record, run_argv

    options, engine = prepare(arguments, MATRICES)
    # What is printed finds the client by its name, as a shell does.
    argv = run_argv(options, "docker" if arguments.dry_run else find_client())
    if arguments.json:
        _print_json({"argv": argv, "docker_host": engine.host, "image": options.image})
        return ExitCode.OK
    if arguments.dry_run:
        print(as_shell(argv, engine.host))
        return ExitCode.OK
    recording = None
    if arguments.record is not None:
        recording = record(options, arguments.record, datetime.now(UTC))
        note(f"recorded in {recording.folder}")
    return execute(argv, engine, gpus=options.gpus != "none", recording=recording)


def do_repro(arguments: argparse.Namespace) -> int:
    from builder.repro.verb import as_json, as_text, read_report, repro, when_of

    site = _site(arguments)
    live = None
    if arguments.report_only and arguments.live is None:
        raise UsageError("`--report-only` without `--live`", hint="`builder repro --live --report-only`")
    if arguments.live is not None:
        from builder.repro.live import look

        if arguments.report is not None:
            raise UsageError("a report and `--live`", hint="leave one of the two out")
        live = look(arguments.live or None)
        text = live.text
        if arguments.report_only:
            print(text, end="")
            return ExitCode.OK
    elif arguments.report is None:
        raise UsageError("no report", hint="name a file, `-` for standard input, or `--live`")
    else:
        text = read_report(arguments.report)
    answer = repro(
        text,
        site,
        MATRICES,
        name=arguments.write,
        when=when_of(arguments.date),
        static=not arguments.no_wheels,
        live=live,
    )
    if arguments.bundle:
        from builder.repro.bundle import write_bundle

        write_bundle(Path(arguments.bundle), answer)
    _print_json(as_json(answer)) if arguments.json else print(as_text(answer))
    return answer.exit_code


def do_diff(arguments: argparse.Namespace) -> int:
    from builder.differences import as_json, as_text, compare, side

    site = _site(arguments)
    found = compare(side(arguments.a, MATRICES), side(arguments.b, MATRICES), site, wheels=not arguments.no_wheels)
    _print_json(as_json(found)) if arguments.json else print(as_text(found))
    return ExitCode.OK


def do_bisect(arguments: argparse.Namespace) -> int:
    from builder.bisect.verb import as_json, as_text, bisect

    found = bisect(arguments, MATRICES, _site(arguments))
    _print_json(as_json(found)) if arguments.json else print(as_text(found))
    return ExitCode.OK if found.culprit else ExitCode.FINDINGS


def do_doctor(arguments: argparse.Namespace) -> int:
    from builder.doctor.verb import Question, doctor

    hosts, facts = tuple(arguments.host), arguments.facts
    found = doctor(Question(arguments.subject, hosts, facts, arguments.strict, arguments.plain_http), MATRICES)
    if arguments.collect:
        _print_json(found.collected())
        return found.unreached
    _print_json(found.as_json()) if arguments.json else print(found.as_text())
    return found.exit_code


def do_verify(arguments: argparse.Namespace) -> int:
    from builder.settings import load
    from builder.trust.verb import compare, verify_image

    verified = verify_image(
        arguments.image,
        load(),
        pub=arguments.pub,
        plain_http=arguments.plain_http,
        signed_as=arguments.signed_as,
    )
    _print_json(verified.as_json()) if arguments.json else print(verified.as_text())
    if line := compare(verified, MATRICES):
        print(line, file=sys.stderr)
    if not arguments.json:
        verified.require()
    return ExitCode.OK if verified.ok else ExitCode.INTEGRITY


def do_bundle(arguments: argparse.Namespace) -> int:
    from builder.files import pretty_size
    from builder.matrix import load_matrix
    from builder.settings import load
    from builder.trust.bundling import bundle, bundle_from
    from builder.trust.cosign import public_key
    from builder.trust.verb import named_key, progress

    site, path, target = load(), _path(arguments), Path(arguments.output)
    load_matrix(path)  # what is wrong with it is said before a key is asked for
    if arguments.source:
        from builder.registry.client import RegistryClient
        from builder.registry.reference import Reference

        if arguments.key:
            raise UsageError(
                "`--key` with `--from`", hint="an image out of a registry keeps the signature it has there"
            )
        source, pub = Reference.named(arguments.source), public_key(named_key(arguments.pub, site, "pub"))
        with contextlib.closing(RegistryClient(source, site, arguments.plain_http)) as client:
            data = bundle_from(path, target, client, pub, progress("downloaded"))
    else:
        data = bundle(path, target, named_key(arguments.key, site, "key"), progress("saved"))
    if arguments.json:
        _print_json(data)
    else:
        print(f"{data['file']}: {pretty_size(data['bytes'])}, {data['matrix']} {data['digest']}")
        print(f"  sha256 {data['sha256']}, signed by the key {data['key'][:12]}…")
    return ExitCode.OK


def do_load(arguments: argparse.Namespace) -> int:
    from builder.hosts.cliverbs import load_verb
    from builder.settings import load
    from builder.trust.bundle import require_bundle

    require_bundle(Path(arguments.file))
    return load_verb(arguments, load())


def do_pull(arguments: argparse.Namespace) -> int:
    from builder.hosts.cliverbs import pull_verb
    from builder.settings import load as load_settings

    return pull_verb(arguments, _path(arguments), load_settings())


def do_hosts(arguments: argparse.Namespace) -> int:
    from builder.hosts.cliverbs import hosts_verb

    return hosts_verb(arguments)


def do_bake(arguments: argparse.Namespace) -> int:
    from builder.bakeverb import bake_verb
    from builder.settings import load, with_options

    return bake_verb(arguments, with_options(load(), arguments.index, arguments.wheels), MATRICES)


def do_prune(arguments: argparse.Namespace) -> int:
    from builder.pruning import prune

    data = prune(yes=arguments.yes, keep=arguments.keep, matrices=MATRICES)
    if arguments.json:
        _print_json(data)
    else:
        print(data["text"])
    return ExitCode.OK
