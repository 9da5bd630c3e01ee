"""How a registry lets us in: what `docker login` stored, basic authentication, bearer tokens."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import docker.auth
import docker.errors
import requests
from requests.auth import AuthBase, HTTPBasicAuth

from builder.errors import UnreachableError, UsageError
from builder.settings import redact

_CHALLENGE = re.compile(r'([a-z_]+)="([^"]*)"')

TIMEOUT = (10, 60)
"""Seconds to connect, and between two bytes of an answer."""


def credentials(registry: str) -> dict[str, str] | None:
    """What `docker login` stored for a registry (config.json or a credential helper), as the SDK reads it; None if nothing.

    Raises `UsageError` where the file or the helper cannot be used.
    """
    try:
        found: dict[str, str] | None = docker.auth.load_config().resolve_authconfig(registry)
    except (docker.errors.DockerException, OSError, ValueError) as error:
        raise UsageError(
            f"the credentials for {registry} cannot be read",
            because=str(error)[:300],
            hint="see `~/.docker/config.json` (or DOCKER_CONFIG) and the credential helper that it names",
        ) from error
    # The file has `username`, a helper gives `Username`.
    return {key.lower(): str(value) for key, value in found.items() if value} if found else None


class Session(requests.Session):
    """A session that trusts one file of authorities: the settings decide, which have read the environment already."""

    def __init__(self, ca: str | None) -> None:
        super().__init__()
        self.ca = ca

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """As requests does it, where REQUESTS_CA_BUNDLE would win over a session's own file."""
        return super().merge_environment_settings(url, proxies, stream, self.ca or verify, cert)


class Bearer(AuthBase):
    """A token in every request; requests drops it where an answer leads to another machine."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


class NoAuth(AuthBase):
    """Nothing, not even what a netrc file has for the machine."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request


class Login:
    """Answers a registry's challenges; keeps the tokens."""

    def __init__(self, session: requests.Session, registry: str, repository: str, *, plain: bool) -> None:
        self._session, self._registry, self._repository, self._plain = session, registry, repository, plain
        self._stored: dict[str, str] | None = None
        self._read = False
        self._auth: dict[bool, AuthBase] = {}

    def auth(self, *, write: bool) -> AuthBase:
        """What the next request carries."""
        return self._auth.get(write, self._auth.get(True, NoAuth()))

    @property
    def stored(self) -> dict[str, str]:
        """The stored credentials; empty if there are none. Read when a registry asks for them, and not before."""
        if not self._read:
            self._stored, self._read = credentials(self._registry), True
        return self._stored or {}

    def answer(self, challenge: str, *, write: bool) -> bool:
        """Take a `WWW-Authenticate` header; whether the request is worth to be sent again."""
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic" and self.stored.get("password"):
            # Refused with a password: the same one again would be refused again.
            again = not isinstance(self._auth.get(True), HTTPBasicAuth)
            self._auth = {True: HTTPBasicAuth(self.stored["username"], self.stored["password"])}
            return again
        if kind.lower() == "bearer":
            self._auth[write] = Bearer(self._token(dict(_CHALLENGE.findall(rest)), write=write))
            return True
        return False

    def _token(self, challenge: dict[str, str], *, write: bool) -> str:
        realm = challenge.get("realm", "")
        secure = urlsplit(realm).scheme == "https"
        if urlsplit(realm).scheme not in ("https", "http") or not (secure or self._plain):
            # A password must not leave unencrypted because an answer says so.
            raise UnreachableError(
                "the registry sends us elsewhere for a token, without encryption",
                where=self._registry,
                because=f"its realm is `{redact(realm)[:200]}`",
                hint="`--plain-http` allows it",
            )
        scope = f"repository:{self._repository}:{'pull,push' if write else 'pull'}"
        asked = {"service": challenge.get("service", ""), "scope": scope}
        stored = self.stored
        if token := stored.get("identitytoken"):
            form = {**asked, "grant_type": "refresh_token", "refresh_token": token, "client_id": "builder"}
            answer = self._session.post(realm, data=form, auth=NoAuth(), timeout=TIMEOUT)
        else:
            password = stored.get("password")
            basic = HTTPBasicAuth(stored["username"], password) if password else NoAuth()
            answer = self._session.get(realm, params=asked, auth=basic, timeout=TIMEOUT)
        if answer.status_code != 200:
            raise refused(self._registry, answer, logged_in=bool(stored))
        try:
            data: dict[str, Any] = answer.json()
            return str(data.get("token") or data["access_token"])
        except (ValueError, KeyError, AttributeError) as error:
            raise UnreachableError(
                "the registry's token service gave no token", where=redact(realm), because=str(error)[:200]
            ) from error


def refused(where: str, answer: requests.Response, *, logged_in: bool) -> UnreachableError:
    """The error for a registry, or its token service, that does not let us in."""
    registry = where.partition("/")[0]
    stored = "the stored credentials are not enough" if logged_in else "no credentials are stored"
    return UnreachableError(
        "the registry does not let us in",
        where=where,
        because=f"{stored} for `{registry}`: {said(answer)}",
        hint=f"`docker login {registry}`",
    )


def said(answer: requests.Response) -> str:
    """A registry's own words, or its status: `403: denied: requested access to the resource is denied`."""
    try:
        errors = answer.json().get("errors") or []
        words = "; ".join(f"{e.get('code', '')}: {e.get('message', '')}".strip(": ") for e in errors[:3])
    except (ValueError, AttributeError, TypeError):
        words = ""
    return f"{answer.status_code}: {(words or answer.reason or '')[:300]}".rstrip(": ")
