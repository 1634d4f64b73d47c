"""The middleware of `vllm serve`: what it refuses, what it changes, and that it leaves all else alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from cacheblend.vllm_backend import middleware
from cacheblend.vllm_backend.middleware import PlanCheck

IDS = list(range(10, 20))
SEGMENTS = [{"tokens": 4}, {"tokens": 4, "reuse": True}, {"tokens": 2}]
PLAN = {"version": 1, "segments": SEGMENTS, "selector": "chunk_head+query", "ratio": 0.15}


async def echo(request: Request) -> JSONResponse:
    """What the app sees of a request."""
    body = await request.body()
    return JSONResponse({"body": body.decode("latin-1"), "length": request.headers.get("content-length")})


ROUTES = [Route(path, echo, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")]


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(PlanCheck(Starlette(routes=ROUTES))) as client:
        yield client


def completion(prompt, plan) -> dict:
    return {"model": "m", "prompt": prompt, "kv_transfer_params": {"cacheblend": plan}}


def seen(response) -> dict:
    assert response.status_code == 200, response.text
    return json.loads(response.json()["body"])


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        ("yes", "send an object"),
        ({"version": 2, "segments": SEGMENTS}, "Version 2"),
        ({"segmets": SEGMENTS}, "segmets"),
        ({"segments": [{"tokens": 0}]}, "segments.0.tokens"),
        ({"segments": [{"tokens": 4}, {"tokens": 5}]}, "count 9 tokens, but the prompt has 10"),
        ({"segments": SEGMENTS, "question": 7}, "question is 7"),
        ({"segments": SEGMENTS, "question": 0}, "always computed"),
        ({"segments": [{"tokens": 8}, {"tokens": 2, "reuse": True}]}, "always computed"),
        ({"segments": SEGMENTS, "policy": "sometimes"}, "policy"),
        ({"segments": SEGMENTS, "selector": "best"}, "Selector 'best' is unknown"),
        ({"segments": SEGMENTS, "selector": "none", "ratio": 0.5}, "takes no ratio"),
        ({"segments": SEGMENTS, "ratio": 1.5}, "ratio"),
        ({"collect": 10}, "no chunk to collect"),
        ({"collect": -1}, "collect"),
    ],
)
def test_a_plan_that_cannot_be_right_is_answered_with_400_and_never_reaches_the_app(client, plan, part):
    response = client.post("/v1/completions", json=completion(IDS, plan))
    error = response.json()["error"]
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert part in error.pop("message")
    assert error == {"type": "BadRequestError", "param": "kv_transfer_params", "code": 400}


def test_one_of_several_prompts_that_does_not_fit_the_plan_is_refused(client):
    response = client.post("/v1/completions", json=completion([IDS, IDS[:-1]], PLAN))
    assert response.status_code == 400
    assert "the prompt has 9" in response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [IDS, [IDS], [IDS, list(reversed(IDS))]])
@pytest.mark.parametrize("plan", [PLAN, {"version": 1, "collect": 4}, {}, {"policy": "full"}])
def test_a_request_that_fits_reaches_the_app_byte_for_byte(client, prompt, plan):
    body = json.dumps(completion(prompt, plan), indent=3).encode()
    response = client.post("/v1/completions", content=body)
    assert response.json() == {"body": body.decode(), "length": str(len(body))}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m",   "prompt": "What is a cacheblend?"}',
        b'{"prompt": [1, 2], "kv_transfer_params": {"other": "cacheblend"}}',
        b'{"prompt": [1, 2], "kv_transfer_params": {"cacheblend": null}}',
        b'{"prompt": [1, 2], "kv_transfer_params": ["cacheblend"]}',
        b'["cacheblend"]',
        b'{"cacheblend": ',
        b"\xff\xfe cacheblend",
        b'"cacheblend' + b"[" * 100_000,
        b"[" * 100_000 + b"cacheblend",
        b"",
    ],
)
def test_a_body_that_brings_no_plan_reaches_the_app_byte_for_byte(client, body):
    response = client.post("/v1/completions", content=body)
    assert response.json() == {"body": body.decode("latin-1"), "length": str(len(body))}


@pytest.mark.parametrize("prompt", ["text", ["text", "more"], [IDS, "text"], [], [[]], [1.5], None])
def test_a_prompt_without_ids_goes_on_with_an_empty_plan(client, prompt):
    response = client.post("/v1/completions", json={**completion(prompt, PLAN), "stop": ["\u20ac"]})
    assert seen(response) == {**completion(prompt, {"version": 1}), "stop": ["\u20ac"]}
    assert int(response.json()["length"]) == len(response.json()["body"])


@pytest.mark.parametrize("plan", [PLAN, {"version": 9}, {"collect": 3}])
def test_a_chat_goes_on_with_an_empty_plan_and_its_other_params(client, plan):
    chat = {"messages": [{"role": "user", "content": "hello"}], "seed": 5}
    response = client.post("/v1/chat/completions", json={**chat, "kv_transfer_params": {"cacheblend": plan, "x": 1}})
    assert seen(response) == {**chat, "kv_transfer_params": {"cacheblend": {"version": 1}, "x": 1}}


def test_other_paths_are_not_looked_at(client):
    assert seen(client.post("/v1/embeddings", json=completion(IDS, "yes"))) == completion(IDS, "yes")


def test_a_server_behind_a_root_path_is_guarded_as_well():
    with TestClient(PlanCheck(Starlette(routes=ROUTES)), root_path="/llm") as client:
        assert client.post("/llm/v1/completions", json=completion(IDS, "yes")).status_code == 400


def test_a_body_that_comes_in_pieces_is_checked_as_a_whole(client):
    body = json.dumps(completion(IDS, {"segments": [{"tokens": 3}]})).encode()
    response = client.post("/v1/completions", content=(body[i : i + 5] for i in range(0, len(body), 5)))
    assert response.status_code == 400


class Recorder:
    """An app that takes messages until it hears that the client has left."""

    def __init__(self) -> None:
        self.messages: list[dict] = []

    async def __call__(self, scope, receive, send) -> None:
        while not self.messages or self.messages[-1]["type"] != "http.disconnect":
            assert len(self.messages) < 10, "the client leaves, but the app does not hear of it"
            self.messages.append(await receive())


def served(messages: list[dict]) -> list[dict]:
    """What the app receives of `messages`."""
    app, waiting = Recorder(), iter(messages)

    async def receive() -> dict:
        return next(waiting)

    async def send(message: dict) -> None:
        raise AssertionError(f"nothing is answered here, but {message} was")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(PlanCheck(app)(scope, receive, send))
    return app.messages


def pieces(*bodies: bytes) -> list[dict]:
    last = len(bodies) - 1
    return [{"type": "http.request", "body": body, "more_body": i < last} for i, body in enumerate(bodies)]


LEFT = {"type": "http.disconnect"}


def test_the_app_still_hears_that_the_client_has_left():
    messages = [*pieces(b'{"prompt": ', b'"x"}'), LEFT]
    assert served(messages) == messages


def test_a_client_that_leaves_in_the_middle_of_its_body_is_passed_on():
    messages = [*pieces(b'{"kv_transfer_params": {"cacheblend": 1}}', b"")[:1], LEFT]
    assert served(messages) == messages


def test_a_changed_body_is_followed_by_what_comes_after_it():
    changed, left = served([*pieces(json.dumps(completion("text", PLAN)).encode()), LEFT])
    assert json.loads(changed["body"]) == completion("text", {"version": 1})
    assert not changed["more_body"]
    assert left == LEFT


def test_no_more_of_an_endless_body_is_held_than_a_plan_can_need(monkeypatch):
    monkeypatch.setattr(middleware, "MOST_BYTES", 100)
    taken = 0

    async def receive() -> dict:
        nonlocal taken
        taken += 1
        assert taken <= 20, "more is taken than the app asks for"
        return {"type": "http.request", "body": b"cacheblend", "more_body": True}

    class Unread(Recorder):
        async def __call__(self, scope, receive, send) -> None:
            self.messages.append({"before": taken})
            self.messages.extend([await receive() for _ in range(20)])

    app = Unread()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(PlanCheck(app)(scope, receive, None))
    assert app.messages[0] == {"before": 11}
    assert taken == 20


def test_it_is_imported_without_torch_and_vllm():
    code = (
        "import sys, cacheblend.vllm_backend.middleware;"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
