"""A registry by its HTTP API (OCI distribution): manifests, small blobs, tags. Layers go through the engine.

Facts about the protocol: the OCI distribution specification 1.1; the token flow is Docker's registry token specification.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests

from builder.errors import IntegrityError, UnreachableError
from builder.files import pretty_size, sha256_hex
from builder.registry.auth import TIMEOUT, Login, Session, refused, said
from builder.registry.reference import Reference
from builder.registry.words import unreachable
from builder.settings import Settings

__all__ = ["MANIFEST_TYPES", "Reference", "RegistryClient"]

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFEST_TYPES = (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST)

MANIFEST_LIMIT = 4 << 20
"""Bytes of a manifest that are read: what the specification asks registries to take."""

ATTEMPTS = 5
"""Tries for a request, with 1, 2, 4 and 8 seconds between them."""

_PAUSE = 1.0


class RegistryClient:
    """One repository of a registry. Raises `UnreachableError` from every method where the registry does not answer or refuses.

    Over TLS with the site's authority, over plain HTTP where ``plain_http`` says so or the registry is on the loopback
    address and does not speak TLS.
    """

    def __init__(self, reference: Reference | str, settings: Settings, plain_http: bool = False) -> None:
        self.reference = Reference.parse(reference) if isinstance(reference, str) else reference
        self._session = Session(str(settings.ca) if settings.ca is not None else None)
        self._base = f"https://{self.reference.registry}"
        self._undecided = self.reference.is_loopback and not plain_http
        if plain_http or self.reference.is_loopback:
            self._base = f"http://{self.reference.registry}"
        plain = plain_http or self.reference.is_loopback
        self._login = Login(self._session, self.reference.registry, self.reference.repository, plain=plain)
        self.pause: Callable[[float], None] = time.sleep

    @property
    def name(self) -> str:
        """`REGISTRY/NAME`."""
        return self.reference.name

    def close(self) -> None:
        self._session.close()

    # ------------------------------------------------------------------------------------------------- reading

    def manifest(self, reference: str) -> tuple[bytes, str] | None:
        """The bytes, as they came, and the media type of what a tag or a digest names; None where there is none.

        Raises `IntegrityError` where a digest was asked for and the bytes are others.
        """
        answer = self._ask("GET", f"manifests/{reference}", headers={"Accept": ", ".join(MANIFEST_TYPES)}, stream=True)
        if answer.status_code == 404:
            return None
        raw = self._read(answer, MANIFEST_LIMIT, reference)
        if reference.startswith("sha256:") and f"sha256:{sha256_hex(raw)}" != reference:
            raise IntegrityError(
                "the registry's manifest is not what its digest says",
                where=f"{self.name}@{reference}",
                because=f"its bytes have sha256:{sha256_hex(raw)}",
            )
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        return raw, kind or str(_parsed(raw, self.name).get("mediaType", ""))

    def image(self, reference: str, platform: str = "linux/amd64") -> tuple[str, dict[str, Any]]:
        """Digest and content of the image manifest that a tag or digest names; of an index, that of ``platform``.

        Raises `UnreachableError` where the registry has none.
        """
        for _ in range(2):
            found = self.manifest(reference)
            if found is None:
                break
            data = _parsed(found[0], self.name)
            if "manifests" not in data:
                return f"sha256:{sha256_hex(found[0])}", data
            fitting = [m for m in data["manifests"] if _platform(m) == platform]
            if not fitting:
                break
            reference = str(fitting[0]["digest"])
        joint = "@" if reference.startswith("sha256:") else ":"
        raise UnreachableError(
            "the registry has no such image",
            where=f"{self.name}{joint}{reference}",
            hint="see what it has: the tags are MATRIX-<first 12 of the lock digest>; put it there with `builder push`",
        )

    def head_blob(self, digest: str) -> int | None:
        """The size of a blob in bytes; None where the registry does not have it."""
        answer = self._ask("HEAD", f"blobs/{digest}")
        return None if answer.status_code == 404 else int(answer.headers.get("Content-Length", 0))

    def blob(self, digest: str, limit: int = MANIFEST_LIMIT) -> bytes:
        """A small blob. Raises `IntegrityError` where it is larger than `limit` bytes or not what its digest says."""
        answer = self._ask("GET", f"blobs/{digest}", stream=True)
        if answer.status_code == 404:
            raise UnreachableError("the registry has no such blob", where=f"{self.name}@{digest}")
        raw = self._read(answer, limit, digest)
        if f"sha256:{sha256_hex(raw)}" != digest:
            raise IntegrityError(
                "a blob in the registry is not what its digest says",
                where=f"{self.name}@{digest}",
                because=f"its bytes have sha256:{sha256_hex(raw)}",
                hint="its storage is damaged or was tampered with: delete the blob there and push again",
            )
        return raw

    def tags(self) -> list[str]:
        """Every tag of the repository, as the registry sorts them; none where there is no such repository."""
        found: list[str] = []
        path = "tags/list?n=1000"
        for _ in range(1000):
            answer = self._ask("GET", path)
            if answer.status_code == 404:
                return found
            found += [str(tag) for tag in (answer.json().get("tags") or ())]
            following = re.search(r'<([^>]+)>;\s*rel="?next', answer.headers.get("Link", ""))
            if following is None:
                return found
            path = urljoin(answer.url, following[1])
        return found

    # ------------------------------------------------------------------------------------------------- writing

    def put_blob(self, data: bytes) -> str:
        """Upload a small blob unless it is there; its digest."""
        digest = f"sha256:{sha256_hex(data)}"
        if self.head_blob(digest) is None:
            begun = self._ask("POST", "blobs/uploads/", write=True)
            place = urljoin(f"{self._base}/", begun.headers.get("Location", ""))
            url = f"{place}{'&' if urlsplit(place).query else '?'}digest={digest}"
            self._ask("PUT", url, write=True, data=data, headers={"Content-Type": "application/octet-stream"})
        return digest

    def put_manifest(self, reference: str, data: bytes, media_type: str) -> str:
        """Upload a manifest under a tag or its digest; its digest."""
        self._ask("PUT", f"manifests/{reference}", write=True, data=data, headers={"Content-Type": media_type})
        return f"sha256:{sha256_hex(data)}"

    def tag(self, digest: str, tag: str) -> None:
        """Give a manifest that is there a tag, and read back that it has it."""
        found = self.manifest(digest)
        if found is None:
            raise UnreachableError("the registry has no such manifest", where=f"{self.name}@{digest}")
        self.put_manifest(tag, *found)
        back = self.manifest(tag)
        if back is None or f"sha256:{sha256_hex(back[0])}" != digest:
            raise IntegrityError(
                "the tag does not name what it was put on",
                where=f"{self.name}:{tag}",
                because="another push moved it, or the registry does not keep what it takes",
                hint="push again",
            )

    # ---------------------------------------------------------------------------------------------- requests

    def _ask(
        self,
        method: str,
        path: str,
        *,
        write: bool = False,
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """Send a request, let in where that is asked for, again where it may help. The answer is fine or a 404 of a reading.

        An upload's POST and PUT go again as well: a blob that is uploaded twice is one blob.
        """
        challenged = 0
        for pause in (*_pauses(), None):
            url = path if "://" in path else f"{self._base}/v2/{self.reference.repository}/{path}"
            try:
                auth = self._login.auth(write=write)
                answer = self._session.request(
                    method, url, headers=headers, data=data, auth=auth, stream=stream, timeout=TIMEOUT
                )
                if answer.status_code == 400 and self._undecided and "HTTPS server" in answer.text:
                    self._base, self._undecided = f"https://{self.reference.registry}", False
                    return self._ask(method, path, write=write, headers=headers, data=data, stream=stream)
                while answer.status_code == 401 and challenged < 2:
                    challenged += 1
                    if not self._login.answer(answer.headers.get("WWW-Authenticate", ""), write=write):
                        break
                    auth = self._login.auth(write=write)
                    answer = self._session.request(
                        method, url, headers=headers, data=data, auth=auth, stream=stream, timeout=TIMEOUT
                    )
            except requests.exceptions.SSLError as error:
                raise unreachable(str(error), where=self.name) from error
            except requests.RequestException as error:
                if pause is None:
                    raise unreachable(str(error), where=self.name) from error
                self.pause(pause)
                continue
            if answer.status_code in (429, 500, 502, 503, 504) and pause is not None:
                answer.close()
                self.pause(pause)
                continue
            return self._judged(answer, write=write)
        raise AssertionError("the last pause is None")

    def _judged(self, answer: requests.Response, *, write: bool) -> requests.Response:
        if answer.status_code in (401, 403):
            raise refused(self.name, answer, logged_in=bool(self._login.stored))
        if answer.ok or (answer.status_code == 404 and not write):
            return answer
        raise UnreachableError("the registry refused", where=self.name, because=said(answer))

    def _read(self, answer: requests.Response, limit: int, what: str) -> bytes:
        raw = b""
        try:
            for chunk in answer.iter_content(65536):
                raw += chunk
                if len(raw) > limit:
                    answer.close()
                    raise IntegrityError(
                        f"what the registry sends is larger than {pretty_size(limit)}", where=f"{self.name} {what}"
                    )
        except requests.RequestException as error:
            raise unreachable(str(error), where=self.name) from error
        return raw


def _pauses() -> Iterator[float]:
    yield from (_PAUSE * 2**number for number in range(ATTEMPTS - 1))


def _platform(descriptor: dict[str, Any]) -> str:
    platform = descriptor.get("platform") or {}
    return f"{platform.get('os', '')}/{platform.get('architecture', '')}"


def _parsed(raw: bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise IntegrityError("what the registry sent is no manifest", where=where)
    return data
