"""`builder pull` and `builder load` onto hosts: doctor, verify, fetch, contents, smoke test, names, record; each on its own.

The image is verified once for all hosts, before the first of them gets a byte. A host that fails keeps what it had under
the image's names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from builder import __version__
from builder.board import Board
from builder.doctor.evaluate import Diagnosis
from builder.doctor.needs import Needs
from builder.doctor.verb import examine
from builder.engine import Engine
from builder.errors import BuilderError, ExitCode, UsageError
from builder.files import pretty_size
from builder.findings import Finding, Severity
from builder.hosts import records
from builder.hosts.delivery import Delivery, there, total
from builder.hosts.fanout import FanOut, Reporter, Stopped
from builder.hosts.host import Host
from builder.hosts.smoke import Checks, smoke_on
from builder.labels import image_names
from builder.trust.verify import Verified, verify_engine

JOBS = 4
"""Hosts at a time."""

INTERRUPTED = 130


class SmokeFailedError(BuilderError):
    """The image does not pass its own test on a host."""

    exit_code = ExitCode.FINDINGS


class RefusedError(BuilderError):
    """Doctor says that the host cannot run the image."""

    exit_code = ExitCode.FINDINGS


@dataclass(frozen=True)
class Options:
    """How it is done. ``gpus`` is `none` for the build's own smoke test alone; ``anyway``: also where doctor says broken."""

    smoke: bool = True
    gpus: str = "none"
    anyway: bool = False
    dry_run: bool = False
    jobs: int = JOBS


@dataclass
class HostResult:
    """What became of one host. ``state``: tagged, had it, refused, failed; of a dry run: would pull, has it."""

    host: str
    ok: bool = False
    state: str = "failed"
    stage: str = "connect"
    exit: int = 0
    message: str = ""
    bytes_pulled: int = 0
    bytes_there: int = 0
    predicted_bytes: int = 0
    doctor: Diagnosis | None = None
    smoke: records.Smoke | None = None
    checks: Checks = field(default_factory=list)
    record: str | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """An entry of `hosts` in docs/distribution.md."""
        data = {name: value for name, value in vars(self).items() if name not in ("doctor", "smoke", "checks")}
        data["doctor"] = None
        if self.doctor is not None:
            found = [finding.model_dump(mode="json") for finding in self.doctor.findings]
            data["doctor"] = {"verdict": self.doctor.verdict, "findings": found}
        smoke = self.smoke
        data["smoke"] = {"ok": smoke.ok, "gpus": list(smoke.gpus), "checks": self.checks} if smoke else None
        return data


@dataclass(frozen=True)
class Delivered:
    """All hosts."""

    matrix: str
    reference: str
    verified: Verified | None
    hosts: tuple[HostResult, ...]
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """0 if all are fine; else that of the failed hosts if they agree; else the smallest of them. 130 interrupted."""
        if self.interrupted:
            return INTERRUPTED
        return min((result.exit for result in self.hosts if not result.ok), default=int(ExitCode.OK))

    def as_json(self) -> dict[str, Any]:
        """The shape `pull` of docs/distribution.md."""
        return {
            "ok": all(result.ok for result in self.hosts),
            "matrix": self.matrix,
            "reference": self.reference,
            "digest": self.verified.digest if self.verified else None,
            "verify": self.verified.as_json() if self.verified else None,
            "hosts": [result.as_json() for result in self.hosts],
        }

    def as_text(self) -> str:
        """What went wrong, in full; then a line for each host."""
        said: dict[str, list[str]] = {}
        for result in self.hosts:
            if result.message:
                said.setdefault(result.message, []).append(result.host)
        lines = [line for message, hosts in said.items() for line in (f"{', '.join(hosts)}:", message, "")]
        rows: list[tuple[str, ...]] = [("host", "state", "pulled", "there", "smoke test", "time")]
        rows += [_row(result) for result in self.hosts]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return "\n".join(lines)


def _row(result: HostResult) -> tuple[str, ...]:
    state = result.state if result.ok else f"{result.state} at {result.stage}"
    smoke = "-"
    if result.smoke is not None:
        where = "on GPUs" if result.smoke.gpus else "no GPU"
        smoke = f"ok, {where}" if result.smoke.ok else "FAILED"
    pulled = pretty_size(result.predicted_bytes if result.state == "would pull" else result.bytes_pulled)
    return (result.host, state, pulled, pretty_size(result.bytes_there), smoke, f"{result.seconds:.0f} s")


def deliver(texts: Sequence[str], delivery: Delivery, needs: Needs, options: Options) -> Delivered:
    """Bring an image onto hosts. What goes wrong on one of them is in its result and raises nothing.

    Raises `UsageError` for a host's name that is none, or is there twice.
    """
    hosts = {host.name: host for host in map(Host.parse, texts)}
    if len(hosts) != len(texts):
        raise UsageError("a host is named twice", because=", ".join(texts))
    results = {name: HostResult(name) for name in hosts}

    def work(name: str, reporter: Reporter) -> HostResult:
        return _one(hosts[name], results[name], delivery, needs, options, reporter, board)

    with Board("host", hosts) as board:
        fan_out = FanOut(board, work, lambda name: hosts[name].close(), options.jobs)
        fan_out.run(list(hosts))
        for name, result in results.items():
            if name not in fan_out.results:
                result.exit, result.message = INTERRUPTED, "interrupted: nothing was named on this host"
    verified = delivery.verified.value
    matrix = delivery.matrix or (verified.matrix if verified else "")
    return Delivered(matrix, delivery.reference, verified, tuple(results.values()), fan_out.interrupted)


def _one(
    host: Host,
    result: HostResult,
    delivery: Delivery,
    needs: Needs,
    options: Options,
    reporter: Reporter,
    board: Board,
) -> HostResult:
    began = time.monotonic()
    with host:
        try:
            _stages(host, result, delivery, needs, options, reporter)
            result.ok = True
        except BuilderError as error:
            if reporter.stopped:
                # What an interrupt cut off says so itself.
                raise Stopped from error
            refused = isinstance(error, RefusedError)
            result.state = "refused" if refused else "failed"
            # Verification is of the image, not of the host.
            told = error if result.stage == "verify" else host.explain(error)
            result.exit, result.message = int(error.exit_code), str(told)
        except Stopped:
            raise
        except Exception as error:
            if reporter.stopped:
                raise Stopped from error
            result.exit = int(ExitCode.UNFORESEEN)
            result.message = (
                f"error: something unforeseen\n  at: {host.name}\n  because: {type(error).__name__}: {error}"
            )
        finally:
            result.seconds = round(time.monotonic() - began, 1)
    board.end(host.name, result.state if result.ok else f"{result.state} at {result.stage}")
    return result


def _stages(
    host: Host,
    result: HostResult,
    delivery: Delivery,
    needs: Needs,
    options: Options,
    reporter: Reporter,
) -> None:
    def at(stage: str, text: str = "") -> None:
        result.stage = stage
        reporter.at(stage, text)

    at("connect")
    engine = host.engine()
    at("doctor")
    result.doctor = examine(host, needs)
    _refuse(result.doctor, options)
    at("verify")
    verified = delivery.verified()
    had = there(engine, verified)
    result.predicted_bytes = 0 if had else delivery.predicted(engine, verified)
    if options.dry_run:
        result.state = "has it" if had else "would pull"
        result.bytes_there = total(verified) - result.predicted_bytes
        return
    at("pull", pretty_size(result.predicted_bytes))
    if had is None:
        arrived = delivery.fetch(engine, verified, reporter.say)
        image, result.bytes_pulled, result.bytes_there = arrived.id, arrived.bytes_pulled, arrived.bytes_there
    else:
        image, result.bytes_there = had, total(verified)
    at("contents")
    verify_engine(engine, image, lock=verified.lock).require()
    if options.smoke:
        at("smoke")
    result.smoke, result.checks = _smoke(engine, image, verified, host.name, result.doctor, options, reporter)
    with reporter.whole():
        result.stage = "tag"
        engine.tag(image, names_of(verified))
        result.state = "had it" if had else "tagged"
        result.stage = "record"
        result.record = str(records.write(_record(host.name, verified, result)))


def _refuse(found: Diagnosis, options: Options) -> None:
    errors = [finding for finding in found.findings if finding.severity is Severity.ERROR]
    if found.verdict == "broken" and not options.anyway:
        raise RefusedError(
            "doctor says that this host cannot run the image: nothing was pulled",
            because="\n".join(_lines(finding) for finding in errors),
            hint="see all that was found: `builder doctor MATRIX --host HOST`; `--anyway` goes on all the same",
        )


def _lines(finding: Finding) -> str:
    parts = [f"{finding.message} [{finding.rule}]", f"  hint: {finding.hint}" if finding.hint else ""]
    return "\n".join(filter(None, parts))


def _smoke(
    engine: Engine,
    image: str,
    verified: Verified,
    name: str,
    found: Diagnosis,
    options: Options,
    reporter: Reporter,
) -> tuple[records.Smoke | None, Checks]:
    """Run the test. Of an image that has its names, and a record that it passed, it is not run again unless GPUs are asked for."""
    if not options.smoke:
        return None, []
    # Asked for, and known to have none: then the build's own test is what can be run. Where nothing is known they are tried.
    gpus = "none" if found.facts.gpus == () else options.gpus
    known = records.read(name, verified.matrix)
    if known and known.smoke and known.smoke.ok and known.image == verified.image and gpus == "none":
        named = [engine.find(each) for each in names_of(verified)]
        if all(each is not None and each.id == image for each in named):
            return known.smoke, []
    smoke, checks = smoke_on(engine, image, gpus, reporter)
    if not smoke.ok:
        failed = [str(check["name"]) for check in checks if not check["ok"] and not check.get("skipped")]
        raise SmokeFailedError(
            "the image does not pass its smoke test on this host: it got no name",
            because=", ".join(failed) or "no check ran on a GPU",
            hint=f"see it in full, on the host: `builder smoke {image[:19]}`",
        )
    return smoke, checks


def names_of(verified: Verified) -> tuple[str, str]:
    """The names that an image gets on a host: by content, and by matrix."""
    assert verified.lock is not None
    return image_names(verified.matrix, verified.lock.digest)


def _record(name: str, verified: Verified, result: HostResult) -> records.Record:
    assert verified.lock is not None and result.doctor is not None
    facts = result.doctor.facts
    return records.Record(
        host=name,
        matrix=verified.matrix,
        lock=verified.lock.digest,
        image=verified.image,
        digest=verified.digest,
        reference=verified.reference,
        driver=facts.driver.version,
        gpus=tuple(records.Gpu(name=gpu.name, capability=gpu.capability) for gpu in facts.gpus or ()),
        smoke=result.smoke,
        doctor=result.doctor.verdict,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        builder=__version__,
    )
