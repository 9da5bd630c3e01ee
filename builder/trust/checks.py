"""The checks of a verification, one method each: what it looks at, and the words for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from builder.labels import INPUTS_LABEL, LABEL, STAND_IN_LABEL, content_tag
from builder.lock import Lock, drift
from builder.trust.attach import labels_of
from builder.trust.cosign import CosignError, PublicKey, verify_attestations, verify_signatures
from builder.trust.layout import FormError, digest_of, load, small_layout
from builder.trust.material import Material
from builder.trust.proof import Proof

_NAMED: Final = re.compile(r"(?P<matrix>.+)-(?P<lock>[0-9a-f]{12})")


class Failed(Exception):
    """A check that failed: its detail in one line, and what can be done."""

    def __init__(self, detail: str, hint: str = "") -> None:
        super().__init__(detail)
        self.hint = hint


class NotMade(Exception):
    """A check that there is nothing to make of, and why."""


@dataclass
class Run:
    """The checks, in their order; each gives its detail, or raises."""

    found: Material
    pub: PublicKey | None
    layout: Path
    expected: Lock | None
    signed_as: str
    labels: Mapping[str, str] = field(default_factory=dict)
    proven: Proof | None = None

    def check_signature(self) -> str:
        found = self.found
        if not found.signed:
            raise NotMade("an engine keeps none: verify the image where it came from, or its bundle")
        if found.signature is None or not found.config:
            if not found.config:
                raise NotMade("not looked at: `digest` failed")
            hint = "take one that is signed; to sign this one: `builder push` or `builder bundle` with `--key`"
            raise Failed("the image is not signed", hint)
        if isinstance(found.signature, str):
            raise Failed(found.signature)
        assert self.pub is not None
        claims = [_claim(data) for _, data in found.signature.entries]
        if all(digest != found.digest for digest, _ in claims):
            others = sorted({digest for digest, _ in claims if digest}) or ["nothing that can be read"]
            raise Failed(f"what is signed is another image: {others[0]}", "push the image again: `builder push`")
        attested = found.attestations if not isinstance(found.attestations, str) else None
        small_layout(self.layout, found.manifest, found.config, found.signature, attested)
        try:
            payloads = verify_signatures(self.layout, self.pub)
        except CosignError as error:
            short = self.pub.fingerprint[:12]
            raise Failed(
                f"no signature is by the key {short}…, or it was changed since: cosign says: {error}",
                "give the public key of who signed it: `--pub FILE`",
            ) from None
        names = sorted({name for digest, name in map(_critical, payloads) if digest == found.digest})
        if self.signed_as and self.signed_as not in names:
            raise Failed(
                f"it is signed as `{', '.join(names)}`, not as `{self.signed_as}`",
                "where you copied it from there on purpose, say so: `builder verify IMAGE --signed-as REGISTRY/NAME`",
            )
        shown = self.signed_as or ", ".join(names)
        return f"by the key {self.pub.fingerprint[:12]}…, as `{shown}`"

    def check_digest(self) -> str:
        if not self.found.signed:
            raise NotMade("an engine computes it itself")
        if self.found.problem:
            raise Failed(self.found.problem)
        return self.found.detail

    def check_labels(self) -> str:
        raw = self.found.labels if self.found.labels is not None else labels_of(self.found.config)
        self.labels = {key: value for key, value in raw.items() if key.startswith((LABEL, "org.opencontainers"))}
        if raw.get(LABEL) != "image":
            raise Failed(f"it is not an image of this builder: it has no label `{LABEL}=image`")
        matrix, lock, inputs = (raw.get(key, "") for key in (f"{LABEL}.matrix", f"{LABEL}.lock", INPUTS_LABEL))
        for label, value in ((f"{LABEL}.lock", lock), (INPUTS_LABEL, inputs)):
            if not re.fullmatch(r"[0-9a-f]{64}", value):
                raise Failed(f"its label `{label}` is no sha256: {value[:80]!r}")
        own = content_tag(matrix, lock)
        named = _NAMED.fullmatch(self.found.tag)
        if named is not None and self.found.tag != own:
            raise Failed(f"the tag says `{self.found.tag}`, the image is `{own}`", "somebody moved the tag")
        return f"matrix {matrix}, lock {lock[:12]}, inputs {inputs[:12]}"

    def check_lock(self) -> str:
        self.proven = self.found.proof()
        lock = self.proven.lock
        said = self.labels[f"{LABEL}.lock"]
        if lock.digest != said:
            raise Failed(f"the lock in the image is {lock.digest[:12]}, its label says {said[:12]}")
        if lock.matrix != self.labels.get(f"{LABEL}.matrix"):
            raise Failed(f"the lock in the image is of the matrix `{lock.matrix}`")
        wanted = self.expected
        if wanted is not None and wanted.digest != lock.digest:
            lines = drift(wanted, lock)
            more = f", and {len(lines) - 1} more differences" if len(lines) > 1 else ""
            first = lines[0] if lines else "their inputs differ"
            raise Failed(
                f"the image's lock is {lock.digest[:12]}, the one here is {wanted.digest[:12]}: {first}{more}",
                f"take the image of this lock: the tag `{content_tag(wanted.matrix, wanted.digest)}`; or take the lock it is of",
            )
        beside = ", the one here" if wanted is not None else ""
        return f"{lock.digest[:12]}{beside}: {len(lock.artefacts)} wheels, {len(lock.base.packages)} packages of the OS"

    def check_sbom(self) -> str:
        from builder.trust.sbom import components, image_in, packages_in, wheels_in

        proof = self._proof
        wanted = {str(item["name"]): (str(item["version"]), str(item["sha256"])) for item in proof.installed}
        system = {package.name: package.version for package in proof.lock.base.packages}

        def trouble(bom: Mapping[str, Any]) -> str:
            if image_in(bom) != digest_of(self.found.config):
                return f"it is of another image: {image_in(bom)[:19]}"
            return _differing(wheels_in(bom), wanted) or _differing(packages_in(bom), system)

        document = self._attested("cyclonedx", "SBOM", trouble)
        return (
            f"CycloneDX {document['specVersion']}, {components(document)} components, {len(wanted)} wheels as installed"
        )

    def check_provenance(self) -> str:
        from builder.trust.provenance import pinned_in, wheels_in

        proof, inputs = self._proof, self.labels[INPUTS_LABEL]
        wanted = {artefact.file: artefact.sha256 for artefact in proof.lock.artefacts}

        def trouble(said: Mapping[str, Any]) -> str:
            if pinned_in(said) != (proof.lock.digest, inputs):
                return "it names another lock, or other inputs"
            return _differing(wheels_in(said), wanted)

        document = self._attested("slsaprovenance1", "provenance", trouble)
        version = document["runDetails"]["builder"]["version"]
        same = document["buildDefinition"]["internalParameters"]["rendersTheseInputs"]
        rendered = "renders these inputs" if same else "does not say that it renders these inputs"
        return f"builder {str(version['revision'])[:12]} ({version['checkout']}), which {rendered}"

    def check_contents(self) -> str:
        proof = self._proof
        smoke, lock = proof.smoke, proof.lock
        if smoke.get("lock") != lock.digest or smoke.get("matrix") != lock.matrix:
            raise Failed("the smoke test's report in the image is of another lock or matrix")
        failed = [str(c.get("name")) for c in smoke["checks"] if not isinstance(c, dict) or c.get("ok") is not True]
        if smoke.get("ok") is not True or failed or not smoke["checks"]:
            why = ", ".join(failed) or ("its report says so" if smoke["checks"] else "it has no checks")
            raise Failed(f"the smoke test in the image did not pass: {why}")
        patched = self._patched()
        if self.found.digest == "" and self.found.image:
            where = "read out of the image"
        else:
            where = "read out of the uppermost layer"
        return f"smoke test passed, {len(smoke['checks'])} checks; {patched}; {where}"

    def check_stand_in(self) -> str:
        labels = self.found.labels if self.found.labels is not None else labels_of(self.found.config)
        if packages := labels.get(STAND_IN_LABEL):
            raise Failed(f"it is for tests: {packages[:200]} are not what they are called")
        return "no wheel in it stands in for another"

    @property
    def _proof(self) -> Proof:
        assert self.proven is not None, "`lock` reads it, and what needs it rests on `lock`"
        return self.proven

    def _patched(self) -> str:
        """What is installed in another form than the lock pins, each with its report and a set that the label names."""
        proof = self._proof
        locked = proof.lock.by_name
        installed = {item["name"]: item for item in proof.installed}
        if set(installed) != set(locked) or len(installed) != len(proof.installed):
            raise Failed("what the image says is installed is not what its lock pins")
        changed = sorted(name for name, item in installed.items() if item["sha256"] != locked[name].sha256)
        reports = {str(report.get("package")): report for report in proof.reports}
        for name in changed:
            if reports.get(name, {}).get("patched_version") != installed[name]["version"]:
                raise Failed(f"{name} {installed[name]['version']} is not the locked wheel, and no report says why")
        named = {word for word in self.labels.get(f"{LABEL}.patches", "").split(",") if word}
        sets = {str(site["set"]).partition("-")[0] for report in reports.values() for site in report["sites"]}
        if sets != {word for word in named if not word.startswith("diff")}:
            shown = ", ".join(sorted(sets)) or "none"
            raise Failed(f"its label names the patches {', '.join(sorted(named)) or 'none'}, its reports {shown}")
        return f"{len(changed) or 'no'} wheel{'s' if len(changed) > 1 else ''} patched"

    def _attested(self, kind: str, words: str, trouble: Callable[[Mapping[str, Any]], str]) -> dict[str, Any]:
        """The predicate of an attestation that the key signed for this image and that `trouble` has nothing against."""
        if not self.found.signed:
            raise NotMade("an engine keeps none")
        if isinstance(self.found.attestations, str):
            raise Failed(self.found.attestations)
        hint = "push the image again, which attaches it: `builder push`"
        if self.found.attestations is None:
            raise Failed(f"no {words} is attached", hint)
        assert self.pub is not None
        try:
            statements = verify_attestations(self.layout, self.pub, kind)
        except CosignError as error:
            raise Failed(
                f"no {words} is attached that the key signed for this image: cosign says: {error}", hint
            ) from None
        wrong = ""
        for said in reversed(statements):
            predicate = said.get("predicate")
            try:
                if not isinstance(predicate, dict):
                    raise TypeError("it has no predicate")
                wrong = trouble(predicate)
            except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
                wrong = f"it is damaged ({type(error).__name__}: {str(error)[:100]})"
            if not wrong:
                return dict(predicate)
        raise Failed(f"the {words} is signed, but it does not fit the image: {wrong}", hint)


def _claim(data: bytes) -> tuple[str, str]:
    """The digest and name that a signature's payload speaks of; "" where it cannot be read."""
    try:
        return _critical(load(data))
    except FormError:
        return "", ""


def _critical(payload: Mapping[str, Any]) -> tuple[str, str]:
    try:
        critical = payload["critical"]
        return str(critical["image"]["docker-manifest-digest"]), str(critical["identity"]["docker-reference"])
    except (KeyError, TypeError):
        return "", ""


def _differing(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first of what two mappings differ in, in words; nothing where they do not."""
    if got == wanted:
        return ""
    differing = sorted(name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name))
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"it differs from the image in {differing[0]}{more}"
