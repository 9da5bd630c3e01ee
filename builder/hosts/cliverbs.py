"""`builder pull`, `builder load` with hosts, `builder hosts`: from the words of the command line to what is printed."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from builder.doctor.configs import of_config
from builder.doctor.needs import of_matrix
from builder.errors import ExitCode, UsageError
from builder.hosts import records
from builder.hosts.delivery import FromBundle, FromRegistry
from builder.hosts.host import Address
from builder.hosts.verb import Delivered, Options, deliver
from builder.lock import check_current, lock_path, read_lock
from builder.matrix import load as load_matrix
from builder.running import check_gpus
from builder.settings import Settings
from builder.trust.cosign import public_key
from builder.trust.verb import named_key, progress


def pull_verb(arguments: argparse.Namespace, path: Path, settings: Settings) -> int:
    """Pull the image of the matrix at `path` onto hosts; the exit status. Raises `UsageError`, `LockError`."""
    loaded = load_matrix(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    name = arguments.source or settings.registry
    if not name:
        raise UsageError(
            "no registry is named",
            because="there is no default one",
            hint='`--from REGISTRY/NAME`, or `registry = "REGISTRY/NAME"` in config.toml',
        )
    options = _options(arguments)
    pub = public_key(named_key(arguments.pub, settings, "pub"))
    delivery = FromRegistry.of(name, lock, pub, settings, plain_http=arguments.plain_http)
    with contextlib.closing(delivery):
        return _told(arguments, deliver(_hosts(arguments, settings), delivery, of_matrix(loaded.matrix, lock), options))


def load_verb(arguments: argparse.Namespace, settings: Settings) -> int:
    """Load a bundle onto hosts. Raises `IntegrityError` for one that is not verified: then no host was touched."""
    options = _options(arguments)
    file = Path(arguments.file)
    delivery = FromBundle(file, public_key(named_key(arguments.pub, settings, "pub")), progress("hashed"))
    verified = delivery.verified()
    needs = of_config(verified.reference, json.loads(verified.config), json.loads(verified.manifest))
    delivered = deliver(_hosts(arguments, settings), delivery, needs, options)
    return _told(arguments, delivered, file=str(file))


def hosts_verb(arguments: argparse.Namespace) -> int:
    """List the records, or forget those of a host."""
    if arguments.forget is not None:
        name = arguments.forget
        # As it was given to `pull`, with a user: as it is recorded, without.
        with contextlib.suppress(UsageError):
            name = str(Address.parse(name))
        count = records.forget(name)
        print(json.dumps({"ok": True, "forgotten": count}) if arguments.json else f"{name}: {count} records removed")
        return ExitCode.OK
    found = records.records()
    print(
        json.dumps(records.as_json(found), indent=2, ensure_ascii=False) if arguments.json else records.as_text(found)
    )
    return ExitCode.OK


def _hosts(arguments: argparse.Namespace, settings: Settings) -> list[str]:
    return list(arguments.host or settings.hosts or ("local",))


def _options(arguments: argparse.Namespace) -> Options:
    gpus = check_gpus(arguments.gpus)
    if not arguments.smoke and gpus != "none":
        raise UsageError("`--no-smoke` and `--gpus` together", because="the test on GPUs is a part of the smoke test")
    return Options(
        smoke=arguments.smoke,
        gpus=gpus,
        anyway=arguments.anyway,
        dry_run=arguments.dry_run,
        jobs=arguments.jobs,
    )


def _told(arguments: argparse.Namespace, delivered: Delivered, **more: str) -> int:
    if arguments.json:
        print(json.dumps({**delivered.as_json(), **more}, indent=2, ensure_ascii=False))
    else:
        print(delivered.as_text())
    if delivered.interrupted:
        print("interrupted: a host that is not told as tagged got no name", file=sys.stderr)
    return delivered.exit_code
