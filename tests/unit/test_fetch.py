"""Fetching wheels: where they come from, what goes wrong on the way, and that nothing half-written is left."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import requests
from urllib3.util import Retry

from builder import cache, download
from builder.cache import find_wheel, incoming, wheel_path
from builder.errors import BuilderError, BuildError, IntegrityError, UnreachableError, UsageError
from builder.fetch import Bar, fetch_all, fetch_artefact, require_used
from builder.index import session
from builder.lock import Artefact
from builder.settings import Settings, with_options
from tests.loopback import Loopback, Served, loopback
from tests.made import ROOT, artefact, lock_of, settings_at, sha, tiny

pytestmark = pytest.mark.processes

FILE = "part-1.0-py3-none-any.whl"
DATA = random.Random(3).randbytes(300_000)
SHA = hashlib.sha256(DATA).hexdigest()
PATH = f"/files/{FILE}"
WAYS = (
    "  hint: each of these provides a file; it is checked wherever it comes from, and what is here already stays:\n"
    "    a folder that has it: `--wheels DIR`, BUILDER_WHEELS=DIR, or `wheels` in the configuration\n"
    "    a mirror (an index, or a folder on a web server): `--index NAME=URL`, BUILDER_INDEX_NAME=URL, or `indexes.NAME`\n"
    "    a way to its URL: https_proxy, the site's authority BUILDER_CA, credentials BUILDER_NETRC"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between attempts, no proxy on the way to loopback, and the caller's own netrc out of it."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("NETRC", os.devnull)


@pytest.fixture
def site() -> Iterator[Loopback]:
    """A server that has the file at its URL."""
    with loopback() as server:
        server.files[PATH] = Served(DATA)
        yield server


def entry(site: Loopback, **fields: Any) -> Artefact:
    """The file as a lock has it."""
    data: dict[str, Any] = {"index": None, "url": f"{site.url}{PATH}", "size": None, "sha256": SHA, "layer": "kernels"}
    return artefact("part", fields.pop("version", "1.0"), **{**data, **fields})


def left(tmp_path: Path) -> list[str]:
    """Every file in the cache, relative to it."""
    return sorted(
        str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*") if path.is_file()
    )


def is_there(tmp_path: Path, path: Path) -> None:
    """The file is in the cache, whole, and nothing else is."""
    assert path == wheel_path(settings_at(tmp_path), SHA, FILE)
    assert path.read_bytes() == DATA
    assert left(tmp_path) == [f"wheels/{SHA[:2]}/{SHA}/{FILE}"]


def words(site: Loopback, error: BuilderError) -> str:
    """The whole message, less the server's port."""
    return str(error).replace(site.url, "SITE").replace(site.url.partition("://")[2], "HOST")


def refusal(site: Loopback, wanted: Artefact, settings: Settings, kind: type[BuilderError] = UnreachableError) -> str:
    with pytest.raises(kind) as caught:
        fetch_artefact(wanted, settings)
    assert type(caught.value) is kind
    return words(site, caught.value)


def not_had(why: str) -> str:
    return f"error: `{FILE}` could not be had\n  at: SITE{PATH}\n  because: its URL: {why}\n    the lock pins sha256 {SHA}\n{WAYS}"


# --- where it comes from ----------------------------------------------------------------------------------------------


def test_a_direct_file_comes_from_its_url(site: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert site.requests == [(PATH, "")]
    out, err = capsys.readouterr()
    told = re.sub(r"in \d+ s", "in N s", err)
    assert (out, told) == ("", f"fetching {site.url}{PATH} …\nfetched {FILE}: 300 kB in N s\n")


def test_what_is_in_the_cache_is_not_asked_for(site: Loopback, tmp_path: Path) -> None:
    fetch_artefact(entry(site), settings_at(tmp_path))
    site.requests.clear()
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert site.requests == []


def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(
    site: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fetch_artefact(entry(site), settings_at(tmp_path))
    path.write_bytes(DATA[:-1] + b"x")
    capsys.readouterr()
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert capsys.readouterr().err.splitlines()[0] == f"{path} was damaged since it was fetched: it is removed"


@pytest.mark.parametrize("plus", ["+", "%2B"])
def test_a_file_in_a_wheel_folder_is_used_where_it_is(site: Loopback, tmp_path: Path, plus: str) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / f"part-1.0{plus}cu1-py3-none-any.whl").write_bytes(DATA)
    url = f"{site.url}/part-1.0%2Bcu1-py3-none-any.whl"
    wanted = entry(site, version="1.0+cu1", file="part-1.0+cu1-py3-none-any.whl", url=url)
    found = fetch_artefact(wanted, settings_at(tmp_path, wheels=(folder,)))
    assert found == folder / f"part-1.0{plus}cu1-py3-none-any.whl"
    assert (site.requests, (tmp_path / "cache").exists()) == ([], False)


def test_another_file_of_that_name_in_a_folder_is_not_taken_and_said_so(
    site: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / FILE).write_bytes(b"other")
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path, wheels=(folder,))))
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"{FILE}: not taken from folder {folder}: the file is another one than the lock wants, and nothing is known of it; "
        f"got sha256 {sha('other')}"
    )


def test_a_mirror_comes_before_the_url(site: Loopback, tmp_path: Path) -> None:
    site.add((FILE, DATA), index="mirror", beside=False)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path, indexes={"any": f"{site.url}/mirror"})))
    assert site.paths() == ["/mirror/part/", f"/mirror/files/{FILE}"]


def test_a_folder_on_a_web_server_is_a_mirror(site: Loopback, tmp_path: Path) -> None:
    site.files[f"/folder/{FILE}"] = Served(DATA)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path, indexes={"any": f"{site.url}/folder/"})))
    assert site.paths() == ["/folder/part/", f"/folder/{FILE}"]


def test_where_the_mirror_has_another_file_the_url_is_asked(site: Loopback, tmp_path: Path) -> None:
    site.add((FILE, b"other"), index="mirror", beside=False)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path, indexes={"any": f"{site.url}/mirror"})))
    assert site.paths() == ["/mirror/part/", PATH]


def test_a_sites_default_index_is_a_mirror_too(site: Loopback, tmp_path: Path) -> None:
    site.add((FILE, DATA), beside=False)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path, index=f"{site.url}/simple")))
    assert site.paths() == ["/simple/part/", f"/simple/files/{FILE}"]


def test_a_file_of_the_default_index(site: Loopback, tmp_path: Path) -> None:
    site.add((FILE, DATA), beside=False)
    wanted = entry(site, index="default", url=None)
    is_there(tmp_path, fetch_artefact(wanted, settings_at(tmp_path, index=f"{site.url}/simple")))


def test_a_file_of_a_named_index_comes_from_the_sites_mirror_of_it(site: Loopback, tmp_path: Path) -> None:
    site.add((FILE, DATA), index="mirror", beside=False)
    wanted = entry(site, index="cu", url=None)
    settings = settings_at(tmp_path, indexes={"cu": f"{site.url}/mirror"})
    is_there(tmp_path, fetch_artefact(wanted, settings, indexes={"cu": "https://wheels.example/cu"}))


def test_a_file_of_a_named_index(site: Loopback, tmp_path: Path) -> None:
    site.add((FILE, DATA), index="cu", beside=False)
    wanted = entry(site, index="cu", url=None)
    is_there(tmp_path, fetch_artefact(wanted, settings_at(tmp_path), indexes={"cu": f"{site.url}/cu"}))


def test_an_index_that_no_longer_has_it(site: Loopback, tmp_path: Path) -> None:
    site.add((FILE, b"other"), beside=False)
    settings = settings_at(tmp_path, index=f"{site.url}/simple")
    assert refusal(site, entry(site, index="default", url=None), settings, IntegrityError) == (
        f"error: `{FILE}` is not the file that the lock pins\n"
        "  because: index `default` (SITE/simple): the file is another one than the lock wants, and nothing is known of it; "
        f"got sha256 {sha('other')}\n"
        f"    the lock pins sha256 {SHA}\n"
        "  hint: take the content that is there now, if it was replaced on purpose: `builder lock MATRIX --repin part`"
    )


def test_redirects_are_followed(site: Loopback, tmp_path: Path) -> None:
    site.files["/elsewhere?signature=x"] = Served(DATA)
    site.files[PATH].location = f"{site.url}/elsewhere?signature=x"
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_a_body_whose_length_nobody_tells(site: Loopback, tmp_path: Path) -> None:
    site.files[PATH].length = False
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


# --- what passes: it is taken up again --------------------------------------------------------------------------------


def test_a_cut_download_is_taken_up_where_it_broke_off(site: Loopback, tmp_path: Path) -> None:
    site.files[PATH].cuts = [100_000, 50_000]
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert site.requests == [(PATH, ""), (PATH, "bytes=100000-"), (PATH, "bytes=150000-")]
    assert site.bytes_sent == len(DATA)


def test_a_server_without_ranges_begins_again(site: Loopback, tmp_path: Path) -> None:
    site.files[PATH].ranges = False
    site.files[PATH].cuts = [100_000, 50_000]
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert site.requests == [(PATH, ""), (PATH, "bytes=100000-"), (PATH, "")]


@pytest.mark.parametrize("told", ["bytes 0-199999/300000", "bytes 7-299999/300000", "", "x"])
def test_a_server_that_answers_with_another_part_begins_again(site: Loopback, tmp_path: Path, told: str) -> None:
    site.files[PATH].cuts = [100_000]
    site.files[PATH].content_range = told
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert site.requests == [(PATH, ""), (PATH, "bytes=100000-"), (PATH, "")]


@pytest.mark.parametrize("statuses", [[503, 503, 503], [429], [500, 502, 504], [-1, 503, -1]])
def test_an_error_for_some_time(site: Loopback, tmp_path: Path, statuses: list[int]) -> None:
    site.files[PATH].statuses = list(statuses)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert len(site.requests) == len(statuses) + 1


def test_the_next_run_goes_on_where_the_last_one_stopped(site: Loopback, tmp_path: Path) -> None:
    site.files[PATH].cuts = [100_000, 0, 0, 0]
    told = refusal(site, entry(site), settings_at(tmp_path))
    assert told == not_had("HOST broke the connection off in the middle of the file (4 attempts)")
    (part,) = left(tmp_path)
    assert part.startswith("wheels/incoming/") and part.endswith(".part")
    site.requests.clear()
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert site.requests == [(PATH, "bytes=100000-")]


def test_what_was_whole_but_had_no_name_yet_is_not_fetched_again(site: Loopback, tmp_path: Path) -> None:
    with incoming(settings_at(tmp_path), SHA, FILE, threading.Event()) as part:
        part.file.write(DATA)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert (site.requests, site.bytes_sent) == ([(PATH, f"bytes={len(DATA)}-")], 0)


@pytest.mark.parametrize("rest", [b"x" * 100_000, b"x" * 400_000])
def test_what_an_earlier_run_left_of_another_file_is_thrown_away(site: Loopback, tmp_path: Path, rest: bytes) -> None:
    with incoming(settings_at(tmp_path), SHA, FILE, threading.Event()) as part:
        part.file.write(rest)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert site.requests == [(PATH, f"bytes={len(rest)}-"), (PATH, "")]


# --- what does not pass: one clear message, nothing half-written, and the next run succeeds ---------------------------


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"status": 404}, "HOST answers 404 Not Found"),
        ({"status": 403}, "HOST answers 403 Forbidden"),
        ({"auth": "me:secret"}, "HOST answers 401 Unauthorized"),
        ({"status": 503}, "HOST answers 503 Service Unavailable (4 attempts)"),
        ({"status": 599}, "HOST answers 599 (4 attempts)"),
        ({"ranges": False, "cuts": [200_000] * 9}, "HOST broke the connection off in the middle of the file (4 attempts)"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_give_it(site: Loopback, tmp_path: Path, fault: dict[str, Any], why: str) -> None:
    site.files[PATH] = Served(DATA, **fault)
    assert refusal(site, entry(site), settings_at(tmp_path)) == not_had(why)
    assert left(tmp_path) == []
    site.files[PATH] = Served(DATA)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_a_server_that_is_not_there(site: Loopback, tmp_path: Path) -> None:
    wanted = entry(site)
    site.stop()
    assert refusal(site, wanted, settings_at(tmp_path)) == not_had("HOST refuses the connection (4 attempts)")
    assert left(tmp_path) == []


def test_a_name_that_nobody_knows(site: Loopback, tmp_path: Path) -> None:
    wanted = entry(site, url=f"https://wheels.invalid/{FILE}")
    assert refusal(site, wanted, settings_at(tmp_path)) == not_had(
        "the name of wheels.invalid cannot be resolved (4 attempts)"
    ).replace(f"SITE{PATH}", f"https://wheels.invalid/{FILE}")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_proxy_that_lets_nothing_through(
    site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", site.url.replace("://", "://me:hunter2@"))
    wanted = entry(site, url=f"https://wheels.example{PATH}")
    if stopped:
        site.stop()
    why = "does not answer" if stopped else "answers 501 Unsupported method ('CONNECT')"
    assert refusal(site, wanted, settings_at(tmp_path)) == not_had(
        f"the proxy on the way to wheels.example {why} (4 attempts)"
    ).replace("SITE", "https://wheels.example")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (requests.exceptions.ConnectTimeout(), "no connection to wheels.example within 10 s"),
        (requests.exceptions.ConnectionError(ConnectionResetError(104, "reset")), "wheels.example broke the connection off"),
        (requests.exceptions.InvalidURL("x"), "the request to wheels.example failed (InvalidURL)"),
        (requests.exceptions.ProxyError(OSError("Tunnel connection failed: 407 Proxy Authentication Required")),
         "the proxy on the way to wheels.example answers 407 Proxy Authentication Required"),
    ],
)  # fmt: skip
def test_what_a_failed_request_is_told_as(error: Exception, told: str) -> None:
    assert download.explain(error, "wheels.example") == told


def test_a_server_that_sends_nothing(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = download.TIMEOUT
    monkeypatch.setattr(download, "TIMEOUT", (10.0, 0.1))
    site.files[PATH].pause = 0.4
    began = time.monotonic()
    assert refusal(site, entry(site), settings_at(tmp_path)) == not_had("HOST sent nothing for 0.1 s (4 attempts)")
    assert time.monotonic() - began < 20
    assert left(tmp_path) == []
    monkeypatch.setattr(download, "TIMEOUT", usual)
    site.files[PATH].pause = 0.0
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_attempts_are_bounded_however_far_they_get(
    site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "HEADWAY", 20_000)
    monkeypatch.setattr(download, "ATTEMPTS", 6)
    site.files[PATH].cuts = [20_000] * 6
    told = refusal(site, entry(site), settings_at(tmp_path))
    assert told == not_had("HOST broke the connection off in the middle of the file (6 attempts)")
    assert [asked for _, asked in site.requests] == ["", *(f"bytes={20_000 * n}-" for n in range(1, 6))]
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_headway_forgives_earlier_failures(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "HEADWAY", 20_000)
    site.files[PATH].statuses = [503, 503, 503, 200, 503, 503, 503]
    site.files[PATH].cuts = [100_000]
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_a_server_that_only_drips(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "WINDOW", 0.2)
    site.files[PATH].pause, site.files[PATH].piece = 0.05, 10
    began = time.monotonic()
    told = refusal(site, entry(site), settings_at(tmp_path))
    assert told == not_had("HOST sends less than 1 kB a second (4 attempts)")
    # At this rate the whole of it takes 25 minutes.
    assert time.monotonic() - began < 20


def test_more_than_was_told(site: Loopback, tmp_path: Path) -> None:
    site.files[PATH] = Served(DATA, length=False)
    wanted = entry(site, size=len(DATA) - 1)
    assert refusal(site, wanted, settings_at(tmp_path)) == not_had(
        f"HOST sends more than {len(DATA) - 1:,} bytes (4 attempts)"
    )
    assert left(tmp_path) == []


def test_another_size_is_seen_before_anything_is_fetched(site: Loopback, tmp_path: Path) -> None:
    wanted = entry(site, size=299_999)
    assert refusal(site, wanted, settings_at(tmp_path), IntegrityError) == (
        f"error: `{FILE}` is not the file that the lock pins\n  at: SITE{PATH}\n"
        "  because: its URL: HOST has 300,000 bytes under this name, the lock wants 299,999 bytes\n"
        f"    the lock pins sha256 {SHA}\n"
        "  hint: take the content that is there now, if it was replaced on purpose: `builder lock MATRIX --repin part`"
    )
    assert left(tmp_path) == []


def test_other_bytes_do_not_stay(site: Loopback, tmp_path: Path) -> None:
    site.files[PATH].data = b"other"
    assert refusal(site, entry(site), settings_at(tmp_path), IntegrityError) == (
        f"error: `{FILE}` is not the file that the lock pins\n  at: SITE{PATH}\n"
        "  because: its URL: the file is another one than the lock wants, and nothing is known of it; "
        f"got sha256 {sha('other')}\n    the lock pins sha256 {SHA}\n"
        "  hint: take the content that is there now, if it was replaced on purpose: `builder lock MATRIX --repin part`"
    )
    assert left(tmp_path) == []
    site.files[PATH].data = DATA
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_what_every_place_said(site: Loopback, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    site.files["/odd/part/"] = Served(b"<html>log in")
    site.files["/none/part/"] = Served(b'{"meta": {"api-version": "1.1"}, "name": "part", "files": [], "versions": []}')
    site.files["/broken/part/"] = Served(b"", status=503)
    del site.files[PATH]
    indexes = {name: f"{site.url}/{name}" for name in ("odd", "none", "broken", "empty")}
    settings = settings_at(tmp_path, wheels=(folder,), indexes=indexes)
    assert refusal(site, entry(site), settings) == (
        f"error: `{FILE}` could not be had\n  at: SITE{PATH}\n"
        f"  because: folder {folder}: has no file of this name\n"
        "    index `odd` (SITE/odd): what it answers is no page of `part`\n"
        "    index `none` (SITE/none): has no file of this name\n"
        "    index `broken` (SITE/broken): HOST answers 503 Service Unavailable, again and again\n"
        "    index `empty` (SITE/empty): HOST answers 404 Not Found\n"
        "    its URL: HOST answers 404 Not Found\n"
        f"    the lock pins sha256 {SHA}\n{WAYS}"
    )


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, signed by itself, and its key: one PEM file."""
    program = shutil.which("openssl")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("openssl is not installed: TLS was not tested")
        pytest.skip("NO openssl, TLS was not tested")
    path = tmp_path_factory.mktemp("tls") / "made.pem"
    argv = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=made", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", "/dev/stdout"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    with path.open("a") as file:
        file.write(done.stdout)
    return path


@pytest.fixture
def secure(authority: Path) -> Iterator[Loopback]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    with loopback(context) as server:
        server.files[PATH] = Served(DATA)
        yield server


def test_an_authority_that_this_machine_does_not_know(secure: Loopback, authority: Path, tmp_path: Path) -> None:
    told = refusal(secure, entry(secure), settings_at(tmp_path, ca=Path(ssl.get_default_verify_paths().cafile or "")))
    assert told == not_had("the certificate of HOST is not valid here: self-signed certificate")
    assert left(tmp_path) == []
    is_there(tmp_path, fetch_artefact(entry(secure), settings_at(tmp_path, ca=authority)))


def test_the_authorities_are_read_once_for_all_connections(
    secure: Loopback, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    kept = ssl.SSLContext.load_verify_locations

    def counted(context: ssl.SSLContext, *arguments: Any, **named: Any) -> None:
        read.append(arguments)
        kept(context, *arguments, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", counted)
    mine = Path(shutil.copy(authority, tmp_path / "authorities.pem"))
    for _ in range(3):
        with session(settings_at(tmp_path, ca=mine)) as client:
            assert client.get(f"{secure.url}{PATH}").content == DATA
    # It is another file by then: the next connection trusts what is in it now.
    os.utime(mine, (1, 1))
    with session(settings_at(tmp_path, ca=mine)) as client:
        client.get(f"{secure.url}{PATH}")
    assert len(read) == 2


def test_a_server_that_speaks_no_tls(site: Loopback, tmp_path: Path) -> None:
    wanted = entry(site, url=f"{site.url}{PATH}".replace("http:", "https:"))
    assert refusal(site, wanted, settings_at(tmp_path)) == not_had(
        "HOST and this machine have no TLS in common"
    ).replace("at: SITE", "at: https://HOST")


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(FileIO):
        """A file on a disk with room for 100,000 bytes."""

        def write(self, data: Any) -> int:
            if self.tell() >= 100_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[: 100_000 - self.tell()])

    monkeypatch.setattr("builder.cache.os.fdopen", lambda handle, *_, **__: Full(handle, "r+b"))
    assert refusal(site, entry(site), settings_at(tmp_path), BuildError) == (
        f"error: the disk is full\n  at: {tmp_path}/cache/wheels/incoming\n  because: No space left on device\n"
        "  hint: free space: `builder prune --yes`; or keep files elsewhere: BUILDER_CACHE=DIR"
    )
    assert left(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_a_disk_that_has_no_room_is_not_filled_first(
    site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.download.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 250_000))
    assert refusal(site, entry(site), settings_at(tmp_path), BuildError) == (
        f"error: the disk is full\n  at: {tmp_path}/cache/wheels/incoming\n"
        "  because: 300 kB are still to come, 250 kB are free\n"
        "  hint: free space: `builder prune --yes`; or keep files elsewhere: BUILDER_CACHE=DIR"
    )
    assert left(tmp_path) == []


def test_a_file_that_may_not_grow_so_large(site: Loopback, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        told = refusal(site, entry(site), settings_at(tmp_path), UsageError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handled)
    assert told.replace(hashlib.sha256(SHA.encode()).hexdigest()[:32], "KEY") == (
        f"error: the cache cannot be used\n  at: {tmp_path}/cache/wheels/incoming/KEY.part\n  because: File too large\n"
        "  hint: keep files elsewhere: BUILDER_CACHE=DIR"
    )
    assert left(tmp_path) == []
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))


def test_a_cache_that_is_no_folder(site: Loopback, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("x")
    told = refusal(site, entry(site), settings_at(tmp_path), UsageError)
    assert told == (
        f"error: the cache cannot be used\n  at: {wheel_path(settings_at(tmp_path), SHA, FILE)}\n"
        "  because: Not a directory\n  hint: keep files elsewhere: BUILDER_CACHE=DIR"
    )


# --- several at once --------------------------------------------------------------------------------------------------

ONE_PROCESS = """
import sys
from pathlib import Path
from builder.fetch import fetch_artefact
from builder.settings import Settings
from tests.made import artefact
url, sha256, cache = sys.argv[1:]
wanted = artefact("part", "1.0", index=None, url=url, size=None, sha256=sha256, layer="kernels")
print(fetch_artefact(wanted, Settings(cache=Path(cache))))
"""


def test_two_processes_fetch_a_file_once(site: Loopback, tmp_path: Path) -> None:
    site.files[PATH].pause = 0.3
    argv = [sys.executable, "-c", ONE_PROCESS, f"{site.url}{PATH}", SHA, str(tmp_path / "cache")]
    both = [
        subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    told = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert {out.strip() for out, _ in told} == {str(wheel_path(settings_at(tmp_path), SHA, FILE))}
    assert site.requests == [(PATH, "")]
    is_there(tmp_path, wheel_path(settings_at(tmp_path), SHA, FILE))


def test_the_one_that_waits_says_so(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, waits, told = settings_at(tmp_path), threading.Event(), list[str]()

    def hear(line: str) -> None:
        told.append(line)
        waits.set()

    monkeypatch.setattr(cache, "note", hear)
    with incoming(settings, SHA, FILE, threading.Event()) as part:
        part.file.write(DATA[:100_000])
        waiting = threading.Thread(target=fetch_artefact, args=(entry(site), settings))
        waiting.start()
        assert waits.wait(30)
    waiting.join()
    is_there(tmp_path, wheel_path(settings, SHA, FILE))
    assert told == [f"waiting for another builder, which fetches {FILE} …"]
    assert site.requests == [(PATH, "bytes=100000-")]


def test_where_a_file_system_has_no_locks(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("builder.cache.fcntl.flock", none)
    fetch_artefact(entry(site), settings_at(tmp_path))
    assert find_wheel(settings_at(tmp_path), SHA, FILE)


def test_a_file_that_got_its_name_before_it_was_held_is_held_anew(
    site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, list[int]()

    def flock(file: Any, operation: int) -> None:
        # The other builder is done between our `open` and our `flock`.
        if not calls:
            next((tmp_path / "cache").rglob("*.part")).unlink()
        calls.append(operation)
        real(file, operation)

    monkeypatch.setattr("builder.cache.fcntl.flock", flock)
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path)))
    assert len(calls) == 2


def test_an_interrupt_keeps_what_came(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builder.fetch.Bar.report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_artefact(entry(site), settings_at(tmp_path))
    (part,) = left(tmp_path)
    assert DATA.startswith((tmp_path / "cache" / part).read_bytes())


# --- all of a lock ----------------------------------------------------------------------------------------------------


def four(site: Loopback) -> list[Artefact]:
    """Four direct files, and one that is on an index."""
    found = []
    for name in ("audio", "kernel", "torch", "vision"):
        file = f"{name}-1.0-py3-none-any.whl"
        site.files[f"/{file}"] = Served(name.encode())
        found.append(
            artefact(name, "1.0", index=None, url=f"{site.url}/{file}", size=None, sha256=sha(name), layer="kernels")
        )
    return [*found, artefact("idna", "3.7")]


def test_every_direct_file_of_a_lock(site: Loopback, tmp_path: Path) -> None:
    lock = lock_of(tiny().matrix, *four(site))
    found = fetch_all(lock, settings_at(tmp_path))
    assert {file: path.read_text() for file, path in found.items()} == {
        f"{name}-1.0-py3-none-any.whl": name for name in ("audio", "kernel", "torch", "vision")
    }


def test_a_lock_without_direct_files_asks_nothing(tmp_path: Path) -> None:
    assert fetch_all(lock_of(tiny().matrix, artefact("idna", "3.7")), settings_at(tmp_path)) == {}


def test_one_list_of_all_that_cannot_be_had(site: Loopback, tmp_path: Path) -> None:
    lock = lock_of(tiny().matrix, *four(site))
    site.files["/audio-1.0-py3-none-any.whl"].status = 503
    del site.files["/torch-1.0-py3-none-any.whl"]
    folder = tmp_path / "wheels"
    folder.mkdir()
    with pytest.raises(UnreachableError) as caught:
        fetch_all(lock, settings_at(tmp_path, wheels=(folder,)))
    assert words(site, caught.value) == (
        "error: 2 of 4 files that are on no index could not be had: nothing was started\n"
        "  because: audio 1.0\n"
        "      file    audio-1.0-py3-none-any.whl\n"
        "      url     SITE/audio-1.0-py3-none-any.whl\n"
        f"      sha256  {sha('audio')}\n"
        f"      why     folder {folder}: has no file of this name\n"
        "              its URL: HOST answers 503 Service Unavailable (4 attempts)\n"
        "    torch 1.0\n"
        "      file    torch-1.0-py3-none-any.whl\n"
        "      url     SITE/torch-1.0-py3-none-any.whl\n"
        f"      sha256  {sha('torch')}\n"
        f"      why     folder {folder}: has no file of this name\n"
        "              its URL: HOST answers 404 Not Found\n"
        f"{WAYS}"
    )
    assert sorted(Path(name).name for name in left(tmp_path)) == [
        "kernel-1.0-py3-none-any.whl",
        "vision-1.0-py3-none-any.whl",
    ]
    site.files["/torch-1.0-py3-none-any.whl"] = Served(b"torch")
    (folder / "audio-1.0-py3-none-any.whl").write_text("audio")
    site.requests.clear()
    assert len(fetch_all(lock, settings_at(tmp_path, wheels=(folder,)))) == 4
    assert site.paths() == ["/torch-1.0-py3-none-any.whl"], "what came the first time was not fetched again"


def test_another_content_in_the_list(site: Loopback, tmp_path: Path) -> None:
    lock = lock_of(tiny().matrix, *four(site))
    site.files["/kernel-1.0-py3-none-any.whl"].data = b"other"
    with pytest.raises(IntegrityError) as caught:
        fetch_all(lock, settings_at(tmp_path))
    assert words(site, caught.value) == (
        "error: 1 of 4 files that are on no index could not be had: nothing was started\n"
        "  because: kernel 1.0\n"
        "      file    kernel-1.0-py3-none-any.whl\n"
        "      url     SITE/kernel-1.0-py3-none-any.whl\n"
        f"      sha256  {sha('kernel')}\n"
        "      why     its URL: the file is another one than the lock wants, and nothing is known of it; "
        f"got sha256 {sha('other')}\n"
        f"{WAYS}\n"
        "    take the content that is there now, if it was replaced on purpose: `builder lock tiny --repin kernel`"
    )


def test_an_interrupt_stops_all(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, slow = Bar.report, "torch-1.0-py3-none-any.whl"

    def report(bar: Bar, have: int, total: int | None) -> None:
        real(bar, have, total)
        if bar._file != slow:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "report", report)
    lock = lock_of(tiny().matrix, *four(site))
    site.files[f"/{slow}"] = Served(bytes(300), pause=0.1, piece=1)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch_all(lock, settings_at(tmp_path))
    assert time.monotonic() - began < 20, "the slow one alone takes 30 s"


def test_a_full_disk_stops_all(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.download.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(BuildError, match="the disk is full"):
        fetch_all(lock_of(tiny().matrix, *four(site)), settings_at(tmp_path))


# --- credentials ------------------------------------------------------------------------------------------------------


def test_credentials_of_a_netrc_go_to_their_host_and_nowhere_else(
    site: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password hunter2\n")
    site.files[PATH].auth = "me:hunter2"
    is_there(tmp_path, fetch_artefact(entry(site), settings_at(tmp_path, netrc=netrc)))
    site.files[PATH].auth = "me:other"
    (tmp_path / "cache").rename(tmp_path / "old")
    told = refusal(site, entry(site), settings_at(tmp_path, netrc=netrc))
    assert told == not_had("HOST answers 401 Unauthorized")
    everything = told + "".join(capsys.readouterr()) + "".join(map(str, (tmp_path / "old").rglob("*")))
    assert "hunter2" not in everything


def test_credentials_in_a_mirrors_url_are_shown_nowhere(
    site: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = site.url.removeprefix("http://")
    mirror = f"http://me:hunter2@{host}/mirror"
    site.add((FILE, DATA), index="mirror", beside=False)
    for path in ("/mirror/part/", f"/mirror/files/{FILE}"):
        site.files[path].auth = "me:hunter2"
    settings = with_options(settings_at(tmp_path), [f"any={mirror}"])
    is_there(tmp_path, fetch_artefact(entry(site), settings))
    (tmp_path / "cache").rename(tmp_path / "old")
    for path in ("/mirror/part/", f"/mirror/files/{FILE}", PATH):
        site.files[path] = Served(b"", status=503)
    told = refusal(site, entry(site), settings)
    assert "    its URL: HOST answers 503 Service Unavailable (4 attempts)\n" in told
    assert (
        "  because: index `any` (http://***@HOST/mirror): HOST answers 503 Service Unavailable, again and again\n"
        in told
    )
    everything = told + "".join(capsys.readouterr()) + "".join(map(str, (tmp_path / "old").rglob("*")))
    assert "hunter2" not in everything


def test_credentials_in_a_url_that_a_mirror_lists_are_shown_nowhere(
    site: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.add((FILE, DATA), index="mirror", beside=False)
    page = site.files["/mirror/part/"]
    page.data = page.data.replace(b"http://", b"http://me:hunter2@")
    site.files[f"/mirror/files/{FILE}"].status = 503
    del site.files[PATH]
    told = refusal(site, entry(site), settings_at(tmp_path, indexes={"any": f"{site.url}/mirror"}))
    assert "  because: index `any` (SITE/mirror): HOST answers 503 Service Unavailable (4 attempts)\n" in told
    assert "hunter2" not in told + "".join(capsys.readouterr())


def test_an_index_whose_address_nobody_told(site: Loopback, tmp_path: Path) -> None:
    told = refusal(site, entry(site, index="cu", url=None), settings_at(tmp_path), UsageError)
    assert told == "error: the address of the index `cu` is not known"


def test_credentials_do_not_follow_to_another_host(site: Loopback, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login me password hunter2\n")
    site.files["/elsewhere"] = Served(DATA)
    site.files[PATH].location = f"{site.url}/elsewhere"
    wanted = entry(site, url=f"{site.url}{PATH}".replace("127.0.0.1", "localhost"))
    is_there(tmp_path, fetch_artefact(wanted, settings_at(tmp_path, netrc=netrc)))
    assert [bool(sent) for sent in site.authorizations] == [True, False]


# --- options ----------------------------------------------------------------------------------------------------------


def test_a_mirror_that_the_matrix_has_no_use_for() -> None:
    settings = with_options(Settings(), ["cu131=https://mirror.example/x"])
    matrix = tiny("indexes: {cu130: {url: https://wheels.example/x, packages: [part]}}\n").matrix
    with pytest.raises(UsageError) as caught:
        require_used(settings, ["cu131=https://mirror.example/x"], matrix)
    assert str(caught.value) == (
        "error: `tiny` has no index `cu131`\n  at: --index\n"
        "  because: its indexes are `default`, `cu130`, and it has no direct files that a mirror could have"
    )


@pytest.mark.parametrize("option", ["cu130=https://mirror.example/x", "default=https://mirror.example/x"])
def test_a_mirror_of_an_index_of_the_matrix(option: str) -> None:
    matrix = tiny("indexes: {cu130: {url: https://wheels.example/x, packages: [part]}}\n").matrix
    require_used(with_options(Settings(), [option]), [option], matrix)
