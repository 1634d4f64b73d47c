"""Makes questions over long contexts from our invented ones, to calibrate on: MuSiQue itself is kept for testing.

Every question gets `contexts` contexts of about `tokens` tokens, each made of several documents of the invented world
(title, text, blank line). Its two supporting documents stand in different contexts at random places, the rest are
other documents of that world, drawn anew for each question. Unlike the invented questions themselves, a document may
hold the answer besides. Tokens are counted as words, so that every model gets the same file.

    python -m eval.calibration --out calibration.json
    python -m eval.musique --data calibration.json
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from inputs import Context, Example, distinct_contexts, load_invented

WORDS_A_TOKEN = 0.75
"""Of English in the tokenizers of current models, about."""

app = typer.Typer(add_completion=False)


def enlarge(examples: Sequence[Example], contexts: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return the questions over long contexts, in the shape of CacheBlend's data.

    Args:
        examples: the questions, with contexts that say whether they are supporting.
        contexts: of each question, at least as many as it has supporting documents.
        tokens: of each context, about: it ends with the document that reaches them.
        seed: of what is drawn, for each question from its id.

    Returns:
        JSON-ready `{"ctxs": [{"title", "text"}], "question", "answers"}`; a context's title is its first document's.

    Raises:
        EvalError: contexts are too few for the supporting documents, or the documents too few for the contexts.
    """
    world = distinct_contexts(examples)
    return [_enlarged(example, world, contexts, tokens, random.Random(f"{seed}:{example.id}")) for example in examples]


@app.command()
def calibration(
    out: Annotated[Path, typer.Option(help="Where to write the questions as JSON.")],
    contexts: Annotated[int, typer.Option(min=2, help="Contexts of each question.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each context, about: 0.75 words each.")] = 600,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
) -> None:
    """Write questions over long contexts, made of our invented ones, in the shape of CacheBlend's data.

    Example: python -m eval.calibration --out calibration.json
    """
    with one_sentence_for_bad_input():
        questions = enlarge(load_invented(), contexts, tokens, seed)
        _write(out, json.dumps(questions, indent=1, ensure_ascii=False) + "\n")
    typer.echo(f"{len(questions)} questions of {contexts} contexts in {out}")


def _enlarged(
    example: Example, world: Sequence[Context], contexts: int, tokens: int, rng: random.Random
) -> dict[str, Any]:
    needed = {(context.title, context.text) for context in example.contexts if context.supporting}
    supporting = [document for document in world if (document.title, document.text) in needed]
    others = [document for document in world if (document.title, document.text) not in needed]
    if len(supporting) > contexts:
        raise EvalError(
            f"Question {example.id} has {len(supporting)} supporting documents, which do not go into {contexts} "
            "contexts one each; give more --contexts."
        )
    rng.shuffle(others)
    groups: list[list[Context]] = [[] for _ in range(contexts)]
    for group, document in zip(rng.sample(groups, len(supporting)), supporting, strict=True):
        group.append(document)
    for group in groups:
        while sum(map(_tokens, group)) < tokens:
            if not others:
                raise EvalError(
                    f"{len(world)} documents of {sum(map(_tokens, world)):,.0f} tokens do not make {contexts} contexts "
                    f"of {tokens:,}; give fewer --contexts or --tokens."
                )
            group.append(others.pop())
        rng.shuffle(group)
    return {
        "ctxs": [{"title": group[0].title, "text": _text(group)} for group in groups],
        "question": example.question,
        "answers": list(example.answers),
    }


def _tokens(document: Context) -> float:
    return len(f"{document.title} {document.text}".split()) / WORDS_A_TOKEN


def _text(group: Sequence[Context]) -> str:
    """The documents under the first one's title, which whoever lays the context out puts before it."""
    first, *others = group
    return "\n\n".join([first.text, *(f"{document.title}\n{document.text}" for document in others)])


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EvalError(f"--out {path} cannot be written ({error.strerror}); name a writable file.") from None


if __name__ == "__main__":
    app()
