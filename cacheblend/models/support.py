"""Which models and RoPE variants blend correctly; every other one is refused with a reason."""

from __future__ import annotations

from typing import Any

from cacheblend.errors import UnsupportedModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_ROPE_REASONS = {
    "dynamic": "its angles depend on the prompt's length, so stored keys cannot be moved",
    "longrope": "its angles depend on the prompt's length, so stored keys cannot be moved",
}


def require_supported(config: Any) -> None:
    """Refuse a model whose blending the gates do not prove.

    Args:
        config: a transformers configuration, already standardised (`rope_parameters` set).

    Raises:
        UnsupportedModelError: one sentence that names what is not supported and what is.
    """
    family = getattr(config, "model_type", "unknown")
    if family not in FAMILIES:
        raise UnsupportedModelError(f"Model type '{family}' is not supported; the gates cover {', '.join(FAMILIES)}.")
    _require_supported_rope(dict(getattr(config, "rope_parameters", None) or {}), family)
    _require_full_attention(config)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("Quantised weights are not supported by the reference runner; use bf16 or fp32.")


def _require_supported_rope(rope: dict[str, Any], family: str) -> None:
    if "mrope_section" in rope:
        raise UnsupportedModelError("M-RoPE is not supported: a row has several positions; use a text-only model.")
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        why = _ROPE_REASONS.get(kind, "no gate covers it")
        raise UnsupportedModelError(
            f"RoPE variant '{kind}' of this {family} model is not supported: {why}; use {', '.join(ROPE_TYPES)}."
        )
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(
            f"Partial rotary embeddings (factor {rope['partial_rotary_factor']}) are not supported; no gate covers it."
        )


def _require_full_attention(config: Any) -> None:
    layer_types = getattr(config, "layer_types", None) or []
    windowed = any(kind != "full_attention" for kind in layer_types)
    window = getattr(config, "sliding_window", None)
    if not layer_types:
        windowed = window is not None and getattr(config, "use_sliding_window", True)
    if windowed:
        raise UnsupportedModelError(
            f"Sliding-window attention (window {window}) is not supported: rows would read keys outside their "
            "window; set sliding_window to null if the model was trained without it."
        )
