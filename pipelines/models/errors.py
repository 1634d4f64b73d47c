"""The error of this package."""


class ModelError(ValueError):
    """A model that cannot be had; the message is one sentence that names it and says what to do."""
