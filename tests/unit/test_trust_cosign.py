"""What is made of cosign's answers: those of the real 2.5, recorded with a key made for it (golden/cosign.json)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from builder import bootstrap
from builder.errors import BuildError, UsageError
from builder.trust import cosign
from builder.trust.cosign import (
    CosignError,
    find_cosign,
    parse_public,
    public_key,
    sign,
    signing_key,
    verify_attestations,
    verify_signatures,
)
from tests.made import GOLDEN
from tests.trust_made import StandInCosign

RECORDED: dict[str, Any] = json.loads((GOLDEN / "cosign.json").read_text(encoding="utf-8"))
KEY = parse_public(RECORDED["public key"], "cosign.pub")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """cosign says what was recorded under a name; the calls."""
    calls: list[list[str]] = []
    monkeypatch.setattr(cosign, "find_cosign", lambda: "cosign")
    return calls


def says(name: str, answers: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    said = RECORDED[name]

    def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        answers.append(argv)
        assert options["stdin"] is subprocess.DEVNULL and options["timeout"]
        assert options["env"]["COSIGN_PASSWORD"] == ""
        return subprocess.CompletedProcess(argv, said["status"], said["stdout"].encode(), said["stderr"].encode())

    monkeypatch.delenv("COSIGN_PASSWORD", raising=False)
    monkeypatch.setattr(subprocess, "run", run)


def test_the_fingerprint_is_that_of_the_der_form() -> None:
    # `openssl pkey -pubin -in cosign.pub -outform DER | sha256sum`
    assert KEY.fingerprint == "7df138194641dd5dace99473e289a22c25f1501aa19392e6c395e945c3376a47"


def test_a_signature_that_is_good(answers: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    says("verify", answers, monkeypatch)
    (payload,) = verify_signatures(Path("layout"), KEY)
    assert payload["critical"]["identity"]["docker-reference"] == "127.0.0.1:5000/x"
    (call,) = answers
    assert call[:3] == ["cosign", "verify", "--key"]
    # Nothing that reaches for a network.
    assert call[4:] == ["--insecure-ignore-tlog=true", "--local-image", "layout"]


def test_an_attestation_that_is_good(answers: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    says("verify-attestation", answers, monkeypatch)
    (statement,) = verify_attestations(Path("layout"), KEY, "cyclonedx")
    assert statement["predicateType"] == "https://cyclonedx.org/bom"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another key", "no matching signatures: invalid signature when validating ASN.1 encoded signature"),
        ("payload changed", "no matching signatures: invalid signature when validating ASN.1 encoded signature"),
        ("not signed", "no signatures associated with the image saved in l3"),
        (
            "another image",
            (
                "no matching signatures: invalid or missing digest in claim: "
                "sha256:bdc152494ae1907ae52dcb83f2ca3af29bd056f9f67eaeec3624424846618809"
            ),
        ),
    ],
)
def test_a_signature_that_is_not(
    name: str, words: str, answers: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(name, answers, monkeypatch)
    with pytest.raises(CosignError) as caught:
        verify_signatures(Path("layout"), KEY)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "another key, attestation",
            "no matching attestations: accepted signatures do not match threshold, Found: 0, Expected 1",
        ),
        ("another image, attestation", "no matching attestations: no matching subject digest found"),
        (
            "no such type",
            (
                "none of the attestations matched the predicate type: spdx, "
                "found: https://slsa.dev/provenance/v1,https://cyclonedx.org/bom"
            ),
        ),
    ],
)
def test_an_attestation_that_is_not(
    name: str, words: str, answers: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(name, answers, monkeypatch)
    with pytest.raises(CosignError) as caught:
        verify_attestations(Path("layout"), KEY, "cyclonedx")
    assert str(caught.value) == words


def test_signing(answers: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cosign.key"
    path.write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    says("public-key", answers, monkeypatch)
    key = signing_key(path)
    assert key.public.fingerprint == KEY.fingerprint
    says("sign-blob", answers, monkeypatch)
    assert sign(key, b"data") == RECORDED["sign-blob"]["stdout"].strip()
    assert answers[-1][1:-1] == ["sign-blob", "--key", str(path), "--tlog-upload=false", "--yes"]


def test_a_wrong_password(answers: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cosign.key"
    path.write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    says("wrong password", answers, monkeypatch)
    with pytest.raises(UsageError) as caught:
        signing_key(path)
    assert str(caught.value) == (
        "error: the key's password is wrong\n"
        f"  at: {path}\n"
        "  because: COSIGN_PASSWORD is not set\n"
        "  hint: set COSIGN_PASSWORD to the password that the key was made with"
    )


MAKE = "make a pair: `cosign generate-key-pair`"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda folder: signing_key(None),
            f"error: no key is named to sign with\n  hint: name one with `--key FILE`, or as `key` in the configuration; {MAKE}",
        ),
        (
            lambda folder: signing_key(folder / "none"),
            (
                "error: there is no such key file\n  at: FOLDER/none\n"
                f"  hint: name one with `--key FILE`, or as `key` in the configuration; {MAKE}"
            ),
        ),
        (
            lambda folder: signing_key(folder / "pub"),
            (
                "error: the file is no private key\n  at: FOLDER/pub\n"
                f"  hint: name one with `--key FILE`, or as `key` in the configuration; {MAKE}"
            ),
        ),
        (
            lambda folder: public_key(None),
            (
                "error: no public key is named\n  because: a signature is worth what its key is\n"
                f"  hint: name one with `--pub FILE`, or as `pub` in the configuration; {MAKE}"
            ),
        ),
        (
            lambda folder: public_key(folder / "key"),
            "error: the file is a private key\n  at: FOLDER/key\n  hint: its public half lies beside it: `cosign.pub`",
        ),
        (
            lambda folder: public_key(folder / "text"),
            (
                "error: the file is no public key\n  at: FOLDER/text\n  because: it holds no `BEGIN PUBLIC KEY`\n"
                f"  hint: name one with `--pub FILE`, or as `pub` in the configuration; {MAKE}"
            ),
        ),
        (
            lambda folder: public_key(folder / "damaged"),
            "error: the public key is damaged\n  at: FOLDER/damaged\n  because: Incorrect padding",
        ),
    ],
)
def test_files_that_are_no_keys(call: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "pub").write_text(RECORDED["public key"])
    (tmp_path / "key").write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "damaged").write_text("-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----\n")
    with pytest.raises(UsageError) as caught:
        call(tmp_path)
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == message


def test_no_cosign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "find_program", lambda name: None)
    with pytest.raises(BuildError) as caught:
        find_cosign()
    assert str(caught.value) == (
        "error: `cosign` was not found\n"
        "  because: signatures are made and verified with it\n"
        "  hint: run `make tools`, which unpacks it on Debian 12 and 13; elsewhere put a cosign 2 on the PATH"
    )


def test_the_stand_in_says_what_the_real_one_says() -> None:
    # Its words are in the tests of verification; these are the real ones.
    assert "invalid signature when validating ASN.1 encoded signature" in RECORDED["another key"]["stderr"]
    assert "accepted signatures do not match threshold" in RECORDED["another key, attestation"]["stderr"]
    assert StandInCosign()("public-key", "--key", "x.key").startswith(b"-----BEGIN PUBLIC KEY-----")
