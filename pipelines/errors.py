"""What can be wrong with a call of the pipeline."""

from pipelines.models import ModelError


class PipelineError(ValueError):
    """A question, option or corpus that cannot be served: one sentence that names the input and the remedy."""


__all__ = ["ModelError", "PipelineError"]
