"""Plain HTTP to a server that runs: a text, or one sentence that says why there is none."""

from __future__ import annotations

import contextlib
import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pipelines.cli.output import on_one_line
from pipelines.errors import PipelineError

LONGEST_MESSAGE = 300
"""Characters of a server's own words that are repeated."""


def get(url: str, timeout_s: float) -> str:
    """The text at `url`.

    Raises:
        PipelineError: it is no http address, or the server does not answer as it should.
    """
    return _exchange(Request(checked(url)), timeout_s)


def post_json(url: str, value: Any, timeout_s: float, api_key: str | None = None) -> str:
    """The text that answers `value`, sent as JSON.

    Raises:
        PipelineError: it is no http address, or the server refuses or does not answer.
    """
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return _exchange(Request(checked(url), json.dumps(value).encode(), headers), timeout_s)


def checked(url: str) -> str:
    """The address as it is.

    Raises:
        PipelineError: it is no http address.
    """
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        right = False
    if not right or not url.isascii() or any(character.isspace() for character in url):
        raise PipelineError(f"--url '{on_one_line(url)}' is no address; write one such as http://localhost:8000.")
    return url


def _exchange(request: Request, timeout_s: float) -> str:
    url = request.full_url
    try:
        with urlopen(request, timeout=timeout_s) as response:
            content: bytes = response.read()
            return content.decode()
    except HTTPError as error:
        raise PipelineError(f"{url} answers {error.code}: {_message_in(error)}") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"{url} answers something that is no text; is it the address of vLLM?") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise PipelineError(f"{url} cannot be reached: {on_one_line(said)}.") from error


def _message_in(error: HTTPError) -> str:
    """What the server says of its refusal, in vLLM's form or as it stands."""
    try:
        text = error.read(1 << 20).decode(errors="replace")
    except (OSError, HTTPException):
        text = ""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return on_one_line(text)[:LONGEST_MESSAGE] or str(error.reason)
