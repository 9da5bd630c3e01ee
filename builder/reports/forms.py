"""The forms of values: what a field may say. A value that has none of them is not taken, and so nothing personal is.

Each function takes any text and gives the value in its usual form, or None. Forms: shared/facts/reports.md, rules 6 and 7.
"""

from __future__ import annotations

import re
from functools import cache

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from builder.facts import load_facts
from builder.facts.reportmodels import GpuNameFact

_VERSION = re.compile(r"^v?(\d[0-9A-Za-z.!+_-]{0,60})")
_WORDS = frozenset(
    [
        "nvidia",
        "amd",
        "intel",
        "geforce",
        "rtx",
        "gtx",
        "titan",
        "quadro",
        "tesla",
        "pro",
        "ada",
        "blackwell",
        "hopper",
        "generation",
        "laptop",
        "gpu",
        "max-q",
        "super",
        "ti",
        "server",
        "workstation",
        "edition",
        "grace",
        "sxm",
        "sxm2",
        "sxm3",
        "sxm4",
        "sxm5",
        "pcie",
        "nvl",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "mig",
        "instinct",
        "radeon",
        "orin",
        "agx",
        "thor",
        "jetson",
        "spark",
        "dgx",
        "station",
        "with",
        "design",
        "embedded",
        "d",
        "mobile",
        "graphics",
        "devkit",
    ]
)
_MODEL = re.compile(
    r"(?:[A-Z]{0,3}\d{1,4}[A-Z]{0,3}|\d{1,3}GB|[A-Z]{1,2}\d{2,3}[A-Z]?-(?:PCIE|PCIe|SXM\d|NVL|HBM\d|3e)(?:-\d{1,3}GB)?|\dg\.\d{1,3}gb|H20-3e)"
)
_DRIVER = re.compile(r"r?(\d{3})(?:\.(\d{1,3}|x{1,3})(?:\.(\d{1,3}))?)?(?:-p2p|-open|-server)?", re.IGNORECASE)
_CAPABILITY = re.compile(
    r"\(?\s*(?:sm_?|compute_)?(\d{1,2})\s{0,2}(?:[.,]\s{0,2}'?)?(\d)([af]?)'?\s*\)?(?:\s*[af])?", re.IGNORECASE
)
_OS = re.compile(
    r"\b(Ubuntu|Debian|Fedora|Rocky|AlmaLinux|CentOS|Red Hat|RHEL|Arch Linux|openSUSE|SUSE|Amazon Linux|Oracle Linux|NixOS"
    r"|Windows|macOS|Linux Mint|Pop!_OS|openEuler|Alpine|TencentOS|Kylin|WSL)\b(?:[^\d\n]{0,40}(\d{1,4}(?:\.\d{1,4}){0,3})(?![\d.]))?",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}")
_FOUR_NUMBERS = ("nvidia-", "cuda-", "opencv-", "tensorrt")
_BUILD = re.compile(r"(?:\.dev\d{1,10}|\+g?[0-9a-f]{6,40}|a0\+)")


def version(text: str) -> str | None:
    """A version of PEP 440 at the beginning of the text, as it is written."""
    found = _VERSION.match(text.strip().strip("`'\""))
    if found is None:
        return None
    word = found[1].rstrip(".-_+!")
    try:
        Version(word)
    except InvalidVersion:
        return None
    local = Version(word).local
    # `+cu130`, `+g1a2b3c4`, `+872d972e41.nv24.8`: anything longer is somebody's own and may say who.
    if local and any(not _is_local(part) for part in local.split(".")):
        return word.partition("+")[0]
    return word


def _is_local(part: str) -> bool:
    return bool(
        re.fullmatch(
            r"cu\d{2,3}|cpu|xpu|rocm\d*|nv\d{1,3}|g?[0-9a-f]{6,40}|d?\d{1,8}|torch\d{1,3}|git[0-9a-f]{0,40}|local|dirty|precompiled",
            part,
        )
    )


def release_of(package_name: str, text: str) -> str | None:
    """The version of a package. What looks like an address is one, but for packages whose versions have four numbers."""
    found = version(text)
    if found is not None and _ADDRESS.fullmatch(found) and not package_name.startswith(_FOUR_NUMBERS):
        return None
    return found


def is_unreleased(word: str) -> bool:
    """Whether a version is a nightly's, a commit's or a vendor's: on no index."""
    return _BUILD.search(word) is not None


def package(text: str) -> str | None:
    """A distribution's normalised name."""
    word = text.strip().strip("`'\"")
    return canonicalize_name(word) if re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", word) else None


def python(text: str) -> str | None:
    """`3.12.12` of `3.12.12 | packaged by … | (main, …) [GCC 11.2.0]`."""
    found = re.match(r"\D{0,10}?(\d\.\d{1,2}(?:\.\d{1,2})?)(?!\d)", text.strip())
    return found[1] if found and found[1].startswith(("2.", "3.")) else None


def cuda(text: str) -> str | None:
    """A CUDA release: `13.0`, `12.8.93`; of nvcc's line what stands after `V`, else after `release`."""
    found = (
        re.search(r"\bV(\d{1,2}\.\d{1,2}\.\d{1,3})\b", text)
        or re.search(r"\brelease (\d{1,2}\.\d{1,2})\b", text)
        or re.match(r"\s*(?:CUDA\s*|v)?(\d{1,2}\.\d{1,2}(?:\.\d{1,3})?)(?![\d])", text)
    )
    return found[1] if found else None


def cuda_number(text: str) -> str | None:
    """`12.8` of `12080`, as CUDA's functions give it."""
    found = re.fullmatch(r"(\d{1,2})0(\d)0", text.strip())
    return f"{found[1]}.{found[2]}" if found else None


def driver(text: str) -> str | None:
    """A driver: `580.126.09`, `575`; `595.58.03-p2p` and `r575` without their additions; `550.xx` as `550`."""
    found = re.match(r"\s*(r?\d{3}(?:\.(?:\d{1,3}|x{1,3})){0,2}(?:-p2p|-open|-server)?)(?![\w])", text, re.IGNORECASE)
    if found is None or (parts := _DRIVER.fullmatch(found[1])) is None:
        return None
    return ".".join(part for part in parts.groups() if part and part.isdigit())


def capability(text: str) -> str | None:
    """`12.0` of `12.0`, `120`, `sm_120a`, `SM120`, `(12, 0)`, `(12, '0f')`, `compute_120`."""
    found = _CAPABILITY.match(text.strip())
    if found is None:
        return None
    value = f"{int(found[1])}.{found[2]}"
    return value if 3 <= int(found[1]) <= 15 else None


@cache
def _products() -> tuple[tuple[re.Pattern[str], GpuNameFact], ...]:
    """Products by the words in their names, longest first."""
    pairs = [(name, fact) for fact in load_facts(GpuNameFact) for name in fact.names]
    pairs.sort(key=lambda pair: (-len(pair[0]), pair[0]))
    return tuple(
        (re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE), fact) for name, fact in pairs
    )


@cache
def _known_words() -> frozenset[str]:
    """The words that names of GPUs are made of: those that stand in many, and those of the facts."""
    return _WORDS | {word.lower() for fact in load_facts(GpuNameFact) for name in fact.names for word in name.split()}


def product(name: str) -> GpuNameFact | None:
    """What the facts know of a GPU of this name."""
    return next((fact for pattern, fact in _products() if pattern.search(name)), None)


def gpu(text: str) -> str | None:
    """A GPU's name, of the words that such names are made of; up to the first other word."""
    words: list[str] = []
    known = _known_words()
    for word in re.split(r"[\s,;(]+", text.strip().strip("`*|").partition("|")[0]):
        if word.rstrip(".").lower() in known or _MODEL.fullmatch(word):
            words.append(word)
        elif words or word:
            break
    name = " ".join(words)
    return name if any(_MODEL.fullmatch(word) for word in words) or product(name) else None


def gpu_cut(text: str) -> bool:
    """Whether nvidia-smi's table cut the name: then it decides nothing."""
    return "..." in text


def operating_system(text: str) -> str | None:
    """Distribution and release: `Ubuntu 24.04.5`."""
    found = _OS.search(text[:200])
    if found is None:
        return None
    return f"{found[1]} {found[2]}" if found[2] else found[1]


def libc(text: str) -> str | None:
    """`2.39` of `glibc-2.39`, `glibc 2.39`."""
    found = re.search(r"(?:glibc|GLIBC)[-_ ]?(2\.\d{1,2})|^\s*(2\.\d{2})\b", text)
    return (found[1] or found[2]) if found else None


def cudnn(text: str) -> str | None:
    """`9.16.0` of `9.16.0`, of a file's name `libcudnn.so.9.16.0`, of torch's number `91600`."""
    found = re.search(r"libcudnn\S{0,40}?\.so\.(\d{1,2}(?:\.\d{1,3}){1,3})", text) or re.match(
        r"\s*(\d{1,2}\.\d{1,3}(?:\.\d{1,3}){0,2})(?![\d])", text
    )
    if found:
        return found[1]
    number = re.match(r"\s*(\d)(\d{2})(\d{2})\s*$", text)
    return f"{number[1]}.{int(number[2])}.{int(number[3])}" if number else None


def machine(text: str) -> str | None:
    """`x86_64` or `aarch64`."""
    found = re.search(r"\b(x86[_-]64|amd64|aarch64|arm64)\b", text, re.IGNORECASE)
    if found is None:
        return None
    return "aarch64" if found[1].lower() in ("aarch64", "arm64") else "x86_64"


def image(text: str) -> str | None:
    """A public image's name. A host's name in it is kept only where the image is a vendor's public one."""
    found = re.search(
        r"\b((?:nvcr\.io/nvidia|lmsysorg|vllm|pytorch|nvidia|rocm)/[\w.-]{1,60}(?:/[\w.-]{1,60})?(?::[\w.-]{1,80})?)",
        text,
    )
    return found[1].rstrip(".") if found else None


def boolean(text: str) -> str | None:
    """`True` or `False`."""
    word = text.strip().lower().rstrip(".")
    return {"true": "True", "yes": "True", "false": "False", "no": "False"}.get(word)
