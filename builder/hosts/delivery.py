"""An image on its way to hosts: what it is, that it is verified once for all, how an engine gets it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from builder.engine import Engine
from builder.files import pretty_size
from builder.labels import content_tag
from builder.lock import Lock
from builder.registry.client import RegistryClient
from builder.registry.pull import Remote, bytes_to_pull, known_layers, pull_image
from builder.registry.reference import Reference
from builder.settings import Settings
from builder.trust.bundle import load_into, verify_bundle
from builder.trust.cosign import PublicKey
from builder.trust.layout import parse_manifest
from builder.trust.verify import Verified, verify_remote

T = TypeVar("T")

Say = Callable[[str], None]


class Once(Generic[T]):
    """A value that is made by the first who asks, and what making it raised for all who do."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._value: T | None = None
        self._error: Exception | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._value is None:
                try:
                    self._value = self._make()
                except Exception as error:
                    self._error = error
                    raise
            return self._value

    @property
    def value(self) -> T | None:
        """What was made; None if nothing was yet."""
        return self._value


@dataclass(frozen=True)
class Arrived:
    """``id`` is the engine's. Bytes are compressed."""

    id: str
    bytes_pulled: int
    bytes_there: int


class Delivery(Protocol):
    """``reference`` is what a person reads: an image in a registry, or a file."""

    matrix: str
    reference: str
    verified: Once[Verified]

    def predicted(self, engine: Engine, verified: Verified) -> int:
        """Compressed bytes that the engine will be sent."""

    def fetch(self, engine: Engine, verified: Verified, say: Say) -> Arrived:
        """Get the image into the engine, without a name. Raises `BuilderError`."""


def total(verified: Verified) -> int:
    """Compressed bytes of all layers."""
    return sum(layer.size for layer in parse_manifest(verified.manifest).layers)


def there(engine: Engine, verified: Verified) -> str | None:
    """The engine's id of the verified image, if it has it: by its config or (containerd store) by its manifest.

    An id is a hash of what it names, so no other image has it.
    """
    for name in filter(None, (verified.image, verified.digest)):
        if (image := engine.find(name)) is not None:
            return image.id
    return None


class FromRegistry:
    """An image of a matrix in a registry, by the tag of its lock."""

    def __init__(self, client: RegistryClient, where: Reference, lock: Lock, pub: PublicKey) -> None:
        self.matrix, self._client = lock.matrix, client
        self._where = where.with_tag(content_tag(lock.matrix, lock.digest))
        self.reference = str(self._where)
        self.verified = Once(lambda: verify_remote(client, self._where.tag, pub, lock=lock).require())

    @classmethod
    def of(cls, name: str, lock: Lock, pub: PublicKey, settings: Settings, *, plain_http: bool) -> FromRegistry:
        """``name`` is REGISTRY/NAME. Raises `UsageError` for what is none."""
        where = Reference.named(name)
        return cls(RegistryClient(where, settings, plain_http), where, lock, pub)

    def close(self) -> None:
        self._client.close()

    def _remote(self, verified: Verified) -> Remote:
        return Remote.parse(verified.manifest, verified.config, self.reference)

    def predicted(self, engine: Engine, verified: Verified) -> int:
        return bytes_to_pull(self._remote(verified), known_layers(engine))

    def fetch(self, engine: Engine, verified: Verified, say: Say) -> Arrived:
        remote = self._remote(verified)
        pulled = pull_image(engine, self._where.with_digest(verified.digest), verified.digest, say, remote=remote)
        return Arrived(pulled.id, pulled.bytes_pulled, pulled.bytes_there)


class FromBundle:
    """An image in a bundle's file."""

    def __init__(self, file: Path, pub: PublicKey, progress: Any = lambda done, total: None) -> None:
        self._file, self.reference, self.matrix = file, str(file), ""
        self.verified = Once(lambda: verify_bundle(file, pub, progress=progress).require())

    def predicted(self, engine: Engine, verified: Verified) -> int:
        # An engine takes a whole archive, whatever it has of it.
        return 0 if there(engine, verified) else total(verified)

    def fetch(self, engine: Engine, verified: Verified, say: Say) -> Arrived:
        def progress(done: int, whole: int) -> None:
            say(f"{pretty_size(done)} of {pretty_size(whole)}")

        image = load_into(engine, self._file, verified, progress)
        return Arrived(image, total(verified), 0)
