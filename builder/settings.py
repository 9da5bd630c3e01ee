"""The site's certificate authority, mirrors, proxies and caches: one place, read once, baked into nothing.

Sources, first one wins: the environment (``BUILDER_*``), ``$XDG_CONFIG_HOME/builder/config.toml``, then the variables
that pip, uv and requests already honour, so that a machine that is set up for them needs nothing more.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from builder.errors import UsageError

CONFIG_KEYS = frozenset({"ca", "index", "indexes", "archive", "netrc", "cache"})
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE")
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
# Where distributions keep the bundle that holds the site's own authority once an administrator has added it.
_SYSTEM_CA = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))

# What the ca-certificates package of Debian and Ubuntu ships, one file each.
_SHIPPED_CA = Path("/usr/share/ca-certificates")


def redact(url: str) -> str:
    """`url` without user name and password, for every text that people or logs see."""
    # Up to the last `@`: a password may hold one.
    return re.sub(r"(?<=://)[^/\s]+@", "***@", url)


@dataclass(frozen=True)
class Settings:
    """What the site wants. Paths are absolute; ``indexes`` maps an index name of a matrix to the URL to use instead."""

    ca: Path | None = None
    index: str | None = None
    indexes: Mapping[str, str] = field(default_factory=dict)
    archive: str | None = None
    netrc: Path | None = None
    proxies: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path()

    def child_environment(self) -> dict[str, str]:
        """The environment for uv and apt-based helpers: the caller's, less other tools' index settings, plus ours."""
        dropped = ("UV_", "PIP_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        env["UV_NO_CONFIG"] = "1"
        # uv breaks its lines to fit the terminal; they are part of our messages, which are broken nowhere.
        env["COLUMNS"] = "1000"
        env["UV_NO_PROGRESS"] = "1"
        if self.ca is not None:
            env["SSL_CERT_FILE"] = str(self.ca)
        if self.index is not None:
            env["UV_DEFAULT_INDEX"] = self.index
        if self.netrc is not None:
            env["NETRC"] = str(self.netrc)
        return env


def config_path() -> Path:
    """`$XDG_CONFIG_HOME/builder/config.toml`."""
    return _folder("XDG_CONFIG_HOME", ".config") / "builder" / "config.toml"


def _folder(variable: str, below_home: str) -> Path:
    if os.environ.get(variable):
        return Path(os.environ[variable]).absolute()
    try:
        return Path.home() / below_home
    except RuntimeError as error:
        raise UsageError("the home folder is not known", because=str(error), hint=f"set HOME or {variable}") from error


def _read_config(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the configuration cannot be read", where=str(path), because=str(error)) from error
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError("the configuration is not valid TOML", where=str(path), because=str(error)) from error
    for key in config:
        if key not in CONFIG_KEYS:
            allowed = ", ".join(f"`{name}`" for name in sorted(CONFIG_KEYS))
            raise UsageError(
                f"unknown key `{key}` in the configuration", where=str(path), hint=f"known keys: {allowed}"
            )
    return config


def _file(value: object, name: str, where: str) -> Path | None:
    if value is None or value == "":
        return None
    path = Path(str(value)).expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"`{name}` names a file that does not exist", where=where, because=f"no file at {path}")
    return path


def _url(value: object, name: str, where: str, schemes: tuple[str, ...] = ("https", "http")) -> str | None:
    if value is None or value == "":
        return None
    url = str(value)
    try:
        parts = urlsplit(url)
        valid = parts.scheme in schemes and bool(parts.hostname or parts.scheme == "file")
    except ValueError:
        valid = False
    # A newline or a space in a URL could end up as an argument of its own somewhere down the line.
    if not valid or re.search(r"[\s\x00-\x1f\x7f\"'\\<>`]", url):
        because = f"got {redact(url)[:200]!r}, allowed: {', '.join(f'{scheme}://…' for scheme in schemes)}"
        raise UsageError(f"`{name}` is not a URL", where=where, because=because)
    return url


@cache
def load() -> Settings:
    """Read the settings of this process. Raises `UsageError` with the file or variable that is wrong."""
    path = config_path()
    config = _read_config(path)
    where = str(path)

    def pick(key: str, variable: str, fallbacks: tuple[str, ...] = ()) -> tuple[object, str]:
        if os.environ.get(variable):
            return os.environ[variable], f"environment variable {variable}"
        if key in config:
            return config[key], where
        for name in fallbacks:
            # requests takes a folder of certificates too; neither uv's variable nor a build secret does.
            if os.environ.get(name) and not Path(os.environ[name]).is_dir():
                return os.environ[name], f"environment variable {name}"
        return None, ""

    ca = _file(*_named("ca", pick("ca", "BUILDER_CA", _CA_VARIABLES)))
    if ca is None:
        ca = next((bundle for bundle in _SYSTEM_CA if bundle.is_file()), None)
    if ca is not None and ca in _SYSTEM_CA and not adds_authorities(ca):
        ca = None
    named = config.get("indexes", {})
    if not isinstance(named, dict):
        raise UsageError("`indexes` is not a table", where=where, hint='write `indexes.NAME = "https://…"`')
    cache_value, _ = pick("cache", "BUILDER_CACHE")
    return Settings(
        ca=ca,
        index=_url(*_named("index", pick("index", "BUILDER_INDEX", _INDEX_VARIABLES))),
        indexes={name: url for name, value in named.items() if (url := _url(value, f"indexes.{name}", where))},
        # apt reads an archive on a disk; an index on a disk would not be seen inside a build.
        archive=_url(*_named("archive", pick("archive", "BUILDER_ARCHIVE")), schemes=("https", "http", "file")),
        netrc=_file(*_named("netrc", pick("netrc", "BUILDER_NETRC", ("NETRC",)))),
        proxies=_proxies(),
        cache=Path(str(cache_value)).expanduser().absolute()
        if cache_value
        else _folder("XDG_CACHE_HOME", ".cache") / "builder",
    )


def adds_authorities(bundle: Path) -> bool:
    """Whether a system's bundle holds an authority that the distribution does not ship; True where that is not known.

    Without one an image needs nothing of it: its installer brings the public authorities along.
    """
    if not _SHIPPED_CA.is_dir():
        return True
    known: set[bytes] = set()
    for path in _SHIPPED_CA.rglob("*.crt"):
        known |= _certificates(path)
    return not _certificates(bundle) <= known


def _certificates(path: Path) -> set[bytes]:
    blocks = re.findall(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", path.read_bytes(), re.DOTALL)
    return {b"".join(block.split()) for block in blocks}


def _named(name: str, picked: tuple[object, str]) -> tuple[object, str, str]:
    return picked[0], name, picked[1]


def _proxies() -> dict[str, str]:
    found = {}
    for name in _PROXY_VARIABLES:
        value = os.environ.get(name) or os.environ.get(name.upper())
        if value:
            found[name] = value
    return found
