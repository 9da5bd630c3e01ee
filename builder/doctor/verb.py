"""`builder doctor [MATRIX|IMAGE]`: what a host can run, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.doctor import report
from builder.doctor.collect import PATIENCE, collect, local_shell
from builder.doctor.configs import of_config, of_inspected
from builder.doctor.evaluate import Diagnosis, evaluate
from builder.doctor.facts import HostFacts, read_facts
from builder.doctor.needs import Needs, of_matrix
from builder.errors import BuilderError, ExitCode, UsageError
from builder.lock import check_current, lock_path, read_lock
from builder.matrix import find_matrix, list_matrices, load
from builder.nearest import nearest, no_matrix

if TYPE_CHECKING:
    from builder.hosts.host import Host

WORKERS = 16
"""Hosts that are asked at a time."""


@dataclass(frozen=True)
class Question:
    """What was asked: of which host (`this host` for none), about what; ``strict`` makes `uncertain` an exit status of 3."""

    subject: str | None = None
    hosts: tuple[str, ...] = ()
    facts: Path | None = None
    strict: bool = False
    plain_http: bool = False


@dataclass(frozen=True)
class Asked:
    """One host: its diagnosis, or the error that kept from one. ``matrices`` are those that it was looked at for."""

    name: str
    diagnosis: Diagnosis | None = None
    error: BuilderError | None = None
    matrices: tuple[tuple[str, Diagnosis | None, str], ...] = ()

    def exit_code(self, strict: bool) -> ExitCode:
        if self.diagnosis is None:
            return self.error.exit_code if self.error is not None else ExitCode.UNFORESEEN
        bad = ("broken", "uncertain") if strict else ("broken",)
        return ExitCode.FINDINGS if self.diagnosis.verdict in bad else ExitCode.OK

    def as_json(self) -> dict[str, Any]:
        if self.diagnosis is None:
            return {"message": str(self.error), "exit": int(self.exit_code(False))}
        data = report.as_json(self.diagnosis)
        if self.matrices:
            data["matrices"] = [
                {"matrix": name, "verdict": found.verdict if found else None, "because": why}
                for name, found, why in self.matrices
            ]
        return data

    def as_text(self) -> str:
        if self.diagnosis is None:
            return f"{self.name}\n{self.error}"
        text = report.as_text(self.name, self.diagnosis)
        return f"{text}\n\n{report.matrices_text(self.matrices)}" if self.matrices else text


@dataclass(frozen=True)
class Outcome:
    """All hosts that were asked."""

    asked: tuple[Asked, ...]
    strict: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """0 if all are fine; else that of the failed hosts if they agree; else the smallest of them."""
        failed = {asked.exit_code(self.strict) for asked in self.asked} - {ExitCode.OK}
        return min(failed, default=ExitCode.OK)

    @property
    def unreached(self) -> ExitCode:
        """The same where nothing is judged: of the hosts that could not be asked."""
        return min({asked.exit_code(False) for asked in self.asked if asked.error is not None}, default=ExitCode.OK)

    def as_json(self) -> dict[str, Any]:
        if len(self.asked) == 1:
            return self.asked[0].as_json()
        hosts = [{"name": asked.name, **asked.as_json()} for asked in self.asked]
        return {"ok": self.exit_code == ExitCode.OK, "hosts": hosts}

    def as_text(self) -> str:
        return "\n\n".join(asked.as_text() for asked in self.asked)

    def collected(self) -> dict[str, Any]:
        """The facts alone; for several hosts by their names."""
        found = [(asked.name, asked.diagnosis.facts.as_json() if asked.diagnosis else None) for asked in self.asked]
        return found[0][1] or {} if len(found) == 1 else {"hosts": [{"name": name, "host": it} for name, it in found]}


def doctor(question: Question, matrices: Path) -> Outcome:
    """Ask, evaluate, and put together what to say.

    Raises `UsageError` for a subject or a file of facts that is none, and what reaching the only host raises.
    """
    if question.facts is not None and question.hosts:
        raise UsageError("`--facts` and `--host` together", because="a file is of one host that is not asked")
    needs = needs_of(question, matrices) if question.subject is not None else None
    if question.facts is not None:
        asked = [_judged(question.facts.name, read_facts(question.facts), needs, matrices)]
    elif not question.hosts:
        asked = [_judged("this host", _here(), needs, matrices)]
    else:
        asked = _others(question.hosts, needs, matrices)
    if len(asked) == 1 and asked[0].error is not None:
        raise asked[0].error
    return Outcome(tuple(asked), question.strict)


def _here() -> HostFacts:
    from builder.engine import connect

    return collect(local_shell, connect)


def _judged(name: str, facts: HostFacts, needs: Needs | None, matrices: Path) -> Asked:
    found = evaluate(facts, needs)
    return Asked(name, found, matrices=tuple(_stacks(found, matrices)) if needs is None else ())


def _stacks(alone: Diagnosis, matrices: Path) -> list[tuple[str, Diagnosis | None, str]]:
    """Which of the matrices the host runs. A matrix that has no lock, or an old one, is told and not judged."""
    rows: list[tuple[str, Diagnosis | None, str]] = []
    for path in list_matrices(matrices):
        try:
            found = evaluate(alone.facts, _of_path(path))
        except BuilderError as error:
            rows.append((path.stem, None, error.what))
            continue
        rows.append((path.stem, found, report.decides(found, alone.findings)))
    return rows


def _others(names: Sequence[str], needs: Needs | None, matrices: Path) -> list[Asked]:
    from builder.hosts.host import Host

    # A name that is none is told before anybody is asked.
    hosts = [Host.parse(name) for name in names]
    with ThreadPoolExecutor(min(WORKERS, len(hosts))) as pool:
        return list(pool.map(lambda host: _other(host, needs, matrices), hosts))


def _other(host: Host, needs: Needs | None, matrices: Path) -> Asked:
    with host:
        try:
            return _judged(host.name, facts_of(host), needs, matrices)
        except BuilderError as error:
            return Asked(host.name, error=host.explain(error))


def facts_of(host: Host) -> HostFacts:
    """The facts of a host that is reached. Raises `UnreachableError` and the like."""
    return collect(lambda script: host.run_shell(script, PATIENCE), host.engine)


def examine(host: Host, needs: Needs | None) -> Diagnosis:
    """Facts and verdict of one host: what `pull` and `load` ask before anything is sent."""
    return evaluate(facts_of(host), needs)


# --- what is needed ---------------------------------------------------------------------------------------------------


def _of_path(path: Path) -> Needs:
    matrix, lock = load(path).matrix, read_lock(lock_path(path))
    check_current(lock, matrix, lock_path(path))
    return of_matrix(matrix, lock)


def needs_of(question: Question, matrices: Path) -> Needs:
    """The needs of MATRIX or IMAGE: of an image in a registry by its manifest and config, of one that is here by the engine's word.

    Raises `UsageError` where there is neither.
    """
    subject = question.subject or ""
    names = [path.stem for path in list_matrices(matrices)]
    if subject in names or subject.endswith((".yaml", ".yml")):
        return _of_path(find_matrix(subject, matrices))
    registry = subject.partition("/")[0]
    if "/" in subject and ("." in registry or ":" in registry or registry == "localhost"):
        return _in_registry(subject, question.plain_http)
    return _in_engine(subject, names, question)


def _in_registry(subject: str, plain_http: bool) -> Needs:
    import json

    from builder.registry.client import RegistryClient
    from builder.registry.reference import Reference
    from builder.settings import load as settings

    reference = Reference.parse(subject)
    client = RegistryClient(reference, settings(), plain_http)
    try:
        _, manifest = client.image(reference.digest or reference.tag or "latest")
        config = json.loads(client.blob(str(manifest["config"]["digest"])))
    finally:
        client.close()
    return of_config(subject, config, manifest)


def _in_engine(subject: str, names: Sequence[str], question: Question) -> Needs:
    from builder.engine import connect
    from builder.registry.transport import api

    try:
        engine = connect()
    except BuilderError as error:
        raise no_matrix(error, subject, names) from error
    image = engine.find(subject)
    if image is None:
        near = nearest(subject, names)
        raise UsageError(
            f"there is no matrix and no image `{subject}`",
            where=engine.host,
            hint=f"did you mean `{near}`"
            if near
            else "see `builder list`; an image in a registry is REGISTRY/NAME:TAG",
        )
    here = not question.hosts and question.facts is None
    # Here it is already.
    return of_inspected(subject, api(engine).inspect_image(subject), unpacked=None if here else image.size)
