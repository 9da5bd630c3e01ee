"""Where an image comes from: the whole predicate, and which builder says so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from builder.trust.provenance import Checkout, checkout, matrix_digest, pinned_in, provenance, wheels_in
from tests.made import golden, sha, tiny
from tests.trust_made import INPUTS, MadeImage

HERE = Checkout("0123456789abcdef0123456789abcdef01234567", "clean")


def test_the_whole_text() -> None:
    image = MadeImage()
    image.files["patches.diff"] = b"diff"
    said = provenance(image.loaded, image.proof, image.labels, rendered=INPUTS, made_by=HERE)
    golden("provenance.json", json.dumps(said, indent=1, sort_keys=True) + "\n")
    assert pinned_in(said) == (image.lock.digest, INPUTS)
    assert wheels_in(said) == {a.file: a.sha256 for a in image.lock.artefacts}


@pytest.mark.parametrize("rendered", ["", sha("other")])
def test_what_this_checkout_does_not_render(rendered: str) -> None:
    image = MadeImage()
    said = provenance(image.loaded, image.proof, image.labels, rendered=rendered, made_by=HERE)
    assert said["buildDefinition"]["internalParameters"]["rendersTheseInputs"] is False


def test_comments_and_order_do_not_count() -> None:
    assert matrix_digest(tiny("# a comment\n")) == matrix_digest(tiny())
    assert matrix_digest(tiny(python='"3.12"')) != matrix_digest(tiny())


@pytest.mark.processes
def test_which_builder(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert checkout(tmp_path) == Checkout("unknown", "unknown")
    git("init", "-q")
    (tmp_path / "builder").mkdir()
    (tmp_path / "builder" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "x")
    revision = git("rev-parse", "HEAD")
    assert checkout(tmp_path) == Checkout(revision, "clean")
    (tmp_path / "notes.txt").write_text("of no account")
    assert checkout(tmp_path) == Checkout(revision, "clean")
    (tmp_path / "builder" / "b.py").write_text("2")
    assert checkout(tmp_path) == Checkout(revision, "dirty")
    # A builder that is installed below somebody's repository is not that repository's.
    assert checkout(tmp_path / "builder") == Checkout("unknown", "unknown")
