"""Models of the Hugging Face hub."""

from pathlib import Path

from pipelines.models.errors import ModelError

# Weights as safetensors only: other formats may run code when they are read.
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def hub_model(name: str, option: str) -> Path:
    """Return the local snapshot of the hub model ``name``, downloading what is missing.

    Args:
        name: a hub id, ``owner/model``.
        option: the command line option that named it, for the message.

    Raises:
        ModelError: the id is malformed or unknown, access is refused, or there is neither network nor
            snapshot.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    # The client lets errors of its HTTP library through, and which library that is depends on its version.
    except Exception as error:
        raise ModelError(
            f"{name!r} is neither a local folder nor a hub model that could be fetched ({_reason(error)}); "
            f"check the name and the network, or pass {option} FOLDER."
        ) from error


def _reason(error: Exception) -> str:
    """State in a few words what the hub client reports in a paragraph."""
    from huggingface_hub import errors

    known: list[tuple[type[Exception], str]] = [
        (errors.HFValidationError, "it is not a well-formed hub id"),
        (errors.GatedRepoError, "its owner grants access on request only"),
        (errors.RepositoryNotFoundError, "the hub has no such public model"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached and no snapshot is cached"),
        (errors.OfflineModeIsEnabled, "the hub is switched off by HF_HUB_OFFLINE"),
    ]
    for kind, reason in known:
        if isinstance(error, kind):
            return reason
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
