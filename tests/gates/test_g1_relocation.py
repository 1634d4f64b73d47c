"""G1: a key encoded at 0 and moved by d equals the key encoded at d."""

import pytest
import torch

from cacheblend.errors import UnsupportedModelError
from cacheblend.models.support import require_supported
from cacheblend.plan import full_prefill_plan
from cacheblend.reference.rows import RowBatch, SequenceRows
from cacheblend.reference.sequence import RunningSequence
from cacheblend.relocation import rotate_keys, rotation_between, unrotate_keys
from cacheblend.sampling_params import SamplingParams


def first_layer_keys(bench, token_ids, start):
    """[n, kv_heads, head_dim] of layer 0, where a key depends on its token and its position only."""
    forward = bench.runner._forward
    filler = [3] * start
    sequence = RunningSequence("s", full_prefill_plan([*filler, *token_ids]), SamplingParams(max_tokens=1))
    rows = RowBatch([SequenceRows(sequence, torch.arange(start, start + len(token_ids)))])
    with torch.inference_mode():
        hidden = forward.embed(rows)
        keys, _ = forward.keys_values(0, hidden, rows, forward.rotary(rows, hidden))
    return keys.transpose(0, 1)


@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, 97), (0, 4096), (0, 8000), (4096, 0), (64, 5000)])
def test_g1_a_moved_key_equals_the_key_encoded_there(bench, old, new):
    ids = bench.ids(48, seed=old + new)
    forward = bench.runner._forward
    positions = torch.arange(old, old + 48)
    rotation = rotation_between(forward.rotary_tables, positions, positions + (new - old), forward.rope_scaling)
    moved = rotate_keys(first_layer_keys(bench, ids, old), *rotation)
    assert (moved - first_layer_keys(bench, ids, new)).abs().max() <= 1e-4


def test_g1_relocation_is_told_from_standing_still(bench):
    ids = bench.ids(48, seed=5)
    assert (first_layer_keys(bench, ids, 0) - first_layer_keys(bench, ids, 1)).abs().max() > 1e-1


def test_g1_keys_without_rotation_are_the_same_at_every_position(bench):
    ids = bench.ids(48, seed=6)
    forward = bench.runner._forward
    bare = [
        unrotate_keys(
            first_layer_keys(bench, ids, start),
            forward.rotary_tables,
            torch.arange(start, start + 48),
            forward.rope_scaling,
        )
        for start in (0, 3000)
    ]
    assert (bare[0] - bare[1]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 1024,
                }
            },
            "longrope",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "M-RoPE",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "Partial rotary",
        ),
    ],
)
def test_g1_rope_variants_that_cannot_be_moved_are_refused_by_name(changes, named):
    from transformers import LlamaConfig

    with pytest.raises(UnsupportedModelError, match=named):
        require_supported(LlamaConfig(**changes))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (("gpt2", {}), "gpt2"),
        (("gemma3_text", {}), "gemma3_text"),
        (("mistral", {"sliding_window": 4096}), "window 4096"),
        (("qwen2", {"use_sliding_window": True, "max_window_layers": 1}), "Sliding-window"),
    ],
)
def test_g1_models_without_a_gate_are_refused_by_name(config, named):
    from transformers import AutoConfig

    family, changes = config
    with pytest.raises(UnsupportedModelError, match=named):
        require_supported(AutoConfig.for_model(family, **changes))
