"""`cacheblend cache budget` against a real HTTP server that answers as vLLM with the connector does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from metrics_server import Server

from cacheblend.vllm_backend.request_format import BudgetParams, check_prompt, parse_params


class Engine:
    """Budgets behind `/v1/completions`.

    Args:
        accepts: as the connector's setting.
        most: bytes that each tier can have; a request for more leaves the budget as it is.
        late: requests that are answered before more memory has been found.
    """

    def __init__(self, accepts: bool = True, most: Mapping[str, int] | None = None, late: int = 0) -> None:
        self.budgets = {"host": 4 << 30, "gpu": 1 << 30}
        self._accepts = accepts
        self._most = most or {}
        self._late = late
        self.key: str | None = None
        self.asked = 0

    def __call__(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, str, bytes]:
        assert (method, path, headers["content-type"]) == ("POST", "/v1/completions", "application/json")
        self.key = headers["authorization"]
        request = json.loads(body)
        if request["model"] != "known":
            return self._says(404, {"error": {"message": "The model `other` does not exist.", "code": 404}})
        params = parse_params(request["kv_transfer_params"])
        assert isinstance(params, BudgetParams)
        check_prompt(params, len(request["prompt"]))
        # A request of one token is answered before the workers have told what they could do.
        assert request["max_tokens"] > 1
        assert request["ignore_eos"]
        for tier, nbytes in params.budgets.items() if self._accepts else ():
            is_there = nbytes <= self.budgets.get(tier, -1) or self.asked >= self._late
            if tier in self.budgets and is_there and nbytes <= self._most.get(tier, nbytes):
                self.budgets[tier] = nbytes
        self.asked += 1
        return self._says(200, {"kv_transfer_params": {"cacheblend": {"version": 1, "budgets": self.budgets}}})

    def _says(self, status: int, value: Any) -> tuple[int, str, bytes]:
        return status, "application/json", json.dumps(value).encode()


def test_budgets_are_changed_and_what_holds_now_is_printed(cli: Any) -> None:
    engine = Engine()
    with Server(engine) as server:
        command = ("cacheblend", "cache", "budget", "--url", server.url, "--model", "known")
        result = cli(*command, "--host", "8GiB", "--gpu", "500MB")
        told = cli(*command, "--host", "16M", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "host: 8.0 GiB (8,589,934,592 bytes)\ngpu: 476.8 MiB (500,000,000 bytes)\n"
    assert json.loads(told.stdout) == {"budgets": {"host": 16 << 20, "gpu": 500_000_000}}
    assert engine.budgets == {"host": 16 << 20, "gpu": 500_000_000}
    assert engine.key is None


def test_the_servers_key_is_sent_from_vllms_own_variable(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    with Server(engine) as server:
        assert (
            cli("cacheblend", "cache", "budget", "--url", f"{server.url}/", "--model", "known", "--gpu", 0).exit_code
            == 0
        )
    assert engine.key == "Bearer a-key"


def one_sentence(result: Any) -> str:
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line)


def test_a_server_that_accepts_no_budgets_ends_with_2_and_says_which_hold(cli: Any) -> None:
    with Server(Engine(accepts=False)) as server:
        result = cli("cacheblend", "cache", "budget", "--url", server.url, "--model", "known", "--host", "3GiB")
    assert "host stays at 4,294,967,296 bytes" in one_sentence(result)
    assert "accept_budgets" in result.stderr
    assert "host: 4.0 GiB" in result.stdout


def test_of_two_budgets_the_one_that_was_not_taken_is_named(cli: Any) -> None:
    with Server(Engine(most={"gpu": 2 << 30})) as server:
        command = ("cacheblend", "cache", "budget", "--url", server.url, "--model", "known")
        result = cli(*command, "--host", "8GiB", "--gpu", "4GiB", "--json", "--wait", 0)
    sentence = one_sentence(result)
    assert "gpu stays at 1,073,741,824 bytes" in sentence
    assert "host stays" not in sentence
    assert json.loads(result.stdout)["budgets"] == {"host": 8 << 30, "gpu": 1 << 30}


def test_more_memory_is_waited_for(cli: Any) -> None:
    engine = Engine(late=2)
    with Server(engine) as server:
        result = cli("cacheblend", "cache", "budget", "--url", server.url, "--model", "known", "--host", "8GiB")
    assert (result.exit_code, engine.asked) == (0, 3)
    assert result.stdout.startswith("host: 8.0 GiB")


def test_more_memory_is_not_waited_for_longer_than_said(cli: Any) -> None:
    engine = Engine(late=100)
    with Server(engine) as server:
        command = ("cacheblend", "cache", "budget", "--url", server.url, "--model", "known")
        result = cli(*command, "--host", "8GiB", "--wait", 0.6)
    assert "host stays at" in one_sentence(result)
    assert engine.asked == 2


def test_a_tier_that_the_server_was_started_without_is_named(cli: Any) -> None:
    engine = Engine()
    del engine.budgets["gpu"]
    with Server(engine) as server:
        result = cli("cacheblend", "cache", "budget", "--url", server.url, "--model", "known", "--gpu", "1GiB")
    assert "it has no gpu tier" in one_sentence(result)
    assert result.stdout == "host: 4.0 GiB (4,294,967,296 bytes)\n"


def test_a_model_that_the_server_does_not_have_is_its_own_sentence(cli: Any) -> None:
    with Server(Engine()) as server:
        result = cli("cacheblend", "cache", "budget", "--url", server.url, "--model", "other", "--host", "1GiB")
    assert "answers 404: The model `other` does not exist." in one_sentence(result)
    assert result.stdout == ""


@pytest.mark.parametrize(
    "answer", [b"{}", b'{"kv_transfer_params": null}', b"[]", b"no JSON", b'{"kv_transfer_params": 1}']
)
def test_a_server_without_the_connector_is_one_sentence(cli: Any, answer: bytes) -> None:
    with Server(lambda *request: (200, "application/json", answer)) as server:
        result = cli("cacheblend", "cache", "budget", "--url", server.url, "--model", "m", "--host", "1GiB")
    assert "answers without budgets" in one_sentence(result)


def test_a_request_for_nothing_or_for_no_size_is_refused_before_anything_is_sent(cli: Any) -> None:
    url = "http://127.0.0.1:9"
    assert "--host" in one_sentence(cli("cacheblend", "cache", "budget", "--url", url, "--model", "m"))
    wrong = cli("cacheblend", "cache", "budget", "--url", url, "--model", "m", "--host", "much")
    assert wrong.exit_code == 2
    assert "is not a size" in wrong.stderr
