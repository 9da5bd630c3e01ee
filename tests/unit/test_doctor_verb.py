"""`builder doctor`: what is asked of whom, what is printed, exit statuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from builder import cli
from builder.doctor import verb
from builder.doctor.facts import HostFacts, read_facts
from builder.errors import BuilderError, BuildError, UnreachableError, UsageError
from builder.hosts.host import Host
from tests.host_cases import HOSTS

GOOD, OLD = HOSTS / "made-good.json", HOSTS / "made-driver575.json"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["doctor", *arguments])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is the made host on which nothing is wrong."""
    monkeypatch.setattr(verb, "_here", lambda: read_facts(GOOD))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, HostFacts | BuilderError]:
    """Hosts by name, with what comes of asking them."""
    answers: dict[str, HostFacts | BuilderError] = {}

    def ask(host: Host) -> HostFacts:
        answer = answers[host.name]
        if isinstance(answer, BuilderError):
            raise answer
        return answer

    monkeypatch.setattr(verb, "facts_of", ask)
    return answers


# --- one host ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_this_host_by_itself_and_what_it_runs(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.startswith("this host\n  system    ubuntu 24.04, kernel 6.8.0-85-generic, x86_64\n")
    assert out.endswith("\nthis host: ok\n\nstacks on it\n  cu128       ok\n  cu130       ok\n  cu130-next  ok\n")


def test_a_file_of_facts(run: Run) -> None:
    code, out, err = run("cu130", "--facts", str(OLD))
    assert (code, err) == (3, "")
    assert out.endswith("\ncu130 on made-driver575.json: broken, 1 error\n")


def test_which_stacks_an_older_driver_runs(run: Run) -> None:
    code, out, _ = run("--facts", str(OLD))
    assert code == 0
    assert out.endswith(
        "stacks on it\n  cu128       ok\n  cu130       broken     driver 575.64.05 is older than 580, and gives CUDA 12.9\n"
        "  cu130-next  broken     driver 575.64.05 is older than 580, and gives CUDA 12.9\n"
    )


def test_json_of_one_host(run: Run) -> None:
    code, out, _ = run("cu130", "--facts", str(OLD), "--json")
    data = json.loads(out)
    assert code == 3
    assert set(data) == {"host", "verdict", "findings", "needs"}
    assert (data["verdict"], data["host"]["driver"]["version"], data["needs"]["subject"]) == (
        "broken",
        "575.64.05",
        "cu130",
    )
    assert {"rule", "severity", "subject", "message", "hint", "source", "evidence"} <= set(data["findings"][0])


def test_json_of_a_host_by_itself(run: Run) -> None:
    _, out, _ = run("--facts", str(OLD), "--json")
    data = json.loads(out)
    assert (data["needs"], data["verdict"]) == (None, "ok")
    assert [(row["matrix"], row["verdict"]) for row in data["matrices"]] == [
        ("cu128", "ok"),
        ("cu130", "broken"),
        ("cu130-next", "broken"),
    ]


@pytest.mark.usefixtures("here")
def test_collected_facts_are_a_file_of_facts(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--collect")
    (tmp_path / "facts.json").write_text(out, encoding="utf-8")
    assert code == 0
    assert read_facts(tmp_path / "facts.json") == read_facts(GOOD)


def test_uncertain_is_an_exit_status_with_strict_alone(run: Run) -> None:
    facts = str(HOSTS / "110-phb.json")
    assert (run("--facts", facts)[0], run("--facts", facts, "--strict")[0]) == (0, 3)


def test_the_made_host_that_is_fine_is_fine_with_strict(run: Run) -> None:
    assert run("cu130", "--facts", str(GOOD), "--strict")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--facts", "x.json", "--host", "local"],
            "error: `--facts` and `--host` together\n  because: a file is of one host that is not asked\n",
        ),
        (
            ["--host", "http://x"],
            "error: `http://x` does not name a host\n  hint: allowed: `ssh://[user@]host[:port]`, `context:NAME`, "
            + "`tcp://host:2376`, `unix:///path` or `local`\n",
        ),
        (["matrices/none.yaml"], "error: there is no file `matrices/none.yaml`\n  hint: a name in `"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)


# --- several hosts ----------------------------------------------------------------------------------------------------


def test_one_other_host(run: Run, others: dict[str, Any]) -> None:
    others["ssh://gpu1"] = read_facts(OLD)
    code, out, _ = run("cu130", "--host", "ssh://alice@gpu1")
    assert code == 3
    # The user is nobody's business.
    assert out.endswith("\ncu130 on ssh://gpu1: broken, 1 error\n")


def test_one_other_host_that_is_not_reached(run: Run, others: dict[str, Any]) -> None:
    others["ssh://gpu1"] = UnreachableError("nothing answers to SSH on the machine")
    code, out, err = run("cu130", "--host", "ssh://gpu1")
    assert (code, out) == (5, "")
    assert err == "error: nothing answers to SSH on the machine\n  at: ssh://gpu1\n"


def test_several_hosts(run: Run, others: dict[str, Any]) -> None:
    others |= {
        "ssh://a": read_facts(GOOD),
        "ssh://b": read_facts(OLD),
        "ssh://c": UnreachableError("nothing answers to SSH on the machine"),
    }
    code, out, _ = run("cu130", "--host", "ssh://a", "--host", "ssh://b", "--host", "ssh://c", "--json")
    data = json.loads(out)
    # The smallest of 3 and 5.
    assert (code, data["ok"]) == (3, False)
    assert [(host["name"], host.get("verdict")) for host in data["hosts"]] == [
        ("ssh://a", "ok"),
        ("ssh://b", "broken"),
        ("ssh://c", None),
    ]
    assert data["hosts"][2]["exit"] == 5


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([read_facts(GOOD), read_facts(GOOD)], 0),
        ([read_facts(GOOD), UnreachableError("x")], 5),
        ([BuildError("x"), UnreachableError("x")], 5),
        ([read_facts(OLD), BuildError("x")], 3),
    ],
)
def test_the_exit_status_over_several_hosts(
    run: Run, others: dict[str, Any], answers: list[HostFacts | BuilderError], code: int
) -> None:
    others |= {"ssh://a": answers[0], "ssh://b": answers[1]}
    assert run("cu130", "--host", "ssh://a", "--host", "ssh://b")[0] == code


def test_facts_of_several_hosts(run: Run, others: dict[str, Any]) -> None:
    others |= {"ssh://a": read_facts(GOOD), "ssh://b": UnreachableError("x")}
    code, out, _ = run("--collect", "--host", "ssh://a", "--host", "ssh://b")
    data = json.loads(out)
    assert [host["name"] for host in data["hosts"]] == ["ssh://a", "ssh://b"]
    assert (data["hosts"][0]["host"]["driver"]["version"], data["hosts"][1]["host"]) == ("580.95.05", None)
    assert code == 5


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "asked"),
    [("unix:///run/a b.sock", "unix:///run/a b.sock"), ("local", "unix:///meant.sock"), (None, "unix:///meant.sock")],
)
def test_the_shell_of_this_machine_asks_the_engine_that_is_meant(
    given: str | None, asked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = tmp_path / "docker"
    client.write_text(f'#!/bin/sh\necho "$DOCKER_HOST" >> {tmp_path}/asked\necho \'{{"ServerVersion":"28.5.2"}}\'\n')
    client.chmod(0o755)
    monkeypatch.setenv("DOCKER_HOST", "unix:///meant.sock")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    facts = verb.facts_of(Host.parse(given)) if given else verb._here()
    assert facts.engine is not None and facts.engine.version == "28.5.2"
    assert set((tmp_path / "asked").read_text().splitlines()) == {asked}


# --- what is asked about ----------------------------------------------------------------------------------------------


class FakeImage:
    """A stand-in for an image of the engine."""

    labels: ClassVar[dict[str, str]] = {
        "sglang-stack": "image",
        "sglang-stack.gpus": "9.0",
        "sglang-stack.cuda": "13.0.2",
        "sglang-stack.driver": "580",
    }
    size = 11_000_000_000


class FakeApi:
    def inspect_image(self, name: str) -> dict[str, Any]:
        config = {"Env": ["NVIDIA_REQUIRE_CUDA=cuda>=13.0"], "Labels": FakeImage.labels}
        return {"Config": config, "Os": "linux", "Architecture": "amd64"}


class FakeEngine:
    """A stand-in for an engine that has one image."""

    host = "unix:///made"

    def find(self, name: str) -> FakeImage | None:
        return FakeImage() if name == "sglang-stack:made" else None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.engine.connect", FakeEngine)
    monkeypatch.setattr("builder.registry.transport.api", lambda engine: FakeApi())


@pytest.mark.usefixtures("engine")
def test_an_image_by_its_labels_alone(run: Run) -> None:
    code, out, _ = run("sglang-stack:made", "--facts", str(OLD), "--json")
    data = json.loads(out)
    assert (code, data["needs"]["require"], data["needs"]["gpus"]) == (3, "cuda>=13.0", ["9.0"])
    assert data["needs"]["unpacked"] == 11_000_000_000
    assert {finding["rule"] for finding in data["findings"] if finding["severity"] == "error"} == {"driver"}


@pytest.mark.usefixtures("engine", "here")
def test_an_image_that_is_here_needs_no_disk(run: Run) -> None:
    data = json.loads(run("sglang-stack:made", "--json")[1])
    assert data["needs"]["unpacked"] is None


@pytest.mark.usefixtures("engine")
def test_what_is_neither_a_matrix_nor_an_image(run: Run) -> None:
    code, out, err = run("cu131")
    assert (code, out) == (2, "")
    assert err == "error: there is no matrix and no image `cu131`\n  at: unix:///made\n  hint: did you mean `cu130`\n"


def test_a_matrix_without_a_lock_is_told_and_not_judged(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text((HOSTS.parents[2] / "matrices" / "cu128.yaml").read_text(encoding="utf-8"))
    outcome = verb.doctor(verb.Question(facts=GOOD), tmp_path)
    assert outcome.as_text().endswith("stacks on it\n  mine  not known  the matrix has no lock")


def test_a_subject_that_is_asked_about_and_has_no_lock(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text((HOSTS.parents[2] / "matrices" / "cu128.yaml").read_text(encoding="utf-8"))
    with pytest.raises(BuilderError, match="the matrix has no lock"):
        verb.doctor(verb.Question("mine", facts=GOOD), tmp_path)


def test_an_image_in_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "os": "linux",
        "architecture": "arm64",
        "config": {"Labels": FakeImage.labels, "Env": ["NVIDIA_REQUIRE_CUDA=cuda>=13.0", "A=B=C"]},
    }

    class Client:
        """A stand-in for a registry with one image."""

        def __init__(self, reference: Any, settings: Any, plain_http: bool) -> None:
            assert (str(reference), plain_http) == ("registry.example/team/stack:v1", True)

        def image(self, reference: str) -> tuple[str, dict[str, Any]]:
            assert reference == "v1"
            return "sha256:m", {"config": {"digest": "sha256:c"}, "layers": [{"size": 10}, {"size": 20}]}

        def blob(self, digest: str) -> bytes:
            assert digest == "sha256:c"
            return json.dumps(config).encode()

        def close(self) -> None:
            pass

    monkeypatch.setattr("builder.registry.client.RegistryClient", Client)
    question = verb.Question("registry.example/team/stack:v1", plain_http=True)
    found = verb.needs_of(question, Path("none"))
    assert (found.platform, found.compressed, found.estimated, found.require) == ("linux/arm64", 30, True, "cuda>=13.0")


def test_a_name_in_a_registry_that_is_none() -> None:
    with pytest.raises(UsageError):
        verb.needs_of(verb.Question("registry.example/Team/stack"), Path("none"))
