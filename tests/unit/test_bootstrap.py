"""Setting up a bare machine: what is chosen and what is said. Nothing is unpacked and no engine is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder import archive, bootstrap
from builder.archive import Archive, SetupError
from tests.made import ROOT


@pytest.fixture(autouse=True)
def machine(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own: tools, sockets and the exec-root below a temporary folder, no engine anywhere."""
    monkeypatch.setattr(archive, "TOOLS", short_folder / "tools")
    monkeypatch.setattr(archive, "UNPACKED", short_folder / "tools" / "root")
    monkeypatch.setattr(bootstrap, "ENGINE", short_folder / "tools" / "engine")
    monkeypatch.setattr(bootstrap, "EXEC_ROOT", short_folder / "run")
    monkeypatch.setattr(bootstrap, "DEFAULT_SOCKET", short_folder / "docker.sock")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("ENGINE", raising=False)
    monkeypatch.setattr(bootstrap, "engine_installed", lambda: None)
    # A fault in what is tested here must not set up an engine on the machine that runs the tests.
    for name in ("unpack_engine", "start_engine", "setup_packages", "clean"):
        monkeypatch.setattr(bootstrap, name, lambda *_, name=name: pytest.fail(f"`{name}` was about to run"))
    (short_folder / "tools" / "engine").mkdir(parents=True)
    return short_folder


def system(monkeypatch: pytest.MonkeyPatch, codename: str, name: str = "Debian GNU/Linux 12 (bookworm)") -> None:
    monkeypatch.setattr(
        archive, "os_release", lambda: {"VERSION_CODENAME": codename, "PRETTY_NAME": name, "ID": "debian"}
    )


@pytest.fixture
def listen(machine: Path) -> Iterator[Callable[..., Path]]:
    """Something that answers on a socket: an engine, or another program."""
    servers: list[socket.socket] = []

    def start(path: Path, answer: bytes = b"HTTP/1.0 200 OK\r\n\r\nOK") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(path))
        server.listen()
        servers.append(server)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return path

    yield start
    for server in servers:
        server.close()


def refusal(call: Callable[[], object]) -> tuple[str, str, str, int]:
    with pytest.raises(SetupError) as caught:
        call()
    return caught.value.what, caught.value.because, caught.value.hint, caught.value.code


# --- which engine -----------------------------------------------------------------------------------------------------


def test_the_users_own_address_comes_first(
    machine: Path, listen: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    listen(machine / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", "tcp://build.example:2376")
    assert bootstrap.engine_host() == "tcp://build.example:2376"


def test_an_engine_at_the_default_address(machine: Path, listen: Callable[..., Path]) -> None:
    listen(machine / "docker.sock")
    assert bootstrap.engine_host() == f"unix://{machine}/docker.sock"
    assert bootstrap.setup_engine() == f"unix://{machine}/docker.sock"


def test_an_engine_of_ours_comes_before_the_default_address(
    machine: Path, listen: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    listen(machine / "docker.sock")
    listen(machine / "run" / "docker.sock")
    monkeypatch.setattr(bootstrap, "engine_pid", lambda: 1)
    assert bootstrap.engine_host() == f"unix://{machine}/run/docker.sock"


def test_what_answers_and_is_no_engine(machine: Path, listen: Callable[..., Path]) -> None:
    listen(machine / "docker.sock", b"SSH-2.0-x\r\n")
    assert bootstrap.engine_host() is None


def test_a_socket_that_nobody_listens_on(machine: Path) -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(machine / "docker.sock"))
    server.close()
    assert not bootstrap.engine_answers(machine / "docker.sock")
    assert not bootstrap._in_use(machine / "docker.sock")


def test_no_engine(machine: Path) -> None:
    assert bootstrap.engine_host() is None


@pytest.mark.parametrize("text", ["", "x", "999999999", "-1"])
def test_a_pid_file_that_says_nothing(machine: Path, text: str) -> None:
    (machine / "tools" / "engine" / "docker.pid").write_text(text)
    assert bootstrap.engine_pid() is None


def test_a_pid_that_is_another_programs_by_now(machine: Path) -> None:
    (machine / "tools" / "engine" / "docker.pid").write_text(str(os.getpid()))
    assert bootstrap.engine_pid() is None


def test_the_pid_of_our_engine(machine: Path) -> None:
    folder = machine / "tools" / "engine"
    script = "import time; print('up', flush=True); time.sleep(30)"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "dockerd", "--data-root", f"{folder}/data"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        (folder / "docker.pid").write_text(f"{process.pid}\n")
        assert bootstrap.engine_pid() == process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
    assert bootstrap.engine_pid() is None


def test_where_our_engine_listens_is_remembered(machine: Path) -> None:
    assert bootstrap.our_socket() == machine / "run" / "docker.sock"
    (machine / "tools" / "engine" / "socket").write_text("/var/run/docker.sock\n")
    assert bootstrap.our_socket() == Path("/var/run/docker.sock")


def test_no_engine_of_ours_is_stopped(machine: Path) -> None:
    assert bootstrap.stop_engine() is False


# --- what is said -----------------------------------------------------------------------------------------------------


def test_an_engine_that_is_installed_and_does_not_run(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "engine_installed", lambda: "/usr/bin/dockerd")
    assert refusal(bootstrap.setup_engine) == (
        "the Docker Engine does not answer",
        f"`/usr/bin/dockerd` is installed but nothing listens on {machine}/docker.sock",
        "start it (`systemctl start docker`), name its address in `DOCKER_HOST`, or leave it and use one in .tools: `ENGINE=own`",
        6,
    )


def test_none_may_be_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE", "none")
    assert refusal(bootstrap.setup_engine) == (
        "no Docker Engine answers",
        "`ENGINE=none` forbids to set one up",
        "start one, or run without `ENGINE=none`",
        6,
    )


def test_a_system_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, "", "Fedora Linux 40")
    assert refusal(bootstrap.setup_engine) == (
        "a Docker Engine cannot be set up on `Fedora Linux 40`",
        "this is done from the distribution's archive, on bookworm, noble, trixie only",
        "install a Docker Engine 23 or newer with buildx, start it, and run the command again",
        6,
    )


def test_a_release_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, "bullseye", "Debian GNU/Linux 11 (bullseye)")
    assert refusal(bootstrap.setup_engine)[0] == "a Docker Engine cannot be set up on `Debian GNU/Linux 11 (bullseye)`"


def test_a_user_who_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, "bookworm")
    monkeypatch.setattr("builder.bootstrap.shutil.which", lambda *_, **__: "/usr/bin/apt-get")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert refusal(bootstrap.setup_engine) == (
        "a Docker Engine needs root",
        "this is uid 1000, and a Docker Engine is a system service",
        "run as root once (`sudo make engine`), or install a Docker Engine and join its group",
        6,
    )


def test_root_on_debian_gets_an_engine_and_is_told(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    system(monkeypatch, "bookworm")
    done: list[str] = []

    def start(store: str) -> str:
        done.append(f"start {store}")
        return "unix:///ours"

    monkeypatch.setattr("builder.bootstrap.shutil.which", lambda *_, **__: "/usr/bin/apt-get")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bootstrap, "unpack_engine", lambda release: done.append(f"unpack {release}"))
    monkeypatch.setattr(bootstrap, "start_engine", start)
    assert bootstrap.setup_engine("containerd") == "unix:///ours"
    assert done == ["unpack bookworm", "start containerd"]
    assert capsys.readouterr().err == (
        f"no Docker Engine is installed: setting one up in {machine}/tools (remove it with `make clean-tools`)\n"
    )


def test_an_error_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ENGINE", "none")
    assert bootstrap.main(["engine"]) == 6
    assert capsys.readouterr() == (
        "",
        (
            "error: no Docker Engine answers\n"
            "  because: `ENGINE=none` forbids to set one up\n"
            "  hint: start one, or run without `ENGINE=none`\n"
        ),
    )


def test_the_address_alone_is_on_stdout(
    machine: Path, listen: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    listen(machine / "docker.sock")
    assert bootstrap.main(["engine"]) == 0
    assert capsys.readouterr() == (f"unix://{machine}/docker.sock\n", "")


def test_a_program_that_fails_is_told_with_its_last_words() -> None:
    assert refusal(lambda: archive.run(["sh", "-c", "echo one >&2; echo two >&2; exit 3"])) == (
        "`sh -c …` exited with 3",
        "one\n  two",
        "see that the machine's apt sources can be reached: `apt-get update`",
        6,
    )


def test_a_program_that_there_is_not() -> None:
    what, _, hint, code = refusal(lambda: archive.run(["no-such-program"]))
    assert (what, hint, code) == (
        "`no-such-program` was not found",
        "this set-up needs Debian's or Ubuntu's apt and dpkg",
        6,
    )


def test_a_python_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert refusal(lambda: bootstrap.make_venv(tmp_path / "venv", tmp_path / "dev.txt")) == (
        "Python 3.9.2 is too old",
        "the builder needs Python 3.11 or newer",
        "set `PYTHON=/path/to/python3.11`",
        2,
    )


def test_a_virtual_environment_of_these_requirements_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    (tmp_path / "dev.txt").write_text("x==1\n")
    (tmp_path / "venv").mkdir()
    digest = hashlib.sha256(b"x==1\n" + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    (tmp_path / "venv" / ".requirements.sha256").write_text(f"{digest}\n")
    monkeypatch.setattr(archive, "run", lambda *_, **__: pytest.fail("something was run"))
    bootstrap.make_venv(tmp_path / "venv", tmp_path / "dev.txt")


# --- what the programs get --------------------------------------------------------------------------------------------


def test_where_nothing_was_unpacked_the_environment_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.tool_environment() == dict(os.environ)


def test_the_systems_programs_come_before_the_unpacked_ones(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine / "tools" / "root"
    (root / "usr" / "sbin").mkdir(parents=True)
    (root / "usr" / "lib" / "x86_64-linux-gnu").mkdir(parents=True)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    env = bootstrap.tool_environment()
    assert env["PATH"] == f"/usr/bin:{root}/usr/sbin"
    assert env["LD_LIBRARY_PATH"] == f"{root}/usr/lib/x86_64-linux-gnu:{root}/usr/lib"
    assert env["XTABLES_LIBDIR"] == f"{root}/usr/lib/x86_64-linux-gnu/xtables"


def test_a_program_is_the_systems_else_the_unpacked_one(machine: Path) -> None:
    folder = machine / "tools" / "root" / "usr" / "bin"
    folder.mkdir(parents=True)
    for name in ("sh", "only-here"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    assert bootstrap.find_program("only-here") == str(folder / "only-here")
    assert bootstrap.find_program("sh") != str(folder / "sh")
    assert bootstrap.find_program("nowhere") is None


def test_pip_does_not_take_constraints_of_other_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", "/x")
    monkeypatch.setenv("PIP_FIND_LINKS", "/y")
    monkeypatch.setenv("PIP_CERT", "/ca.pem")
    env = bootstrap._pip_environment()
    assert ("PIP_CONSTRAINT" in env, "PIP_FIND_LINKS" in env, env["PIP_CERT"]) == (False, False, "/ca.pem")


# --- the archive ------------------------------------------------------------------------------------------------------

TARGETS = """\
Packages|bookworm|main|https://archive.example/debian/
Translations|bookworm|main|https://archive.example/debian/
Packages|bookworm-security|main|https://archive.example/security/
Packages|bookworm|main|https://archive.example/debian/
Packages|bookworm|contrib|https://archive.example/debian/
"""


def test_the_suites_are_those_of_the_sources_not_of_what_the_system_fetched(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system(monkeypatch, "bookworm")
    asked: list[list[str]] = []

    def run(argv: list[str], **_: object) -> str:
        asked.append(
            [word for word in argv if word in ("update", "indextargets") or word.startswith("Dir::State::lists")]
        )
        return TARGETS

    monkeypatch.setattr(archive, "run", run)
    assert Archive().suites() == [
        ("bookworm", "https://archive.example/debian/"),
        ("bookworm-security", "https://archive.example/security/"),
    ]
    lists = f"Dir::State::lists={machine}/tools/apt/bookworm/lists"
    assert asked == [[lists, "update"], [lists, "indextargets"]]


def test_a_newer_release_is_taken_from_the_mirror_that_the_host_uses(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system(monkeypatch, "bookworm")
    monkeypatch.setattr(archive, "run", lambda *_, **__: TARGETS)
    assert Archive("trixie")._foreign_sources() == (
        "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] https://archive.example/debian/ trixie main\n"
    )


def test_a_host_without_a_source_of_its_release(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, "bookworm")
    monkeypatch.setattr(archive, "run", lambda *_, **__: TARGETS.replace("bookworm", "sid"))
    assert refusal(Archive("trixie")._foreign_sources) == (
        "no apt source for `bookworm` main was found",
        "the engine's packages are taken from the mirror that the machine already uses",
        "add the release's main component to the apt sources, or install a Docker Engine 23 or newer",
        6,
    )


def test_the_systems_apt_state_is_not_touched(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, "bookworm")
    ran: list[list[str]] = []

    def run(argv: list[str], **_: object) -> str:
        ran.append(argv)
        return "Inst part [1] (2)\nInst dep (1)\nConf part\n"

    monkeypatch.setattr(archive, "run", run)
    assert Archive("bookworm").missing(["part"]) == ["part", "dep"]
    for argv in ran:
        assert f"Dir::State::lists={machine}/tools/apt/bookworm/lists" in argv
        assert f"Dir::Cache={machine}/tools/apt/bookworm/cache" in argv
    assert ran[1][-5:] == ["-qq", "-s", "install", "--no-install-recommends", "part"]


def test_what_was_unpacked_is_not_fetched_again(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, "bookworm")
    ran: list[list[str]] = []

    def run(argv: list[str], cwd: Path | None = None, **_: object) -> str:
        ran.append(argv)
        if "download" in argv and cwd is not None:
            (cwd / "part_1_amd64.deb").write_text("")
        return ""

    monkeypatch.setattr(archive, "run", run)
    Archive("bookworm").unpack(["part"])
    assert ran[-1][:2] == ["dpkg-deb", "-x"]
    count = len(ran)
    Archive("bookworm").unpack(["part"])
    assert len(ran) == count


@pytest.mark.processes
@pytest.mark.parametrize("options", [["-I", "-S"], ["-S"]], ids=["isolated", "by path"])
def test_the_script_runs_on_a_bare_python(options: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *options, str(ROOT / "builder" / "bootstrap.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
def test_no_module_of_the_package_stands_before_the_standard_librarys(tmp_path: Path) -> None:
    # As `python builder/bootstrap.py` has it: the script's folder first. `ensurepip` needs the library's `bisect`.
    script = (
        "import runpy, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "sys.argv[:] = ['bootstrap', '--help']\n"
        "try:\n    runpy.run_path(sys.path[0] + '/bootstrap.py', run_name='__main__')\n"
        "except SystemExit:\n    import ensurepip\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, str(ROOT / "builder")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
def test_two_checkouts_have_sockets_of_their_own() -> None:
    script = "from builder import bootstrap; print(bootstrap.EXEC_ROOT)"
    places = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "BUILDER_TOOLS": tools},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for tools in ("/a/.tools", "/b/.tools", "/a/.tools")
    ]
    assert places[0] == places[2] != places[1]
    assert all(len(place.strip()) < 30 for place in places)


# --- cosign -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, list[str]]]:
    """What would be unpacked, and from which release; no program is found."""
    taken: list[tuple[str | None, list[str]]] = []
    monkeypatch.setattr(Archive, "unpack", lambda self, names, target=None: taken.append((self.release, list(names))))
    monkeypatch.setattr(bootstrap, "find_program", lambda name: None)
    monkeypatch.setattr("builder.bootstrap.shutil.which", lambda name: f"/usr/bin/{name}")
    return taken


@pytest.mark.parametrize("host", ["bookworm", "trixie"])
def test_cosign_comes_from_debian_13(
    host: str, unpacked: list[tuple[str | None, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    system(monkeypatch, host)
    bootstrap.setup_cosign()
    assert unpacked == [("trixie", ["cosign"])]


def test_no_cosign_for_ubuntu(unpacked: list[tuple[str | None, list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, "noble", "Ubuntu 24.04 LTS")
    assert refusal(bootstrap.setup_cosign) == (
        "`cosign` is no package of `noble`",
        "it is taken from Debian's archive, on bookworm, trixie only",
        "put a cosign 2 on the PATH, as its project releases it",
        6,
    )
    assert unpacked == []


def test_the_systems_cosign_is_taken(
    unpacked: list[tuple[str | None, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "find_program", lambda name: f"/usr/bin/{name}")
    bootstrap.setup_cosign()
    assert unpacked == []


def test_tools_without_cosign_are_of_use_all_the_same(
    unpacked: list[tuple[str | None, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    system(monkeypatch, "noble", "Ubuntu 24.04 LTS")
    monkeypatch.setattr(bootstrap, "unpack_engine", lambda release: None)
    monkeypatch.setattr(bootstrap, "setup_packages", lambda names: None)
    assert bootstrap.main(["tools"]) == 0
    assert capsys.readouterr().err == (
        "note: `cosign` is no package of `noble`: put a cosign 2 on the PATH, as its project releases it\n"
    )
