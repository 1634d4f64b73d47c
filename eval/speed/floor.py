"""What a first token costs at the least: each arm's floor, from parts that are measured in the same run.

A forward pass of some rows takes the larger of reading the weights once and the rows' own work, which is the slope of
full prefill over its length:

    pass(rows) = max(weights, rows x slope), and nothing for no rows

The question is always the engine's own step, measured as the time to first token of a plain request of its length. An
arm's floor is then (L layers; `load` is 0 where the chunks are on the device):

    none         max(load, pass(system)) + step
    chunk_head   max(load, pass(system + recomputed)) + step
    deviation    max(load, 2/L full + (1 - 2/L) pass(system + recomputed)) + step
    query        load + pass(system + question) + pass(recomputed) + step

`query` must have all keys before it chooses when it scores over all layers, so its load hides behind nothing; an
engine that scores on the first layers while the rest loads may go below this floor. A recomputed row is taken to attend
as far as one in the middle of the prefills that the slope was measured on; for longer prompts that makes the floors
lower than they could be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.errors import EvalError

FORMULAS = {
    "none": "max(load, pass(system)) + step",
    "chunk_head": "max(load, pass(system + recomputed)) + step",
    "deviation": "max(load, 2/L full + (1 - 2/L) pass(system + recomputed)) + step",
    "query": "load + pass(system + question) + pass(recomputed) + step",
}
"""By selector, in the order of what each must see before it chooses; composed selectors have their last part's."""
PASS_FORMULA = "pass(rows) = max(weights, rows x slope), and nothing for no rows"
FULL_LAYERS_OF_DEVIATION = 2


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """What the floors are made of.

    Attributes:
        link_gb_s: 10^9 bytes a second of one large copy from page-locked host memory to the device.
        weights_ms: milliseconds of reading the weights of all layers once.
        row_ms: milliseconds that one more row costs a full prefill.
        full_ms: milliseconds to first token of full prefill of the whole prompt.
        step_ms: milliseconds to first token of a plain request as long as the question.
    """

    link_gb_s: float
    weights_ms: float
    row_ms: float
    full_ms: float
    step_ms: float

    def pass_ms(self, rows: float) -> float:
        """Milliseconds of a forward pass of so many rows; none is made for no rows."""
        return max(self.weights_ms, rows * self.row_ms) if rows else 0.0


@dataclass(frozen=True, slots=True)
class ArmWork:
    """What one arm must do for a prompt.

    Attributes:
        selector: its name.
        system_rows: rows before the first chunk that are not in the prefix cache.
        question_rows: rows of the question.
        recomputed_rows: reusable rows that are recomputed.
        host_bytes: bytes of chunk KV that come from the host; 0 from the GPU pool.
        layers: of the model.
    """

    selector: str
    system_rows: int
    question_rows: int
    recomputed_rows: int
    host_bytes: int
    layers: int


@dataclass(frozen=True, slots=True)
class Floor:
    """An arm's floor.

    Attributes:
        ms: milliseconds to first token at the least.
        formula: how it is made of the terms.
        terms_ms: the terms in milliseconds, by name.
    """

    ms: float
    formula: str
    terms_ms: dict[str, float]


def floor_of(work: ArmWork, parts: MeasuredParts) -> Floor:
    """The floor of one arm.

    Raises:
        EvalError: no formula is stated for the selector.
    """
    # Of a composed selector, the part that must see more before it chooses sets the floor.
    family = next((name for name in reversed(FORMULAS) if name in work.selector.split("+")), None)
    if family is None:
        raise EvalError(f"No floor is stated for selector {work.selector!r}; use one of {', '.join(FORMULAS)}.")
    load = work.host_bytes / parts.link_gb_s / 1e6
    terms = {"load": load, "step": parts.step_ms}
    if family == "query":
        terms["score"] = parts.pass_ms(work.system_rows + work.question_rows)
        terms["recompute"] = parts.pass_ms(work.recomputed_rows)
        return Floor(sum(terms.values()), FORMULAS[family], terms)
    terms["recompute"] = parts.pass_ms(work.system_rows + work.recomputed_rows)
    computed = terms["recompute"]
    if family == "deviation":
        share = FULL_LAYERS_OF_DEVIATION / work.layers
        terms["full layers"] = share * parts.full_ms
        terms["recompute"] *= 1 - share
        computed = terms["full layers"] + terms["recompute"]
    return Floor(max(load, computed) + parts.step_ms, FORMULAS[family], terms)


def recomputed_rows(options: Mapping[str, Any], chunks: int, chunk_tokens: int) -> int:
    """Reusable rows that a request with these options recomputes in the layers after its choice.

    Args:
        options: of the request: `ratio`, which includes heads, or else `head_tokens` of each chunk, or neither.
        chunks: in its prompt; the first one stands where it was encoded, so that none of its rows is chosen.
        chunk_tokens: of each.
    """
    choosable = max(0, chunks - 1)
    if "ratio" in options:
        wanted = round(options["ratio"] * chunks * chunk_tokens)
        return wanted if options["ratio"] >= 1.0 else min(wanted, choosable * chunk_tokens)
    return choosable * min(options.get("head_tokens", 0), chunk_tokens)


def layer_weight_bytes(config: Mapping[str, Any], bytes_a_number: int = 2) -> int:
    """Bytes of the weight matrices of all layers of a Llama-shaped model; embeddings and the head are not among them.

    Args:
        config: the model's `config.json`.
        bytes_a_number: 2 for bf16.
    """
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    attention = hidden * head_dim * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    mlp = 3 * hidden * config["intermediate_size"]
    return int(config["num_hidden_layers"] * (attention + mlp) * bytes_a_number)
