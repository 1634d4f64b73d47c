"""What can be wrong with a request, a plan or a model: one clear sentence each."""


class BlendError(ValueError):
    """A request, plan or parameter that cannot be served as it stands.

    The message is one sentence that names the input and the remedy; commands print it and exit with 2.
    """


class UnsupportedModelError(BlendError):
    """A model or RoPE variant whose blending is not proven by the gates, refused when it is loaded."""
