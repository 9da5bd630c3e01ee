"""What `pull` does on hosts, stage by stage; engines, doctor, registry and smoke test are stand-ins."""

from __future__ import annotations

import _thread
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from builder.doctor.evaluate import Diagnosis
from builder.doctor.facts import Gpu, HostFacts
from builder.doctor.needs import Needs
from builder.engine import Engine, Image
from builder.errors import BuildError, IntegrityError, UnreachableError, UsageError
from builder.findings import Finding, Severity
from builder.hosts import records, verb
from builder.hosts.delivery import Arrived, Delivery, Once, Say
from builder.hosts.host import Host
from builder.hosts.records import Smoke
from builder.hosts.verb import Delivered, Options, deliver
from builder.lock import lock_path, read_lock
from builder.trust.verify import Check, Verified

ROOT = Path(__file__).resolve().parents[2]
LOCK = read_lock(lock_path(ROOT / "matrices" / "cu128.yaml"))
NAMES = (f"sglang-stack:cu128-{LOCK.digest[:12]}", "sglang-stack:cu128")
CONFIG = "sha256:" + "c" * 64
NEEDS = cast("Needs", None)


@dataclass
class StandInEngine:
    """An engine that keeps names."""

    host: str
    images: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Image | None:
        identity = self.images.get(name)
        return Image(identity, (), {}, 0, ()) if identity else None

    def tag(self, image: str, names: tuple[str, ...]) -> None:
        self.images |= dict.fromkeys(names, image)

    def close(self) -> None:
        pass


def verified(ok: bool = True) -> Verified:
    layers = [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "sha256:" + "1" * 64, "size": 70}]
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": CONFIG, "size": 2}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": layers,
    }
    return Verified(
        reference="registry.example/stack:cu128-x",
        image=CONFIG,
        digest="sha256:" + "d" * 64,
        checks=(Check("signature", ok, "by the key abc…" if ok else "there is none"),),
        labels={"sglang-stack.matrix": "cu128"},
        lock=LOCK,
        manifest=json.dumps(manifest).encode(),
    )


class StandInDelivery:
    """Brings an image that was never anywhere. ``trouble`` is raised for that engine instead."""

    matrix, reference = "cu128", "registry.example/stack:cu128-x"

    def __init__(self, outcome: Verified | None = None) -> None:
        self.made: list[str] = []
        self.trouble: dict[str, Exception] = {}
        found = outcome or verified()
        self.verified = Once(lambda: self._verify(found))

    def _verify(self, found: Verified) -> Verified:
        self.made.append("verified")
        return found.require()

    def predicted(self, engine: Engine, verified: Verified) -> int:
        return 50

    def fetch(self, engine: Engine, verified: Verified, say: Say) -> Arrived:
        self.made.append(engine.host)
        if (trouble := self.trouble.get(engine.host)) is not None:
            raise trouble
        cast("StandInEngine", engine).images[CONFIG] = CONFIG
        return Arrived(CONFIG, 50, 20)


def diagnosis(verdict: Any = "ok", *findings: Finding, gpus: int = 1) -> Diagnosis:
    facts = HostFacts(collected="2026-11-30")
    found = tuple(Gpu(index=number, name="RTX PRO 6000", capability="12.0") for number in range(gpus))
    return Diagnosis(facts.model_copy(update={"gpus": found}), None, findings, verdict)


@dataclass
class Site:
    """The stand-ins of a test, and what they were asked."""

    engines: dict[str, StandInEngine] = field(default_factory=dict)
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)
    smoked: list[tuple[str, str]] = field(default_factory=list)
    smoke: Smoke = field(default_factory=lambda: Smoke(ok=True, checks=2))
    unreachable: set[str] = field(default_factory=set)

    def engine(self, host: Host) -> StandInEngine:
        if host.name in self.unreachable:
            raise UnreachableError("the machine is not reached", where=host.name, hint="see that it is up")
        return self.engines.setdefault(host.name, StandInEngine(host.name))

    def run(self, engine: StandInEngine, image: str, gpus: str, _: object) -> tuple[Smoke, list[dict[str, object]]]:
        self.smoked.append((engine.host, gpus))
        return self.smoke, [{"name": "load", "ok": self.smoke.ok}, {"name": "nvcc", "ok": True}]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    made = Site()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Host, "engine", lambda host: made.engine(host))
    monkeypatch.setattr(verb, "examine", lambda host, needs: made.diagnoses.get(host.name, diagnosis()))
    monkeypatch.setattr(verb, "verify_engine", lambda engine, image, lock: verified())
    monkeypatch.setattr(verb, "smoke_on", made.run)
    return made


Pull = Callable[..., Delivered]


@pytest.fixture
def pull(site: Site) -> Pull:
    def run(*hosts: str, delivery: StandInDelivery | None = None, **options: Any) -> Delivered:
        found = cast("Delivery", delivery or StandInDelivery())
        return deliver([f"ssh://{host}" for host in hosts], found, NEEDS, Options(**options))

    return run


def rows(delivered: Delivered) -> list[tuple[str, str, str, int]]:
    return [(each.host.removeprefix("ssh://"), each.state, each.stage, each.exit) for each in delivered.hosts]


# --- stages -----------------------------------------------------------------------------------------------------------


def test_it_gets_its_names_and_a_record(site: Site, pull: Pull) -> None:
    done = pull("a")
    assert (rows(done), done.exit_code) == ([("a", "tagged", "record", 0)], 0)
    assert site.engines["ssh://a"].images == dict.fromkeys((CONFIG, *NAMES), CONFIG)
    record = records.read("ssh://a", "cu128")
    assert record is not None
    assert (record.image, record.lock, record.doctor, len(record.gpus)) == (CONFIG, LOCK.digest, "ok", 1)


def test_it_is_verified_once_for_all_and_before_the_first_byte(pull: Pull) -> None:
    delivery = StandInDelivery()
    pull("a", "b", "c", delivery=delivery)
    assert delivery.made[0] == "verified"
    assert sorted(delivery.made[1:]) == ["ssh://a", "ssh://b", "ssh://c"]


def test_one_that_is_not_verified_gets_onto_no_host(site: Site, pull: Pull) -> None:
    delivery = StandInDelivery(verified(ok=False))
    done = pull("a", "b", delivery=delivery)
    assert rows(done) == [("a", "failed", "verify", 7), ("b", "failed", "verify", 7)]
    assert (done.exit_code, delivery.made) == (7, ["verified"])
    assert not any(engine.images for engine in site.engines.values())


def test_doctor_refuses_before_anything_is_asked_of_the_registry(site: Site, pull: Pull) -> None:
    finding = Finding(rule="gpu-absent", severity=Severity.ERROR, subject="gpus", message="no GPU", hint="add one")
    site.diagnoses["ssh://a"] = diagnosis("broken", finding)
    delivery = StandInDelivery()
    done = pull("a", delivery=delivery)
    assert (rows(done), delivery.made) == ([("a", "refused", "doctor", 3)], [])
    assert done.hosts[0].message == (
        "error: doctor says that this host cannot run the image: nothing was pulled\n"
        "  at: ssh://a\n"
        "  because: no GPU [gpu-absent]\n"
        "      hint: add one\n"
        "  hint: see all that was found: `builder doctor MATRIX --host HOST`; `--anyway` goes on all the same"
    )


def test_what_doctor_does_not_know_refuses_nothing(site: Site, pull: Pull) -> None:
    site.diagnoses["ssh://a"] = diagnosis("uncertain")
    assert pull("a").exit_code == 0


def test_anyway(site: Site, pull: Pull) -> None:
    site.diagnoses["ssh://a"] = diagnosis("broken")
    assert rows(pull("a", anyway=True)) == [("a", "tagged", "record", 0)]
    assert cast("records.Record", records.read("ssh://a", "cu128")).doctor == "broken"


def test_an_image_that_fails_its_smoke_test_gets_no_name(site: Site, pull: Pull) -> None:
    site.engines["ssh://a"] = StandInEngine("ssh://a", dict.fromkeys(NAMES, "sha256:old"))
    site.smoke = Smoke(ok=False)
    done = pull("a")
    assert rows(done) == [("a", "failed", "smoke", 3)]
    assert {site.engines["ssh://a"].images[name] for name in NAMES} == {"sha256:old"}
    assert records.records() == []
    assert "because: load\n" in done.hosts[0].message


def test_what_is_there_is_not_fetched(site: Site, pull: Pull) -> None:
    site.engines["ssh://a"] = StandInEngine("ssh://a", {CONFIG: CONFIG})
    delivery = StandInDelivery()
    done = pull("a", delivery=delivery)
    assert (rows(done), delivery.made) == ([("a", "had it", "record", 0)], ["verified"])
    assert (done.hosts[0].bytes_pulled, done.hosts[0].bytes_there) == (0, 70)
    assert site.smoked == [("ssh://a", "none")]


def test_what_passed_and_has_its_names_is_not_tested_again(site: Site, pull: Pull) -> None:
    pull("a")
    assert pull("a").hosts[0].smoke == Smoke(ok=True, checks=2)
    assert len(site.smoked) == 1


def test_an_image_that_lost_its_names_is_tested_again(site: Site, pull: Pull) -> None:
    pull("a")
    site.engines["ssh://a"].images[NAMES[1]] = "sha256:another"
    pull("a")
    assert len(site.smoked) == 2


def test_what_another_image_passed_is_nothing(site: Site, pull: Pull) -> None:
    pull("a")
    record = cast("records.Record", records.read("ssh://a", "cu128"))
    records.write(record.model_copy(update={"image": "sha256:" + "e" * 64}))
    pull("a")
    assert len(site.smoked) == 2


def test_what_an_interrupt_cuts_off_has_no_name(site: Site, pull: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = threading.Event()
    monkeypatch.setattr(Host, "close", lambda host: cut.set())

    class Cut(StandInDelivery):
        def fetch(self, engine: Engine, verified: Verified, say: Say) -> Arrived:
            _thread.interrupt_main()
            # As a connection that is closed under the one who reads from it.
            assert cut.wait(20)
            raise BuildError("the engine is gone")

    done = pull("a", "b", delivery=Cut(), jobs=1)
    assert (done.interrupted, done.exit_code) == (True, 130)
    told = "interrupted: nothing was named on this host"
    assert [(each.state, each.stage, each.exit, each.message) for each in done.hosts] == [
        ("failed", "pull", 130, told),
        ("failed", "connect", 130, told),
    ]
    assert site.engines["ssh://a"].images == {}


def test_on_gpus_it_is_tested_again(site: Site, pull: Pull) -> None:
    pull("a")
    pull("a", gpus="all")
    assert site.smoked == [("ssh://a", "none"), ("ssh://a", "all")]


def test_gpus_are_asked_for_where_there_are_any(site: Site, pull: Pull) -> None:
    site.diagnoses["ssh://b"] = diagnosis(gpus=0)
    pull("a", "b", gpus="all", jobs=1)
    assert site.smoked == [("ssh://a", "all"), ("ssh://b", "none")]


def test_without_the_smoke_test_the_record_says_so(site: Site, pull: Pull) -> None:
    assert pull("a", smoke=False).exit_code == 0
    assert site.smoked == []
    assert cast("records.Record", records.read("ssh://a", "cu128")).smoke is None


def test_a_dry_run_changes_nothing(site: Site, pull: Pull) -> None:
    site.engines["ssh://b"] = StandInEngine("ssh://b", {CONFIG: CONFIG})
    delivery = StandInDelivery()
    done = pull("a", "b", delivery=delivery, dry_run=True)
    assert rows(done) == [("a", "would pull", "verify", 0), ("b", "has it", "verify", 0)]
    assert [(each.predicted_bytes, each.bytes_there) for each in done.hosts] == [(50, 20), (0, 70)]
    assert (delivery.made, site.smoked, records.records()) == (["verified"], [], [])
    assert site.engines["ssh://a"].images == {}


# --- several ----------------------------------------------------------------------------------------------------------


def test_one_that_fails_keeps_no_other_from_it(site: Site, pull: Pull) -> None:
    site.unreachable.add("ssh://b")
    delivery = StandInDelivery()
    delivery.trouble["ssh://c"] = BuildError("the disk is full", hint="free some")
    done = pull("a", "b", "c", delivery=delivery)
    assert rows(done) == [("a", "tagged", "record", 0), ("b", "failed", "connect", 5), ("c", "failed", "pull", 6)]
    assert done.hosts[2].message == "error: the disk is full\n  at: ssh://c\n  hint: free some"


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([None, None], 0),
        ([BuildError("x"), None], 6),
        ([BuildError("x"), BuildError("y")], 6),
        ([IntegrityError("x"), UnreachableError("y")], 5),
        ([ValueError("x"), UnreachableError("y")], 1),
    ],
)
def test_the_exit_status_of_several(pull: Pull, errors: list[Exception | None], code: int) -> None:
    delivery = StandInDelivery()
    delivery.trouble = {f"ssh://{name}": error for name, error in zip("ab", errors, strict=True) if error}
    assert pull("a", "b", delivery=delivery).exit_code == code


def test_something_unforeseen_is_told_with_its_name(pull: Pull) -> None:
    delivery = StandInDelivery()
    delivery.trouble["ssh://a"] = ValueError("no")
    done = pull("a", "b", delivery=delivery)
    assert rows(done)[1] == ("b", "tagged", "record", 0)
    assert done.hosts[0].message == "error: something unforeseen\n  at: ssh://a\n  because: ValueError: no"


def test_a_host_named_twice(pull: Pull) -> None:
    with pytest.raises(UsageError) as caught:
        pull("a", "alice@a")
    assert str(caught.value) == "error: a host is named twice\n  because: ssh://a, ssh://alice@a"


# --- what is told -----------------------------------------------------------------------------------------------------


def test_the_table(site: Site, pull: Pull) -> None:
    site.unreachable.add("ssh://b")
    done = pull("a", "b")
    hosts = tuple(replace(each, seconds=2.2) for each in done.hosts)
    assert replace(done, hosts=hosts).as_text() == (
        "ssh://b:\n"
        "error: the machine is not reached\n"
        "  at: ssh://b\n"
        "  hint: see that it is up\n"
        "\n"
        "host     state              pulled  there  smoke test  time\n"
        "ssh://a  tagged             50 B    20 B   ok, no GPU  2 s\n"
        "ssh://b  failed at connect  0 B     0 B    -           2 s"
    )


def test_json_has_the_shape_of_the_contract(pull: Pull) -> None:
    data = json.loads(json.dumps(pull("a").as_json()))
    assert data.keys() == {"ok", "matrix", "reference", "digest", "verify", "hosts"}
    (row,) = data["hosts"]
    assert row.keys() == {
        "host", "ok", "state", "stage", "exit", "message", "bytes_pulled", "bytes_there", "predicted_bytes",
        "doctor", "smoke", "record", "seconds",
    }  # fmt: skip
    assert row["doctor"] == {"verdict": "ok", "findings": []}
    assert row["smoke"]["checks"] == [{"name": "load", "ok": True}, {"name": "nvcc", "ok": True}]
