"""How a pipeline is set up."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cacheblend.errors import BlendError
from cacheblend.fidelity import Fidelity
from cacheblend.plan import Policy
from pipelines.errors import PipelineError
from pipelines.models import DEFAULT_EMBEDDER, DEFAULT_MODEL
from pipelines.models.cache import cache_home
from retrieval.text import clean_text

if TYPE_CHECKING:
    from cacheblend.selectors import Selector

DEFAULT_SYSTEM_PROMPT = "Answer the question from the documents. Give only the answer, in a few words."


class PrefixMode(StrEnum):
    """What chunks are encoded behind."""

    SYSTEM = "system"
    BOS = "bos"
    NONE = "none"


class PipelineConfig(BaseModel):
    """Settings of a `RagPipeline`.

    Attributes:
        model: `bundled:NAME`, a local folder or a hub id.
        embedder: the same for the embedding model.
        engine: `reference`, `vllm`, or `auto` for the best that is installed.
        engine_options: of `vllm`: arguments of `VllmRunner.from_folder` and of vLLM's engine, such as
            `{"max_model_len": 16384, "gpu_memory_utilization": 0.8}`.
        dtype: of weights and KV.
        device: a torch device, for `reference`; vLLM runs on what it was built for.
        cache_dir: folder of chunk KV; None keeps chunks in memory only.
        index_dir: folder that keeps retrieval indexes between runs; None keeps none.
        host_budget_bytes: bytes of chunk KV that host memory may hold.
        prefix: what chunks are encoded behind.
        primer: passages of the corpus, about a thousand tokens, that come between the prefix and a chunk when it is
            encoded, so that it has seen others as it will in a prompt; their own rows are not stored with it. None
            encodes behind the prefix alone. "auto" chooses chunks of the documents that the pipeline is made with (none
            where they are few), and documents added later do not change the choice; but a pipeline made with others
            may choose others, and then all chunks are computed anew. For a corpus that grows, pin it: a path names a
            .txt, .md or .jsonl file whose first chunks are the primer (`precompute-chunk-cache --save-primer` writes
            one). Use one for a corpus of one kind, after measuring on it, and none for a mixed one: over one invented
            world it cut the divergence from full prefill to a half or less, but over MuSiQue's retrieved passages it
            raised that of the first token from 0.387 to 0.625 nats (15 % `query`).
        system_prompt: the instruction before the documents.
        chunk_tokens: tokens of a chunk at most.
        chunk_overlap: tokens of a chunk repeated in the next one.
        top_k: chunks retrieved for a question.
        candidates: further chunks looked at for speculative prefetch.
        policy, selector, ratio, head_tokens: how prompts are blended unless a call says otherwise.
        carry_drift: whether rows that are not recomputed are moved by what near ones that are turned out to be
            (`cacheblend.drift`).
        fidelity: `fast`, `balanced` or `faithful` instead of `ratio`: how close to full prefill's answers shall be.
        max_tokens: new tokens of an answer unless a call says otherwise.
        collect_missed: after an answer, compute the KV of the chunks that were missing when its question was laid
            out; where no tier has room for them (no folder, host full) that is in vain, each time anew.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = DEFAULT_MODEL
    embedder: str = DEFAULT_EMBEDDER
    engine: Literal["auto", "reference", "vllm"] = "auto"
    engine_options: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    cache_dir: Path | None = Field(default_factory=lambda: cache_home() / "kv")
    index_dir: Path | None = Field(default_factory=lambda: cache_home() / "indexes")
    host_budget_bytes: int = Field(default=4 << 30, ge=0)
    prefix: PrefixMode = PrefixMode.SYSTEM
    primer: Literal["auto"] | Path | None = None
    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    chunk_tokens: int = Field(default=512, ge=1)
    chunk_overlap: int = Field(default=0, ge=0)
    top_k: int = Field(default=5, ge=1)
    candidates: int = Field(default=5, ge=0)
    policy: Policy = Policy.BLEND
    selector: str = "query"
    ratio: float | None = None
    carry_drift: bool = True
    fidelity: Fidelity | None = None
    head_tokens: int | None = None
    max_tokens: int = Field(default=64, ge=1)
    collect_missed: bool = False

    @field_validator("system_prompt", mode="before")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        # Before pydantic sees it, which takes no lone surrogates: arguments that are not UTF-8 come with them.
        return clean_text(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _selector_exists(self) -> PipelineConfig:
        self.make_selector(ratio=self.ratio, fidelity=self.fidelity)
        return self

    def make_selector(
        self,
        name: str | None = None,
        ratio: float | None = None,
        head_tokens: int | None = None,
        fidelity: Fidelity | str | None = None,
    ) -> Selector:
        """The selector of a call: what the call names, the settings otherwise.

        A call that names another selector than the settings starts from that one's defaults. Its ratio takes the place
        of a fidelity in the settings, and its fidelity that of a ratio.

        Raises:
            PipelineError: for an unknown fidelity, one beside a ratio, or one for a selector without a ratio.
            BlendError: for an unknown selector or a ratio outside 0 to 1.
        """
        asked = None if fidelity is None else _fidelity(fidelity)
        if asked is not None and ratio is not None:
            raise PipelineError(f"Fidelity '{asked}' and ratio {ratio} are both given; give one of them.")
        if name is None or name == self.selector:
            name = self.selector
            head_tokens = self.head_tokens if head_tokens is None else head_tokens
            if ratio is None and asked is None:
                ratio, asked = self.ratio, self.fidelity
        if asked is not None:
            return _selector_of_fidelity(name, asked, head_tokens)
        return _selector(name, ratio, head_tokens)


def _fidelity(name: str) -> Fidelity:
    try:
        return Fidelity(name)
    except ValueError:
        raise PipelineError(f"Fidelity '{name}' is unknown; use one of {', '.join(Fidelity)}.") from None


def _selector(name: str, ratio: float | None, head_tokens: int | None) -> Selector:
    # Imported here because it loads torch, and `--help` shows the settings without it.
    from cacheblend.selectors import make_selector

    return make_selector(name, ratio, head_tokens)


def _selector_of_fidelity(name: str, fidelity: Fidelity, head_tokens: int | None) -> Selector:
    _selector(name, None, head_tokens)
    try:
        return _selector(name, fidelity.ratio, head_tokens)
    except BlendError:
        # It is the ratio that this selector refuses, and the user gave none.
        sentence = f"Selector '{name}' takes no fidelity (got '{fidelity}'); leave it out or use another selector."
        raise PipelineError(sentence) from None


def make_config(**settings: Any) -> PipelineConfig:
    """Build a configuration.

    Raises:
        PipelineError: for an unknown setting or a value out of range, naming it.
    """
    try:
        return PipelineConfig(**settings)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        if not name:
            raise PipelineError(f"{message}.") from None
        raise PipelineError(f"Setting '{name}' cannot be {problem['input']!r}: {message}.") from None
