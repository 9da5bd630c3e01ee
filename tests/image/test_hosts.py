"""Images onto hosts, for real: a signed image in a registry, engines as hosts, one of them behind a real SSH server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builder.errors import BuilderError, BuildError, ExitCode, UnreachableError
from builder.hosts.host import Host
from tests.image.engines import SecondEngine, small_disk
from tests.image.onhosts import Pushed
from tests.image.sshd import Sshd, sshd_program

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if os.geteuid() != 0 or shutil.which("ssh") is None:
        words = "NO SSH, the tests of hosts behind it did not run: they need root and OpenSSH's client"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)
    return sshd_program(tmp_path_factory.mktemp("sshd"))


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondEngine]:
    """A host on this machine, with the containerd store."""
    with SecondEngine(tmp_path_factory.mktemp("near") / "engine", "containerd") as engine:
        yield engine


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondEngine]:
    """The engine that logins by SSH reach."""
    with SecondEngine(tmp_path_factory.mktemp("far") / "engine") as engine:
        yield engine


@pytest.fixture(scope="module")
def sshd(far: SecondEngine, program: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("ssh") / "server", far.address, program=program) as server, server.client():
        yield server


@pytest.fixture(scope="module")
def tagged(pushed: Pushed, near: SecondEngine, sshd: Sshd) -> dict[str, Any]:
    """`first` on both hosts, and on one that does not answer: what `builder pull` told."""
    done = pushed.pull("first", "ssh://gpu1", near.address, "ssh://127.0.0.1:1")
    assert done.stdout, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return {**data, "exit": done.returncode, "progress": done.stderr}


# --- pull -------------------------------------------------------------------------------------------------------------


def test_two_hosts_get_it_and_one_that_does_not_answer_keeps_neither_from_it(tagged: dict[str, Any]) -> None:
    rows = {row["host"]: (row["state"], row["stage"], row["exit"]) for row in tagged["hosts"]}
    assert rows.pop("ssh://127.0.0.1:1") == ("failed", "connect", 5)
    assert set(rows.values()) == {("tagged", "record", 0)}, tagged
    assert tagged["exit"] == ExitCode.UNREACHABLE
    assert tagged["verify"]["ok"] is True
    assert all(row["smoke"]["ok"] for row in tagged["hosts"] if row["ok"])


def test_what_was_predicted_is_what_was_pulled(tagged: dict[str, Any]) -> None:
    fresh = [row for row in tagged["hosts"] if row["ok"]]
    assert [row["bytes_pulled"] for row in fresh] == [row["predicted_bytes"] for row in fresh]
    assert min(row["bytes_pulled"] for row in fresh) > 100_000_000


def test_a_host_by_ssh_has_the_image_under_both_names(tagged: dict[str, Any], far: SecondEngine) -> None:
    said = far.docker("run", "--rm", "--network", "none", "sglang-stack:first").stdout
    assert said.startswith("first: A small stack for tests\n")
    images = far.docker("images", "--format", "{{.Tag}}", "sglang-stack").stdout.split()
    assert sorted(images) == ["first", f"first-{tagged['verify']['checks'][3]['detail'][:12]}"]


def test_the_record_is_of_that_image(tagged: dict[str, Any], pushed: Pushed, near: SecondEngine) -> None:
    records = [json.loads(Path(row["record"]).read_text()) for row in tagged["hosts"] if row["record"]]
    assert {record["host"] for record in records} == {"ssh://gpu1", near.address}
    for record in records:
        assert (record["matrix"], record["digest"]) == ("first", tagged["digest"])
        assert record["image"] == tagged["verify"]["image"]
        assert record["smoke"]["ok"] is True


def test_it_is_not_pulled_or_tested_again(tagged: dict[str, Any], pushed: Pushed, near: SecondEngine) -> None:
    before = len(pushed.registry.requests())
    done = pushed.pull("first", near.address)
    row = json.loads(done.stdout)["hosts"][0]
    assert (done.returncode, row["state"], row["bytes_pulled"], row["smoke"]["checks"]) == (0, "had it", 0, [])
    blobs = [request.blob for request in pushed.registry.requests()[before:]]
    layers = set(json.loads(_manifest(pushed, tagged["digest"]))["layers"][0].values())
    assert not set(filter(None, blobs)) & layers


def _manifest(pushed: Pushed, digest: str) -> bytes:
    return pushed.registry.blob_path(digest).read_bytes()


def test_a_dry_run_says_what_comes_and_nothing_does(tagged: dict[str, Any], pushed: Pushed, near: SecondEngine) -> None:
    done = pushed.pull("second", near.address, options=("--anyway", "--dry-run"))
    row = json.loads(done.stdout)["hosts"][0]
    assert (done.returncode, row["state"], row["bytes_pulled"]) == (0, "would pull", 0)
    # OS, Python and CUDA are there from `first`.
    assert 0 < row["predicted_bytes"] < row["bytes_there"]
    assert "second" not in near.docker("images", "-a").stdout


def test_doctor_refuses_a_host_without_gpus_before_the_first_byte(pushed: Pushed, near: SecondEngine) -> None:
    before = len(pushed.registry.requests())
    done = pushed.pull("second", near.address, options=())
    row = json.loads(done.stdout)["hosts"][0]
    assert (done.returncode, row["state"], row["stage"]) == (3, "refused", "doctor")
    assert "this host has no GPU of NVIDIA [gpu-absent]" in row["message"]
    assert len(pushed.registry.requests()) == before


# --- faults in the middle of a pull -----------------------------------------------------------------------------------


@pytest.fixture
def old(tagged: dict[str, Any], near: SecondEngine) -> Iterator[str]:
    """An image that has the names of `second` on the host, and runs: `first`, under them. Its id."""
    near.docker("tag", "sglang-stack:first", "sglang-stack:second")
    yield near.docker("image", "inspect", "--format", "{{.Id}}", "sglang-stack:second").stdout.strip()
    near.docker("rmi", "sglang-stack:second", check=False)


def still_there(host: SecondEngine, image: str) -> None:
    """The old image has its name, runs, and nothing of the new one has a name."""
    assert host.docker("image", "inspect", "--format", "{{.Id}}", "sglang-stack:second").stdout.strip() == image
    said = host.docker("run", "--rm", "--network", "none", "sglang-stack:second").stdout
    assert said.startswith("first: ")
    assert "second-" not in host.docker("images").stdout


def pulling(pushed: Pushed, *hosts: str, at: int = 2_000_000) -> subprocess.Popen[str]:
    """A pull of `second` that is under way: slow, and so many bytes through."""
    pushed.throttle.rate = 1_500_000
    before = pushed.throttle.down
    argv = pushed.argv("second", *hosts, options=("--anyway", "--no-smoke"))
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, env=pushed.environment(), stdout=pipe, stderr=pipe, text=True)
    try:
        pushed.throttle.wait_for(lambda: pushed.throttle.down - before, at, seconds=120)
    except BaseException:
        process.kill()
        raise
    return process


@pytest.fixture
def slow(pushed: Pushed) -> Iterator[None]:
    yield
    pushed.throttle.mend()
    pushed.throttle.rate = 200_000_000


def told(process: subprocess.Popen[str], seconds: float = 200) -> tuple[int, list[dict[str, Any]]]:
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert out, errors
    return process.returncode, json.loads(out)["hosts"]


def test_an_interrupt_leaves_no_name(pushed: Pushed, near: SecondEngine, old: str, slow: None) -> None:
    process = pulling(pushed, near.address)
    process.send_signal(signal.SIGINT)
    code, rows = told(process, 60)
    assert code == 130
    assert [(row["state"], row["message"]) for row in rows] == [
        ("failed", "interrupted: nothing was named on this host")
    ]
    still_there(near, old)


def test_a_registry_that_goes_away(pushed: Pushed, near: SecondEngine, old: str, slow: None) -> None:
    process = pulling(pushed, near.address)
    pushed.throttle.cut()
    code, rows = told(process)
    assert (code, rows[0]["stage"], rows[0]["exit"]) == (5, "pull", 5), rows
    still_there(near, old)


def test_an_engine_that_is_killed(pushed: Pushed, near: SecondEngine, old: str, slow: None) -> None:
    process = pulling(pushed, near.address)
    near.kill()
    try:
        code, rows = told(process)
    finally:
        near.start()
    assert (code, rows[0]["stage"], rows[0]["exit"]) == (6, "pull", 6), rows
    still_there(near, old)


def test_a_disk_that_is_full(pushed: Pushed, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 250_000_000) as disk, SecondEngine(tmp_path / "engine", data=disk) as host:
        done = pushed.pull("second", host.address, options=("--anyway", "--no-smoke"))
        row = json.loads(done.stdout)["hosts"][0]
        assert (done.returncode, row["stage"], row["exit"]) == (6, "pull", 6), row
        assert "no space left on device" in row["message"]
        assert host.docker("images", "--quiet", "sglang-stack").stdout == ""


# --- what leads to a host ---------------------------------------------------------------------------------------------


def refused(text: str) -> BuilderError:
    with Host.parse(text) as host, pytest.raises(BuilderError) as caught:
        host.engine()
    return caught.value


def test_the_users_configuration_gives_a_host_its_address(sshd: Sshd, far: SecondEngine) -> None:
    with Host.parse("ssh://gpu1") as host:
        assert host.engine().info().data_root == far.data
        assert host.run_shell("echo $DOCKER_HOST", 30) == f"{far.address}\n"


def test_nothing_of_a_connection_stays(sshd: Sshd) -> None:
    with Host.parse("ssh://gpu1") as host:
        engine = host.engine()
        folder = Path(engine.host.removeprefix("unix://")).parent
        assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    deadline = time.monotonic() + 20
    while f"-F {sshd.folder}" in _commands():
        assert time.monotonic() < deadline, _commands()
        time.sleep(0.1)


def _commands() -> str:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def test_a_host_key_that_is_not_known(sshd: Sshd) -> None:
    known = (sshd.folder / "known_hosts").read_text()
    (sshd.folder / "known_hosts").write_text("")
    try:
        error = refused("ssh://gpu1")
    finally:
        (sshd.folder / "known_hosts").write_text(known)
    assert isinstance(error, UnreachableError)
    assert str(error) == (
        "error: the machine's host key is not known\n"
        "  at: ssh://gpu1\n"
        "  because: Host key verification failed.\n"
        "  hint: look at it and accept it once: `ssh gpu1 true`"
    )


def test_a_host_key_that_changed(sshd: Sshd) -> None:
    sshd.known(sshd.folder / "other.pub")
    try:
        error = refused("ssh://gpu1")
    finally:
        sshd.known(sshd.folder / "host.pub")
    assert error.what == "the machine's host key is another one than before"
    assert error.hint.startswith("find out why first: it may be another machine. Then `ssh-keygen -R gpu1`")


def test_a_key_that_is_refused(sshd: Sshd) -> None:
    with sshd.client("other"):
        error = refused("ssh://gpu1")
    assert isinstance(error, UnreachableError)
    assert (error.what, error.because) == (
        "the machine refused every key",
        "root@127.0.0.1: Permission denied (publickey).",
    )


@pytest.fixture
def behind(program: tuple[str, str], tmp_path: Path) -> Callable[[str, str], Sshd]:
    def make(docker_host: str, environment: str = "") -> Sshd:
        return Sshd(tmp_path / "server", docker_host, program=program, environment=environment)

    return make


def test_an_engine_that_does_not_run_there(behind: Callable[..., Sshd]) -> None:
    with behind("unix:///nowhere/docker.sock") as server, server.client():
        error = refused("ssh://gpu1")
    assert isinstance(error, BuildError)
    assert error.what == "the machine's Docker Engine does not answer"
    assert "/nowhere/docker.sock" in error.because


def test_no_docker_client_there(behind: Callable[..., Sshd], tmp_path: Path) -> None:
    with behind("unix:///nowhere/docker.sock", f'PATH="{tmp_path}"') as server, server.client():
        error = refused("ssh://gpu1")
    assert isinstance(error, BuildError)
    assert error.what == "there is no Docker client on the machine"
