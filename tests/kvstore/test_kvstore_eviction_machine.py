"""Each policy of eviction beside its model: the same victims after any calls."""

from __future__ import annotations

import random

import pytest
from eviction_models import GdsfModel, LruModel, S3FifoModel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.eviction import GdsfPolicy, LruPolicy, S3FifoPolicy
from kvstore.key import ChunkKey

PAIRS = {"lru": (LruPolicy, LruModel), "gdsf": (GdsfPolicy, GdsfModel), "s3fifo": (S3FifoPolicy, S3FifoModel)}
OPERATIONS = 100_000

KEYS = st.sampled_from([ChunkKey(letter) for letter in "abcdefgh"])
SIZES = st.integers(1, 9)
COSTS = st.sampled_from([0.0, 0.001, 0.02, 3.0])
CONFIDENCES = st.sampled_from([0.0, 0.3, 0.5, 1.0])


class PolicyMachine(RuleBasedStateMachine):
    """Calls one policy and its model alike."""

    name: str

    def __init__(self):
        super().__init__()
        policy, model = PAIRS[self.name]
        self.policy, self.model = policy(), model()

    @rule(key=KEYS, nbytes=SIZES, cost_s=COSTS)
    def add(self, key, nbytes, cost_s):
        self.policy.add(key, nbytes, cost_s)
        self.model.add(key, nbytes, cost_s)

    @rule(key=KEYS)
    def touch(self, key):
        self.policy.touch(key)
        self.model.touch(key)

    @rule(key=KEYS, confidence=CONFIDENCES)
    def expect(self, key, confidence):
        self.policy.expect(key, confidence)
        self.model.expect(key, confidence)

    @rule(key=KEYS)
    def remove(self, key):
        self.policy.remove(key)
        self.model.remove(key)

    @rule(key=KEYS)
    def hold(self, key):
        self.policy.hold(key)
        self.model.hold(key)

    @precondition(lambda self: +self.model.holds)
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(+self.model.holds)))
        self.policy.release(key)
        self.model.release(key)

    @rule(nbytes=st.integers(0, 60))
    def ask_for_victims(self, nbytes):
        check_victims(self.policy, self.model, nbytes)

    @rule(nbytes=st.integers(0, 60))
    def evict(self, nbytes):
        for key in check_victims(self.policy, self.model, nbytes):
            self.policy.remove(key)
            self.model.remove(key)

    @invariant()
    def all_that_is_not_held_can_be_freed_and_not_a_byte_more(self):
        evictable = self.model.evictable()
        assert self.policy.victims(evictable + 1) == []


def check_victims(policy, model, nbytes: int) -> list[ChunkKey]:
    victims = policy.victims(nbytes)
    assert victims == policy.victims(nbytes) == model.victims(nbytes)
    sizes = [model.sizes[key] for key in victims]
    assert len(set(victims)) == len(victims)
    assert not any(model.held(key) for key in victims)
    assert bool(victims) == (0 < nbytes <= model.evictable())
    assert not victims or sum(sizes) >= nbytes > sum(sizes[:-1])
    return victims


@pytest.mark.parametrize("name", PAIRS)
def test_a_policy_names_the_victims_of_its_model_after_any_calls(name):
    machine = type(f"{name}Machine", (PolicyMachine,), {"name": name})
    case = machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
    case("runTest").runTest()


@pytest.mark.parametrize("name", PAIRS)
def test_a_policy_agrees_with_its_model_over_a_third_of_100_000_operations(name):
    """More chunks and longer runs than the machine above, so that heaps are rebuilt and ghosts forgotten."""
    draw = random.Random(name)
    policy, model = (make() for make in PAIRS[name])
    keys = [ChunkKey(f"{number:02d}") for number in range(40)]
    for _ in range(OPERATIONS // len(PAIRS)):
        key = draw.choice(keys)
        call = draw.choices(("add", "touch", "expect", "remove", "hold", "release", "evict"), (20, 40, 8, 2, 6, 6, 6))[
            0
        ]
        if call == "evict":
            for victim in check_victims(policy, model, draw.randint(0, 40)):
                policy.remove(victim)
                model.remove(victim)
        elif call != "release" or model.held(key):
            arguments = {"add": (draw.randint(1, 9), draw.random()), "expect": (draw.random(),)}.get(call, ())
            getattr(policy, call)(key, *arguments)
            getattr(model, call)(key, *arguments)
