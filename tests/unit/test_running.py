"""`builder run`: the docker command, what is refused before it, and the exit status of COMMAND."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from builder import bootstrap, cli, running, verbs
from builder.engine import Image
from builder.errors import BuildError, LockError, UsageError
from builder.lock import lock_path, write_lock
from builder.running import Mount, RunOptions, run_argv
from tests.made import ROOT, TINY, artefact, lock_of, tiny

ID = "sha256:abcdef0123456789" + "0" * 48
VOLUME = "sglang-stack-cache-abcdef012345"


class FakeEngine:
    """Images by name, and what the engine lists of NVIDIA."""

    host = "unix:///var/run/docker.sock"

    def __init__(self, *names: str, labels: dict[str, str] | None = None, runtimes: tuple[str, ...] = ()) -> None:
        self.names, self.runtimes = names, runtimes
        self.labels = {"sglang-stack": "image"} if labels is None else labels

    def find(self, reference: str) -> Image | None:
        return Image(ID, self.names, self.labels, 1, ()) if reference in self.names else None

    def gpu_runtimes(self) -> tuple[str, ...]:
        return self.runtimes


@pytest.fixture
def matrices(tmp_path: Path) -> Path:
    """A folder with one locked matrix."""
    folder = tmp_path / "matrices"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    write_lock(lock_of(tiny().matrix, artefact("idna", "3.7")), lock_path(folder / "tiny.yaml"))
    return folder


TAG = f"sglang-stack:tiny-{lock_of(tiny().matrix, artefact('idna', '3.7')).digest[:12]}"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine(TAG, "mine:1")
    monkeypatch.setattr(running, "connect", lambda: fake)
    return fake


def arguments(*words: str) -> argparse.Namespace:
    ours, command = cli._command(["run", *words])
    parsed = cli.parser().parse_args(ours)
    parsed.command = command
    return parsed


def made(matrices: Path, *words: str) -> list[str]:
    """The docker command of a command line, without a terminal."""
    return run_argv(running.prepare(arguments(*words), matrices)[0])


def refusal(matrices: Path, *words: str) -> str:
    with pytest.raises(UsageError) as caught:
        running.prepare(arguments(*words), matrices)
    return str(caught.value)


def environment(*items: str) -> list[str]:
    return [part for item in items for part in ("--env", item)]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_least() -> None:
    assert run_argv(RunOptions("sglang-stack:x")) == [
        *("docker", "run", "--rm", "--pull", "never", "--gpus", "all", "--ipc", "host"),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "sglang-stack:x"),
    ]


def test_all_options_at_once() -> None:
    options = RunOptions(
        image="sglang-stack:x",
        command=("python3", "-m", "x", "--flag", "a b"),
        gpus="device=0,1",
        ipc="private",
        shm_size="16g",
        network="lab",
        publish=("127.0.0.1:30000:30000", "0.0.0.0:1:2"),
        user="1000:1000",
        name="k2",
        mounts=(
            Mount("bind", "/data/K2", "/models/K2", readonly=True),
            Mount("volume", "v", "/var/cache/sglang-stack"),
        ),
        environment=("A=b c", "HF_TOKEN"),
        nccl_p2p=False,
        terminal=True,
    )
    assert run_argv(options, "/x/docker") == [
        *("/x/docker", "run", "--rm", "--pull", "never", "--interactive", "--tty", "--name", "k2"),
        *("--gpus", '"device=0,1"', "--ipc", "private", "--shm-size", "16g"),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--network", "lab"),
        *("--publish", "127.0.0.1:30000:30000", "--publish", "0.0.0.0:1:2", "--user", "1000:1000"),
        *("--mount", "type=bind,source=/data/K2,target=/models/K2,readonly"),
        *("--mount", "type=volume,source=v,target=/var/cache/sglang-stack,volume-label=sglang-stack=cache"),
        *environment("NCCL_P2P_DISABLE=1", "A=b c", "HF_TOKEN"),
        *("sglang-stack:x", "python3", "-m", "x", "--flag", "a b"),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions("x", gpus="none"), []),
        (RunOptions("x", gpus="2"), ["--gpus", "2"]),
        (RunOptions("x", gpus="device=3"), ["--gpus", "device=3"]),
    ],
)
def test_gpus(options: RunOptions, words: list[str]) -> None:
    assert run_argv(options)[5:-7] == words


def test_private_shared_memory_has_a_size_of_its_own() -> None:
    assert run_argv(RunOptions("x", ipc="private"))[7:11] == ["--ipc", "private", "--shm-size", "32g"]


def test_standard_input_without_a_terminal() -> None:
    assert run_argv(RunOptions("x", interactive=True))[5:6] == ["--interactive"]


def test_a_folder_with_a_comma_and_a_quote_in_its_name() -> None:
    mount = Mount("bind", '/data/a,b"c', '/models/a,b"c', readonly=True)
    assert mount.option == 'type=bind,"source=/data/a,b""c","target=/models/a,b""c",readonly'


# --- the command line -------------------------------------------------------------------------------------------------


def test_a_matrix_is_the_image_of_its_lock(matrices: Path, engine: FakeEngine) -> None:
    assert made(matrices, "tiny", "--", "python3", "-m", "x", "--", "--gpus") == [
        *("docker", "run", "--rm", "--pull", "never", "--gpus", "all", "--ipc", "host"),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--mount", f"type=volume,source={VOLUME},target=/var/cache/sglang-stack,volume-label=sglang-stack=cache"),
        *(TAG, "python3", "-m", "x", "--", "--gpus"),
    ]


def test_an_image_with_everything(
    matrices: Path, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    model, hub = tmp_path / "Kimi-K2.5", tmp_path / "hub"
    for folder in (model, hub):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    owner = f"{os.getuid()}:{os.getgid()}"
    words = ["mine:1", "--gpus", "device=0,1", "--model", str(model), "--hf-cache", str(hub), "--user", owner]
    words += ["--publish", "30000", "--publish", "0.0.0.0:8000:80", "--env", "HF_TOKEN", "--env", "A=b"]
    words += ["--nccl-p2p", "off", "--name", "k2", "-i"]
    argv = made(matrices, *words)
    assert argv == [
        *("docker", "run", "--rm", "--pull", "never", "--interactive", "--name", "k2", "--gpus", '"device=0,1"'),
        *("--ipc", "host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--publish", "127.0.0.1:30000:30000", "--publish", "0.0.0.0:8000:80", "--user", owner),
        *("--mount", f"type=bind,source={model},target=/models/Kimi-K2.5,readonly"),
        *("--mount", f"type=bind,source={hub},target=/mnt/huggingface"),
        "--mount",
        f"type=volume,source={VOLUME}-u{os.getuid()},target=/var/cache/sglang-stack,volume-label=sglang-stack=cache",
        *environment("NCCL_P2P_DISABLE=1", "HF_HOME=/mnt/huggingface", "HF_TOKEN", "A=b"),
        "mine:1",
    ]
    assert "secret" not in " ".join(argv)


def test_no_cache_volume_and_the_hosts_network(matrices: Path, engine: FakeEngine) -> None:
    assert made(matrices, "mine:1", "--cache", "none", "--network", "host", "--gpus", "none") == [
        *("docker", "run", "--rm", "--pull", "never", "--ipc", "host"),
        *("--network", "host", "mine:1"),
    ]


def test_a_volume_of_ones_own(matrices: Path, engine: FakeEngine) -> None:
    argv = made(matrices, "mine:1", "--cache", "kernels")
    assert "type=volume,source=kernels,target=/var/cache/sglang-stack,volume-label=sglang-stack=cache" in argv


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--gpus", "0,1"],
            (
                "error: `--gpus 0,1` is not known\n"
                "  because: it takes all, none, a count, or device=0,1 (indexes or UUIDs)\n"
                "  hint: these GPUs: `--gpus device=0,1`"
            ),
        ),
        (
            ["--gpus", "some"],
            (
                "error: `--gpus some` is not known\n"
                "  because: it takes all, none, a count, or device=0,1 (indexes or UUIDs)"
            ),
        ),
        (
            ["--publish", "99999"],
            "error: `--publish 99999` is not known\n  because: it takes PORT, HOST-PORT:PORT or ADDRESS:HOST-PORT:PORT",
        ),
        (
            ["--env", "A-B=1"],
            "error: `A-B` is not an environment variable's name\n  because: `--env` takes K=V or K",
        ),
        (
            ["--env", "NOT_SET_HERE"],
            (
                "error: `NOT_SET_HERE` is not set here\n"
                "  because: `--env NOT_SET_HERE` hands on the value that it has\n"
                "  hint: set it, or write `--env NOT_SET_HERE=VALUE`"
            ),
        ),
        (
            ["--shm-size", "16g"],
            (
                "error: `--shm-size` has no effect with `--ipc host`\n"
                "  because: the container uses the host's /dev/shm\n"
                "  hint: leave it out, or add `--ipc private`"
            ),
        ),
        (
            ["--ipc", "private", "--shm-size", "much"],
            "error: `--shm-size much` is not known\n  because: it takes a size, as in 32g",
        ),
        (
            ["--network", "host", "--publish", "1"],
            (
                "error: `--publish` has no effect with `--network host`\n"
                "  because: its ports are the host's\n"
                "  hint: leave one of the two out"
            ),
        ),
        (
            ["--network", "none", "--publish", "1"],
            (
                "error: `--publish` has no effect with `--network none`\n"
                "  because: the container has no network\n"
                "  hint: leave one of the two out"
            ),
        ),
        (["--name=-x"], "error: `--name -x` is not known\n  because: it takes A-Z a-z 0-9 _ . -"),
        (["--json"], "error: `--json` goes with `--dry-run`\n  because: what COMMAND prints is not ours"),
        (
            ["--model", "/not/there"],
            "error: `--model` names a folder that does not exist\n  at: /not/there",
        ),
        (["--model", "/"], "error: `--model` names the whole disk\n  at: /"),
        (
            ["--hf-cache", "/not/there"],
            "error: `--hf-cache` names a folder that does not exist\n  at: /not/there",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_before_the_engine_is_asked(
    matrices: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.setattr(running, "connect", lambda: pytest.fail("the engine was asked"))
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    assert refusal(matrices, "tiny", *words) == text


@pytest.mark.parametrize(
    ("port", "published"),
    [
        ("30000", "127.0.0.1:30000:30000"),
        ("8000:30000", "127.0.0.1:8000:30000"),
        ("0.0.0.0:30000", "0.0.0.0:30000:30000"),
        ("[::]:8000:30000", "[::]:8000:30000"),
    ],
)
def test_ports_are_on_loopback_unless_an_address_is_given(port: str, published: str) -> None:
    assert running.check_publish([port]) == (published,)


# --- images -----------------------------------------------------------------------------------------------------------


def test_a_matrix_that_is_not_built(matrices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "connect", FakeEngine)
    assert refusal(matrices, "tiny") == (
        "error: the image of `tiny` is not built\n"
        "  at: unix:///var/run/docker.sock\n"
        f"  because: there is no `{TAG}`, which its lock names\n"
        "  hint: build it: `make image MATRIX=tiny`"
    )


def test_a_matrix_by_its_path(matrices: Path, engine: FakeEngine) -> None:
    assert made(matrices, str(matrices / "tiny.yaml"))[-1] == TAG


def test_a_matrix_that_was_changed_after_its_lock(matrices: Path, engine: FakeEngine) -> None:
    (matrices / "tiny.yaml").write_text(f"{TINY}extras: [idna==3.7]\n")
    with pytest.raises(LockError):
        running.prepare(arguments("tiny"), matrices)


@pytest.mark.parametrize(("target", "hint"), [("tinyy", "did you mean `tiny`"), ("zzz:1", "see `builder list`")])
def test_neither_a_matrix_nor_an_image(matrices: Path, engine: FakeEngine, target: str, hint: str) -> None:
    assert refusal(matrices, target) == (
        f"error: there is no matrix and no image `{target}`\n  at: unix:///var/run/docker.sock\n  hint: {hint}"
    )


def test_an_image_of_somebody_else(matrices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "connect", lambda: FakeEngine("debian:12", labels={}))
    assert refusal(matrices, "debian:12") == (
        "error: `debian:12` is not an image of this builder\n"
        "  because: it has no label `sglang-stack=image`\n"
        "  hint: run it with `docker run`: the folders that are mounted here would not be where it looks"
    )


# --- folders ----------------------------------------------------------------------------------------------------------


def test_two_models_of_one_name(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "K2", tmp_path / "b" / "K2"
    for folder in (one, two):
        folder.mkdir(parents=True)
    with pytest.raises(UsageError) as caught:
        running.model_mounts([one, two], "")
    assert str(caught.value) == (
        "error: two model folders are called `K2`\n"
        f"  at: {one}, {two}\n"
        "  because: both would be /models/K2\n"
        "  hint: rename one of them"
    )


def test_a_snapshot_of_the_hubs_cache_has_links_to_outside(tmp_path: Path) -> None:
    blob, snapshot = tmp_path / "blobs" / "abc", tmp_path / "snapshots" / "1"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    with pytest.raises(UsageError) as caught:
        running.model_mounts([snapshot], "")
    assert str(caught.value) == (
        "error: `config.json` in the model folder is a link to outside of it\n"
        f"  at: {snapshot}\n"
        f"  because: the container has the folder alone, not {blob}\n"
        "  hint: for a folder of the model hub's cache mount the cache, `--hf-cache DIR`, and give the server the model's name"
    )


def test_a_link_inside_of_the_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    assert running.model_mounts([tmp_path], f"{os.getuid()}") == (
        Mount("bind", str(tmp_path), f"/models/{tmp_path.name}", readonly=True),
    )


class Status:
    """What the system says of a folder of somebody else's."""

    def __init__(self, mode: int, uid: int = 4000, gid: int = 4242) -> None:
        self.st_mode, self.st_uid, self.st_gid = mode, uid, gid


@pytest.mark.parametrize(
    ("name", "mode", "what"),
    [
        ("K2", 0o750, "read the model folder `K2`"),
        ("config.json", 0o640, "read `config.json` of the model folder `K2`"),
    ],
)
@pytest.mark.parametrize(("uid", "hint"), [(4000, "run as its owner: `--user 4000:4242`"), (0, "")])
def test_a_model_that_the_containers_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int, what: str, uid: int, hint: str
) -> None:
    folder = tmp_path / "K2"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(running, "_folder", lambda folder, option: folder)
    monkeypatch.setattr(Path, "stat", lambda self, **options: Status(mode if self.name == name else 0o755, uid))
    path = folder if name == "K2" else folder / name
    with pytest.raises(UsageError) as caught:
        running.model_mounts([folder], "")
    assert str(caught.value) == (
        f"error: the container's user (uid 10001, gid 0) may not {what}\n"
        f"  at: {path}\n"
        f"  because: it is of uid {uid}, gid 4242, mode {mode:04o}\n"
        f"  hint: {hint or f'let others: `chmod -R a+rX {path}`'}"
    )
    assert running.model_mounts([folder], f"{uid}:4242")


@pytest.mark.parametrize(
    ("mode", "user", "allowed"),
    [
        (0o755, "", False),
        (0o777, "", True),
        (0o775, "777:4242", True),
        (0o775, "777", False),
        (0o700, "777:777", False),
        (0o700, "0", True),
        (0o555, "{owner}:4242", False),
        (0o755, "{owner}", True),
    ],
)
def test_who_may_write_to_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, user: str, allowed: bool
) -> None:
    monkeypatch.setattr(running, "_folder", lambda folder, option: folder)
    monkeypatch.setattr(Path, "stat", lambda self, **options: Status(mode))
    user = user.format(owner=4000)
    if allowed:
        assert running.hub_mount(tmp_path, user) == Mount("bind", str(tmp_path), "/mnt/huggingface")
        return
    with pytest.raises(UsageError) as caught:
        running.hub_mount(tmp_path, user)
    assert caught.value.because == f"it is of uid 4000, gid 4242, mode {mode:04o}"


# --- what it does -----------------------------------------------------------------------------------------------------


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker client that is a script: it writes down its arguments and does what SCRIPT says."""
    client = tmp_path / "docker"
    client.write_text(f'#!/bin/sh\nprintf "%s\\n" "$DOCKER_HOST" "$@" > {tmp_path}/said\nexec sh -c "$SCRIPT"\n')
    client.chmod(0o755)
    monkeypatch.setattr(running, "find_client", lambda: str(client))
    return client


def run_verb(matrices: Path, monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> int:
    monkeypatch.setattr(verbs, "MATRICES", matrices)
    monkeypatch.setenv("SCRIPT", script)
    return cli.main(["run", *words])


def test_the_exit_status_is_the_commands(
    matrices: Path, engine: FakeEngine, docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_verb(matrices, monkeypatch, "exit 42", "mine:1", "--cache", "none", "--", "false", "--json") == 42
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0] == engine.host
    assert said[1:] == run_argv(RunOptions("mine:1", ("false", "--json")))[1:]


def test_a_client_that_a_signal_ended(
    matrices: Path, engine: FakeEngine, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_verb(matrices, monkeypatch, "kill -KILL $$", "mine:1") == 128 + signal.SIGKILL


def test_no_gpu_runtime(
    matrices: Path,
    engine: FakeEngine,
    docker: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = "echo 'docker: could not select device driver' >&2; exit 125"
    assert run_verb(matrices, monkeypatch, script, "mine:1") == 6
    assert capfd.readouterr() == (
        "",
        (
            "docker: could not select device driver\n"
            "error: the container did not start, and the engine has no GPU runtime\n"
            "  at: unix:///var/run/docker.sock\n"
            "  because: it lists no runtime and no device of NVIDIA\n"
            "  hint: install NVIDIA's container toolkit, then `nvidia-ctk runtime configure --runtime=docker` and restart the "
            "engine; without a GPU: `--gpus none`\n"
        ),
    )


@pytest.mark.parametrize("words", [["--gpus", "none"], []])
def test_another_reason_not_to_start_is_dockers_to_say(
    matrices: Path, engine: FakeEngine, docker: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    engine.runtimes = ("nvidia",)
    assert run_verb(matrices, monkeypatch, "exit 125", "mine:1", *words) == 125


def test_a_dry_run_prints_the_command_and_runs_nothing(
    matrices: Path,
    engine: FakeEngine,
    docker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    words = ["mine:1", "--cache", "none", "--gpus", "device=0,1", "--dry-run"]
    assert run_verb(matrices, monkeypatch, "exit 1", *words, "--", "echo", "a b") == 0
    line = capsys.readouterr().out
    assert line == (
        "docker run --rm --pull never --gpus '\"device=0,1\"' --ipc host --ulimit memlock=-1 --ulimit stack=67108864 "
        "mine:1 echo 'a b'\n"
    )
    assert shlex.split(line) == run_argv(RunOptions("mine:1", ("echo", "a b"), gpus="device=0,1"))
    assert not (tmp_path / "said").exists()


def test_a_dry_run_for_an_engine_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert running.as_shell(["docker", "run"], "unix:///a b") == "DOCKER_HOST='unix:///a b' docker run"
    monkeypatch.setenv("DOCKER_HOST", "unix:///a b")
    assert running.as_shell(["docker", "run"], "unix:///a b") == "docker run"


def test_a_dry_run_as_json(
    matrices: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    assert run_verb(matrices, monkeypatch, "", "mine:1", "--cache", "none", "--dry-run", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data == {"argv": run_argv(RunOptions("mine:1")), "docker_host": engine.host, "image": "mine:1"}


def test_no_client(matrices: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "find_program", lambda name: None)
    with pytest.raises(BuildError) as caught:
        running.find_client()
    assert str(caught.value) == (
        "error: the docker client was not found\n"
        "  because: containers are run by `docker run`\n"
        "  hint: install your distribution's docker client, or run `make engine`, which unpacks one"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_client(tmp_path: Path, number: signal.Signals) -> None:
    # A process of its own with no terminal: what is sent to it alone has to reach the child, which says so and ends.
    # A signal that is ignored here (under nohup) would be in the child, too, and no shell can trap it then.
    script = textwrap.dedent("""\
        import signal
        from builder.running import execute
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        class Engine:
            host = "unix:///x"
        client = '''trap "echo got; exit 7" TERM INT HUP; echo ready; while :; do sleep 0.05; done'''
        raise SystemExit(execute(["sh", "-c", client], Engine(), gpus=True))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("got\n", 7)


class Client:
    """What the Docker SDK says of the engine."""

    api: Any = None

    def __init__(self, **info: Any) -> None:
        self.info = lambda: info


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({}, ()),
        ({"Runtimes": {"runc": {}, "io.containerd.runc.v2": {}}}, ()),
        ({"Runtimes": {"runc": {}, "nvidia": {}}}, ("nvidia",)),
        ({"Runtimes": None, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}, ("nvidia.com/gpu=0",)),
    ],
)
def test_what_the_engine_lists_of_nvidia(info: dict[str, Any], found: tuple[str, ...]) -> None:
    from builder.engine import Engine

    engine = Engine.__new__(Engine)
    engine._client = Client(**info)
    assert engine.gpu_runtimes() == found


def test_volumes_by_label() -> None:
    from builder.engine import Engine

    class Api:
        def __init__(self) -> None:
            self.removed: list[str] = []
            self.found: list[dict[str, str]] | None = [{"Name": "b"}, {"Name": "a"}]

        def volumes(self, filters: dict[str, str]) -> dict[str, Any]:
            assert filters == {"label": "sglang-stack=cache"}
            return {"Volumes": self.found}

        def remove_volume(self, name: str) -> None:
            self.removed.append(name)

    engine = Engine.__new__(Engine)
    engine._client = Client()
    engine._client.api = api = Api()
    assert engine.volumes("sglang-stack=cache") == ["a", "b"]
    engine.remove_volume("a")
    assert api.removed == ["a"]
    api.found = None
    assert engine.volumes("sglang-stack=cache") == []


def test_the_current_folder(
    matrices: Path, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir(mode=0o755)
    monkeypatch.chdir(here)
    argv = made(matrices, "mine:1", "--cache", "none", "--gpus", "none", "--here", "--", "python3", "bug.py")
    assert argv[7:] == [
        "--workdir",
        "/mnt/here",
        "--mount",
        f"type=bind,source={here},target=/mnt/here,readonly",
        "mine:1",
        "python3",
        "bug.py",
    ]


def test_the_current_folder_that_the_container_cannot_read(
    matrices: Path, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir(mode=0o700)
    monkeypatch.chdir(here)
    assert refusal(matrices, "mine:1", "--here").startswith(
        f"error: the container's user (uid 10001, gid 0) may not read the current folder\n  at: {here}\n"
    )


def test_a_recorded_run_has_no_terminal_and_is_not_dry(matrices: Path, engine: FakeEngine, tmp_path: Path) -> None:
    assert refusal(matrices, "mine:1", "--record", str(tmp_path), "--dry-run") == (
        "error: `--record` has no effect with `--dry-run`\n  hint: leave one of the two out"
    )
    options, _ = running.prepare(arguments("mine:1", "--record", str(tmp_path)), matrices)
    assert not options.terminal
