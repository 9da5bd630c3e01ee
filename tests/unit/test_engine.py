"""Engine and buildx: what is read of them, what is told when they are too old, what a command line holds. No engine."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest

from builder import archive, bootstrap, engine
from builder.engine import BuildRequest, Buildx, Engine, build_argv, find_buildx
from builder.errors import BuildError, ExitCode


class FakeClient:
    """As much of the SDK's client as a test needs."""

    def __init__(self, version: str = "26.1.5+dfsg1", info: dict[str, Any] | None = None) -> None:
        self._version, self._info = version, info or {}
        self.api: Any = None

    def version(self) -> dict[str, Any]:
        return {"Version": self._version}

    def info(self) -> dict[str, Any]:
        return self._info


def connected(monkeypatch: pytest.MonkeyPatch, client: FakeClient, host: str = "unix:///made.sock") -> Engine:
    monkeypatch.setattr(docker, "DockerClient", lambda **_: client)
    return Engine(host)


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("26.1.5+dfsg1", "26.1.5"),
        ("0.13.1+ds1-3", "0.13.1"),
        ("v0.21.2", "0.21.2"),
        ("20.10.24+dfsg1", "20.10.24"),
        ("28.0.0-rc.1", "28.0.0"),
        ("", "0"),
        ("dev", "0"),
    ],
)
def test_versions_as_distributions_write_them(text: str, release: str) -> None:
    assert str(engine._parsed(text)) == release


@pytest.mark.parametrize("version", ["23.0.0", "26.1.5+dfsg1", "28.2.2"])
def test_an_engine_that_is_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    connected(monkeypatch, FakeClient(version)).require()


def test_an_engine_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError) as caught:
        connected(monkeypatch, FakeClient("20.10.24+dfsg1")).require()
    assert caught.value.exit_code is ExitCode.BUILD
    assert str(caught.value) == (
        "error: the Docker Engine is too old: found 20.10.24+dfsg1, needed 23.0 or newer\n"
        "  at: unix:///made.sock\n"
        "  because: builds use BuildKit's secrets, bind mounts and cache\n"
        "  hint: upgrade it, or stop it and run `make image ENGINE=own`, which sets one up in .tools"
    )


@pytest.mark.parametrize(("version", "does"), [("26.1.5+dfsg1", True), ("25.0.3", False), ("28.5.2+dfsg4", False)])
def test_an_engine_that_reads_all_again_for_a_secret(monkeypatch: pytest.MonkeyPatch, version: str, does: bool) -> None:
    assert connected(monkeypatch, FakeClient(version)).reads_all_for_secrets is does


def test_an_engine_that_does_not_answer(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with pytest.raises(BuildError) as caught:
        Engine(f"unix://{short_folder}/absent.sock")
    told = str(caught.value).splitlines()
    assert told[:2] == ["error: the Docker Engine does not answer", f"  at: unix://{short_folder}/absent.sock"]
    assert told[2:] == [
        "  because: there is no such socket",
        "  hint: see that it runs: `systemctl start docker`; where none is installed, `make engine` sets one up",
    ]


def test_an_engine_that_is_named_and_does_not_answer(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = short_folder / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with pytest.raises(BuildError) as caught:
        Engine(f"unix://{path}")
    assert caught.value.because == "nothing listens there"
    assert caught.value.hint.endswith("; or unset DOCKER_HOST, which names this one")


def test_no_engine_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "engine_host", lambda: None)
    with pytest.raises(BuildError) as caught:
        engine.connect()
    assert str(caught.value) == (
        "error: no Docker Engine answers\n"
        "  because: nothing listens on /var/run/docker.sock and DOCKER_HOST is not set\n"
        "  hint: start it, or run `make engine`, which sets one up where none is installed"
    )


@pytest.mark.parametrize(
    ("status", "store"),
    [
        ([["driver-type", "io.containerd.snapshotter.v1"]], "containerd"),
        ([["Backing Filesystem", "extfs"], ["Supports d_type", "true"]], "classic"),
        (None, "classic"),
        ([["odd"]], "classic"),
    ],
)
def test_the_image_store(monkeypatch: pytest.MonkeyPatch, status: Any, store: str) -> None:
    client = FakeClient(info={"DriverStatus": status, "DockerRootDir": "/nowhere"})
    info = connected(monkeypatch, client).info()
    assert (info.store, info.local, str(info.data_root)) == (store, False, "/nowhere")


def test_an_engine_behind_a_socket_with_its_data_here_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(info={"DockerRootDir": str(tmp_path)})
    assert connected(monkeypatch, client).info().local
    assert not connected(monkeypatch, client, "tcp://build.example:2376").info().local


# --- images -----------------------------------------------------------------------------------------------------------


class FakeApi:
    """The low-level client: one image, one container."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **_: Any) -> Any:
            self.calls.append((name, arguments))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


RAW = {
    "Id": "sha256:abc",
    "RepoTags": ["sglang-stack:b", "sglang-stack:a"],
    "Config": {"Labels": {"sglang-stack": "image"}},
    "Size": 42,
    "RootFS": {"Layers": ["sha256:1", "sha256:2"]},
}


def with_api(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> tuple[Engine, FakeApi]:
    client = FakeClient()
    client.api = FakeApi(**answers)
    return connected(monkeypatch, client), client.api


def test_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = with_api(monkeypatch, inspect_image=RAW)
    image = found.find("sglang-stack:a")
    assert image is not None
    assert (image.id, image.tags, image.size) == ("sha256:abc", ("sglang-stack:a", "sglang-stack:b"), 42)
    assert (image.labels, image.diff_ids) == ({"sglang-stack": "image"}, ("sha256:1", "sha256:2"))


def test_an_image_of_which_little_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = with_api(monkeypatch, inspect_image={"Id": "sha256:abc", "RepoTags": None, "Config": {"Labels": None}})
    image = found.find("x")
    assert image is not None
    assert (image.tags, image.labels, image.size, image.diff_ids) == ((), {}, 0, ())


def test_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = with_api(monkeypatch, inspect_image=docker.errors.ImageNotFound("no such image"))
    assert found.find("x") is None


def test_an_engine_that_refuses_is_told_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "Get https://me:hunter2@registry.example/v2/: denied"
    found, _ = with_api(monkeypatch, remove_image=docker.errors.APIError("409", explanation=words))
    with pytest.raises(BuildError) as caught:
        found.remove("x")
    assert str(caught.value) == (
        "error: the Docker Engine refused\n  at: unix:///made.sock\n"
        "  because: Get https://***@registry.example/v2/: denied"
    )


def test_layers_with_what_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [
        {"Size": 0, "CreatedBy": "CMD"},
        {"Size": 5, "CreatedBy": "RUN b # buildkit"},
        {"Size": 0, "CreatedBy": "ENV X=1"},
        {"Size": 7, "CreatedBy": "ADD rootfs.tar /"},
    ]
    found, _ = with_api(monkeypatch, inspect_image=RAW, history=history)
    assert [(layer.diff_id, layer.size, layer.created_by) for layer in found.layers("x")] == [
        ("sha256:1", 7, "ADD rootfs.tar /"),
        ("sha256:2", 5, "RUN b # buildkit"),
    ]


def test_an_empty_layer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [
        {"Size": 5, "CreatedBy": "RUN b # buildkit"},
        {"Size": 0, "CreatedBy": "USER 1"},
        {"Size": 0, "CreatedBy": "WORKDIR /home"},
        {"Size": 7, "CreatedBy": "ADD rootfs.tar /"},
    ]
    raw = {**RAW, "RootFS": {"Layers": ["sha256:1", "sha256:2", "sha256:3"]}}
    found, _ = with_api(monkeypatch, inspect_image=raw, history=history)
    assert [(layer.diff_id, layer.created_by) for layer in found.layers("x")] == [
        ("sha256:1", "ADD rootfs.tar /"),
        ("sha256:2", "WORKDIR /home"),
        ("sha256:3", "RUN b # buildkit"),
    ]


def test_a_base_of_which_history_says_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**RAW, "RootFS": {"Layers": ["sha256:1", "sha256:2"]}}
    found, _ = with_api(monkeypatch, inspect_image=raw, history=[{"Size": 5, "CreatedBy": "RUN b # buildkit"}])
    assert [(layer.diff_id, layer.created_by) for layer in found.layers("x")] == [
        ("sha256:1", ""),
        ("sha256:2", "RUN b # buildkit"),
    ]


def test_names_are_given_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    found, api = with_api(monkeypatch)
    found.tag("sha256:abc", ["sglang-stack:a", "registry.example:5000/x:b"])
    assert api.calls == [
        ("tag", ("sha256:abc", "sglang-stack", "a")),
        ("tag", ("sha256:abc", "registry.example:5000/x", "b")),
    ]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_container_is_removed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    found, api = with_api(
        monkeypatch, create_container={"Id": "c1"}, get_archive=docker.errors.NotFound("no such file")
    )
    with pytest.raises(BuildError) as caught:
        found.read_file("sglang-stack:a", "/opt/x")
    assert str(caught.value) == (
        "error: `sglang-stack:a` has no /opt/x\n  because: it is not an image of this builder, or an older one"
    )
    assert api.calls[-1][0] == "remove_container"


def test_the_output_of_a_container_comes_in_lines_and_then_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    found, api = with_api(
        monkeypatch,
        create_container={"Id": "c1"},
        create_host_config={},
        attach=[b"one\ntw", b"o\n", b"end"],
        wait={"StatusCode": 3},
    )
    assert list(found.run("x", ["true"])) == ["one", "two", "end", 3]
    assert api.calls[-1] == ("remove_container", ("c1",))


def test_a_container_whose_output_nobody_wants_any_more_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, api = with_api(
        monkeypatch, create_container={"Id": "c1"}, create_host_config={}, attach=[b"one\n", b"two\n"]
    )
    output: Any = found.run("x", ["true"])
    assert next(output) == "one"
    output.close()
    assert api.calls[-1] == ("remove_container", ("c1",))


# --- buildx -----------------------------------------------------------------------------------------------------------


def program(path: Path, says: str, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any buildx; what a test puts into the folder is all there is."""
    monkeypatch.setattr("builder.engine.shutil.which", lambda name: None)
    real = Path

    def below(*parts: str) -> Path:
        return tmp_path / "system" if parts == ("/",) else real(*parts)

    monkeypatch.setattr("builder.engine.Path", below)
    monkeypatch.setattr(archive, "UNPACKED", tmp_path / "tools")
    return tmp_path


PLUGIN = "usr/libexec/docker/cli-plugins/docker-buildx"


def test_no_buildx(nowhere: Path) -> None:
    with pytest.raises(BuildError) as caught:
        find_buildx()
    assert str(caught.value) == (
        "error: `docker buildx` was not found\n"
        "  because: images are built with BuildKit\n"
        "  hint: install your distribution's docker-buildx package, or run `make engine`, which unpacks one"
    )


def test_a_buildx_that_is_too_old(nowhere: Path) -> None:
    program(nowhere / "system" / PLUGIN, "github.com/docker/buildx 0.11.2 9872040")
    with pytest.raises(BuildError) as caught:
        find_buildx()
    assert str(caught.value) == (
        "error: buildx is too old: found 0.11.2, needed 0.13 or newer\n"
        "  hint: upgrade it, or run `make engine`, which unpacks one"
    )


def test_where_the_systems_is_too_old_the_unpacked_one_is_taken(nowhere: Path) -> None:
    program(nowhere / "system" / PLUGIN, "github.com/docker/buildx 0.11.2 9872040")
    ours = program(nowhere / "tools" / PLUGIN, "github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3")
    assert find_buildx() == Buildx((str(ours),), "0.13.1+ds1")


def test_the_clients_plugin_comes_first(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = program(nowhere / "docker", "github.com/docker/buildx v0.21.2 1360a9e")
    program(nowhere / "tools" / PLUGIN, "github.com/docker/buildx 0.13.1")
    monkeypatch.setattr("builder.engine.shutil.which", lambda name: str(client))
    assert find_buildx() == Buildx((str(client), "buildx"), "v0.21.2")


def test_a_client_without_the_plugin_is_passed_over(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = program(nowhere / "docker", "docker: 'buildx' is not a docker command.", 1)
    ours = program(nowhere / "tools" / PLUGIN, "github.com/docker/buildx 0.13.1")
    monkeypatch.setattr("builder.engine.shutil.which", lambda name: str(client))
    assert find_buildx().argv == (str(ours),)


def request(**fields: Any) -> BuildRequest:
    return BuildRequest(dockerfile=Path("/c/Dockerfile"), context=Path("/c"), **fields)


def test_the_command_line_of_a_build() -> None:
    asked = request(
        target="image",
        tags=("a:b",),
        labels={"y": "2", "x": "1"},
        arguments={"KIND": "archive"},
        secrets={"ca": Path("/etc/ca.pem"), "index": Path("/run/s/index")},
        no_cache=True,
    )
    assert build_argv(Buildx(("docker", "buildx"), "0.13"), asked, Path("/m.json")) == [
        *("docker", "buildx", "build", "--progress=rawjson", "--provenance=false", "--metadata-file", "/m.json"),
        *("--file", "/c/Dockerfile", "--tag", "a:b", "--target", "image", "--no-cache"),
        *("--label", "x=1", "--label", "y=2", "--build-arg", "KIND=archive"),
        *("--secret", "id=ca,src=/etc/ca.pem", "--secret", "id=index,src=/run/s/index", "/c"),
    ]


def test_no_secret_is_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("https://me:hunter2@wheels.example/simple")
    asked = request(secrets={"index": tmp_path / "index"})
    line = " ".join(build_argv(Buildx(("buildx",), "0.13"), asked, Path("/m.json")))
    assert "hunter2" not in line
    assert "wheels.example" not in line


EVENT = {"vertexes": [{"digest": "sha256:1", "name": '[torch 2/2] RUN echo {"a": 1}'}]}


def events(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    words: list[str] = []
    return list(engine.progress_events(iter(text.splitlines(keepends=True)), words)), words


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_events_on_one_line_and_on_several(indent: int | str | None) -> None:
    text = "".join(f"{json.dumps(EVENT, indent=indent)}\n" for _ in range(3))
    assert events(text) == ([EVENT] * 3, [])


def test_text_among_the_events_is_kept() -> None:
    one = json.dumps(EVENT)
    several = json.dumps(EVENT, indent=2)
    text = f"warning: x\n{one}\nERROR: failed to solve\n{several}\n\nlast words"
    assert events(text) == ([EVENT, EVENT], ["warning: x", "ERROR: failed to solve", "", "last words"])


def test_an_event_that_is_cut_off_is_text() -> None:
    assert events('{"vertexes": [') == ([], ['{"vertexes": ['])


def test_what_looks_like_an_event_and_is_none_is_text() -> None:
    assert events("{not json}\n" + json.dumps(EVENT)) == ([EVENT], ["{not json}"])


FAKE_BUILDX = """\
#!/bin/sh
echo '{"vertexes": [{"digest": "d", "name": "n"}]}' >&2
echo "DOCKER_HOST=$DOCKER_HOST BUILDX_BUILDER=$BUILDX_BUILDER" >&2
exit 1
"""


def test_a_build_gives_its_events_and_last_its_status_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "buildx"
    fake.write_text(FAKE_BUILDX)
    fake.chmod(0o755)
    host = connected(monkeypatch, FakeClient())
    asked = request()
    found = list(engine.run_buildx(host, Buildx((str(fake),), "0.13"), asked, tmp_path / "m.json"))
    assert found == [
        {"vertexes": [{"digest": "d", "name": "n"}]},
        {
            "exit": 1,
            "stderr": "DOCKER_HOST=unix:///made.sock BUILDX_BUILDER=default",
        },
    ]


SLOW_BUILDX = """\
#!/bin/sh
trap 'echo interrupted > {mark}; exit 130' INT
echo '{{"vertexes": []}}' >&2
while :; do sleep 0.05; done
"""


def test_closing_a_build_interrupts_it_and_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, mark = tmp_path / "buildx", tmp_path / "mark"
    fake.write_text(SLOW_BUILDX.format(mark=mark))
    fake.chmod(0o755)
    host = connected(monkeypatch, FakeClient())
    running: Any = engine.run_buildx(host, Buildx((str(fake),), "0.13"), request(), tmp_path / "m.json")
    assert next(running) == {"vertexes": []}
    running.close()
    assert mark.read_text() == "interrupted\n"
