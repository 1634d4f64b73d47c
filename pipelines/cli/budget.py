"""`cacheblend cache budget`: the byte budgets of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Annotated

import typer
from typer import Option

from cacheblend.vllm_backend.request_format import PARAMS_KEY, BudgetParams, as_transfer_params
from pipelines.cli.failures import ends_with_a_sentence
from pipelines.cli.http_client import post_json
from pipelines.cli.options import AsJson
from pipelines.cli.output import print_json
from pipelines.cli.units import parse_size, size_text
from pipelines.errors import PipelineError

TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.5
"""Between two requests while the server takes memory; each pause is twice as long as the one before."""

TOKENS = 8
"""Of the request: more than one, because one of a single token ends before the workers have told what they did."""


@ends_with_a_sentence
def budget(
    model: Annotated[str, Option(help="The model's name at the server.")],
    url: Annotated[str, Option(help="The server.")] = "http://localhost:8000",
    host: Annotated[
        int | None, Option(parser=parse_size, metavar="SIZE", help="KV that host memory may hold, of each worker.")
    ] = None,
    gpu: Annotated[
        int | None, Option(parser=parse_size, metavar="SIZE", help="KV that the GPU pool may hold, of each worker.")
    ] = None,
    wait: Annotated[float, Option(min=0.0, help="Seconds that the server may take to find memory for more.")] = 60.0,
    api_key: Annotated[str | None, Option(envvar="VLLM_API_KEY", help="The server's, if it asks for one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change a running server's byte budgets.

    It must have the setting accept_budgets. What holds afterwards is printed; a budget that the server has not taken
    by then ends the command with 2.

    \b
    Example:
      cacheblend cache budget --model Qwen/Qwen3-8B --host 8GiB
    """
    asked = {name: nbytes for name, nbytes in (("host", host), ("gpu", gpu)) if nbytes is not None}
    if not asked:
        raise PipelineError("No budget is given; give --host, --gpu or both.")
    held = _settled(lambda: _ask(url.rstrip("/"), model, asked, api_key), asked, wait)
    if as_json:
        print_json({"budgets": held})
    else:
        for name, nbytes in held.items():
            typer.echo(f"{name}: {size_text(nbytes)} ({nbytes:,} bytes)")
    refused = [_what_holds(name, held) for name, nbytes in asked.items() if held.get(name) != nbytes]
    if refused:
        raise PipelineError(
            f"The server has not taken it, {' and '.join(refused)}; either its setting accept_budgets is off, or its "
            "log says why."
        )


def _what_holds(name: str, held: Mapping[str, int]) -> str:
    return f"{name} stays at {held[name]:,} bytes" if name in held else f"it has no {name} tier"


def _settled(ask: Callable[[], dict[str, int]], asked: Mapping[str, int], wait_s: float) -> dict[str, int]:
    """Ask until the larger budgets hold, for which the server takes memory in the background, or the time is over."""
    end, pause = time.monotonic() + wait_s, FIRST_PAUSE_S
    held = ask()
    while any(name in held and held[name] < n for name, n in asked.items()) and time.monotonic() + pause <= end:
        time.sleep(pause)
        pause *= 2
        held = ask()
    return held


def _ask(url: str, model: str, asked: dict[str, int], api_key: str | None) -> dict[str, int]:
    """The budgets that hold after a request that changes them."""
    request = {
        "model": model,
        # Token ids, because the middleware strips the params of a text prompt; id 0 is in every vocabulary.
        "prompt": [0],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "kv_transfer_params": as_transfer_params(BudgetParams.model_validate({"budgets": asked})),
    }
    answer = post_json(f"{url}/v1/completions", request, TIMEOUT_S, api_key)
    try:
        budgets = json.loads(answer)["kv_transfer_params"][PARAMS_KEY]["budgets"]
        return {str(name): int(nbytes) for name, nbytes in budgets.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PipelineError(
            f"{url} answers without budgets; start it with CacheBlendConnector to have any to change."
        ) from error
