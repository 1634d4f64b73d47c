"""The prompt that a latency run serves again and again."""

from __future__ import annotations

from typing import Any

from eval.errors import EvalError
from eval.layout import LaidOutPrompt
from inputs import distinct_contexts, load_invented
from pipelines.config import DEFAULT_SYSTEM_PROMPT
from pipelines.prompt import PromptTemplate


def make_workload(tokenizer: Any, chunks: int, chunk_tokens: int) -> LaidOutPrompt:
    """Cut the invented documents into `chunks` runs of `chunk_tokens` ids, and take the first question.

    Raises:
        EvalError: if the documents hold fewer tokens.
    """
    examples = load_invented()
    text = "\n\n".join(f"{context.title}\n{context.text}" for context in distinct_contexts(examples))
    # Cut afterwards: that all documents together exceed the model's context is no reason to warn.
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if chunks < 1 or chunk_tokens < 1 or chunks * chunk_tokens > len(ids):
        raise EvalError(
            f"{chunks} chunks of {chunk_tokens} tokens cannot be cut from the invented documents' {len(ids)} tokens; "
            "ask for at least one chunk of one token, and for fewer or smaller ones than that."
        )
    template = PromptTemplate(tokenizer, DEFAULT_SYSTEM_PROMPT)
    cut = tuple(tuple(ids[i * chunk_tokens : (i + 1) * chunk_tokens]) for i in range(chunks))
    return LaidOutPrompt(template.head_ids, cut, template.question_ids(examples[0].question))
