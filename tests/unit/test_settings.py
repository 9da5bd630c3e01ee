"""Settings: which source wins, what is refused, what a child process gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from builder import settings
from builder.errors import UsageError
from builder.settings import Settings, redact, with_options

VARIABLES = (
    *("BUILDER_CA", "BUILDER_INDEX", "BUILDER_ARCHIVE", "BUILDER_NETRC", "BUILDER_CACHE", "BUILDER_WHEELS", "NETRC"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE"),
    *("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"),
    *(name for base in ("http_proxy", "https_proxy", "no_proxy", "all_proxy") for name in (base, base.upper())),
    *("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "BUILDER_REGISTRY", "BUILDER_KEY", "BUILDER_PUB", "BUILDER_HOSTS"),
)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(settings, "_SYSTEM_CA", ())
    settings.load.cache_clear()
    yield
    settings.load.cache_clear()


def configure(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "home" / ".config" / "builder" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


def refusal() -> str:
    with pytest.raises(UsageError) as caught:
        settings.load()
    return str(caught.value)


# --- which source wins ------------------------------------------------------------------------------------------------


def test_without_any_source_there_is_a_cache_only(tmp_path: Path) -> None:
    assert settings.load() == Settings(cache=tmp_path / "home" / ".cache" / "builder")


def test_every_key_of_the_configuration_is_read(tmp_path: Path) -> None:
    ca, netrc = made(tmp_path / "ca.pem"), made(tmp_path / "netrc")
    configure(
        tmp_path,
        f'ca = "{ca}"\nindex = "https://wheels.example/simple"\narchive = "https://archive.example/debian"\n'
        f'netrc = "{netrc}"\ncache = "{tmp_path}/cache"\nindexes.site = "https://wheels.example/site"\n'
        f'wheels = ["{tmp_path}"]\n',
    )
    assert settings.load() == Settings(
        ca=ca,
        index="https://wheels.example/simple",
        indexes={"site": "https://wheels.example/site"},
        archive="https://archive.example/debian",
        netrc=netrc,
        cache=tmp_path / "cache",
        wheels=(tmp_path,),
    )


@pytest.mark.parametrize("field", ["index", "archive"])
def test_our_variable_wins_over_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    configure(tmp_path, f'{field} = "https://wheels.example/file"\n')
    assert getattr(settings.load(), field) == "https://wheels.example/file"
    settings.load.cache_clear()
    monkeypatch.setenv(f"BUILDER_{field.upper()}", "https://wheels.example/variable")
    assert getattr(settings.load(), field) == "https://wheels.example/variable"


@pytest.mark.parametrize("field", ["ca", "netrc"])
def test_our_variable_wins_over_the_configuration_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    configure(tmp_path, f'{field} = "{made(tmp_path / "file")}"\n')
    monkeypatch.setenv(f"BUILDER_{field.upper()}", str(made(tmp_path / "variable")))
    assert getattr(settings.load(), field) == tmp_path / "variable"


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"])
def test_other_tools_index_is_taken_where_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "https://wheels.example/theirs")
    assert settings.load().index == "https://wheels.example/theirs"


def test_the_configuration_wins_over_other_tools_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, 'index = "https://wheels.example/file"\n')
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://wheels.example/theirs")
    assert settings.load().index == "https://wheels.example/file"


def test_of_other_tools_variables_uvs_comes_before_pips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://wheels.example/pip")
    monkeypatch.setenv("UV_INDEX_URL", "https://wheels.example/uv")
    assert settings.load().index == "https://wheels.example/uv"


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE"])
def test_other_tools_authority_is_taken_where_nothing_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(made(tmp_path / "theirs.pem")))
    assert settings.load().ca == tmp_path / "theirs.pem"


def test_a_folder_of_certificates_of_another_tool_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path))
    monkeypatch.setenv("PIP_CERT", str(made(tmp_path / "pip.pem")))
    assert settings.load().ca == tmp_path / "pip.pem"


def test_the_systems_bundle_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_SYSTEM_CA", (tmp_path / "absent", made(tmp_path / "system.pem")))
    monkeypatch.setattr(settings, "_SHIPPED_CA", tmp_path / "nothing is known of what is shipped")
    assert settings.load().ca == tmp_path / "system.pem"


def certificate(body: str) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"


def test_a_systems_bundle_with_public_authorities_only_is_none_of_the_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped" / "mozilla"
    shipped.mkdir(parents=True)
    for body in ("AAAA", "BBBB"):
        (shipped / f"{body}.crt").write_text(certificate(body))
    bundle = made(tmp_path / "bundle.crt")
    monkeypatch.setattr(settings, "_SYSTEM_CA", (bundle,))
    monkeypatch.setattr(settings, "_SHIPPED_CA", tmp_path / "shipped")
    bundle.write_text(certificate("BBBB") + certificate("AA\nAA"))
    assert settings.load().ca is None
    # Other tools are often told to use the very same bundle.
    monkeypatch.setenv("PIP_CERT", str(bundle))
    settings.load.cache_clear()
    assert settings.load().ca is None
    bundle.write_text(certificate("AAAA") + certificate("CCCC"))
    settings.load.cache_clear()
    assert settings.load().ca == bundle


def test_the_cache_is_in_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert settings.load().cache == tmp_path / "xdg" / "builder"


def test_the_configuration_is_in_xdg_config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    made(tmp_path / "xdg" / "builder" / "config.toml").write_text('index = "https://wheels.example/xdg"\n')
    assert settings.load().index == "https://wheels.example/xdg"


def test_paths_are_absolute_whatever_the_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "ca.pem")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("BUILDER_CA", "ca.pem")
    assert (settings.load().ca, settings.load().cache) == (tmp_path / "ca.pem", tmp_path / "relative" / "builder")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "home" / "ca.pem")
    monkeypatch.setenv("BUILDER_CA", "~/ca.pem")
    assert settings.load().ca == tmp_path / "home" / "ca.pem"


def test_an_empty_variable_is_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, 'index = "https://wheels.example/file"\n')
    monkeypatch.setenv("BUILDER_INDEX", "")
    assert settings.load().index == "https://wheels.example/file"


def test_a_variable_wins_over_the_configuration_for_a_named_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, 'indexes.torch-cu130 = "https://wheels.example/file"\nindexes.b = "https://wheels.example/b"\n')
    monkeypatch.setenv("BUILDER_INDEX_TORCH_CU130", "https://wheels.example/variable")
    monkeypatch.setenv("BUILDER_INDEX_C", "")
    assert settings.load().indexes == {
        "torch-cu130": "https://wheels.example/variable",
        "b": "https://wheels.example/b",
    }


def test_folders_of_the_variable_are_as_in_path_and_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, 'wheels = ["/"]\n')
    for name in ("one", "two"):
        (tmp_path / "home" / name).mkdir(parents=True)
    monkeypatch.setenv("BUILDER_WHEELS", f"~/one::{tmp_path}/home/two")
    assert settings.load().wheels == (tmp_path / "home" / "one", tmp_path / "home" / "two")


def test_options_win_over_everything_and_folders_come_first(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    before = Settings(index="https://a.example", indexes={"x": "https://b.example", "y": "https://c.example"})
    before = replace(before, wheels=(tmp_path,))
    after = with_options(
        before,
        ["default=https://me@d.example/?a=b", "x=https://e.example", "z=https://f.example"],
        [f"{tmp_path}/given"],
    )
    assert after.index == "https://me@d.example/?a=b"
    assert after.indexes == {"x": "https://e.example", "y": "https://c.example", "z": "https://f.example"}
    assert after.wheels == (tmp_path / "given", tmp_path)
    assert with_options(before) == before


def test_proxies_are_those_of_the_environment_lower_case_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:2")
    monkeypatch.setenv("NO_PROXY", "localhost")
    assert settings.load().proxies == {"https_proxy": "http://proxy.example:1", "no_proxy": "localhost"}


def test_where_images_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, pub = made(tmp_path / "k" / "cosign.key"), made(tmp_path / "k" / "cosign.pub")
    text = f'registry = "r.example/x"\nkey = "{key}"\npub = "{pub}"\nhosts = ["ssh://gpu1", "local", "ssh://gpu1"]\n'
    configure(tmp_path, text)
    found = settings.load()
    assert (found.registry, found.key, found.pub, found.hosts) == ("r.example/x", key, pub, ("ssh://gpu1", "local"))
    settings.load.cache_clear()
    monkeypatch.setenv("BUILDER_REGISTRY", "o.example/y")
    monkeypatch.setenv("BUILDER_HOSTS", "ssh://gpu2 ssh://gpu3")
    assert (settings.load().registry, settings.load().hosts) == ("o.example/y", ("ssh://gpu2", "ssh://gpu3"))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_unknown_key(tmp_path: Path) -> None:
    path = configure(tmp_path, 'indx = "https://wheels.example"\n')
    assert refusal() == (
        "error: unknown key `indx` in the configuration\n"
        f"  at: {path}\n"
        "  hint: known keys: `archive`, `ca`, `cache`, `hosts`, `index`, `indexes`, `key`, `netrc`, `pub`, `registry`, `wheels`"
    )


def test_hosts_that_are_no_list(tmp_path: Path) -> None:
    path = configure(tmp_path, 'hosts = "ssh://gpu1"\n')
    assert refusal() == (
        f'error: `hosts` is not a list of hosts\n  at: {path}\n  hint: write `hosts = ["ssh://gpu1", "local"]`'
    )


def test_a_registry_that_is_no_text(tmp_path: Path) -> None:
    path = configure(tmp_path, "registry = 5\n")
    assert refusal() == (
        f'error: `registry` is not a text\n  at: {path}\n  hint: write `registry = "registry.example.com/team/stack"`'
    )


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    path = configure(tmp_path, 'key = "/none/cosign.key"\n')
    assert refusal() == (
        f"error: `key` names a file that does not exist\n  at: {path}\n  because: no file at /none/cosign.key"
    )


def test_bad_toml(tmp_path: Path) -> None:
    path = configure(tmp_path, "index = \n")
    assert refusal() == (
        f"error: the configuration is not valid TOML\n  at: {path}\n  because: Invalid value (at line 1, column 9)"
    )


def test_a_configuration_that_is_not_utf_8(tmp_path: Path) -> None:
    path = configure(tmp_path, b'index = "\xff"\n')
    assert refusal() == (
        f"error: the configuration cannot be read\n  at: {path}\n"
        "  because: 'utf-8' codec can't decode byte 0xff in position 9: invalid start byte"
    )


def test_indexes_that_are_no_table(tmp_path: Path) -> None:
    path = configure(tmp_path, 'indexes = "https://wheels.example"\n')
    assert refusal() == (f'error: `indexes` is not a table\n  at: {path}\n  hint: write `indexes.NAME = "https://…"`')


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('indexes.default = "https://wheels.example"', ("`default` cannot name an index\n  at: FILE\n"
         "  because: allowed: a-z, 0-9 and -\n  hint: the default index is set with `index`")),
        ('indexes.A = "https://wheels.example"', ("`A` cannot name an index\n  at: FILE\n"
         "  because: allowed: a-z, 0-9 and -\n  hint: the default index is set with `index`")),
        ('wheels = "/srv"', "`wheels` is not a list of folders\n  at: FILE\n  hint: write `wheels = [\"/srv/wheels\"]`"),
        ('wheels = [1]', "`wheels` is not a list of folders\n  at: FILE\n  hint: write `wheels = [\"/srv/wheels\"]`"),
        ('wheels = ["/nowhere"]', ("`wheels` names a folder that does not exist\n  at: FILE\n"
         "  because: no folder at /nowhere")),
    ],
)  # fmt: skip
def test_bad_places_in_the_configuration(tmp_path: Path, text: str, told: str) -> None:
    path = configure(tmp_path, f"{text}\n")
    assert refusal() == f"error: {told}".replace("FILE", str(path))


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("BUILDER_INDEX_DEFAULT", "https://wheels.example", ("`default` cannot name an index\n  at: environment variable "
         "BUILDER_INDEX_DEFAULT\n  because: allowed: a-z, 0-9 and -\n  hint: the default index is set with `BUILDER_INDEX`")),
        ("BUILDER_INDEX_X", "me:hunter2@wheels.example", ("`BUILDER_INDEX_X` is not a URL\n  at: environment variable "
         "BUILDER_INDEX_X\n  because: got '***@wheels.example', allowed: https://…, http://…")),
        ("BUILDER_WHEELS", "/nowhere", ("`wheels` names a folder that does not exist\n  at: environment variable "
         "BUILDER_WHEELS\n  because: no folder at /nowhere")),
    ],
)  # fmt: skip
def test_bad_places_in_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str) -> None:
    monkeypatch.setenv(variable, value)
    assert refusal() == f"error: {told}"


def test_an_authority_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILDER_CA", str(tmp_path / "absent.pem"))
    assert refusal() == (
        "error: `ca` names a file that does not exist\n  at: environment variable BUILDER_CA\n"
        f"  because: no file at {tmp_path}/absent.pem"
    )


def test_a_missing_authority_in_the_configuration_names_the_file(tmp_path: Path) -> None:
    path = configure(tmp_path, f'ca = "{tmp_path}/absent.pem"\n')
    assert refusal() == (
        f"error: `ca` names a file that does not exist\n  at: {path}\n  because: no file at {tmp_path}/absent.pem"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://wheels.example/a\nRUN evil", r"'https://wheels.example/a\nRUN evil'"),
        ("https://wheels.example/a b", "'https://wheels.example/a b'"),
        ("https://wheels.example/\x7f", r"'https://wheels.example/\x7f'"),
        ("https://wheels.example/'", '"https://wheels.example/\'"'),
        ("https://", "'https://'"),
        ("https://[::1", "'https://[::1'"),
        ("ftp://wheels.example", "'ftp://wheels.example'"),
        ("wheels.example", "'wheels.example'"),
        ("file:///srv/simple", "'file:///srv/simple'"),
        ("https://me:secret@wheels.example/ x", "'https://***@wheels.example/ x'"),
    ],
)
def test_what_is_no_url_of_an_index(monkeypatch: pytest.MonkeyPatch, value: str, shown: str) -> None:
    monkeypatch.setenv("BUILDER_INDEX", value)
    assert refusal() == (
        "error: `index` is not a URL\n  at: environment variable BUILDER_INDEX\n"
        f"  because: got {shown}, allowed: https://…, http://…"
    )


def test_a_url_of_a_named_index_is_checked_as_well(tmp_path: Path) -> None:
    path = configure(tmp_path, 'indexes.site = "wheels.example"\n')
    assert refusal() == (
        f"error: `indexes.site` is not a URL\n  at: {path}\n  because: got 'wheels.example', allowed: https://…, http://…"
    )


def test_an_archive_may_be_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILDER_ARCHIVE", "file:///srv/debian")
    assert settings.load().archive == "file:///srv/debian"


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert refusal() == (
        "error: the home folder is not known\n  because: Could not determine home directory.\n"
        "  hint: set HOME or XDG_CONFIG_HOME"
    )


# --- what others see --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@wheels.example/simple", "https://***@wheels.example/simple"),
        ("https://token@wheels.example", "https://***@wheels.example"),
        ("https://me:p@ss@wheels.example/", "https://***@wheels.example/"),
        (
            "at https://a:b@x.example/ and https://c:d@y.example/",
            "at https://***@x.example/ and https://***@y.example/",
        ),
        ("https://wheels.example/simple/@scope", "https://wheels.example/simple/@scope"),
        ("nobody@wheels.example", "nobody@wheels.example"),
    ],
)
def test_credentials_are_never_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_a_child_gets_our_settings_and_nothing_of_other_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "https://wheels.example/other")
    monkeypatch.setenv("PIP_FIND_LINKS", "/opt/wheels")
    monkeypatch.setenv("KEPT", "1")
    ours = Settings(ca=tmp_path / "ca.pem", index="https://wheels.example/simple", netrc=tmp_path / "netrc")
    child = ours.child_environment()
    assert child == {
        **{key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_"))},
        "KEPT": "1",
        "UV_NO_CONFIG": "1",
        "UV_NO_PROGRESS": "1",
        "COLUMNS": "1000",
        "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
        "UV_DEFAULT_INDEX": "https://wheels.example/simple",
        "NETRC": str(tmp_path / "netrc"),
    }


def test_a_child_gets_nothing_that_was_not_set() -> None:
    child = Settings().child_environment()
    assert {name for name in child if name.startswith(("UV_", "PIP_"))} == {"UV_NO_CONFIG", "UV_NO_PROGRESS"}
    assert "SSL_CERT_FILE" not in child
    assert "NETRC" not in child
