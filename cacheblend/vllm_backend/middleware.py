"""Refuses plans that cannot be right before they reach the engine: `vllm serve --middleware ...PlanCheck`.

vLLM's API server asks a connector nothing, so the engine can only prefill such a request whole and say `bad_plan` in
its result. This class sees the bodies and answers HTTP 400. Imports neither torch nor vllm until a selector is named.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from cacheblend.errors import BlendError
from cacheblend.vllm_backend.request_format import (
    FORMAT_VERSION,
    PARAMS_KEY,
    BlendParams,
    Params,
    check_prompt,
    parse_params,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
PARAMS_FIELD = "kv_transfer_params"
MOST_BYTES = 64 << 20
"""Of a body that is looked at: vLLM authenticates later, and what nobody vouches for must not fill the memory."""

_MARK = PARAMS_KEY.encode()


class PlanCheck:
    """ASGI middleware that answers 400 to a plan that does not fit its prompt, and passes all else on.

    A body without the plan's name costs one search for it and reaches the app in the messages it came in. A prompt
    without token ids (text, chat) is not refused: it goes on with an empty plan, so that its result says
    `no_token_ids`.

    Args:
        app: what answers.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if not _takes_plans(scope):
            await self._app(scope, receive, send)
            return
        messages = await _read(receive)
        body = b"".join(message.get("body", b"") for message in messages)
        try:
            changed = _checked(body) if _MARK in body and _is_whole(messages) else None
        except BlendError as error:
            await _refuse(send, str(error))
            return
        if changed is not None:
            scope = {**scope, "headers": _with_length(scope["headers"], len(changed))}
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
        await self._app(scope, _replay(messages, receive), send)


def _takes_plans(scope: Mapping[str, Any]) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in PATHS


async def _read(receive: Receive) -> list[Message]:
    """The messages up to the body's end, a disconnect, or the first one over `MOST_BYTES`."""
    messages: list[Message] = []
    length = 0
    while length <= MOST_BYTES:
        message = await receive()
        messages.append(message)
        length += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return messages


def _is_whole(messages: Sequence[Message]) -> bool:
    return messages[-1]["type"] == "http.request" and not messages[-1].get("more_body", False)


def _replay(messages: Sequence[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def next_message() -> Message:
        for message in waiting:
            return message
        return await receive()

    return next_message


def _checked(body: bytes) -> bytes | None:
    """The body to pass on instead of this one, None to leave it as it is.

    Raises:
        BlendError: for a plan that cannot be right.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        # Not ours to refuse: vLLM says what is wrong with it.
        return None
    given = request.get(PARAMS_FIELD) if isinstance(request, dict) else None
    if not isinstance(given, dict) or given.get(PARAMS_KEY) is None:
        return None
    prompts = _token_ids(request.get("prompt"))
    if not prompts:
        given[PARAMS_KEY] = {"version": FORMAT_VERSION}
        return json.dumps(request).encode()
    params = parse_params(given)
    assert params is not None
    for prompt in prompts:
        check_prompt(params, len(prompt))
    _check_selector(params)
    return None


def _check_selector(params: Params) -> None:
    if isinstance(params, BlendParams) and params.selector is not None:
        # Here because it loads torch, which the API server's start has no need to wait for.
        from cacheblend.selectors import make_selector

        make_selector(params.selector, params.asked_ratio, params.head_tokens, params.check_layers)


def _token_ids(prompt: Any) -> list[list[int]]:
    """The prompts of a completion request as lists of ids; none where one of them is something else."""
    if not isinstance(prompt, list):
        return []
    prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
    sound = all(isinstance(ids, list) and ids and all(type(i) is int for i in ids) for ids in prompts)
    return prompts if sound else []


def _with_length(headers: Sequence[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    return [(name, str(length).encode() if name.lower() == b"content-length" else value) for name, value in headers]


async def _refuse(send: Send, message: str) -> None:
    error = {"message": message, "type": "BadRequestError", "param": PARAMS_FIELD, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
