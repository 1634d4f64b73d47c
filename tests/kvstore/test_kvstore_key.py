from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import ChunkIdentity, ShardLayout, StoreError

IDS = st.lists(st.integers(0, 2**40), max_size=6).map(tuple)
IDENTITIES = st.builds(ChunkIdentity, st.sampled_from(["a", "ab", "b"]), IDS, IDS.filter(bool))


def test_a_key_is_the_same_in_every_process_whatever_its_hash_seed(run_python):
    code = "from kvstore import ChunkIdentity;print(ChunkIdentity('model-a', (1, 2), (7, 128000, 0)).key, end='')"
    here = ChunkIdentity("model-a", (1, 2), (7, 128000, 0)).key
    assert {run_python(code, PYTHONHASHSEED=seed) for seed in ("0", "1", "random")} == {here}


def test_the_encoding_is_the_one_that_the_module_specifies():
    def ids(*values):
        return len(values).to_bytes(8, "little") + b"".join(value.to_bytes(8, "little") for value in values)

    encoded = b"cacheblend chunk key" + (1).to_bytes(4, "little") + (7).to_bytes(8, "little") + b"model-a"
    encoded += ids(1, 2) + ids(7, 128000, 0)
    assert ChunkIdentity("model-a", (1, 2), (7, 128000, 0)).key == hashlib.sha256(encoded).hexdigest()


@given(IDENTITIES, IDENTITIES)
@settings(max_examples=200)
def test_keys_are_equal_exactly_when_identities_are(left, right):
    assert (left.key == right.key) == (left == right)


def test_moving_a_token_between_prefix_and_chunk_changes_the_key():
    assert ChunkIdentity("m", (1, 2), (3,)).key != ChunkIdentity("m", (1,), (2, 3)).key


def test_the_base_position_is_the_length_of_the_prefix():
    assert ChunkIdentity("m", (), (3,)).base_position == 0
    assert ChunkIdentity("m", (1, 2), (3,)).base_position == 2


def test_lists_of_ids_make_the_same_identity_as_tuples():
    assert ChunkIdentity("m", [1], [2, 3]) == ChunkIdentity("m", (1,), (2, 3))


@pytest.mark.parametrize(
    "parts",
    [
        ("m", (), ()),
        ("m", (), (-1,)),
        ("m", (), (1, -(2**63), 2)),
        ("m", (-1,), (1,)),
        ("m", (), (2**63,)),
        ("m", (), (1, 2**64 + 1)),
        ("m", (), (1.5,)),
        ("", (), (1,)),
        ("../x", (), (1,)),
    ],
)
def test_an_identity_that_makes_no_sense_is_refused(parts):
    with pytest.raises(StoreError):
        ChunkIdentity(*parts)


def test_ids_of_every_size_up_to_the_largest_are_taken_and_numpys_become_plain_ones():
    assert ChunkIdentity("m", (), (0, 255, 2**62, 2**63 - 1)).token_ids == (0, 255, 2**62, 2**63 - 1)
    of_numpy = ChunkIdentity("m", (), tuple(np.array([128, 32768])))
    assert of_numpy.key == ChunkIdentity("m", (), (128, 32768)).key
    assert {type(token) for token in of_numpy.token_ids} == {int}


@pytest.mark.parametrize("layout", [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_outside_its_size_is_refused(layout):
    with pytest.raises(StoreError):
        ShardLayout(*layout)


@pytest.mark.parametrize("prefix", [([1],), (1.0, 2), ("1", 2)])
def test_a_prefix_of_anything_but_integers_is_refused_also_when_an_equal_one_is_known(prefix):
    ChunkIdentity("m", (1, 2), (3,))
    ChunkIdentity("m", (1,), (3,))
    with pytest.raises(StoreError, match="prefix's token ids must be integers"):
        ChunkIdentity("m", prefix, (3,))
