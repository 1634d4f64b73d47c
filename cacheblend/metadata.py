"""`cache_fuse_metadata`: CacheBlend's switchboard as a typed mapping. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheblend.errors import BlendError


class _Switches(BaseModel):
    model_config = ConfigDict(validate_assignment=True, extra="forbid")

    collect: bool = False
    check: bool = False
    recomp_ratio: float = Field(default=0.15, ge=0.0, le=1.0)
    suffix_len: int = Field(default=0, ge=0)
    check_layers: list[int] = Field(default_factory=lambda: [1], min_length=1)
    selector: str = "deviation"


class CacheFuseMetadata(MutableMapping[str, Any]):
    """The mode switches of a runner, used like CacheBlend's dictionary.

    Keys:
        collect: keep each layer's [k, v] of the last prompt in `hack_kv`.
        check: blend the next prompt with `old_kvs`. With both False a prompt is fully prefilled.
        recomp_ratio: share of reusable rows to recompute, 0 to 1.
        suffix_len: tokens at the prompt's end (the question) that are always computed.
        check_layers: layers at which deviating rows are picked, ascending from 1.
        selector: the policy that picks rows, `deviation` as in CacheBlend.

    Raises:
        BlendError: for an unknown key, a value of a wrong type or out of range, or when a key is deleted.
    """

    def __init__(self) -> None:
        self._switches = _Switches()

    def __getitem__(self, key: str) -> Any:
        self._require_known(key)
        return getattr(self._switches, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._require_known(key)
        try:
            setattr(self._switches, key, value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise BlendError(f"cache_fuse_metadata['{key}'] cannot be {value!r}: {problem}.") from None

    def __delitem__(self, key: str) -> None:
        raise BlendError(f"cache_fuse_metadata['{key}'] cannot be deleted; set it to False or its default.")

    def __contains__(self, key: object) -> bool:
        return key in _Switches.model_fields

    def __iter__(self) -> Iterator[str]:
        return iter(_Switches.model_fields)

    def __len__(self) -> int:
        return len(_Switches.model_fields)

    def __repr__(self) -> str:
        return f"cache_fuse_metadata({dict(self)})"

    @staticmethod
    def _require_known(key: str) -> None:
        if key not in _Switches.model_fields:
            known = ", ".join(_Switches.model_fields)
            raise BlendError(f"cache_fuse_metadata has no key '{key}'; it has {known}.")
