"""Shows that `vllm serve` blends: asks a server over HTTP with and without a plan, and prints what came back.

    python -m eval.serve_check --model bundled:smollm2-135m

Exits with 1 if anything does not hold: reuse counts, HTTP 400 for a wrong plan, `no_token_ids` for a chat, counters in
/metrics, and the same answer without a plan as from a server without the connector.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlopen

import typer
from rich.table import Table

from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.layout import LaidOutPrompt
from eval.serving.server import free_port, serve_command, serving
from inputs import INVENTED_PATH
from pipelines.cli.output import print_table
from pipelines.config import DEFAULT_SYSTEM_PROMPT
from pipelines.models import DEFAULT_MODEL, resolve_model
from pipelines.prompt import PromptTemplate
from pipelines.tokenizer import require_tokenizer

QUESTION = "Which baker invented the salt cake?"
DOCUMENTS = ("salt-cake.md", "velmory-ferry.md", "garden-of-winds.md")
CHUNK_TOKENS = 100
ANSWER_TOKENS = 16
MIDDLEWARE = "cacheblend.vllm_backend.middleware.PlanCheck"
NAME = "served"
FLAGS = (
    *("--served-model-name", NAME, "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--dtype", "float32", "--block-size", "32", "--enforce-eager"),
)
"""Besides the connector's: what a small CPU machine needs."""

DOES_NOT_HOLD = 1

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Check:
    """Something that was tried, what was seen, and whether that is as it should be."""

    tried: str
    seen: str
    holds: bool


@app.command(help=__doc__)
def serve_check(
    model: Annotated[str, typer.Option(help="bundled:NAME, a folder or a hub id")] = DEFAULT_MODEL,
    port: Annotated[int, typer.Option(help="to serve on; 0 picks a free one")] = 0,
) -> None:
    """Start a server with the connector, then one without, and compare."""
    # Ended like this, a process would leave its server behind: let it unwind instead.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with one_sentence_for_bad_input(), tempfile.TemporaryDirectory() as folder:
        checks, counters = _run(resolve_model(model), port, Path(folder))
    _print(checks, counters)
    if not all(check.holds for check in checks):
        raise typer.Exit(DOES_NOT_HOLD)


def connector_flags(store: Path) -> tuple[str, ...]:
    """The flags that turn blending on, as the page for operators gives them."""
    config = {
        "kv_connector": "CacheBlendConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store)},
    }
    return ("--kv-transfer-config", json.dumps(config), "--middleware", MIDDLEWARE)


def make_prompt(model: Path) -> LaidOutPrompt:
    """Three short documents, each the beginning of one of the demo's, and a question that the first one answers."""
    tokenizer = require_tokenizer(model)
    template = PromptTemplate(tokenizer, DEFAULT_SYSTEM_PROMPT)
    texts = [(INVENTED_PATH.parent / "demo" / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    chunks = tuple(tuple(tokenizer(text, add_special_tokens=False).input_ids[:CHUNK_TOKENS]) for text in texts)
    return LaidOutPrompt(template.head_ids, chunks, template.question_ids(QUESTION))


class Client:
    """A plain `openai` client that asks for one prompt.

    Args:
        address: of the server.
        prompt: what is asked.
    """

    def __init__(self, address: str, prompt: LaidOutPrompt) -> None:
        try:
            self._openai = import_module("openai")
        except ImportError:
            raise EvalError("The package `openai` is not installed; `pip install openai` adds it.") from None
        self._client = self._openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        self._address = address
        self._prompt = prompt

    def collect(self) -> Check:
        """Have each chunk prefilled behind the prompt's head and kept."""
        head = list(self._prompt.head)
        accounts = [self._complete([*head, *c], {"collect": len(head)}, 2)[1] for c in self._prompt.chunks]
        kept = sum(bool(account.get("on_disk")) for account in accounts)
        tokens = sum(account.get("tokens", 0) for account in accounts)
        return Check("collect three chunks", f"{kept} on disk, {tokens} tokens", kept == len(accounts))

    def ask_with_plan(self) -> Check:
        """Ask over the collected chunks."""
        text, account = self._complete(self._prompt.token_ids, self._plan())
        reused, again = account.get("reused_tokens", 0), account.get("recomputed_tokens", 0)
        chunk_tokens = sum(map(len, self._prompt.chunks))
        holds = account.get("mode") == "blend" and reused == chunk_tokens and 0 < again < reused
        counts = f"{self._prompt.length} tokens: {reused} reused, {again} of them recomputed"
        return Check("ask with a plan", f"{counts}; {text!r}", holds and not account["fallback_reasons"])

    def ask_in_vain(self) -> Check:
        """Send a plan to a server that has no connector."""
        text, account = self._complete(self._prompt.token_ids, self._plan())
        return Check("send it a plan", f"account {account or 'none'}; {text!r}", not account)

    def ask_plainly(self) -> tuple[str, Check]:
        """Ask without a plan; the answer comes with the check."""
        text, account = self._complete(self._prompt.token_ids, None)
        return text, Check("ask without a plan", f"account {account or 'none'}; {text!r}", not account)

    def ask_with_wrong_counts(self) -> Check:
        """Send a plan that counts one token more than the prompt has."""
        tried = "send a plan that counts wrongly"
        try:
            self._complete(self._prompt.token_ids[:-1], self._plan())
        except self._openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            seen = f"HTTP {error.status_code} {body.get('type')}: {body.get('message')}"
            return Check(tried, seen, error.status_code == 400 and body.get("param") == "kv_transfer_params")
        return Check(tried, "it was answered", False)

    def chat(self) -> Check:
        """Send a plan with a chat, whose ids the client does not know."""
        answer = self._client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=1,
            extra_body={"kv_transfer_params": {"cacheblend": self._plan()}},
        )
        reasons = _account(answer).get("fallback_reasons")
        return Check("chat with a plan", f"reasons {reasons}", reasons == ["no_token_ids"])

    def counters(self) -> dict[str, float]:
        """The connector's counters in /metrics, by name and labels of their own."""
        with urlopen(f"{self._address}/metrics") as response:
            lines = response.read().decode().splitlines()
        return {_short(name): float(value) for name, value in (line.rsplit(" ", 1) for line in lines if _is_ours(line))}

    def _plan(self) -> dict[str, Any]:
        chunks = [{"tokens": len(chunk), "reuse": True} for chunk in self._prompt.chunks]
        head, question = ({"tokens": len(part)} for part in (self._prompt.head, self._prompt.question))
        return {"version": 1, "segments": [head, *chunks, question]}

    def _complete(
        self, ids: Sequence[int], plan: dict[str, Any] | None, max_tokens: int = ANSWER_TOKENS
    ) -> tuple[str, dict[str, Any]]:
        params = {} if plan is None else {"kv_transfer_params": {"cacheblend": plan}}
        answer = self._client.completions.create(
            model=NAME, prompt=list(ids), temperature=0, max_tokens=max_tokens, extra_body=params
        )
        return answer.choices[0].text, _account(answer)


def _account(answer: Any) -> dict[str, Any]:
    return (getattr(answer, "kv_transfer_params", None) or {}).get("cacheblend", {})


def _is_ours(line: str) -> bool:
    return line.startswith("vllm:cacheblend_") and "_created{" not in line


def _short(name: str) -> str:
    """The metric's name without the labels that vLLM gives to all of its own."""
    name, _, labels = name.partition("{")
    own = [label for label in labels.rstrip("}").split(",") if not label.startswith(("engine=", "model_name="))]
    return f"{name}{{{','.join(own)}}}" if own else name


def _run(model: Path, port: int, folder: Path) -> tuple[list[Check], dict[str, float]]:
    prompt = make_prompt(model)
    port = port or free_port()
    with serving(serve_command(model, *connector_flags(folder / "store"), *FLAGS), port, folder / "log") as address:
        client = Client(address, prompt)
        checks = [client.collect(), client.ask_with_plan()]
        answer, check = client.ask_plainly()
        checks += [check, client.ask_with_wrong_counts(), client.chat()]
        counters = client.counters()
    hits = counters.get("vllm:cacheblend_hits_total", 0.0)
    checks.append(Check("read /metrics", f"{hits:.0f} hits", hits == len(prompt.chunks)))
    with serving(serve_command(model, *FLAGS), port, folder / "plain-log") as address:
        client = Client(address, prompt)
        other, _ = client.ask_plainly()
        same = other == answer
        checks.append(Check("ask a server without the connector", "the same answer" if same else repr(other), same))
        checks.append(client.ask_in_vain())
    return checks, counters


def _print(checks: Sequence[Check], counters: dict[str, float]) -> None:
    table = Table(title="vllm serve with the connector")
    for heading in ("tried", "seen", "holds"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.tried, check.seen, "yes" if check.holds else "NO")
    print_table(table)
    found = Table(title="counters in /metrics")
    found.add_column("counter", overflow="fold")
    found.add_column("value", justify="right")
    for name, value in counters.items():
        found.add_row(name, f"{value:,.6g}")
    print_table(found)


if __name__ == "__main__":
    app()
