"""Images, registries and a cosign that are made up, for tests of what is signed and how it is verified.

`StandInCosign` stands in for the program: it signs with a hash instead of a key pair, and says what cosign 2.5 says. The real
one is in tests/image/test_trust.py; words that it really said are in tests/unit/test_trust_cosign.py.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder.errors import IntegrityError
from builder.files import canonical_json, sha256_hex
from builder.lock import Lock
from builder.matrix import LoadedMatrix
from builder.trust.attach import Attachments, Subject, attachments
from builder.trust.bundling import LAYER
from builder.trust.cosign import CosignError, PublicKey, SigningKey
from builder.trust.layout import CONFIG, KINDS, MANIFEST, Descriptor, digest_of
from builder.trust.proof import FOLDER, Proof, parse_proof
from builder.trust.squeeze import squeezed
from tests.made import artefact, lock_of, sha, tiny

NAME = "registry.example/team/stack"
INPUTS = sha("inputs")


def pem(word: str) -> str:
    """A public key's file: any bytes are a key to the stand-in."""
    return f"-----BEGIN PUBLIC KEY-----\n{base64.b64encode(word.encode()).decode()}\n-----END PUBLIC KEY-----\n"


def key(word: str = "ours") -> SigningKey:
    return SigningKey(Path(f"/keys/{word}.key"), PublicKey(pem(word), sha256_hex(word.encode())))


class StandInCosign:
    """Called as `builder.trust.cosign._cosign` is."""

    def __call__(self, verb: str, *arguments: str) -> bytes:
        options = dict(itertools.pairwise(arguments))
        if verb == "public-key":
            return pem(Path(options["--key"]).stem).encode()
        if verb == "sign-blob":
            secret = pem(Path(options["--key"]).stem)
            return self._sign(secret, Path(arguments[-1]).read_bytes()).encode()
        layout, public = Path(arguments[-1]), Path(options["--key"]).read_text(encoding="utf-8")
        index = json.loads((layout / "index.json").read_bytes())
        found = {row["annotations"]["kind"]: row["digest"] for row in index["manifests"]}
        image = found[KINDS["image"]]
        if verb == "verify":
            return self._verify(layout, public, found.get(KINDS["sigs"]), image)
        assert verb == "verify-attestation"
        return self._attested(layout, public, found[KINDS["atts"]], image, options["--type"])

    @staticmethod
    def _sign(secret: str, data: bytes) -> str:
        return base64.b64encode(hashlib.sha256(secret.encode() + data).digest()).decode()

    @staticmethod
    def _blob(layout: Path, digest: str) -> bytes:
        return (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()

    def _verify(self, layout: Path, public: str, signatures: str | None, image: str) -> bytes:
        assert signatures is not None
        good, words = [], "no signatures"
        for row in json.loads(self._blob(layout, signatures))["layers"]:
            payload = self._blob(layout, row["digest"])
            claim = json.loads(payload)
            claimed = claim["critical"]["image"]["docker-manifest-digest"]
            if row["annotations"].get("dev.cosignproject.cosign/signature") != self._sign(public, payload):
                words = "invalid signature when validating ASN.1 encoded signature"
            elif claimed != image:
                words = f"invalid or missing digest in claim: {claimed}"
            else:
                good.append(claim)
        if not good:
            raise CosignError(f"no matching signatures: {words}")
        return json.dumps(good).encode()

    def _attested(self, layout: Path, public: str, attestations: str, image: str, kind: str) -> bytes:
        types = {"cyclonedx": "https://cyclonedx.org/bom", "slsaprovenance1": "https://slsa.dev/provenance/v1"}
        good, words, seen = [], "", []
        for row in json.loads(self._blob(layout, attestations))["layers"]:
            envelope = json.loads(self._blob(layout, row["digest"]))
            body, of = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
            signed = b"DSSEv1 %d %s %d %s" % (len(of), of, len(body), body)
            statement = json.loads(body)
            seen.append(statement["predicateType"])
            if envelope["signatures"][0]["sig"] != self._sign(public, signed):
                words = "no matching attestations: accepted signatures do not match threshold, Found: 0, Expected 1"
            elif f"sha256:{statement['subject'][0]['digest']['sha256']}" != image:
                words = "no matching attestations: no matching subject digest found"
            elif statement["predicateType"] == types[kind]:
                good.append(json.dumps(envelope))
        if not good:
            found = f"none of the attestations matched the predicate type: {kind}, found: {','.join(seen)}"
            raise CosignError(words or found)
        return "\n".join(good).encode()


@dataclass
class StandInRegistry:
    """A repository in memory, as `RegistryClient` is used."""

    name: str = NAME
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[bytes, str]] = field(default_factory=dict)

    def manifest(self, reference: str) -> tuple[bytes, str] | None:
        return self.manifests.get(reference)

    def blob(self, digest: str, limit: int = 4 << 20) -> bytes:
        data = self.blobs[digest]
        if digest_of(data) != digest or len(data) > limit:
            raise IntegrityError("a blob in the registry is not what its digest says", because="it was changed")
        return data

    def put_blob(self, data: bytes) -> str:
        self.blobs[digest_of(data)] = data
        return digest_of(data)

    def put_manifest(self, reference: str, data: bytes, media_type: str) -> str:
        self.manifests[reference] = self.manifests[digest_of(data)] = data, media_type
        return digest_of(data)


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@dataclass
class MadeImage:
    """An image of ours: a layer of something, and the proof's. Every part may be exchanged before it is used."""

    loaded: LoadedMatrix = field(default_factory=tiny)
    lock: Lock = field(init=False)
    labels: dict[str, str] = field(init=False)
    files: dict[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.lock = lock_of(self.loaded.matrix, artefact("numpy", "2.2.6"), artefact("six"))
        self.labels = {
            "sglang-stack": "image",
            "sglang-stack.matrix": self.lock.matrix,
            "sglang-stack.lock": self.lock.digest,
            "sglang-stack.inputs": INPUTS,
        }
        listed = [
            {k: getattr(a, k) for k in ("name", "version", "metadata_version", "file", "sha256", "layer")}
            for a in self.lock.artefacts
        ]
        checks = [{"name": "installed", "ok": True}, {"name": "load", "ok": True}]
        smoke = {"schema": 1, "ok": True, "matrix": self.lock.matrix, "lock": self.lock.digest, "checks": checks}
        self.files = {
            "lock.json": self.lock.text().encode(),
            "smoke.json": json.dumps(smoke).encode(),
            "spec.json": json.dumps({"artefacts": listed}).encode(),
        }

    def edit(self, name: str, **fields: Any) -> None:
        """Exchange fields of a JSON file of the proof."""
        self.files[name] = json.dumps({**json.loads(self.files[name]), **fields}).encode()

    @property
    def layers(self) -> list[bytes]:
        """Without compression."""
        return [tar_of({"etc/hostname": b"x" * 3000}), tar_of({f"{FOLDER}/{n}": d for n, d in self.files.items()})]

    @property
    def packed(self) -> list[bytes]:
        return [b"".join(squeezed([layer], 1)) for layer in self.layers]

    @property
    def config(self) -> bytes:
        diff_ids = [digest_of(layer) for layer in self.layers]
        rootfs = {"type": "layers", "diff_ids": diff_ids}
        inner = {"Labels": self.labels}
        return canonical_json({"architecture": "amd64", "os": "linux", "config": inner, "rootfs": rootfs})

    @property
    def manifest(self) -> bytes:
        rows = [Descriptor(LAYER, digest_of(data), len(data)).as_json() for data in self.packed]
        config = Descriptor(CONFIG, digest_of(self.config), len(self.config)).as_json()
        return canonical_json({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": rows})

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def proof(self) -> Proof:
        return parse_proof(self.files)

    def subject(self, name: str = NAME, rendered: str = INPUTS) -> Subject:
        return Subject(self.loaded, self.proof, self.manifest, self.config, name, rendered, {"six": ("MIT",)})

    def signed(self, by: SigningKey | None = None, name: str = NAME) -> Attachments:
        return attachments(self.subject(name), by or key())

    def pushed(self, registry: StandInRegistry, *tags: str) -> StandInRegistry:
        """Put it there, without what is attached."""
        for data in (*self.packed, self.config):
            registry.put_blob(data)
        for tag in tags or ("tiny",):
            registry.put_manifest(tag, self.manifest, MANIFEST)
        return registry


def put_attached(registry: StandInRegistry, made: Attachments) -> None:
    """What is attached, whatever is there."""
    for one in (made.signature, made.attestations):
        for data in one.blobs.values():
            registry.put_blob(data)
        registry.put_manifest(one.tag, one.manifest, MANIFEST)
