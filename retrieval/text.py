"""Text as every tokenizer accepts it, and its hash."""

import hashlib


def clean_text(text: str) -> str:
    """Return ``text`` with surrogates repaired and everything else kept exactly, NUL included.

    A pair of surrogates becomes the character it encodes; a lone one, which no tokenizer and no UTF-8 file
    accepts, becomes U+FFFD.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def content_hash(*parts: str) -> str:
    """Return 32 hexadecimal digits that identify ``parts``, the same in every process."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]
