"""The error of this room."""


class RetrievalError(ValueError):
    """Bad input to retrieval; the message is one sentence that names the input and the remedy."""
