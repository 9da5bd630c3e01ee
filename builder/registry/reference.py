"""REGISTRY/NAME[:TAG][@DIGEST]. There is no default registry: a name without one is refused."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from builder.errors import UsageError

# The grammar of distribution's reference package, with a registry that is always there.
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})?)*|\[[0-9A-Fa-f:]{2,45}\])"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<registry>{_HOST}(?::[0-9]{{1,5}})?)/(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Reference:
    """An image in a registry; without tag and digest, all of them. ``registry`` is `host[:port]`."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises `UsageError` for what is no reference, or names no registry."""
        found = _REFERENCE.fullmatch(text) if len(text) <= 512 else None
        if found is None or not is_registry(found["registry"]):
            shown = re.sub(r"[^\x20-\x7e]", "?", re.sub(r"(?<=://)[^/\s]*@", "***@", text))[:200]
            because = "the first part has to be a registry, with a dot or a port in it, or `localhost`"
            if "://" in text:
                because = "it is a name and no URL"
            elif found is None and text != text.lower():
                because = "the name of an image has no capital letters"
            raise UsageError(
                f"`{shown}` does not name an image in a registry",
                because=because,
                hint="write REGISTRY/NAME, as in `registry.example.com/team/sglang-stack`",
            )
        return cls(found["registry"], found["repository"], found["tag"] or "", found["digest"] or "")

    @classmethod
    def named(cls, text: str) -> Reference:
        """REGISTRY/NAME alone, where the tag comes from the content. Raises `UsageError` for one with a tag or digest, too."""
        reference = cls.parse(text)
        if reference.tag or reference.digest:
            raise UsageError(
                f"`{text}` has a tag",
                because="the tag comes from the content: MATRIX-<first 12 of the lock digest>",
                hint=f"write `{reference.name}`; `--moving-tag` of a push puts MATRIX there, too",
            )
        return reference

    @property
    def name(self) -> str:
        """`REGISTRY/NAME`."""
        return f"{self.registry}/{self.repository}"

    @property
    def host(self) -> str:
        """The registry without its port."""
        return re.sub(r":[0-9]+\Z", "", self.registry).strip("[]")

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this machine's loopback address: there engines and we speak HTTP unasked."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_tag(self, tag: str) -> Reference:
        return replace(self, tag=tag, digest="")

    def with_digest(self, digest: str) -> Reference:
        return replace(self, tag="", digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}{'@' + self.digest if self.digest else ''}"


def is_registry(part: str) -> bool:
    # As engines decide it: anything else would be looked for in their own default registry.
    return "." in part or ":" in part or part == "localhost"
