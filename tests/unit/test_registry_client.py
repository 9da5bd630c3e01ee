"""The registry client against a registry of our own on loopback that can be told to misbehave; the real one is in tests/image."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from builder.errors import BuilderError, IntegrityError, UnreachableError
from builder.files import sha256_hex
from builder.registry.client import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, RegistryClient
from builder.registry.reference import Reference
from builder.settings import Settings

pytestmark = pytest.mark.processes

BASIC = "Basic " + base64.b64encode(b"user:word").decode()


@dataclass
class State:
    """What the registry has and how it answers."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, one each, before it answers as it should."""
    challenge: str = ""
    """What it says to who has no token; `{address}` is its own."""
    tokens: list[dict[str, list[str]]] = field(default_factory=list)
    """What its token service was asked for."""
    let_in: str = "Bearer t0"
    asked: list[str] = field(default_factory=list)
    pages: bool = False


class Handler(BaseHTTPRequestHandler):
    """The API's few calls."""

    state: ClassVar[State]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _any(self) -> None:
        state, parts = self.state, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        state.asked.append(f"{self.command} {parts.path}")
        if parts.path == "/token":
            asked = parse_qs(parts.query or body.decode())
            asked["authorization"] = [self.headers.get("Authorization", "")]
            state.tokens.append(asked)
            self._send(200, json.dumps({"token": "t0"}).encode())
            return
        if state.statuses:
            status = state.statuses.pop(0)
            if status == -1:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._send(status)
            return
        if state.challenge and self.headers.get("Authorization") != state.let_in:
            address = self.headers["Host"]
            words = json.dumps({"errors": [{"code": "UNAUTHORIZED", "message": "who are you"}]}).encode()
            self._send(401, words, WWW_Authenticate=state.challenge.replace("{address}", address))
            return
        kind, _, name = parts.path.removeprefix("/v2/team/stack/").partition("/")
        self._call(kind, name, parts.query, body)

    def _call(self, kind: str, name: str, query: str, body: bytes) -> None:
        state = self.state
        if kind == "manifests" and self.command == "PUT":
            state.manifests[name] = self.headers["Content-Type"], body
            state.manifests[f"sha256:{sha256_hex(body)}"] = self.headers["Content-Type"], body
            self._send(201)
        elif kind == "manifests" and name in state.manifests:
            media, data = state.manifests[name]
            self._send(200, data, Content_Type=media)
        elif kind == "blobs" and self.command == "POST":
            self._send(202, Location="/v2/team/stack/blobs/uploads/1?state=x")
        elif kind == "blobs" and self.command == "PUT":
            state.blobs[parse_qs(query)["digest"][0]] = body
            self._send(201)
        elif kind == "blobs" and name in state.blobs:
            self._send(200, state.blobs[name])
        elif kind == "tags" and state.pages:
            last = "last" in query
            link = {} if last else {"Link": '</v2/team/stack/tags/list?last=b&n=2>; rel="next"'}
            self._send(200, json.dumps({"tags": ["c"] if last else ["a", "b"]}).encode(), **link)
        else:
            self._send(404, b'{"errors": [{"code": "NAME_UNKNOWN"}]}')

    do_GET = do_HEAD = do_PUT = do_POST = _any


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def client(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryClient]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    handler = type("Bound", (Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = RegistryClient(f"127.0.0.1:{server.server_address[1]}/team/stack", Settings())
    made.pause = lambda seconds: None
    yield made
    made.close()
    server.shutdown()
    server.server_close()


def login(tmp_path: Path, registry: str, **entry: str) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {registry: entry}}))


def refusal(call: object, kind: type[BuilderError]) -> str:
    with pytest.raises(kind) as caught:
        call()  # type: ignore[operator]
    return str(caught.value)


# --- manifests and blobs ----------------------------------------------------------------------------------------------


def put(state: State, data: dict[str, object], media: str = OCI_MANIFEST, tag: str = "") -> str:
    raw = json.dumps(data).encode()
    digest = f"sha256:{sha256_hex(raw)}"
    state.manifests[digest] = media, raw
    if tag:
        state.manifests[tag] = media, raw
    return digest


def test_a_manifest_comes_as_it_is(client: RegistryClient, state: State) -> None:
    digest = put(state, {"layers": []}, DOCKER_MANIFEST, "v1")
    assert client.manifest("v1") == client.manifest(digest) == (b'{"layers": []}', DOCKER_MANIFEST)


def test_no_manifest_is_none(client: RegistryClient) -> None:
    assert client.manifest("v1") is None


def test_a_manifest_that_is_not_its_digest(client: RegistryClient, state: State) -> None:
    digest = f"sha256:{'0' * 64}"
    state.manifests[digest] = OCI_MANIFEST, b"{}"
    assert refusal(lambda: client.manifest(digest), IntegrityError) == (
        "error: the registry's manifest is not what its digest says\n"
        f"  at: {client.name}@{digest}\n"
        f"  because: its bytes have sha256:{sha256_hex(b'{}')}"
    )


def test_the_image_of_an_index_is_that_of_the_platform(client: RegistryClient, state: State) -> None:
    digest = put(state, {"layers": [1]})
    listed = [
        {"digest": "sha256:other", "platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": digest, "platform": {"os": "linux", "architecture": "amd64"}},
    ]
    put(state, {"manifests": listed}, OCI_INDEX, "v1")
    assert client.image("v1") == (digest, {"layers": [1]})


def test_an_index_of_itself_ends(client: RegistryClient, state: State) -> None:
    platform = {"os": "linux", "architecture": "amd64"}
    inner = put(state, {"manifests": [{"digest": f"sha256:{'1' * 64}", "platform": platform}]}, OCI_INDEX)
    put(state, {"manifests": [{"digest": inner, "platform": platform}]}, OCI_INDEX, "v1")
    assert "the registry has no such image" in refusal(lambda: client.image("v1"), UnreachableError)


def test_what_is_no_manifest(client: RegistryClient, state: State) -> None:
    state.manifests["v1"] = "text/html", b"<html>"
    assert refusal(lambda: client.image("v1"), IntegrityError) == (
        f"error: what the registry sent is no manifest\n  at: {client.name}"
    )


def test_a_blob_that_is_not_its_digest(client: RegistryClient, state: State) -> None:
    digest = f"sha256:{sha256_hex(b'right')}"
    state.blobs[digest] = b"wrong"
    assert refusal(lambda: client.blob(digest), IntegrityError) == (
        "error: a blob in the registry is not what its digest says\n"
        f"  at: {client.name}@{digest}\n"
        f"  because: its bytes have sha256:{sha256_hex(b'wrong')}\n"
        "  hint: its storage is damaged or was tampered with: delete the blob there and push again"
    )


def test_a_blob_that_is_too_large(client: RegistryClient, state: State) -> None:
    digest = f"sha256:{sha256_hex(bytes(2000))}"
    state.blobs[digest] = bytes(2000)
    assert refusal(lambda: client.blob(digest, 1000), IntegrityError) == (
        f"error: what the registry sends is larger than 1 kB\n  at: {client.name} {digest}"
    )


def test_a_blob_is_uploaded_once(client: RegistryClient, state: State) -> None:
    digest = client.put_blob(b"data")
    assert (client.put_blob(b"data"), client.blob(digest), client.head_blob(digest)) == (digest, b"data", 4)
    assert sum(line.startswith("PUT") for line in state.asked) == 1
    assert client.head_blob("sha256:none") is None


def test_a_tag_is_read_back(client: RegistryClient, state: State) -> None:
    digest = put(state, {"layers": []})
    client.tag(digest, "moving")
    assert client.manifest("moving") == client.manifest(digest)


def test_tags_over_several_pages(client: RegistryClient, state: State) -> None:
    assert client.tags() == []
    state.pages = True
    assert client.tags() == ["a", "b", "c"]


# --- what goes wrong for a moment, and for good -----------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 429, -1])
def test_what_is_gone_in_a_moment_is_asked_again(client: RegistryClient, state: State, status: int) -> None:
    put(state, {"layers": []}, tag="v1")
    state.statuses = [status, status]
    assert client.manifest("v1") is not None
    assert len(state.asked) == 3


def test_what_stays_is_given_up(client: RegistryClient, state: State) -> None:
    state.statuses = [503] * 9
    assert refusal(lambda: client.manifest("v1"), UnreachableError) == (
        f"error: the registry refused\n  at: {client.name}\n  because: 503: Service Unavailable"
    )
    assert len(state.asked) == 5


def test_what_is_refused_is_not_asked_again(client: RegistryClient, state: State) -> None:
    state.statuses = [405]
    assert refusal(lambda: client.put_manifest("v1", b"{}", OCI_MANIFEST), UnreachableError) == (
        f"error: the registry refused\n  at: {client.name}\n  because: 405: Method Not Allowed"
    )


# --- who is let in ----------------------------------------------------------------------------------------------------

TOKEN = 'Bearer realm="http://{address}/token",service="reg",scope="repository:other:pull"'


def test_a_token_for_reading_and_one_for_writing(client: RegistryClient, state: State, tmp_path: Path) -> None:
    login(tmp_path, client.reference.registry, auth=BASIC.removeprefix("Basic "))
    state.challenge = TOKEN
    put(state, {"layers": []}, tag="v1")
    assert client.manifest("v1") is not None
    client.put_manifest("v2", b"{}", OCI_MANIFEST)
    assert [(asked["scope"], asked["service"], asked["authorization"]) for asked in state.tokens] == [
        ([f"repository:team/stack:{action}"], ["reg"], [BASIC]) for action in ("pull", "pull,push")
    ]


def test_the_scope_of_a_writing(client: RegistryClient, state: State) -> None:
    state.challenge = TOKEN
    client.put_manifest("v2", b"{}", OCI_MANIFEST)
    assert [(asked["scope"], asked["authorization"]) for asked in state.tokens] == [
        (["repository:team/stack:pull,push"], [""])
    ]


def test_an_identity_token(client: RegistryClient, state: State, tmp_path: Path) -> None:
    login(tmp_path, client.reference.registry, identitytoken="it")
    state.challenge = TOKEN
    assert client.manifest("v1") is None
    assert (state.tokens[0]["grant_type"], state.tokens[0]["refresh_token"]) == (["refresh_token"], ["it"])


def test_a_token_that_is_not_enough(client: RegistryClient, state: State) -> None:
    state.challenge, state.let_in = TOKEN, "nothing"
    registry = client.reference.registry
    assert refusal(lambda: client.manifest("v1"), UnreachableError) == (
        "error: the registry does not let us in\n"
        f"  at: {client.name}\n"
        f"  because: no credentials are stored for `{registry}`: 401: UNAUTHORIZED: who are you\n"
        f"  hint: `docker login {registry}`"
    )


def test_a_password_that_is_wrong_is_sent_once(client: RegistryClient, state: State, tmp_path: Path) -> None:
    login(tmp_path, client.reference.registry, auth=BASIC.removeprefix("Basic "))
    state.challenge, state.let_in = 'Basic realm="x"', "nothing"
    said = refusal(lambda: client.manifest("v1"), UnreachableError)
    assert "the stored credentials are not enough" in said
    assert len(state.asked) == 2


def test_a_registry_elsewhere_is_asked_with_tls() -> None:
    client = RegistryClient("registry.example.com/team/stack", Settings())
    assert client._base == "https://registry.example.com"
    assert RegistryClient("registry.example.com/team/stack", Settings(), True)._base == "http://registry.example.com"


def test_a_password_does_not_go_to_a_token_service_without_tls(client: RegistryClient, state: State) -> None:
    client._login._plain = False
    state.challenge = TOKEN
    said = refusal(lambda: client.manifest("v1"), UnreachableError)
    assert said.startswith("error: the registry sends us elsewhere for a token, without encryption\n")
    assert state.tokens == []


@pytest.mark.filterwarnings("ignore:docker-credential-none not installed")
def test_a_config_that_is_damaged(client: RegistryClient, state: State, tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"credHelpers": {client.reference.registry: "none"}}))
    state.challenge = 'Basic realm="x"'
    said = refusal(lambda: client.manifest("v1"), BuilderError)
    assert said.startswith(f"error: the credentials for {client.reference.registry} cannot be read\n  because: ")


def test_a_reference_is_taken_as_it_is() -> None:
    reference = Reference.parse("127.0.0.1:5000/team/stack")
    assert RegistryClient(reference, Settings()).reference is reference
