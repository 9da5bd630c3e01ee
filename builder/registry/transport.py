"""Layers between an engine and a registry, by the engine's own push and pull: their progress, their errors, tries again.

An engine sends no layer that it knows the registry to have, and of a push or pull that broke off it keeps the layers that
were whole. It tries a layer five times by itself; on top of that the whole is tried again here, a few times, with pauses.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import docker.auth
import docker.errors
import requests
import urllib3

from builder.engine import Engine
from builder.errors import BuilderError, UnreachableError
from builder.files import pretty_size
from builder.registry import words
from builder.registry.auth import credentials
from builder.registry.reference import Reference

Progress = Callable[[str], None]

PAUSES = (5.0, 15.0, 30.0)
"""Seconds between the tries of a push or pull."""

STALL = 300.0
"""Seconds without a word from the engine until a push or pull is given up. It says much while it moves bytes, nothing while
it hashes or (containerd store) unpacks one layer: 5 GB take it under two minutes on two cores."""

_EVERY = 5.0

DONE_PUSH = ("Pushed", "Mounted from", "Layer already exists")
DONE_PULL = ("Pull complete", "Download complete", "Already exists")


@dataclass
class Events:
    """What an engine said: by layer (the first 12 digits of its digest or diff ID) the states it went through."""

    states: dict[str, list[str]] = field(default_factory=dict)
    digest: str = ""
    ended: bool = False
    """Whether the last words came: without them the engine went away in the middle."""
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)
    changed: bool = False
    """Whether anything is other than it was when this was reset: the containerd store repeats itself while nothing comes."""

    def feed(self, event: Mapping[str, Any]) -> str:
        """Take one; the layer whose state changed, or an empty string. Raises `_Said` for an error."""
        if said := event.get("errorDetail") or event.get("error"):
            raise _Said(str(said.get("message") if isinstance(said, Mapping) else said))
        aux = event.get("aux") or {}
        if isinstance(aux, Mapping) and aux.get("Digest"):
            self.digest, self.ended = str(aux["Digest"]), True
        layer, state = str(event.get("id") or ""), str(event.get("status") or "")
        # The last words: of a pull `Status: …`, of a push `TAG: digest: sha256:… size: …`.
        if not layer and (found := re.search(r"^\S+: digest: (sha256:[0-9a-f]{64}) ", state)):
            self.digest, self.ended = found[1], True
        self.ended = self.ended or (not layer and state.startswith("Status:"))
        detail = event.get("progressDetail") or {}
        if detail.get("current") is not None:
            moved = int(detail["current"]), int(detail.get("total") or 0)
            self.changed = self.changed or self.moved.get(layer) != moved
            self.moved[layer] = moved
        seen = self.states.setdefault(layer, []) if layer else []
        if not layer or (seen and seen[-1] == state):
            return ""
        self.changed = True
        seen.append(state)
        return layer

    def has(self, layer: str, *states: str) -> bool:
        """Whether the layer with this digest or diff ID went through one of the states."""
        seen = self.states.get(layer.removeprefix("sha256:")[:12], ())
        return any(state.startswith(states) for state in seen)


class _Said(Exception):
    """An engine's error, in its words."""


def api(engine: Engine) -> Any:
    """The SDK's client of an engine: pushes and pulls go through the connection that the engine has."""
    return engine.api


@contextlib.contextmanager
def _patience(client: Any, seconds: float) -> Iterator[None]:
    """Wait no longer than this between two words of the engine."""
    before = client.timeout
    client.timeout = seconds
    try:
        yield
    finally:
        client.timeout = before


def follow(
    engine: Engine,
    where: str,
    begin: Callable[[Any], Iterator[Mapping[str, Any]]],
    progress: Progress,
    *,
    seen: Callable[[Events, str], None] = lambda _events, _layer: None,
    stall: float = STALL,
    pauses: tuple[float, ...] = PAUSES,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Events]:
    """Run a push or pull of ``where`` to its end, again where that may help; what was said, a list for each try.

    ``begin`` starts it, ``seen`` is called when a layer's state changed. Raises what `words` makes of the engine's words.
    """
    tries: list[Events] = []
    for pause in (*pauses, None):
        tries.append(Events())
        try:
            _once(engine, begin, progress, tries[-1], seen, stall)
            if tries[-1].ended:
                return tries
            raise words.engine_gone("its answer ended in the middle", engine.host)
        except _Said as error:
            text, told = str(error), words.engine_said(str(error), where, engine=engine.host)
        except docker.errors.APIError as error:
            text = str(error.explanation or error)
            told = words.engine_said(text, where, engine=engine.host)
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            docker.errors.DockerException,
            OSError,
        ) as error:
            if "timed out" in str(error).lower():
                because = f"nothing came for {stall:.0f} s, and the connections hang"
                hint = "the same command goes on: layers that were whole are kept"
                raise UnreachableError(
                    "the registry does not answer", where=where, because=because, hint=hint
                ) from error
            raise words.engine_gone(str(error), engine.host) from error
        if pause is None or not words.worth_again(text):
            raise told
        progress(f"{told.what} ({text.strip()[:160]}); trying again in {pause:.0f} s")
        sleep(pause)
    raise AssertionError("the last pause is None")


def _once(
    engine: Engine,
    begin: Callable[[Any], Iterator[Mapping[str, Any]]],
    progress: Progress,
    events: Events,
    seen: Callable[[Events, str], None],
    stall: float,
) -> None:
    client, told, changed = api(engine), time.monotonic(), time.monotonic()
    with _patience(client, stall):
        stream = begin(client)
        try:
            for event in stream:
                if layer := events.feed(event):
                    before, state = ["", *events.states[layer]][-2:]
                    # An engine counts the seconds down.
                    counting = state.startswith("Retrying") and before.startswith("Retrying")
                    if state.startswith((*DONE_PUSH, *DONE_PULL, "Retrying")) and not counting:
                        progress(f"  {layer} {state[0].lower()}{state[1:]}")
                    seen(events, layer)
                if events.changed:
                    changed, events.changed = time.monotonic(), False
                if time.monotonic() - changed > stall:
                    raise TimeoutError("timed out")
                if time.monotonic() - told > _EVERY and events.moved:
                    told = time.monotonic()
                    progress(_line(events))
        finally:
            # An engine gives up a pull or push whose client goes away.
            close = getattr(stream, "close", None)
            if close is not None:
                close()


def _line(events: Events) -> str:
    # A layer that is whole waits for those below it, and is as far as it was.
    waits = ("Download complete", "Verifying Checksum")
    busy = {
        layer: moved
        for layer, moved in events.moved.items()
        if not events.has(layer, *DONE_PUSH, "Pull complete") and not events.states[layer][-1].startswith(waits)
    }
    parts = [
        f"{layer} {pretty_size(at)}" + (f" of {pretty_size(of)}" if of >= at else "")
        for layer, (at, of) in busy.items()
    ]
    return f"  {', '.join(parts)}" if parts else "  …"


def pull_stream(
    client: Any, reference: Reference, digest: str, login: Mapping[str, str]
) -> Iterator[Mapping[str, Any]]:
    """The events of a pull by digest: as the SDK's `pull`, which would wait for an engine without end."""
    answer = client._post(
        client._url("/images/create"),
        params={"fromImage": reference.name, "tag": digest},
        headers={"X-Registry-Auth": docker.auth.encode_header(login)},
        stream=True,
        timeout=client.timeout,
    )
    client._raise_for_status(answer)
    stream: Iterator[Mapping[str, Any]] = client._stream_helper(answer, decode=True)
    return stream


def auth_config(reference: Reference) -> dict[str, str]:
    """What the engine is given to log in with; empty where nothing is stored (the SDK then sends nothing of its own)."""
    return credentials(reference.registry) or {}


# -------------------------------------------------------------------------------------------------------- push


@dataclass(frozen=True)
class Pushed:
    """A push that went through. ``sent`` are layers (12 digits, as the engine names them) whose bytes were uploaded."""

    digest: str
    sent: frozenset[str]
    tries: int


def push_image(
    engine: Engine,
    image: str,
    reference: Reference,
    progress: Progress,
    *,
    stall: float = STALL,
    pauses: tuple[float, ...] = PAUSES,
) -> Pushed:
    """Push an image of the engine under a reference with a tag. Raises `UnreachableError`, `BuildError`.

    The image keeps that name in the engine: by it the engine remembers what the registry has.
    """
    login = auth_config(reference)

    def begin(client: Any) -> Iterator[Mapping[str, Any]]:
        stream: Iterator[Mapping[str, Any]] = client.push(
            reference.name, tag=reference.tag, stream=True, decode=True, auth_config=login
        )
        return stream

    with name_put_back(engine, str(reference)):
        engine.tag(image, [str(reference)])
        tries = follow(engine, str(reference), begin, progress, stall=stall, pauses=pauses)
    sent = {layer for events in tries for layer in events.states if events.has(layer, "Pushed")}
    return Pushed(tries[-1].digest, frozenset(sent), len(tries))


@contextlib.contextmanager
def name_put_back(engine: Engine, name: str) -> Iterator[None]:
    """What fails in here, or is interrupted, leaves the name as it was: on the image that had it, or on none.

    The containerd store drops an image that loses its only name: then there is none to put it back on.
    """
    had = engine.find(name)
    try:
        yield
    except BaseException:
        # Whatever this comes to, the error that led here is the one to tell.
        with contextlib.suppress(BuilderError):
            before = engine.find(had.id) if had is not None else None
            if before is not None:
                engine.tag(before.id, [name])
            elif engine.find(name) is not None:
                untag(engine, name)
        raise


def untag(engine: Engine, name: str) -> None:
    """Take a name off an image that has others; the image stays. Raises `BuildError` and what `words` makes of a refusal."""
    try:
        api(engine).remove_image(name, noprune=True)
    except docker.errors.APIError as error:
        raise words.engine_said(str(error.explanation or error), name, engine=engine.host) from error
    except (requests.RequestException, docker.errors.DockerException) as error:
        raise words.engine_gone(str(error), engine.host) from error
