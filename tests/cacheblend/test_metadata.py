"""`cache_fuse_metadata` and sampling parameters: what they take and what they refuse."""

from __future__ import annotations

import pytest

from cacheblend.errors import BlendError
from cacheblend.metadata import CacheFuseMetadata
from cacheblend.sampling_params import SamplingParams


def test_the_switches_start_as_full_prefill_with_cacheblends_defaults():
    assert dict(CacheFuseMetadata()) == {
        "collect": False,
        "check": False,
        "recomp_ratio": 0.15,
        "suffix_len": 0,
        "check_layers": [1],
        "selector": "deviation",
    }


def test_it_is_used_like_a_dictionary():
    metadata = CacheFuseMetadata()
    metadata["collect"] = True
    metadata.update(suffix_len=12, recomp_ratio=1)
    assert metadata["collect"] is True
    assert metadata.get("suffix_len") == 12
    assert metadata["recomp_ratio"] == 1.0
    assert "check" in metadata
    assert "cheque" not in metadata
    assert len(metadata) == 6
    assert "suffix_len" in repr(metadata)


def test_two_runners_do_not_share_switches():
    first, second = CacheFuseMetadata(), CacheFuseMetadata()
    first["check"] = True
    first["check_layers"] = [1, 2]
    assert second["check"] is False
    assert second["check_layers"] == [1]


@pytest.mark.parametrize("use", [lambda m: m["cheque"], lambda m: m.__setitem__("cheque", True)])
def test_an_unknown_key_is_refused_and_the_known_ones_named(use):
    with pytest.raises(BlendError, match="no key 'cheque'; it has collect, check,"):
        use(CacheFuseMetadata())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("collect", "perhaps"),
        ("check", None),
        ("recomp_ratio", -0.1),
        ("recomp_ratio", 1.1),
        ("recomp_ratio", float("nan")),
        ("recomp_ratio", "much"),
        ("suffix_len", -1),
        ("suffix_len", 1.5),
        ("check_layers", []),
        ("check_layers", ["one"]),
        ("selector", 3),
    ],
)
def test_a_wrong_value_is_refused_by_key_and_value_and_changes_nothing(key, value):
    metadata = CacheFuseMetadata()
    before = dict(metadata)
    with pytest.raises(BlendError) as caught:
        metadata[key] = value
    assert f"cache_fuse_metadata['{key}'] cannot be {value!r}: " in str(caught.value)
    assert dict(metadata) == before


def test_a_switch_cannot_be_deleted():
    with pytest.raises(BlendError, match="cannot be deleted"):
        del CacheFuseMetadata()["check"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"stop": "END"}, "stop is the string 'END'"),
        ({"stop": ("ok", "")}, "stop string is empty"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(settings, words):
    with pytest.raises(BlendError, match=words):
        SamplingParams(**settings)


def test_sampling_is_greedy_unless_asked_otherwise():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.0, 1.0, 0, ())
