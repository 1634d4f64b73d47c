"""Talking to a Redis or Valkey server, never waiting long for one that does not answer.

Importing this module needs the package `redis`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from kvstore.back_off import BackOff
from kvstore.errors import ChunkUnavailable, StoreError, UnavailableReason

logger = logging.getLogger(__name__)

Command = tuple[str | bytes | memoryview | int, ...]

SLOWEST_BYTES_PER_S = 8 << 20
"""A server that moves less is of no use: prefilling a chunk again is faster."""

_NO_ANSWER = (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError)


class RedisLink:
    """Conversations with one server. Thread-safe; connects when first used.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as the official client reads it.
        timeout_s: seconds of silence after which the server counts as unreachable; `socket_timeout` in the
            URL has precedence.

    Attributes:
        name: the URL without user, password and options, for people.

    Raises:
        StoreError: the URL cannot be right. No connection is tried.
    """

    def __init__(self, url: str, timeout_s: float):
        self.name = url_without_secrets(url)
        self._pool = _pool_of(url, self.name, timeout_s)
        self._client = redis.Redis(connection_pool=self._pool)
        self._timeout_s: float = self._pool.connection_kwargs["socket_timeout"]
        self._back_off = BackOff(self._timeout_s)

    @contextmanager
    def conversation(
        self, key: str, refused: UnavailableReason, undo: Sequence[Command] = ()
    ) -> Iterator[Conversation]:
        """Ask the server about a chunk, in any number of round trips.

        Args:
            key: of the chunk.
            refused: the reason to give when the server answers with an error.
            undo: sent when the conversation fails though the server answers.

        Raises:
            ChunkUnavailable: `unreachable`, at once while the server is left alone; `disk_full` when the
                server has no memory, or had to drop what was just written; else `refused`.
        """
        if not self._back_off.may_try():
            detail = f"{self.name} did not answer lately and is left alone for now"
            raise ChunkUnavailable(key, UnavailableReason.UNREACHABLE, detail)
        talk = Conversation(self._client, self._timeout_s)
        try:
            yield talk
        except _NO_ANSWER as error:
            raise self._unreachable(key, error) from error
        except (redis.RedisError, ChunkUnavailable) as error:
            self._answered()
            self._undo(undo)
            if isinstance(error, ChunkUnavailable):
                raise
            reason = UnavailableReason.DISK_FULL if _is_full(error) else refused
            raise ChunkUnavailable(key, reason, f"{self.name} refuses: {_said(error)}") from error
        self._answered()

    def close(self) -> None:
        """Close the connections; conversations that are under way end as unreachable."""
        self._pool.disconnect()

    def _unreachable(self, key: str, error: Exception) -> ChunkUnavailable:
        detail = f"{self.name} cannot be reached: {_said(error)}"
        pause_s = self._back_off.failed()
        if pause_s is not None:
            logger.warning("the remote tier %s; it is left alone for %.0f s", detail, pause_s)
        return ChunkUnavailable(key, UnavailableReason.UNREACHABLE, detail)

    def _answered(self) -> None:
        if self._back_off.answered():
            logger.info("the remote tier %s answers again", self.name)

    def _undo(self, commands: Sequence[Command]) -> None:
        if not commands:
            return
        try:
            Conversation(self._client, self._timeout_s).round_trip(commands)
        except (*_NO_ANSWER, redis.RedisError) as error:
            logger.warning(
                "the remote tier %s keeps a half-written chunk until it expires: %s", self.name, _said(error)
            )


class Conversation:
    """Round trips to a server: each fails after `timeout_s` of silence, and all together fail when they take
    longer than that and what the slowest useful server needs for the bytes.

    They raise the exceptions of the official client, or OSError.
    """

    def __init__(self, client: redis.Redis, timeout_s: float):
        self._client = client
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._nbytes = 0

    def will_move(self, nbytes: int) -> None:
        """Say how many bytes the conversation is about."""
        self._nbytes = nbytes

    def round_trip(self, commands: Sequence[Command], transaction: bool = False) -> list[Any]:
        """Send commands together and wait for all replies.

        Args:
            commands: each a name and its arguments.
            transaction: nobody else's commands come in between.
        """
        allowed_s = self._timeout_s + self._nbytes / SLOWEST_BYTES_PER_S
        if time.monotonic() - self._started > allowed_s:
            raise TimeoutError(f"{self._nbytes} bytes took more than {allowed_s:.1f} s")
        with self._client.pipeline(transaction=transaction) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            try:
                return pipeline.execute()
            except ValueError as error:
                # The client's parser stumbles over other protocols in this way as well.
                raise redis.InvalidResponse("what it says is not Redis' protocol") from error


def url_without_secrets(url: str) -> str:
    """The URL without user, password and options, whatever else may be wrong with it."""
    scheme = (re.match(r"\w+://", url) or [""])[0]
    place, *options = re.split(r"[?#]", url.removeprefix(scheme), maxsplit=1)
    if any("@" in option for option in options):
        # What comes before may be the start of a password that should have been quoted.
        return f"{scheme}..."
    return scheme + place.rpartition("@")[2]


def _pool_of(url: str, name: str, timeout_s: float) -> redis.ConnectionPool:
    options: dict[str, Any] = {"socket_timeout": timeout_s}
    if not url.startswith("unix://"):
        options |= {"socket_connect_timeout": timeout_s, "socket_keepalive": True}
    try:
        options |= parse_url(url)
        # Our bytes are not text, and trying again is the back-off's business.
        options |= {"decode_responses": False, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
        pool = redis.ConnectionPool(**options)
        pool.connection_class(**pool.connection_kwargs)
        right = options["socket_timeout"] > 0 and _names_a_database(url)
    except (ValueError, TypeError, redis.RedisError):
        right = False
    if not right:
        # Out here, so that no cause is told: the client's message may contain what it took a password for.
        raise StoreError(
            f"The remote tier's URL {name!r} is not one of a Redis server; "
            "give redis://HOST:PORT/DATABASE, rediss:// for TLS, or unix:///PATH, and quote special characters."
        )
    return pool


def _names_a_database(url: str) -> bool:
    """The client takes a path that is no number for database 0."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return bool(parts.path)
    return re.fullmatch(r"/?\d*", unquote(parts.path)) is not None and parts.hostname is not None


def _is_full(error: redis.RedisError) -> bool:
    # Only a key that was written and dropped is ever renamed without being there.
    return isinstance(error, redis.OutOfMemoryError) or "no such key" in str(error)


def _said(error: Exception) -> str:
    """What went wrong, without the command that the client puts before it."""
    return str(error).rpartition("caused error: ")[2].rstrip(".")
