"""The policies of eviction once more, slow and obvious: lists that are walked, and nothing that is remembered."""

from __future__ import annotations

from collections import Counter

from kvstore.key import ChunkKey


class Model:
    """What all have in common: sizes, holds, and victims as the first in an order that is made anew each time."""

    def __init__(self):
        self.sizes: dict[ChunkKey, int] = {}
        self.holds: Counter[ChunkKey] = Counter()

    def hold(self, key):
        self.holds[key] += 1

    def release(self, key):
        self.holds[key] -= 1

    def held(self, key) -> bool:
        return self.holds[key] > 0

    def evictable(self) -> int:
        return sum(size for key, size in self.sizes.items() if not self.held(key))

    def victims(self, nbytes):
        if nbytes > self.evictable():
            return []
        chosen = []
        for key in self.order(nbytes):
            if sum(self.sizes[other] for other in chosen) >= nbytes:
                break
            chosen.append(key)
        return chosen

    def order(self, nbytes) -> list[ChunkKey]:
        raise NotImplementedError


class LruModel(Model):
    def __init__(self):
        super().__init__()
        self.used: list[ChunkKey] = []

    def add(self, key, nbytes, cost_s):
        self.remove(key)
        self.sizes[key] = nbytes
        self.used.append(key)

    def touch(self, key):
        if key in self.sizes:
            self.add(key, self.sizes[key], 0.0)

    def expect(self, key, confidence):
        pass

    def remove(self, key):
        if self.sizes.pop(key, None):
            self.used.remove(key)

    def order(self, nbytes):
        return [key for key in self.used if not self.held(key)]


class GdsfModel(Model):
    def __init__(self):
        super().__init__()
        self.age = 0.0
        self.worth: dict[ChunkKey, float] = {}
        self.uses: Counter[ChunkKey] = Counter()
        self.aged: dict[ChunkKey, float] = {}
        self.confidence: dict[ChunkKey, float] = {}
        self.priority: dict[ChunkKey, float] = {}
        self.proposed: set[ChunkKey] = set()

    def add(self, key, nbytes, cost_s):
        self.sizes[key] = nbytes
        self.worth[key] = max(cost_s, 1e-9) / nbytes
        self.touch(key)

    def touch(self, key):
        if key in self.sizes:
            self.uses[key] = min(2, self.uses[key] + 1)
            self.aged[key] = self.age
            self.set_priority(key)

    def expect(self, key, confidence):
        if key in self.sizes:
            self.confidence[key] = confidence
            self.set_priority(key)

    def set_priority(self, key):
        unused = self.aged[key] + self.uses[key] * self.worth[key]
        used = self.age + min(2, self.uses[key] + 1) * self.worth[key]
        self.priority.pop(key, None)
        # Last in the dict, so that the sort, which is stable, puts it last among its equals.
        self.priority[key] = unused + self.confidence.get(key, 0.0) * (used - unused)
        self.proposed.discard(key)

    def remove(self, key):
        if key not in self.sizes:
            return
        if key in self.proposed:
            self.age = max(self.age, self.priority[key])
        for kept in (self.sizes, self.worth, self.uses, self.aged, self.confidence, self.priority):
            kept.pop(key, None)
        self.proposed.discard(key)

    def order(self, nbytes):
        return [key for key in sorted(self.priority, key=self.priority.__getitem__) if not self.held(key)]

    def victims(self, nbytes):
        chosen = super().victims(nbytes)
        self.proposed.update(chosen)
        return chosen


class S3FifoModel(Model):
    """Held chunks stay where they are in the lists and are passed over."""

    def __init__(self):
        super().__init__()
        self.small: list[ChunkKey] = []
        self.main: list[ChunkKey] = []
        self.doomed: list[ChunkKey] = []
        self.ghosts: list[tuple[ChunkKey, int]] = []
        self.from_small: set[ChunkKey] = set()
        self.uses: Counter[ChunkKey] = Counter()
        self.expected: set[ChunkKey] = set()

    def add(self, key, nbytes, cost_s):
        if key in self.sizes:
            self.sizes[key] = nbytes
            self.touch(key)
            return
        was_ghost = any(key == ghost for ghost, _ in self.ghosts)
        self.ghosts = [(ghost, size) for ghost, size in self.ghosts if ghost != key]
        self.sizes[key] = nbytes
        (self.main if was_ghost else self.small).append(key)

    def touch(self, key):
        if key in self.doomed:
            self.save(key)
        elif key in self.sizes:
            self.uses[key] = min(3, self.uses[key] + 1)

    def save(self, key):
        self.doomed.remove(key)
        self.from_small.discard(key)
        self.main.append(key)

    def expect(self, key, confidence):
        self.expected.discard(key)
        if key in self.doomed and confidence >= 0.5:
            self.save(key)
        elif key in self.sizes and confidence >= 0.5:
            self.expected.add(key)

    def remove(self, key):
        if key not in self.sizes:
            return
        size = self.sizes.pop(key)
        for queue in (self.small, self.main, self.doomed):
            if key in queue:
                queue.remove(key)
        if key in self.from_small:
            self.ghosts.append((key, size))
            while sum(size for _, size in self.ghosts) > sum(self.sizes.values()):
                self.ghosts.pop(0)
        self.from_small.discard(key)
        self.expected.discard(key)
        del self.uses[key]

    def free(self, queue):
        return [key for key in queue if not self.held(key)]

    def bytes_of(self, keys):
        return sum(self.sizes[key] for key in keys)

    def order(self, nbytes):
        while self.bytes_of(self.free(self.doomed)) < nbytes:
            small, main = self.free(self.small), self.free(self.main)
            newcomers_have_too_much = self.bytes_of(small) > 0.1 * sum(self.sizes.values())
            if newcomers_have_too_much or not main:
                self.look_at(small[0], self.small, uses_to_stay=2)
            else:
                self.look_at(main[0], self.main, uses_to_stay=1)
        return self.free(self.doomed)

    def look_at(self, key, queue, uses_to_stay):
        queue.remove(key)
        if key in self.expected:
            self.expected.discard(key)
            queue.append(key)
        elif self.uses[key] >= uses_to_stay:
            self.uses[key] = 0 if queue is self.small else self.uses[key] - 1
            self.main.append(key)
        else:
            self.uses[key] = 0
            self.doomed.append(key)
            if queue is self.small:
                self.from_small.add(key)
