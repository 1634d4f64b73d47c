"""The prompt around the documents: token ids before them and after them.

Chunk boundaries are token boundaries: head, chunks and question are tokenised alone and their ids concatenated. A
question or a document that spells out a special token is read as plain text: only the template opens turns. Templates
that write today's date get a fixed one: the head is part of every chunk's key, which must not change at midnight.
"""

from __future__ import annotations

from typing import Any

from pipelines.config import PrefixMode
from pipelines.errors import PipelineError

_FIXED_DATE = {
    "%Y": "2024",
    "%y": "24",
    "%B": "July",
    "%b": "Jul",
    "%m": "07",
    "%-m": "7",
    "%d": "26",
    "%-d": "26",
    "%e": "26",
    "%j": "208",
    "%A": "Friday",
    "%a": "Fri",
    "%H": "00",
    "%I": "12",
    "%p": "AM",
    "%M": "00",
    "%S": "00",
    "%F": "2024-07-26",
    "%T": "00:00:00",
}
"""26 July 2024, the date that Llama's template falls back to, by the directives of `strftime`."""

# A macro, because transformers hands templates no functions of a caller's. The line break at its end is dropped when
# the template is read, and leaves the model's own template at the beginning of a line, where it was.
_FIXED_CLOCK = (
    "{%- macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{directive}', '{value}')" for directive, value in _FIXED_DATE.items())
    + " }}{% endmacro %}\n"
)

_DOCUMENTS = "\N{OBJECT REPLACEMENT CHARACTER}documents\N{OBJECT REPLACEMENT CHARACTER}"


class PromptTemplate:
    """A model's chat template, cut where the documents go; plain text for a model without one.

    Args:
        tokenizer: the model's tokenizer.
        system_prompt: the instruction before the documents.
    """

    def __init__(self, tokenizer: Any, system_prompt: str) -> None:
        self._tokenizer = tokenizer
        head, tail = self._cut(system_prompt)
        plain = not getattr(tokenizer, "chat_template", None)
        self.head_ids: tuple[int, ...] = tuple(tokenizer(head, add_special_tokens=plain).input_ids)
        """Ids before the first document: template head and system prompt."""
        self._tail_ids: tuple[int, ...] = tuple(tokenizer(tail, add_special_tokens=False).input_ids)

    def question_ids(self, question: str) -> tuple[int, ...]:
        """Ids after the last document: the question and what opens the answer.

        Raises:
            PipelineError: if the question is empty.
        """
        if not question.strip():
            raise PipelineError("The question is empty; ask something.")
        text = f"\n\nQuestion: {question.strip()}"
        asked = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return (*asked, *self._tail_ids)

    def prefix_ids(self, mode: PrefixMode) -> tuple[int, ...]:
        """What chunks are encoded behind.

        Raises:
            PipelineError: for `bos` with a model that has no such token.
        """
        if mode is PrefixMode.SYSTEM:
            return self.head_ids
        return self.bos_ids(required=True) if mode is PrefixMode.BOS else ()

    def bos_ids(self, required: bool = False) -> tuple[int, ...]:
        """The beginning-of-sequence token alone, or nothing.

        Raises:
            PipelineError: if it is required and the model has none.
        """
        bos = self._tokenizer.bos_token_id
        if bos is None and required:
            raise PipelineError("The model has no beginning-of-sequence token; use the prefix `system` or `none`.")
        return () if bos is None else (bos,)

    def _cut(self, system_prompt: str) -> tuple[str, str]:
        if not getattr(self._tokenizer, "chat_template", None):
            return f"{system_prompt}\n\n", "\nAnswer:"
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": _DOCUMENTS}]
        try:
            text = self._render(messages)
        except Exception:
            # Templates raise what they like for a role they do not know; the instruction then opens the user's turn.
            text = self._render([{"role": "user", "content": f"{system_prompt}\n\n{_DOCUMENTS}"}])
        head, found, tail = text.partition(_DOCUMENTS)
        if not found:
            raise PipelineError("The model's chat template drops the user's message; use another model folder.")
        return head, tail

    def _render(self, messages: list[dict[str, str]]) -> str:
        template = _FIXED_CLOCK + self._tokenizer.get_chat_template()
        return str(
            self._tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )
