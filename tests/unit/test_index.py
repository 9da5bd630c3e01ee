"""METADATA from an index on loopback: from beside the wheel, out of the wheel, and what the user sees when neither works."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from urllib3.util import Retry

from builder import index
from builder.errors import UnreachableError, UsageError
from builder.index import RemoteFile, RemoteWheel, confined, fetch_metadata, offers, session
from tests.loopback import Loopback, Served, loopback, metadata, wheel
from tests.made import settings_at, sha

MADE = wheel("tiny-part", "1.0", ["idna>=3"])
TEXT = metadata("tiny-part", "1.0", ["idna>=3"]).decode()
HINT = "  hint: see that the index answers; a site's certificate authority is set with `BUILDER_CA`"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as server:
        yield server


def remote(url: str, name: str = "tiny-part") -> RemoteWheel:
    file = url.rsplit("/", 1)[-1]
    return RemoteWheel(name, "1.0", file, url, sha(url))


def big(where: str) -> tuple[str, bytes]:
    """A wheel of which the tail alone does not hold METADATA: more than a megabyte, METADATA at its start."""
    filler = {"tiny_part/data.bin": bytes(1_500_000)}
    name, data = wheel("tiny-part", "1.0", ["idna>=3"], files=filler)
    if where == "end":
        return name, data
    import io

    with zipfile.ZipFile(io.BytesIO(data)) as old:
        members = {entry: old.read(entry) for entry in old.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        for entry in sorted(members, key=lambda entry: not entry.endswith("METADATA")):
            new.writestr(entry, members[entry])
    return name, buffer.getvalue()


def refusal(site: Loopback, tmp_path: Path, url: str) -> str:
    with pytest.raises(UnreachableError) as caught:
        fetch_metadata([remote(url)], settings_at(tmp_path))
    assert not (tmp_path / "cache" / "metadata").exists()
    return str(caught.value).replace(site.url, "SITE").replace(site.url.removeprefix("http://"), "SITE")


# --- where it is found ------------------------------------------------------------------------------------------------


def test_metadata_beside_the_wheel_is_all_that_is_fetched(site: Loopback, tmp_path: Path) -> None:
    url = site.add(MADE)
    assert fetch_metadata([remote(url)], settings_at(tmp_path)) == [TEXT]
    assert site.paths() == [f"/simple/files/{MADE[0]}.metadata"]


@pytest.mark.parametrize("status", [403, 404, 405, 410])
def test_where_it_is_not_beside_the_wheel_it_is_read_out_of_it(site: Loopback, tmp_path: Path, status: int) -> None:
    url = site.add(MADE)
    site.files[f"/simple/files/{MADE[0]}.metadata"].status = status
    assert fetch_metadata([remote(url)], settings_at(tmp_path)) == [TEXT]
    assert site.requests[1:] == [(f"/simple/files/{MADE[0]}", "bytes=-262144")]


@pytest.mark.parametrize("where", ["start", "end"])
def test_of_a_large_wheel_a_part_is_read(site: Loopback, tmp_path: Path, where: str) -> None:
    made = big(where)
    url = site.add(made, beside=False)
    assert fetch_metadata([remote(url)], settings_at(tmp_path)) == [TEXT]
    assert site.bytes_sent < 400_000 < len(made[1])


def test_the_order_is_that_of_the_wheels(site: Loopback, tmp_path: Path) -> None:
    names = [f"part{number}" for number in range(20)]
    wheels = [remote(site.add(wheel(name, "1.0")), name) for name in names]
    texts = fetch_metadata(wheels, settings_at(tmp_path))
    assert [text.splitlines()[1] for text in texts] == [f"Name: {name}" for name in names]


def test_a_second_time_the_cache_answers_with_the_server_down(site: Loopback, tmp_path: Path) -> None:
    crlf = TEXT.replace("\n", "\r\n") + "\r\nüñ\r\n"
    url = site.add(wheel("tiny-part", "1.0", text=crlf.encode()))
    first = fetch_metadata([remote(url)], settings_at(tmp_path))
    site.stop()
    assert first == [crlf] == fetch_metadata([remote(url)], settings_at(tmp_path))


def test_a_name_in_another_spelling_is_the_same_package(site: Loopback, tmp_path: Path) -> None:
    text = TEXT.replace("tiny-part", "Tiny_Part")
    url = site.add(wheel("tiny-part", "1.0", text=text.encode()))
    assert fetch_metadata([remote(url)], settings_at(tmp_path)) == [text]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_error_that_passes_is_waited_for(site: Loopback, tmp_path: Path, status: int) -> None:
    url = site.add(MADE)
    site.files[f"/simple/files/{MADE[0]}.metadata"].statuses = [status, status]
    assert fetch_metadata([remote(url)], settings_at(tmp_path)) == [TEXT]
    assert len(site.requests) == 3


# --- what the user sees -----------------------------------------------------------------------------------------------


def test_no_wheel_either(site: Loopback, tmp_path: Path) -> None:
    assert refusal(site, tmp_path, f"{site.url}/absent-1.0-py3-none-any.whl") == (
        "error: the METADATA of `absent-1.0-py3-none-any.whl` could not be read\n"
        f"  because: 404 Client Error: Not Found for url: SITE/absent-1.0-py3-none-any.whl\n{HINT}"
    )


def test_a_server_without_byte_ranges_is_not_asked_for_the_whole_wheel(site: Loopback, tmp_path: Path) -> None:
    name, data = wheel("tiny-part", "1.0", files={"tiny_part/data.bin": bytes(60_000_000)})
    url = site.add((name, data), beside=False)
    site.files[f"/simple/files/{name}"].ranges = False
    assert refusal(site, tmp_path, url) == (
        f"error: the METADATA of `{name}` could not be read\n  because: the server does not answer byte ranges\n{HINT}"
    )
    assert site.bytes_sent < 20_000_000


@pytest.mark.parametrize("told", ["", "bytes */12", "bytes 0-x/12", "bytes 0-900000/900001", "0-1/2/3"])
def test_a_senseless_content_range(site: Loopback, tmp_path: Path, told: str) -> None:
    url = site.add(MADE, beside=False)
    site.files[f"/simple/files/{MADE[0]}"].content_range = told
    assert refusal(site, tmp_path, url) == (
        f"error: the METADATA of `{MADE[0]}` could not be read\n"
        f"  because: the server answers a byte range with `Content-Range: {told}`\n{HINT}"
    )


def test_another_range_than_was_asked_for(site: Loopback, tmp_path: Path) -> None:
    name, data = big("start")
    url = site.add((name, data), beside=False)
    client = session(settings_at(tmp_path))
    file = RemoteFile(client, url)
    site.files[f"/simple/files/{name}"].content_range = f"bytes 7-9/{len(data)}"
    with pytest.raises(OSError, match=r"the server sent 4 bytes for|another part than byte 0 of"):
        file.read(4)


def test_a_file_that_is_no_wheel(site: Loopback, tmp_path: Path) -> None:
    site.files["/x-1.0-py3-none-any.whl"] = Served(b"<html>" * 100)
    assert refusal(site, tmp_path, f"{site.url}/x-1.0-py3-none-any.whl") == (
        f"error: the METADATA of `x-1.0-py3-none-any.whl` could not be read\n  because: File is not a zip file\n{HINT}"
    )


def test_a_wheel_without_metadata(site: Loopback, tmp_path: Path) -> None:
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_part/__init__.py", "")
    site.files["/x-1.0-py3-none-any.whl"] = Served(buffer.getvalue())
    assert refusal(site, tmp_path, f"{site.url}/x-1.0-py3-none-any.whl") == (
        f"error: the METADATA of `x-1.0-py3-none-any.whl` could not be read\n"
        f"  because: the wheel has 0 METADATA files\n{HINT}"
    )


def test_a_login_page_is_not_taken_for_metadata(site: Loopback, tmp_path: Path) -> None:
    url = site.add(MADE)
    site.files[f"/simple/files/{MADE[0]}.metadata"] = Served(b"<html><body>Please log in</body></html>")
    assert refusal(site, tmp_path, url) == (
        f"error: the METADATA of `{MADE[0]}` could not be read\n"
        f"  because: what the server sent is not the METADATA of this package\n{HINT}"
    )


def test_metadata_of_another_package_is_not_taken(site: Loopback, tmp_path: Path) -> None:
    url = site.add(wheel("tiny-part", "1.0", text=metadata("other", "1.0")))
    assert "is not the METADATA of this package" in refusal(site, tmp_path, url)


def test_a_connection_that_breaks_off(site: Loopback, tmp_path: Path) -> None:
    url = site.add(MADE)
    site.files[f"/simple/files/{MADE[0]}.metadata"].statuses = [-1] * 9
    told = refusal(site, tmp_path, url)
    assert told.splitlines()[0] == f"error: the METADATA of `{MADE[0]}` could not be read"
    assert "IncompleteRead(" in told


def test_an_error_that_stays(site: Loopback, tmp_path: Path) -> None:
    url = site.add(MADE)
    site.files[f"/simple/files/{MADE[0]}.metadata"].status = 503
    told = refusal(site, tmp_path, url)
    assert told.splitlines()[0] == f"error: the METADATA of `{MADE[0]}` could not be read"
    assert "too many 503 error responses" in told
    assert len(site.requests) == 5


def test_a_server_that_is_down(site: Loopback, tmp_path: Path) -> None:
    site.stop()
    assert "Connection refused" in refusal(site, tmp_path, f"{site.url}/x-1.0-py3-none-any.whl")


def test_the_first_failure_is_not_followed_by_hundreds(site: Loopback, tmp_path: Path) -> None:
    wheels = [remote(f"{site.url}/x{number}-1.0-py3-none-any.whl") for number in range(300)]
    with pytest.raises(UnreachableError):
        fetch_metadata(wheels, settings_at(tmp_path))
    assert len(site.requests) < 150


# --- credentials and authorities --------------------------------------------------------------------------------------


def test_credentials_of_the_index_are_sent_to_its_host_and_never_shown(site: Loopback, tmp_path: Path) -> None:
    url = site.add(MADE)
    for served in site.files.values():
        served.auth = "me:se@cret"
    settings = settings_at(tmp_path, index=site.url.replace("://", "://me:se%40cret@") + "/simple")
    assert fetch_metadata([remote(url)], settings) == [TEXT]
    for served in site.files.values():
        served.auth = "me:other"
    with pytest.raises(UnreachableError) as caught:
        fetch_metadata([remote(url + "x")], settings)
    assert "cret" not in str(caught.value)


def test_credentials_of_a_netrc_that_the_configuration_names(site: Loopback, tmp_path: Path) -> None:
    url = site.add(MADE)
    for served in site.files.values():
        served.auth = "me:secret"
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    assert fetch_metadata([remote(url)], settings_at(tmp_path, netrc=tmp_path / "netrc")) == [TEXT]


def test_a_damaged_netrc_is_named_and_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine x login y passwort hunter2\n")
    with pytest.raises(UsageError) as caught:
        session(settings_at(tmp_path, netrc=tmp_path / "netrc"))
    assert str(caught.value) == f"error: the netrc cannot be read\n  at: {tmp_path}/netrc, line 1"


def test_credentials_are_not_sent_elsewhere(site: Loopback, tmp_path: Path) -> None:
    client = session(settings_at(tmp_path, index="https://me:secret@wheels.example/simple"))
    prepared = client.prepare_request(requests.Request("GET", f"{site.url}/x"))
    assert "Authorization" not in prepared.headers


def test_the_sites_authority_wins_over_the_variables_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/other.pem")
    client = session(settings_at(tmp_path, ca=tmp_path / "ca.pem"))
    merged = client.merge_environment_settings("https://wheels.example", {}, False, None, None)
    assert merged["verify"] == str(tmp_path / "ca.pem")


# --- indexes for some packages ----------------------------------------------------------------------------------------


def test_a_confined_index_has_the_named_packages_and_no_other(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("one", "1.0"), index="extra")
    site.add(wheel("two", "1.0"), index="extra")
    client = session(settings_at(tmp_path))
    with confined({"extra": (f"{site.url}/extra/", ["One"])}) as doors:
        answers = [client.get(f"{doors['extra']}/{name}/") for name in ("one", "two", "")]
        other = client.get(doors["extra"].replace("/extra", "/other/one/"))
    assert [answer.status_code for answer in (*answers, other)] == [200, 404, 404, 404]
    assert answers[0].url == f"{site.url}/extra/one/"


def test_without_indexes_nothing_listens() -> None:
    with confined({}) as doors:
        assert doors == {}


def test_whether_an_index_offers_a_file(site: Loopback, tmp_path: Path) -> None:
    made = wheel("one", "1.0")
    site.add(made, index="extra")
    import hashlib

    settings, digest = settings_at(tmp_path), hashlib.sha256(made[1]).hexdigest()
    url = f"{site.url}/extra"
    assert [offers(url, "one", d, settings) for d in (digest, sha("x"))] == [True, False]
    assert offers(url, "absent", digest, settings) is False


def test_an_index_page_that_cannot_be_read(site: Loopback, tmp_path: Path) -> None:
    site.files["/extra/one/"] = Served(b"{", status=500)
    with pytest.raises(UnreachableError) as caught:
        offers(f"{site.url}/extra", "one", sha("x"), settings_at(tmp_path))
    assert str(caught.value).startswith("error: the index page of `one` could not be read\n  because: ")


def test_the_most_metadata_there_may_be(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_METADATA", 10)
    url = site.add(MADE, beside=False)
    assert refusal(site, tmp_path, url) == (
        f"error: the METADATA of `{MADE[0]}` could not be read\n  because: its METADATA has {len(TEXT)} bytes\n{HINT}"
    )
