"""What a request says about reuse: `kv_transfer_params={"cacheblend": {...}}`. Imports neither torch nor vllm.

A prompt is token ids; its plan names runs of them, never keys:

    {"version": 1, "segments": [{"tokens": 64, "reuse": false}, {"tokens": 640, "reuse": true}, ...],
     "question": 5, "policy": "blend", "selector": "query", "ratio": 0.15}

A request that collects a chunk names the length of the prefix it is encoded behind: `{"version": 1, "collect": 64}`.
A request changes byte budgets, where the operator lets it: `{"version": 1, "budgets": {"host": 8589934592}}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cacheblend.errors import BlendError
from cacheblend.fidelity import Fidelity
from cacheblend.plan import Policy

PARAMS_KEY = "cacheblend"
FORMAT_VERSION = 1
NAMESPACE_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

_STRICT = ConfigDict(frozen=True, extra="forbid")


class SegmentParams(BaseModel):
    """One run of the prompt's token ids.

    Attributes:
        tokens: how many.
        reuse: whether it is a chunk whose stored KV may be used.
    """

    model_config = _STRICT

    tokens: int = Field(ge=1)
    reuse: bool = False


class BlendParams(BaseModel):
    """A prompt's plan as the client sends it.

    Attributes:
        version: of this format.
        segments: the prompt's parts in order; empty where the client sends text and cannot count.
        question: index of the segment that asks; the last by default. Nothing after it may be reused.
        prefix: tokens at the prompt's start that its chunks were encoded behind; by default all that come before the
            first reusable segment.
        primer: token ids that came between that prefix and a chunk when it was encoded; a chunk without such a version
            is looked for behind the prefix alone.
        policy: full, blend or auto; the server's default if None.
        selector: by name; the server's default if None.
        ratio: share of reusable rows to recompute; the selector's default if None.
        fidelity: fast, balanced or faithful: the ratio that was measured for it; not together with `ratio`.
        head_tokens: rows a chunk for `chunk_head` and its compositions.
        check_layers: layers at which `deviation` drops rows.
        rows: recompute these reusable positions and no others, instead of a selector's choice (for replays).
        carry_drift: whether the rows that are not recomputed move with those that are; the server's default if None.
        namespace: look only for chunks that were collected or put under this name; the model's own if None.
        session: the conversation it belongs to; documents reappear in one, which prediction learns from.
        candidates: token ids of chunks that the retriever nearly picked, best first; a hint for prediction.
    """

    model_config = _STRICT

    version: Literal[1] = 1
    segments: tuple[SegmentParams, ...] = ()
    question: int | None = None
    prefix: int | None = Field(default=None, ge=0)
    primer: tuple[Annotated[int, Field(ge=0)], ...] = ()
    policy: Policy | None = None
    selector: str | None = None
    ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    fidelity: Fidelity | None = None
    head_tokens: int | None = Field(default=None, ge=0)
    check_layers: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    carry_drift: bool | None = None
    namespace: str | None = Field(default=None, pattern=NAMESPACE_PATTERN)
    session: str | None = Field(default=None, min_length=1, max_length=256)
    candidates: tuple[tuple[int, ...], ...] = ()

    @model_validator(mode="after")
    def _question_is_last_but_for_fresh_segments(self) -> BlendParams:
        if self.question is None or not self.segments:
            return self
        if not 0 <= self.question < len(self.segments):
            raise ValueError(f"question is {self.question}, but there are {len(self.segments)} segments")
        return self

    @model_validator(mode="after")
    def _one_says_how_many_rows(self) -> BlendParams:
        if self.fidelity is not None and self.ratio is not None:
            raise ValueError(f"fidelity '{self.fidelity}' and ratio {self.ratio} are both given; choose one")
        return self

    @model_validator(mode="after")
    def _nothing_is_reused_from_the_question_on(self) -> BlendParams:
        if any(segment.reuse for segment in self.segments[self.question_index :]):
            raise ValueError("the question and what follows it are always computed; set their reuse to false")
        return self

    @property
    def asked_ratio(self) -> float | None:
        """The ratio, said as such or by a fidelity."""
        return self.ratio if self.fidelity is None else self.fidelity.ratio

    @property
    def question_index(self) -> int:
        """Index of the question's segment."""
        return len(self.segments) - 1 if self.question is None else self.question

    @property
    def first_reused_index(self) -> int:
        """Index of the first reusable segment; the question's if there is none."""
        return next((i for i, segment in enumerate(self.segments) if segment.reuse), self.question_index)

    def bounds(self, prompt_tokens: int) -> tuple[tuple[int, int], ...]:
        """The segments' (start, end) in the prompt.

        Raises:
            BlendError: if they do not sum to `prompt_tokens`.
        """
        ends = list(accumulate(segment.tokens for segment in self.segments))
        total = ends[-1] if ends else 0
        if total != prompt_tokens:
            raise BlendError(
                f"The segments of the plan count {total} tokens, but the prompt has {prompt_tokens}; "
                "send the token ids that were counted."
            )
        return tuple(zip([0, *ends[:-1]], ends, strict=True))


class CollectParams(BaseModel):
    """A request that collects a chunk.

    Attributes:
        version: of this format.
        collect: tokens at the prompt's start that are the prefix; the rest is the chunk.
        namespace: the name it is collected under; the model's own if None.
    """

    model_config = _STRICT

    version: Literal[1] = 1
    collect: int = Field(ge=0)
    namespace: str | None = Field(default=None, pattern=NAMESPACE_PATTERN)

    def require_chunk(self, prompt_tokens: int) -> None:
        """Refuse a prompt that is all prefix.

        Raises:
            BlendError: naming both lengths.
        """
        if self.collect >= prompt_tokens:
            raise BlendError(
                f"A prompt of {prompt_tokens} tokens behind a prefix of {self.collect} has no chunk to collect; "
                "give the length of the prefix alone."
            )


class BudgetParams(BaseModel):
    """A request that changes byte budgets.

    Attributes:
        version: of this format.
        budgets: bytes of chunk KV that each of these memory tiers (`host`, `gpu`) may hold from now on, of each worker.
    """

    model_config = _STRICT

    version: Literal[1] = 1
    budgets: Mapping[Literal["host", "gpu"], Annotated[int, Field(ge=0)]] = Field(min_length=1)


Params: TypeAlias = BlendParams | CollectParams | BudgetParams


def parse_params(kv_transfer_params: Mapping[str, Any] | None) -> Params | None:
    """What a request asks of us; None if it asks nothing.

    Raises:
        BlendError: one sentence that names the field that is wrong.
    """
    if not isinstance(kv_transfer_params, Mapping) or kv_transfer_params.get(PARAMS_KEY) is None:
        return None
    given = kv_transfer_params[PARAMS_KEY]
    if not isinstance(given, Mapping):
        raise BlendError(f"kv_transfer_params['{PARAMS_KEY}'] is {given!r}; send an object.")
    if given.get("version", FORMAT_VERSION) != FORMAT_VERSION:
        raise BlendError(f"Version {given['version']!r} of the plan is unknown; this server reads {FORMAT_VERSION}.")
    try:
        return _kind_of(given)(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "plan"
        message = problem["msg"].removeprefix("Value error, ")
        raise BlendError(f"The plan's '{where}' cannot be used: {message}.") from None


def _kind_of(given: Mapping[str, Any]) -> type[BlendParams] | type[CollectParams] | type[BudgetParams]:
    if "collect" in given:
        return CollectParams
    return BudgetParams if "budgets" in given else BlendParams


def check_prompt(params: Params, prompt_tokens: int) -> None:
    """Refuse params that do not belong to a prompt of `prompt_tokens` ids.

    Raises:
        BlendError: naming both counts.
    """
    if isinstance(params, CollectParams):
        params.require_chunk(prompt_tokens)
    elif isinstance(params, BlendParams) and params.segments:
        params.bounds(prompt_tokens)


def as_transfer_params(params: Params) -> dict[str, Any]:
    """The form that travels: `kv_transfer_params` of a request."""
    return {PARAMS_KEY: params.model_dump(mode="json", exclude_none=True)}


def segments_of(lengths: Sequence[tuple[int, bool]]) -> tuple[SegmentParams, ...]:
    """Segments from (tokens, reuse) pairs."""
    return tuple(SegmentParams(tokens=tokens, reuse=reuse) for tokens, reuse in lengths)


def fingerprint_in(fingerprint: str, namespace: str | None) -> str:
    """The fingerprint that chunks of a namespace are stored under: no other namespace finds them."""
    return fingerprint if namespace is None else f"{fingerprint}.{namespace}"
