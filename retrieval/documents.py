"""Documents, and the shapes of other libraries that are accepted as documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.text import clean_text, content_hash

_TEXT_KEYS = ("text", "page_content")
_OWN_KEYS = {*_TEXT_KEYS, "id", "title", "metadata"}


@dataclass(frozen=True, slots=True)
class Document:
    """A text to retrieve from.

    Text, title and id are kept exactly, NUL characters included, except that surrogates are repaired
    (``retrieval.text.clean_text``).

    Attributes:
        id: names the document within its corpus; when empty it becomes a hash of title and text.
        text: the text; whitespace alone counts as no text.
        title: a heading that is repeated at the head of each chunk; may be empty.
        metadata: whatever the caller wants back with a source.

    Raises:
        RetrievalError: there is no text, or a field is of another type.
    """

    id: str
    text: str
    title: str = ""
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("id", "text", "title"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise RetrievalError(
                    f"document {self.id!r} has a {name} of type {type(value).__name__}; give a string."
                )
            object.__setattr__(self, name, clean_text(value))
        if not self.text.strip():
            raise RetrievalError(f"document {self.id!r} has no text; give it some or leave it out.")
        if not self.id:
            object.__setattr__(self, "id", content_hash(self.title, self.text))

    @classmethod
    def from_any(cls, obj: object) -> "Document":
        """Return ``obj`` as a document.

        Accepted are a document, a string, a mapping with ``text`` (other keys than ``id``, ``title`` and
        ``metadata`` go into the metadata), and objects shaped like LangChain's ``Document``
        (``page_content``, ``metadata``) or LlamaIndex's nodes (``text`` or ``get_content()``, ``metadata``,
        ``node_id`` or ``id_``) and ``NodeWithScore`` (``node``). Neither library is imported. A title is
        taken from ``title`` or from the metadata's ``title``.

        Raises:
            RetrievalError: the shape is unknown, or there is no text.
        """
        if isinstance(obj, cls):
            return obj
        if isinstance(obj, str):
            return cls("", obj)
        if isinstance(obj, Mapping):
            return _from_mapping(obj)
        return _from_attributes(getattr(obj, "node", obj))


from_any = Document.from_any


def _from_mapping(fields: Mapping[str, Any]) -> Document:
    text = next((fields[key] for key in _TEXT_KEYS if fields.get(key) is not None), "")
    metadata = {str(key): value for key, value in fields.items() if key not in _OWN_KEYS}
    return _document(fields.get("id"), text, fields.get("title"), fields.get("metadata"), metadata)


def _from_attributes(obj: object) -> Document:
    text = next((getattr(obj, key) for key in _TEXT_KEYS[::-1] if hasattr(obj, key)), None)
    if text is None and callable(getattr(obj, "get_content", None)):
        text = obj.get_content()  # type: ignore[attr-defined]
    if text is None and not any(hasattr(obj, key) for key in (*_TEXT_KEYS, "get_content")):
        raise RetrievalError(
            f"a {type(obj).__name__} is no document; give a string, a mapping with 'text', "
            "or a LangChain or LlamaIndex document."
        )
    identifier = next((value for key in ("id", "node_id", "id_") if (value := getattr(obj, key, None))), None)
    return _document(identifier, text, getattr(obj, "title", None), getattr(obj, "metadata", None), {})


def _document(identifier: object, text: object, title: object, metadata: object, extra: dict[str, Any]) -> Document:
    """Build a document from fields of unknown type; ``metadata`` wins over ``extra``."""
    name = "" if identifier is None else str(identifier)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise RetrievalError(f"document {name!r} has metadata of type {type(metadata).__name__}; give a mapping.")
    known = {**extra, **(metadata or {})}
    if title is None and isinstance(known.get("title"), str):
        title = known["title"]
    # A wrong type is refused by Document itself, which names it.
    return Document(name, "" if text is None else text, "" if title is None else title, known)  # type: ignore[arg-type]
