"""A long text cut into windows that an embedder reads whole."""

from typing import Any

from retrieval.cuts import TokenCuts


def split_windows(text: str, tokenizer: Any, capacity: int) -> list[str]:
    """Return consecutive windows that concatenate to ``text``, each of at most ``capacity`` word pieces.

    Windows are about equally long, so that none is a mere tail, and end at the end of a word where possible.

    Args:
        text: the text; it is the only window if it fits.
        tokenizer: the embedder's own, a Hugging Face tokenizer that gives offsets.
        capacity: word pieces that the model reads beside its special ones, 1 or more.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    cuts = TokenCuts(text, encoded["offset_mapping"])
    windows: list[str] = []
    start = 0
    while start < len(text):
        end = _window_end(text, tokenizer, cuts, start, capacity)
        windows.append(text[start:end])
        start = end
    return windows or [text]


def _window_end(text: str, tokenizer: Any, cuts: TokenCuts, start: int, capacity: int) -> int:
    remaining = cuts.tokens(start, len(text))
    windows_left = max(1, -(-remaining // capacity))
    limit = cuts.furthest(start, -(-remaining // windows_left))
    end = start + 1
    for end in cuts.descending(start, limit):
        if len(tokenizer(text[start:end], add_special_tokens=False)["input_ids"]) <= capacity:
            break
    return end
