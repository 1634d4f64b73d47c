"""Which chunks the scheduler's half believes in: what workers told, and what lies in the folder."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
from connector_samples import MODEL, identity_of, ids_of, put
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheblend.vllm_backend.directory import ChunkDirectory
from kvstore.errors import UnavailableReason
from kvstore.events import Evicted, NotStored, Published, Quarantined
from kvstore.key import ChunkIdentity
from kvstore.tiers import Tier

HEAD = (5, 6)
BOS = (1,)
PREFIXES = [HEAD, BOS, ()]


def published(identity, tier=Tier.HOST):
    return Published(identity.key, tier, 64, 4)


def evicted(identity, tier=Tier.HOST):
    return Evicted(identity.key, tier, 64)


def find(directory, seed=1, prefixes=PREFIXES):
    return directory.find(MODEL, ids_of(seed), prefixes)


def test_a_chunk_in_the_folder_is_found(tmp_path):
    put(tmp_path, identity_of(1))
    directory = ChunkDirectory(tmp_path, ranks=1)
    assert find(directory) == (identity_of(1), None)
    assert find(directory, seed=2) == (None, UnavailableReason.MISSING)
    assert [record.key for record in directory.records()] == [identity_of(1).key]


def test_without_a_folder_there_is_what_the_workers_tell():
    directory = ChunkDirectory(None, ranks=1)
    assert directory.folder is None
    assert directory.records() == []
    assert find(directory) == (None, UnavailableReason.MISSING)
    directory.follow([(0, published(identity_of(1)))])
    assert find(directory) == (identity_of(1), None)
    directory.lose(identity_of(1).key)
    assert find(directory) == (None, UnavailableReason.MISSING)
    directory.close()


def test_chunks_whose_ids_have_one_hash_are_told_apart_whichever_was_asked_for_last():
    # Python hashes integers modulo this number.
    one, other = (0, 7), (2**61 - 1, 7)
    assert hash((MODEL, HEAD, one)) == hash((MODEL, HEAD, other))
    identities = {ids: ChunkIdentity(MODEL, HEAD, ids) for ids in (one, other)}
    directory = ChunkDirectory(None, ranks=1)
    directory.follow([(0, published(identity)) for identity in identities.values()])
    for ids in (one, other, other, one):
        assert directory.find(MODEL, ids, [HEAD]) == (identities[ids], None)


def test_a_chunk_is_there_once_every_rank_has_told():
    directory, chunk = ChunkDirectory(None, ranks=2), identity_of(1)
    assert directory.follow([(1, published(chunk))]) == []
    assert chunk.key not in directory
    assert directory.follow([(1, published(chunk))]) == [], "one rank told twice"
    assert find(directory) == (None, UnavailableReason.MISSING)
    assert directory.follow([(0, published(chunk))]) == [published(chunk)]
    assert chunk.key in directory
    assert find(directory) == (chunk, None)


def test_ranks_that_tell_of_different_tiers_do_not_make_one_together():
    directory, chunk = ChunkDirectory(None, ranks=2), identity_of(1)
    assert directory.follow([(0, published(chunk, Tier.HOST)), (1, published(chunk, Tier.DISK))]) == []
    assert chunk.key not in directory


def test_a_chunk_leaves_with_the_first_rank_that_tells():
    directory, chunk = ChunkDirectory(None, ranks=2), identity_of(1)
    directory.follow([(0, published(chunk)), (1, published(chunk))])
    assert directory.follow([(1, evicted(chunk))]) == [evicted(chunk)]
    assert chunk.key not in directory
    assert directory.follow([(0, evicted(chunk))]) == [], "everybody knows it has left"
    assert chunk.key not in directory


def test_a_chunk_that_leaves_one_tier_is_still_in_the_other():
    directory, chunk = ChunkDirectory(None, ranks=1), identity_of(1)
    directory.follow([(0, published(chunk, Tier.HOST)), (0, published(chunk, Tier.DISK))])
    assert directory.follow([(0, evicted(chunk, Tier.HOST))]) == [evicted(chunk, Tier.HOST)]
    assert chunk.key in directory


def test_an_eviction_nobody_was_told_the_start_of_is_no_news():
    assert ChunkDirectory(None, ranks=1).follow([(0, evicted(identity_of(1)))]) == []


@st.composite
def histories(draw) -> list[tuple[int, bool]]:
    """Each rank publishes and evicts one chunk in turn, some ranks ahead of others: (rank, whether it has it now)."""
    counts = [draw(st.integers(0, 4)) for _ in range(draw(st.integers(1, 3)))]
    order = draw(st.permutations([rank for rank, count in enumerate(counts) for _ in range(count)]))
    told = [islice(cycle([True, False]), count) for count in counts]
    return [(rank, next(told[rank])) for rank in order]


@settings(max_examples=200, deadline=None)
@example([(0, True), (1, True), (0, False), (0, True), (1, False), (1, True)])
@given(histories())
def test_however_far_one_rank_is_ahead_a_chunk_is_there_when_all_ranks_have_it(history):
    """A chunk may be evicted and loaded again before the other rank has told of the eviction."""
    ranks = 1 + max((rank for rank, _ in history), default=0)
    directory, chunk = ChunkDirectory(None, ranks), identity_of(1)
    has_it = dict.fromkeys(range(ranks), False)
    believed = False
    for rank, is_there in history:
        has_it[rank] = is_there
        for event in directory.follow([(rank, published(chunk) if is_there else evicted(chunk))]):
            assert isinstance(event, Published) != believed, "told twice"
            believed = isinstance(event, Published)
        assert (chunk.key in directory) == believed == all(has_it.values())


def test_news_of_files_count_once_as_the_first_rank_tells_them():
    directory, key = ChunkDirectory(None, ranks=2), identity_of(1).key
    news = [NotStored(key, UnavailableReason.DISK_FULL), Quarantined(key, UnavailableReason.CHECKSUM, "flipped")]
    assert directory.follow([(rank, event) for event in news for rank in (1, 0)]) == news
    assert key not in directory


@pytest.mark.parametrize(("stored", "used"), [(1, 2), (2, 1), (2, 4)])
def test_a_chunk_stored_under_another_tensor_parallel_size_is_tp_layout(tmp_path, stored, used):
    put(tmp_path, identity_of(1), ranks=stored)
    directory = ChunkDirectory(tmp_path, ranks=used)
    assert find(directory) == (None, UnavailableReason.TP_LAYOUT)
    assert directory.records() == []


def test_a_chunk_stored_under_the_same_tensor_parallel_size_is_found(tmp_path):
    put(tmp_path, identity_of(1), ranks=2)
    assert find(ChunkDirectory(tmp_path, ranks=2)) == (identity_of(1), None)


def test_what_another_process_puts_there_is_found_after_a_look_at_the_folder(tmp_path):
    directory = ChunkDirectory(tmp_path, ranks=1)
    put(tmp_path, identity_of(1))
    assert find(directory) == (identity_of(1), None)


def test_a_chunk_lost_is_found_again_only_where_it_really_is(tmp_path):
    put(tmp_path, identity_of(1))
    directory = ChunkDirectory(tmp_path, ranks=1)
    for seed in (1, 2):
        directory.follow([(0, published(identity_of(seed)))])
    for seed in (1, 2):
        directory.lose(identity_of(seed).key)
        assert identity_of(seed).key not in directory
    assert find(directory, 1) == (identity_of(1), None), "it lies in the folder"
    assert find(directory, 2) == (None, UnavailableReason.MISSING)


def test_a_lost_chunk_whose_file_is_gone_is_not_offered_again(tmp_path):
    gone, kept = identity_of(1), identity_of(2)
    put(tmp_path, gone)
    put(tmp_path, kept)
    directory = ChunkDirectory(tmp_path, ranks=1)
    assert find(directory, 1) == (gone, None)
    for path in tmp_path.rglob(f"{gone.key}*"):
        path.unlink()
    directory.lose(gone.key)
    assert find(directory, 1)[0] is None
    assert [record.key for record in directory.records()] == [kept.key]


@pytest.mark.parametrize("told", [True, False])
def test_the_requests_own_head_comes_before_the_bos_and_that_before_none(tmp_path, told):
    directory = ChunkDirectory(None if told else tmp_path, ranks=1)
    for prefix in reversed(PREFIXES):
        chunk = identity_of(1, prefix=prefix)
        if told:
            directory.follow([(0, published(chunk))])
        else:
            put(tmp_path, chunk)
            directory.look_again()
        assert find(directory) == (chunk, None)


def test_a_chunk_that_workers_hold_is_not_taken_before_one_in_the_folder_behind_a_better_prefix(tmp_path):
    """Where a chunk is changes when an answer comes, never the answer."""
    best, other = identity_of(1, prefix=HEAD), identity_of(1, prefix=BOS)
    for chunk in (best, other):
        put(tmp_path, chunk)
    directory = ChunkDirectory(tmp_path, ranks=1)
    assert find(directory) == (best, None)
    directory.follow([(0, published(other))])
    assert find(directory) == (best, None)


def test_a_chunk_behind_other_prefixes_only_is_prefix_changed(tmp_path):
    put(tmp_path, identity_of(1, prefix=(9,)))
    directory = ChunkDirectory(tmp_path, ranks=1)
    assert find(directory) == (None, UnavailableReason.PREFIX_CHANGED)
    assert find(directory, prefixes=[(9,)]) == (identity_of(1, prefix=(9,)), None)


def test_a_chunk_of_another_model_is_other_model(tmp_path):
    put(tmp_path, identity_of(1, model="another"))
    assert find(ChunkDirectory(tmp_path, ranks=1)) == (None, UnavailableReason.OTHER_MODEL)
