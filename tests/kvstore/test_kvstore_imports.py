from __future__ import annotations

import pytest

import kvstore

TORCH_FREE = (
    "kvstore, kvstore.arena, kvstore.errors, kvstore.events, kvstore.index, kvstore.eviction, kvstore.key, "
    "kvstore.pins, kvstore.single_flight, kvstore.tiers, kvstore.transfer"
)


def test_importing_the_room_and_its_torch_free_modules_imports_no_torch(run_python):
    code = (
        f"import sys, {TORCH_FREE}\n"
        "from kvstore import AsyncPrefetcher, LruPolicy, ThreadPrefetcher, TransferResult\n"
        "print('torch' in sys.modules, end=' ')\n"
        "from kvstore import ChunkStore\n"
        "print('torch' in sys.modules)"
    )
    assert run_python(code).split() == ["False", "True"]


@pytest.mark.parametrize("name", kvstore.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(kvstore, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        kvstore.no_such_thing  # noqa: B018
