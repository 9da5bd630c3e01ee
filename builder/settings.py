"""The site's certificate authority, mirrors, proxies and caches: one place, read once, baked into nothing.

Sources, first one wins: the environment (``BUILDER_*``), ``$XDG_CONFIG_HOME/builder/config.toml``, then the variables
that pip, uv and requests already honour, so that a machine that is set up for them needs nothing more.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from builder.errors import UsageError

CONFIG_KEYS = frozenset(
    {"ca", "index", "indexes", "archive", "netrc", "cache", "wheels", "registry", "key", "pub", "hosts"}
)
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE")
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
# `BUILDER_INDEX_TORCH_CU130` is for the index `torch-cu130`.
_INDEX_PREFIX = "BUILDER_INDEX_"
_INDEX_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}", re.ASCII)
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
# Where distributions keep the bundle that holds the site's own authority once an administrator has added it.
_SYSTEM_CA = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))

# What the ca-certificates package of Debian and Ubuntu ships, one file each.
_SHIPPED_CA = Path("/usr/share/ca-certificates")


def redact(url: str) -> str:
    """`url` without user name and password, for every text that people or logs see."""
    # Up to the last `@`: a password may hold one.
    return re.sub(r"(?<=://)[^/\s]+@", "***@", url)


def _shown(text: str) -> str:
    """What was given instead of a URL, for a message: a password may stand in it all the same."""
    return re.sub(r"^[^/\s]*@", "***@", redact(text))


@dataclass(frozen=True)
class Settings:
    """What the site wants. Paths are absolute.

    ``indexes`` maps an index name of a matrix to the URL to use instead; each of them is a mirror of direct files too.
    ``wheels`` are folders in which wheels are looked for before anything is asked. ``registry`` is REGISTRY/NAME, where
    images are pushed to and pulled from; ``key`` and ``pub`` are the files of cosign's key pair; ``hosts`` are machines that
    images are pulled onto, as they were written.
    """

    ca: Path | None = None
    index: str | None = None
    indexes: Mapping[str, str] = field(default_factory=dict)
    archive: str | None = None
    netrc: Path | None = None
    proxies: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path()
    wheels: tuple[Path, ...] = ()
    registry: str | None = None
    key: Path | None = None
    pub: Path | None = None
    hosts: tuple[str, ...] = ()

    @property
    def proxy_script(self) -> str:
        """The proxies as a shell script that exports them, for a build secret.

        Not as BuildKit's predefined arguments: those are in no layer, but the engine keeps them in its build history.
        """
        lines = [
            f"export {name}={shlex.quote(value)}\n"
            for key, value in sorted(self.proxies.items())
            for name in (key, key.upper())
        ]
        return "".join(lines)

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
        because = f"got {_shown(url)[:200]!r}, allowed: {', '.join(f'{scheme}://…' for scheme in schemes)}"
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
    cache_value, _ = pick("cache", "BUILDER_CACHE")
    return Settings(
        ca=ca,
        index=_url(*_named("index", pick("index", "BUILDER_INDEX", _INDEX_VARIABLES))),
        indexes=_indexes(config.get("indexes", {}), where),
        # apt reads an archive on a disk; an index on a disk would not be seen inside a build.
        archive=_url(*_named("archive", pick("archive", "BUILDER_ARCHIVE")), schemes=("https", "http", "file")),
        netrc=_file(*_named("netrc", pick("netrc", "BUILDER_NETRC", ("NETRC",)))),
        proxies=_proxies(),
        cache=Path(str(cache_value)).expanduser().absolute()
        if cache_value
        else _folder("XDG_CACHE_HOME", ".cache") / "builder",
        wheels=_wheels(*pick("wheels", "BUILDER_WHEELS")),
        registry=_text(*_named("registry", pick("registry", "BUILDER_REGISTRY"))),
        key=_file(*_named("key", pick("key", "BUILDER_KEY"))),
        pub=_file(*_named("pub", pick("pub", "BUILDER_PUB"))),
        hosts=_hosts(*pick("hosts", "BUILDER_HOSTS")),
    )


def with_options(settings: Settings, indexes: Sequence[str] = (), wheels: Sequence[str] = ()) -> Settings:
    """The settings with what a command line says: `--index NAME=URL`, `--wheels DIR`; it wins. Raises `UsageError`."""
    named = dict(settings.indexes)
    default = settings.index
    for option in indexes:
        name, equals, value = option.partition("=")
        if not equals or not value:
            raise UsageError(
                f"`{_shown(option)[:200]}` is not NAME=URL",
                where="--index",
                hint="as in `--index torch-cu130=https://mirror.example/whl/cu130`; `default` is the default index",
            )
        if name == "default":
            default = _url(value, name, "--index")
        else:
            named[_index_name(name, "--index", "`default` is the default index")] = _url(value, name, "--index") or ""
    folders = tuple(_wheel_folder(folder, "--wheels") for folder in wheels)
    return replace(settings, index=default, indexes=named, wheels=(*folders, *settings.wheels))


def _indexes(table: object, where: str) -> dict[str, str]:
    """Other URLs for named indexes: of the configuration, and of the environment, which wins."""
    if not isinstance(table, dict):
        raise UsageError("`indexes` is not a table", where=where, hint='write `indexes.NAME = "https://…"`')
    found: dict[str, str] = {}
    for name, value in table.items():
        _index_name(name, where, "the default index is set with `index`")
        if url := _url(value, f"indexes.{name}", where):
            found[name] = url
    for variable in sorted(os.environ):
        if variable.startswith(_INDEX_PREFIX):
            place = f"environment variable {variable}"
            name = variable.removeprefix(_INDEX_PREFIX).lower().replace("_", "-")
            _index_name(name, place, "the default index is set with `BUILDER_INDEX`")
            if url := _url(os.environ[variable], variable, place):
                found[name] = url
    return found


def _index_name(name: str, where: str, hint: str) -> str:
    if name == "default" or not _INDEX_NAME.fullmatch(name):
        raise UsageError(
            f"`{name[:100]}` cannot name an index", where=where, because="allowed: a-z, 0-9 and -", hint=hint
        )
    return name


def _wheels(value: object, where: str) -> tuple[Path, ...]:
    """Folders of wheels: a list in the configuration, as in PATH in the environment."""
    if value is None:
        return ()
    folders = value.split(os.pathsep) if isinstance(value, str) and where.startswith("environment") else value
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise UsageError("`wheels` is not a list of folders", where=where, hint='write `wheels = ["/srv/wheels"]`')
    return tuple(_wheel_folder(folder, where) for folder in folders if folder)


def _text(value: object, name: str, where: str) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not value.isprintable():
        raise UsageError(
            f"`{name}` is not a text", where=where, hint=f'write `{name} = "registry.example.com/team/stack"`'
        )
    return value


def _hosts(value: object, where: str) -> tuple[str, ...]:
    """Machines: a list in the configuration, between white space in the environment. What each means is told where it is used."""
    hosts = value.split() if isinstance(value, str) and where.startswith("environment") else value
    if hosts is None:
        return ()
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise UsageError("`hosts` is not a list of hosts", where=where, hint='write `hosts = ["ssh://gpu1", "local"]`')
    return tuple(dict.fromkeys(hosts))


def _wheel_folder(value: str, where: str) -> Path:
    path = Path(value).expanduser().absolute()
    if not path.is_dir():
        because = f"{path} is a file" if path.exists() else f"no folder at {path}"
        raise UsageError("`wheels` names a folder that does not exist", where=where, because=because)
    return path


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
