"""Pipelines over one cache folder: each uses what the others put there while it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.stored_chunks import REFRESH_INTERVAL_S, StoredChunks

DOCUMENTS = [f"Lighthouse {number} stands on a rock and was lit in {1800 + number}." for number in range(4)]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def pair(make_rag, tmp_path):
    """Two pipelines, each with a store of its own, over one folder."""
    return [make_rag(DOCUMENTS, cache_dir=tmp_path) for _ in range(2)]


def missing(pipeline):
    return pipeline.run("When?", documents=DOCUMENTS).meta.fallback_reasons


def test_a_question_finds_what_another_process_has_precomputed_since(pair):
    running, other = pair
    other.precompute()
    assert missing(running) == ()


def test_the_folder_is_looked_at_again_at_most_once_a_second(pair):
    running, other = pair
    clock = Clock()
    running._planner = replace(running._planner, stored=StoredChunks(running.store, clock))
    assert missing(running) == ("missing",) * 4
    other.precompute()
    clock.now += REFRESH_INTERVAL_S * 0.99
    assert missing(running) == ("missing",) * 4
    clock.now += REFRESH_INTERVAL_S * 0.02
    assert missing(running) == ()


def test_precomputing_passes_over_what_another_process_has_precomputed_since(pair):
    running, other = pair
    other.precompute()
    foretold, summary = running.precompute(dry_run=True), running.precompute()
    assert (foretold.cached, foretold.computed) == (summary.cached, summary.computed) == (4, 0)
