"""The kinds of value a matrix holds, each with a strict full-match form.

Everything a person writes may end up in a Dockerfile, so no form here lets through a line break, a control character or
(where it reaches an instruction) a character that Docker or a shell would expand. `re.fullmatch` decides, never `$`,
which in Python also matches before a trailing newline. The same patterns, anchored, go into the JSON Schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as ParsedRequirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion
from packaging.version import Version as ParsedVersion
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from builder.yamlsource import SECRET_NAME, FieldPath, shown


class Model(BaseModel):
    """Base of everything read from YAML: strict, frozen, no unknown keys; attribute docstrings are descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        hide_input_in_errors=True,
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        field_title_generator=lambda name, info: info.alias or name,
        validate_default=False,
        allow_inf_nan=False,
    )


@dataclass(frozen=True)
class Complaint:
    """Why a value is refused. ``at`` is relative to the value that is being validated."""

    message: str
    allowed: str = ""
    because: str = ""
    hint: str = ""
    at: FieldPath = ()


def complain(*complaints: Complaint) -> PydanticCustomError:
    """The exception for a pydantic validator to raise; `builder.source` turns it into one problem a complaint."""
    message = "; ".join(complaint.message for complaint in complaints)
    return PydanticCustomError("builder", "{message}", {"message": message, "complaints": complaints})


Check = Callable[[str], Complaint | None]


@dataclass(frozen=True)
class Form:
    """What a string has to look like. ``what`` continues "is not …", ``allowed`` shows what is right."""

    what: str
    pattern: str
    allowed: str
    check: Check | None = None
    max_length: int = 200
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compile once; ASCII only, so that `\\w` and the like cannot mean more than they show."""
        object.__setattr__(self, "_compiled", re.compile(self.pattern, re.ASCII))

    def validate(self, value: str) -> str:
        """``value`` unchanged, or a complaint."""
        if len(value) > self.max_length:
            raise complain(Complaint(f"{shown(value)} is longer than {self.max_length} characters", self.allowed))
        if self.check is not None and (complaint := self.check(value)) is not None:
            raise complain(complaint)
        if not self._compiled.fullmatch(value):
            raise complain(Complaint(f"{shown(value)} is not {self.what}", self.allowed))
        return value

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validate after the string itself."""
        return core_schema.no_info_after_validator_function(self.validate, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The same form for editors."""
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$", "maxLength": self.max_length}


# Printable on one line. \x7f-\x9f are controls, U+2028/2029 line breaks, the rest bidirectional and zero-width marks
# that make a text read differently from what it is.
_UNSAFE = (
    "\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff\\ufeff"
)
_DOCKER_SAFE = r"[ !#%-\[\]-_a-~]*"  # printable ASCII without " $ \ `: needs no escape between double quotes


def _one_line(value: str) -> Complaint | None:
    if "\n" in value:
        hint = "fold it with `>-` instead of `>` or `|`" if value.endswith("\n") and value.count("\n") == 1 else ""
        return Complaint(f"{shown(value)} has a line break", "text on one line", hint=hint)
    if not value.isprintable():
        return Complaint(f"{shown(value)} has a character that does not print", "text on one line")
    return None if value.strip() else Complaint("a text of blanks only", "text on one line")


def _normal_version(value: str) -> Complaint | None:
    try:
        normal = str(ParsedVersion(value))
    except InvalidVersion:
        return None
    return None if value == normal else Complaint(f"{shown(value)} is not in normal form", hint=f"write `{normal}`")


def _normal_name(value: str) -> Complaint | None:
    normal = canonicalize_name(value)
    if value != normal and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value):
        return Complaint(f"{shown(value)} is not in normal form", hint=f"write `{normal}`")
    return None


def _pinned(value: str) -> Complaint | None:
    try:
        parsed = ParsedRequirement(value)
    except InvalidRequirement:
        return None
    allowed = "name==version, as in `torchvision==0.26.0`"
    if parsed.url or parsed.marker:
        part = "a URL" if parsed.url else "a marker"
        return Complaint(
            f"{shown(value)} has {part}", allowed, hint="name a direct file under `files`" if parsed.url else ""
        )
    clauses = [(clause.operator, clause.version) for clause in parsed.specifier]
    if len(clauses) != 1 or clauses[0][0] != "==" or clauses[0][1].endswith(".*"):
        return Complaint(
            f"{shown(value)} is not pinned", allowed, because="a range drifts: the matrix says what is wanted"
        )
    return _normal_name(parsed.name) or _normal_version(clauses[0][1])


def _requirement(value: str) -> Complaint | None:
    try:
        parsed = ParsedRequirement(value)
    except InvalidRequirement as error:
        return Complaint(
            f"{shown(value)} is not a requirement", "PEP 508, as in `filelock>=3.13`", because=str(error).split("\n")[0]
        )
    return Complaint(f"{shown(value)} has a URL", "PEP 508 without a URL") if parsed.url else None


def _specifiers(value: str) -> Complaint | None:
    try:
        valid = bool(value.strip()) and SpecifierSet(value) is not None
    except InvalidSpecifier:
        valid = False
    return None if valid else Complaint(f"{shown(value)} is not a version range", "as in `==0.6.3` or `>=0.6.3,<0.7`")


def _url(value: str) -> Complaint | None:
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return None
    allowed = "https://HOST/PATH"
    if "@" in parts.netloc:
        hint = "put credentials into the configuration file or a netrc, never into a matrix"
        return Complaint("the URL has credentials in it", allowed, "everyone who has the image could read them", hint)
    if parts.query or parts.fragment:
        part = "a query" if parts.query else "a fragment"
        return Complaint(
            f"{shown(value)} has {part}", allowed, hint="a hash goes into `sha256`" if parts.fragment else ""
        )
    loopback = host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None
    if parts.scheme == "http" and not loopback:
        return Complaint(f"{shown(value)} is not encrypted", "https, or http on a loopback address")
    return None


# What the image itself sets, or what would change how it is built: setting it here would break a promise of the image.
_OWNED = (
    r"BASH_ENV|CUDA_HOME|CUDA_PATH|CURL_CA_BUNDLE|ENV|FLASHINFER_WORKSPACE_BASE|HOME|HOSTNAME|IFS|LD_.*|LOGNAME|PATH|PWD"
    r"|PYTHON(?:DONTWRITEBYTECODE|HOME|PATH|PYCACHEPREFIX|STARTUP)|REQUESTS_CA_BUNDLE|SHELL|SOURCE_DATE_EPOCH"
    r"|SSL_CERT_(?:DIR|FILE)|TMPDIR|USER|VIRTUAL_ENV|(?:PIP|UV|BUILDKIT|DOCKER)_.*|.*_PROXY"
)
_OWNED_FORM = re.compile(_OWNED, re.ASCII | re.IGNORECASE)


def _env_name(value: str) -> Complaint | None:
    if SECRET_NAME.fullmatch(value.upper()):
        hint = "give it to the container when it runs: `docker run --env`"
        return Complaint(
            f"{shown(value)} looks like a secret", "", "a secret would be readable by everyone who has the image", hint
        )
    if _OWNED_FORM.fullmatch(value):
        return Complaint(f"{shown(value)} is not a matrix's to set", "", "the image or its build owns it")
    return None


def _label_name(value: str) -> Complaint | None:
    if value.startswith(("com.docker.", "io.docker.", "org.dockerproject.")):
        return Complaint(f"{shown(value)} is reserved", "", "Docker keeps that prefix for itself")
    return None


def _relative(value: str) -> Complaint | None:
    if value.startswith("/") or any(part in ("", ".", "..") for part in value.split("/")):
        return Complaint(f"{shown(value)} does not stay below the matrix's folder", "a relative path without `..`")
    return None


_VERSION = r"([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
_NAME = r"[a-z0-9]+(-[a-z0-9]+)*"
_HOST = r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?"

VERSION_FORM = Form(
    "a version", _VERSION, "a PEP 440 version, as in 2.9.1, 0.5.15.post1 or 2.9.1+cu130", _normal_version, 64
)
URL_FORM = Form("a URL", rf"https?://{_HOST}(/[A-Za-z0-9._~%+!,=/-]*)?", "https://HOST/PATH", _url, 1000)
_ENV_VALUE = Form("one line of plain text", _DOCKER_SAFE, 'printable ASCII without " $ \\ `', max_length=1000)

Version = Annotated[str, VERSION_FORM]
CubinVersion = Annotated[
    str, Form("a version or none", rf"none|{_VERSION}", "none, or a PEP 440 version, as in 0.6.12", _normal_version, 64)
]
CudaVersion = Annotated[str, Form("a CUDA version", r"1[0-9]\.[0-9]{1,2}(\.[0-9]{1,2})?", "as in 13.0.2 or 12.8")]
Capability = Annotated[str, Form("a compute capability", r"[1-9][0-9]?\.[0-9]", "as in 12.0 or 9.0")]
PackageName = Annotated[
    str, Form("a package name", _NAME, "a normalised name, as in flashinfer-python", _normal_name, 100)
]
IndexName = Annotated[
    str,
    Form(
        "an index name",
        r"[a-z0-9][a-z0-9-]{0,31}",
        "a-z, 0-9 and -, as in torch-cu130",
    ),
]
Sha256 = Annotated[str, Form("a sha256", r"[0-9a-f]{64}", "64 lower-case hexadecimal digits")]
Url = Annotated[str, URL_FORM]
Summary = Annotated[str, Form("one line of plain text", _DOCKER_SAFE, 'printable ASCII without " $ \\ `', _one_line)]
Prose = Annotated[str, Form("one line of text", rf"[^{_UNSAFE}]+", "text on one line", _one_line, 1000)]
Pin = Annotated[str, Form("a version range", r"[0-9A-Za-z.+!*<>=~, -]+", "as in ==0.6.3", _specifiers, 100)]
Requirement = Annotated[
    str,
    Form(
        "a requirement",
        r"[A-Za-z0-9][A-Za-z0-9 ._,<>=!~*+;()'\"\[\]-]*",
        "PEP 508, as in `filelock>=3.13`",
        _requirement,
        300,
    ),
]
PinnedRequirement = Annotated[
    str,
    Form("a pinned requirement", rf"{_NAME}(\[{_NAME}(,{_NAME})*\])?=={_VERSION}", "name==version, no blanks", _pinned),
]
Codename = Annotated[str, Form("a release's code name", r"[a-z]{3,20}", "as in bookworm, trixie or noble")]
OsPackage = Annotated[str, Form("an OS package name", r"[a-z0-9][a-z0-9.+-]{1,99}", "as in libnuma1 or g++")]
ImageReference = Annotated[
    str,
    Form(
        "an image by digest",
        r"[a-z0-9][a-z0-9._/:-]{0,199}@sha256:[0-9a-f]{64}",
        "NAME@sha256:DIGEST (a tag may move or go away)",
        max_length=300,
    ),
]
EnvName = Annotated[str, Form("an environment variable's name", r"[A-Z_][A-Z0-9_]*", "A-Z, 0-9 and _", _env_name, 100)]
EnvValue = Annotated[str, _ENV_VALUE]
LabelName = Annotated[
    str,
    Form(
        "a label's name", r"[a-z0-9]+([.-][a-z0-9]+)*", "as in com.example.team (a-z, 0-9, . and -)", _label_name, 100
    ),
]
EntryName = Annotated[str, Form("an entry's name", r"[a-z0-9]+([.-][a-z0-9]+)*", "a-z, 0-9, . and -", None, 100)]
RelativePath = Annotated[
    str, Form("a path", r"[A-Za-z0-9._+/-]+", "a relative path of A-Z a-z 0-9 . _ + - /", _relative)
]
MATRIX_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)


def _parse_date(value: object) -> date:
    if type(value) is date:
        return value
    allowed = "YYYY-MM-DD, as in 2026-03-01"
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value, re.ASCII):
        raise complain(Complaint(f"{shown(value)} is not a date", allowed))
    try:
        return date.fromisoformat(value)
    except ValueError as error:
        raise complain(Complaint(f"{shown(value)} is not a date", allowed, because=str(error))) from None


Date = Annotated[date, BeforeValidator(_parse_date)]

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"[0-9]{1,6}(\.[0-9]{1,3})? ?(MB|GB|MiB|GiB)"


class _SizeSchema:
    """Bytes in Python; in YAML bytes, or a number with a unit."""

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(
            self._parse, core_schema.int_schema(strict=True, gt=0, lt=2**50)
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string", "pattern": f"^(?:{_SIZE})$"}, {"type": "integer", "exclusiveMinimum": 0}]}

    @staticmethod
    def _parse(value: object) -> object:
        if isinstance(value, str) and re.fullmatch(_SIZE, value, re.ASCII):
            number, unit = re.fullmatch(r"([0-9.]+) ?([A-Za-z]+)", value).groups()  # type: ignore[union-attr]
            return round(float(number) * _UNITS[unit])
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**50:
            return value
        raise complain(Complaint(f"{shown(value)} is not a size", 'as in "13 GB", "12.5 GiB", or a number of bytes'))


Size = Annotated[int, _SizeSchema()]


class NotEmpty:
    """At least one item. (pydantic's own check counts valid items only, and so adds to every bad one "is too short".)"""

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validate after the items."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The same for editors."""
        return {**handler(schema), "minItems": 1}

    @staticmethod
    def _check(value: Sequence[object]) -> Sequence[object]:
        if not value:
            raise complain(Complaint("the list is empty", "at least one item"))
        return value


def no_duplicates(values: Sequence[str]) -> Sequence[str]:
    """``values`` unchanged, or one complaint for each that was there before (compared as package names are)."""
    seen: dict[str, int] = {}
    complaints = []
    for i, value in enumerate(values):
        key = canonicalize_name(re.split(r"[\[=<>!~; ]", value, maxsplit=1)[0]) if "=" in value else value
        if key in seen:
            complaints.append(Complaint(f"{shown(key)} is listed twice", hint="keep one of the two", at=(i,)))
        seen.setdefault(key, i)
    if complaints:
        raise complain(*complaints)
    return values


class SchemaWriter(GenerateJsonSchema):
    """JSON Schema of what a person may write: an absent key is absent, not null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """An optional value without `null`: an empty value is refused (`yamlsource`)."""
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """A default only where it says something."""
        written = super().default_schema(schema)
        return {k: v for k, v in written.items() if not (k == "default" and v in (None, [], {}))}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """A mapping whose keys have a form takes no other keys."""
        written = super().dict_schema(schema)
        return {**written, "additionalProperties": False} if "patternProperties" in written else written


def json_schema(model: type[BaseModel], comment: str) -> Mapping[str, Any]:
    """The JSON Schema (draft 2020-12) of ``model`` as it is written in YAML."""
    body = model.model_json_schema(by_alias=True, schema_generator=SchemaWriter, mode="validation")
    return {"$schema": SchemaWriter.schema_dialect, "$comment": comment, **body}
