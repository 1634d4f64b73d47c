"""The prompt that a latency run serves again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cacheblend.plan import BlendPlan, Segment, SegmentRole
from eval.errors import EvalError
from inputs import distinct_contexts, load_invented
from kvstore.key import ChunkIdentity
from pipelines.config import DEFAULT_SYSTEM_PROMPT
from pipelines.prompt import PromptTemplate


@dataclass(frozen=True)
class Workload:
    """Token ids of one prompt: the template's head, chunks of equal length, and a question."""

    head: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.head) + sum(map(len, self.chunks)) + len(self.question)

    def plan(self, fingerprint: str, selector: Any, reuse: bool) -> BlendPlan:
        """The prompt as a plan; `reuse` False leaves every chunk fresh."""
        chunks = [
            Segment(SegmentRole.CHUNK, ids, ChunkIdentity(fingerprint, self.head, ids) if reuse else None)
            for ids in self.chunks
        ]
        head = Segment(SegmentRole.SYSTEM, self.head)
        return BlendPlan((head, *chunks, Segment(SegmentRole.QUESTION, self.question)), selector)


def make_workload(tokenizer: Any, chunks: int, chunk_tokens: int) -> Workload:
    """Cut the invented documents into `chunks` runs of `chunk_tokens` ids, and take the first question.

    Raises:
        EvalError: if the documents hold fewer tokens.
    """
    examples = load_invented()
    text = "\n\n".join(f"{context.title}\n{context.text}" for context in distinct_contexts(examples))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if chunks < 1 or chunk_tokens < 1 or chunks * chunk_tokens > len(ids):
        raise EvalError(
            f"{chunks} chunks of {chunk_tokens} tokens cannot be cut from the invented documents' {len(ids)} tokens; "
            "ask for at least one chunk of one token, and for fewer or smaller ones than that."
        )
    template = PromptTemplate(tokenizer, DEFAULT_SYSTEM_PROMPT)
    cut = tuple(tuple(ids[i * chunk_tokens : (i + 1) * chunk_tokens]) for i in range(chunks))
    return Workload(template.head_ids, cut, template.question_ids(examples[0].question))
