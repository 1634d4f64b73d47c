"""`ReferenceRunner.collect`: what is computed, how often, and what comes out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from cacheblend.errors import BlendError
from cacheblend.models.fingerprint import model_fingerprint
from cacheblend.reference import collect as collecting
from cacheblend.reference.runner import ReferenceRunner
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore
from kvstore.tiers import Tier

PREFIX = [1, 50, 51, 52, 53]
CHUNKS = [list(range(10, 40)), [99], list(range(100, 180)), list(range(30, 55))]


class Counted:
    """A runner that notes which chunks it computes, and can be held or broken in the middle of it."""

    def __init__(self, folder, store):
        self.runner = ReferenceRunner.from_folder(folder, store)
        self.computed: list[tuple[int, ...]] = []
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.failure: Exception | None = None
        self._collect = self.runner._collector.collect
        self.runner._collector.collect = self._counted

    def _counted(self, identities):
        if not identities:
            return
        self.entered.set()
        assert self.may_go_on.wait(30)
        if self.failure is not None:
            raise self.failure
        for chunk in self._collect(identities):
            self.computed.append(chunk.identity.token_ids)
            yield chunk


@pytest.fixture
def store():
    return ChunkStore(None, 1 << 26)


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("llama-default")


@pytest.fixture
def counted(folder, store):
    return Counted(folder, store)


def identities(runner, chunks, prefix):
    return [ChunkIdentity(runner.fingerprint, tuple(prefix), tuple(chunk)) for chunk in chunks]


def test_it_returns_one_key_a_chunk_in_order_and_stores_each(counted, store):
    keys = counted.runner.collect([*CHUNKS, CHUNKS[0]], PREFIX)
    wanted = identities(counted.runner, [*CHUNKS, CHUNKS[0]], PREFIX)
    assert keys == [identity.key for identity in wanted]
    assert all(store.lookup(identity) is Tier.HOST for identity in wanted)
    assert counted.computed == [tuple(chunk) for chunk in CHUNKS]


def test_what_is_there_is_not_computed_again(counted, store):
    counted.runner.collect(CHUNKS[:2], PREFIX)
    counted.computed.clear()
    counted.runner.collect(CHUNKS, PREFIX)
    assert counted.computed == [tuple(chunk) for chunk in CHUNKS[2:]]
    counted.computed.clear()
    counted.runner.collect(CHUNKS, PREFIX)
    assert counted.computed == []


def test_another_prefix_is_another_chunk(counted):
    first, second = (counted.runner.collect(CHUNKS[:1], prefix) for prefix in (PREFIX, []))
    assert first != second
    assert len(counted.computed) == 2


@pytest.mark.parametrize("prefix", [[], [1], PREFIX])
def test_several_chunks_behind_one_prefix_are_what_each_is_alone(folder, store, prefix):
    together = ReferenceRunner.from_folder(folder, store)
    together.collect(CHUNKS, prefix)
    for chunk in CHUNKS:
        alone_store = ChunkStore(None, 1 << 26)
        alone = ReferenceRunner.from_folder(folder, alone_store)
        alone.collect([chunk], prefix)
        (identity,) = identities(alone, [chunk], prefix)
        got, want = store.get(identity).kv, alone_store.get(identity).kv
        assert got.shape == (4, 2, len(chunk), 2, 16)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_batches_hold_at_most_so_many_rows_their_prefixes_included_and_change_nothing(
    counted, folder, store, monkeypatch
):
    other_store = ChunkStore(None, 1 << 26)
    ReferenceRunner.from_folder(folder, other_store).collect(CHUNKS, PREFIX)
    monkeypatch.setattr(collecting, "MAX_BATCH_ROWS", 116)
    sizes = []
    collect_batch = counted.runner._collector._collect_batch

    def noting(batch, prefix_kv):
        sizes.append([len(PREFIX) + len(identity.token_ids) for identity in batch])
        return collect_batch(batch, prefix_kv)

    monkeypatch.setattr(counted.runner._collector, "_collect_batch", noting)
    counted.runner.collect(CHUNKS, PREFIX)
    assert sizes == [[35, 6], [85, 30]]
    for identity in identities(counted.runner, CHUNKS, PREFIX):
        torch.testing.assert_close(store.get(identity).kv, other_store.get(identity).kv, atol=1e-5, rtol=0)


def rows_of_passes(runner):
    """The rows of every forward pass from now on, in a list that grows."""
    rows = []
    run = runner._forward.run

    def counted(batch, *args, **kwargs):
        rows.append(len(batch))
        return run(batch, *args, **kwargs)

    runner._forward.run = counted
    return rows


def test_calls_behind_the_same_prefix_prefill_it_once(folder, store):
    runner = ReferenceRunner.from_folder(folder, store)
    rows = rows_of_passes(runner)
    for chunk in CHUNKS[:3]:
        runner.collect([chunk], PREFIX)
    assert rows == [5, 30, 1, 80]


def test_one_prefix_is_kept_until_another_one_or_the_end(folder, store):
    runner = ReferenceRunner.from_folder(folder, store)
    rows = rows_of_passes(runner)
    runner.collect([[10]], PREFIX)
    runner.collect([[11]], [])
    runner.collect([[12]], PREFIX)
    assert rows == [5, 1, 1, 1]
    runner.collect([[13]], PREFIX[:2])
    runner.collect([[14]], PREFIX)
    assert rows[4:] == [2, 1, 5, 1]
    runner.close()
    assert runner._collector._last_prefix is None
    runner.collect([[15]], PREFIX)
    assert rows[8:] == [5, 1]


@pytest.mark.parametrize("variant", ["llama-default", "qwen3-yarn"])
def test_chunks_behind_a_kept_prefix_are_bit_for_bit_those_of_a_runner_that_is_new_to_it(tiny_folder, store, variant):
    runner = ReferenceRunner.from_folder(tiny_folder(variant), store)
    for chunk in CHUNKS:
        runner.collect([chunk], PREFIX)
        other_store = ChunkStore(None, 1 << 26)
        other = ReferenceRunner.from_folder(tiny_folder(variant), other_store)
        other.collect([chunk], PREFIX)
        (identity,) = identities(other, [chunk], PREFIX)
        assert torch.equal(store.get(identity).kv, other_store.get(identity).kv)


def test_a_prefix_that_could_not_be_prefilled_is_not_kept(folder, store):
    runner = ReferenceRunner.from_folder(folder, store)
    run = runner._forward.run

    def out_of_memory(*_):
        raise RuntimeError("out of memory")

    runner._forward.run = out_of_memory
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.collect([[10]], PREFIX)
    runner._forward.run = run
    rows = rows_of_passes(runner)
    runner.collect([[10]], PREFIX)
    assert rows == [5, 1]


def test_a_chunk_of_one_token_is_one_row(counted, store):
    counted.runner.collect([[99]], [])
    (identity,) = identities(counted.runner, [[99]], [])
    assert store.get(identity).kv.shape == (4, 2, 1, 2, 16)


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([[10, 11], []], "A chunk has no tokens"),
        ([[10, 11], [20] * 8188], "8188 tokens behind a prefix of 5 does not fit the model's context of 8192"),
        ([[10, 11], [256]], "Token id 256 is outside the model's vocabulary of 256"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused_before_any_is_computed(counted, chunks, words):
    with pytest.raises(BlendError, match=words):
        counted.runner.collect(chunks, PREFIX)
    assert counted.computed == []


def test_a_chunk_that_just_fits_is_taken(make_tiny_model):
    short = ReferenceRunner(make_tiny_model("llama-default", max_position_embeddings=32), ChunkStore(None, 1 << 26))
    assert len(short.collect([[9] * 27], PREFIX)) == 1
    with pytest.raises(BlendError, match="28 tokens behind a prefix of 5"):
        short.collect([[9] * 28], PREFIX)


def test_without_a_store_nothing_is_collected(folder):
    with pytest.raises(BlendError, match="without a store"):
        ReferenceRunner.from_folder(folder).collect([[1]], [])


def two_askers(folder, store):
    """The first is held in the middle of computing; the second asks for the same chunks meanwhile."""
    first, second = Counted(folder, store), Counted(folder, store)
    first.may_go_on.clear()
    wanted = identities(first.runner, CHUNKS[:2], PREFIX)

    def ask_second():
        keys = second.runner.collect(CHUNKS[:2], PREFIX)
        return keys, [store.lookup(identity) for identity in wanted]

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.runner.collect, CHUNKS[:2], PREFIX)
        assert first.entered.wait(30)
        two = pool.submit(ask_second)
        # Time for the second to be wrong in; when it is right, the outcome does not depend on it.
        wait([two], timeout=0.3)
        yield first, second, two
        first.may_go_on.set()
        yield one, two


def test_two_threads_that_ask_for_one_chunk_compute_it_once_and_both_find_it(folder, store):
    steps = two_askers(folder, store)
    first, second, waiting = next(steps)
    assert not waiting.done()
    one, two = next(steps)
    keys, tiers = two.result(30)
    assert keys == one.result(30)
    assert tiers == [Tier.HOST, Tier.HOST]
    assert (len(first.computed), second.computed) == (2, [])
    steps.close()


def test_what_another_thread_fails_to_compute_is_taken_over(folder, store):
    steps = two_askers(folder, store)
    first, second, _ = next(steps)
    first.failure = RuntimeError("out of memory")
    one, two = next(steps)
    with pytest.raises(RuntimeError, match="out of memory"):
        one.result(30)
    assert two.result(30)[1] == [Tier.HOST, Tier.HOST]
    assert len(second.computed) == 2
    steps.close()


def test_models_made_by_hand_never_share_keys(make_tiny_model):
    """Also not when one takes the place of another in memory."""
    made = {model_fingerprint(make_tiny_model("llama-default", seed).config, "float32", None) for seed in range(6)}
    assert len(made) == 6


def test_a_copied_folder_is_the_same_model_and_other_weights_are_not(folder, tmp_path, make_tiny_model):
    import shutil

    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(folder, copy)
    make_tiny_model("llama-default", seed=5).save_pretrained(other)
    config = ReferenceRunner.from_folder(folder)._forward.model.config
    same, copied, changed = (model_fingerprint(config, "float32", each) for each in (folder, copy, other))
    assert same == copied != changed
    assert model_fingerprint(config, "bfloat16", folder) != same


def test_a_model_without_a_folder_is_refused_over_a_store_that_writes_to_disk(make_tiny_model, tmp_path):
    with pytest.raises(BlendError, match="must not reach a disk"):
        ReferenceRunner(make_tiny_model("llama-default"), ChunkStore(tmp_path, 1 << 20))


def test_a_device_that_is_not_there_is_refused_in_one_sentence(tiny_folder):
    with pytest.raises(BlendError, match="Device 'nonsense' cannot be used here"):
        ReferenceRunner.from_folder(tiny_folder("llama-default"), device="nonsense")
