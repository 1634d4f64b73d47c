"""G7: a chunk that is not what the plan says becomes fresh rows, the reason is stated, nothing else changes."""

import os
from pathlib import Path

import pytest
import torch

from cacheblend.selectors import make_selector
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore
from kvstore.tiers import Tier


@pytest.fixture
def disk_bench(load_bench, tiny_folder, tmp_path):
    """A bench whose chunks are on disk only when they are used."""
    return load_bench(tiny_folder("qwen3-default"), root=tmp_path / "store")


def two_chunks(bench):
    return [bench.collect(bench.ids(n, n), bench.ids(6, 1)) for n in (90, 60)]


def file_of(bench, chunk: ChunkIdentity, root: Path) -> Path:
    return next(path for path in root.rglob("*.safetensors") if path.name.startswith(chunk.key))


def check_second_is_fresh(bench, chunks, reason, max_error, selector="chunk_head"):
    """The prompt over both chunks equals the plan in which the second is fresh, and says why."""
    question, system = bench.ids(9, 2), bench.ids(12, 3)
    got, report = bench.runner.score(bench.plan(chunks, question, make_selector(selector), system))
    fresh = bench.plan([chunks[0], chunks[1].token_ids], question, make_selector(selector), system)
    assert max_error(got[-1], bench.logits(fresh)) <= 1e-5
    assert report.fallback_reasons == (reason,)
    assert report.reused_tokens == 90


@pytest.mark.parametrize("selector", ["none", "chunk_head", "deviation", "query"])
def test_g7_a_flipped_byte_makes_that_chunk_fresh(disk_bench, tmp_path, max_error, selector):
    chunks = two_chunks(disk_bench)
    disk_bench.store.evict(chunks[1].key, Tier.HOST)
    path = file_of(disk_bench, chunks[1], tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[-1000] ^= 1
    path.write_bytes(damaged)
    check_second_is_fresh(disk_bench, chunks, "checksum", max_error, selector)
    assert not path.exists()


def test_g7_a_truncated_file_makes_that_chunk_fresh(disk_bench, tmp_path, max_error):
    chunks = two_chunks(disk_bench)
    disk_bench.store.evict(chunks[1].key, Tier.HOST)
    path = file_of(disk_bench, chunks[1], tmp_path)
    os.truncate(path, path.stat().st_size - 4096)
    check_second_is_fresh(disk_bench, chunks, "truncated", max_error)


def test_g7_a_chunk_evicted_between_plan_and_use_is_fresh(disk_bench, max_error):
    chunks = two_chunks(disk_bench)
    for tier in (Tier.HOST, Tier.DISK):
        disk_bench.store.evict(chunks[1].key, tier)
    question, system = disk_bench.ids(9, 2), disk_bench.ids(12, 3)
    plan = disk_bench.plan(chunks, question, make_selector("query"), system)
    got, report = disk_bench.runner.score(plan)
    fresh = disk_bench.plan([chunks[0], chunks[1].token_ids], question, make_selector("query"), system)
    assert max_error(got[-1], disk_bench.logits(fresh)) <= 1e-5
    assert report.fallback_reasons in {("evicted",), ("missing",)}


def test_g7_the_file_of_another_model_is_not_served(disk_bench, tmp_path, max_error, load_bench, make_tiny_model):
    chunks = two_chunks(disk_bench)
    make_tiny_model("qwen3-default", seed=1).save_pretrained(tmp_path / "other")
    other = load_bench(tmp_path / "other", root=tmp_path / "other-store")
    stranger = two_chunks(other)[1]
    assert stranger.key != chunks[1].key
    disk_bench.store.evict(chunks[1].key, Tier.HOST)
    stranger_file = file_of(other, stranger, tmp_path / "other-store")
    file_of(disk_bench, chunks[1], tmp_path / "store").write_bytes(stranger_file.read_bytes())
    check_second_is_fresh(disk_bench, chunks, "other_model", max_error)


def test_g7_weights_dtype_and_prefix_are_part_of_the_key(disk_bench, tmp_path, load_bench, tiny_folder):
    narrow = load_bench(tiny_folder("qwen3-default"), dtype="bfloat16")
    assert narrow.runner.fingerprint != disk_bench.runner.fingerprint
    ids = disk_bench.ids(20, 1)
    keys = {disk_bench.collect(ids, prefix).key for prefix in ((), (1,), disk_bench.ids(6, 1))}
    assert len(keys) == 3


def test_g7_every_chunk_gone_is_a_full_prefill_with_reasons(disk_bench, max_error):
    chunks = two_chunks(disk_bench)
    for chunk in chunks:
        for tier in (Tier.HOST, Tier.DISK):
            disk_bench.store.evict(chunk.key, tier)
    plan = disk_bench.plan(chunks, disk_bench.ids(9, 2), make_selector("deviation"))
    got, report = disk_bench.runner.score(plan)
    assert max_error(got[-1], disk_bench.full(plan.token_ids)) <= 1e-4
    assert report.mode == "full"
    assert len(report.fallback_reasons) == 2


def test_g7_kv_that_another_dtype_left_under_a_key_is_not_served(disk_bench, max_error):
    from kvstore.chunk import ChunkKV

    chunks = two_chunks(disk_bench)
    exact = disk_bench.store.get(chunks[1]).kv
    store = ChunkStore(None, 1 << 30)
    store.put(ChunkKV(chunks[0], disk_bench.store.get(chunks[0]).kv))
    store.put(ChunkKV(chunks[1], exact.to(torch.bfloat16)))
    runner = type(disk_bench.runner)(disk_bench.runner._forward.model, store)
    plan = disk_bench.plan(chunks, disk_bench.ids(9, 2), make_selector("none"))
    got, report = runner.score(plan)
    assert report.fallback_reasons == ("other_model",)
    fresh = disk_bench.plan([chunks[0], chunks[1].token_ids], disk_bench.ids(9, 2), make_selector("none"))
    assert max_error(got[-1], disk_bench.logits(fresh)) <= 1e-5
