"""The error of this room."""


class EvalError(ValueError):
    """Input that cannot be evaluated; the message is one sentence that names it and the remedy."""
