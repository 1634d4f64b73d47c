"""`ReferenceRunner`: the ModelRunner that runs anywhere and that others are measured against."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cacheblend.errors import BlendError
from cacheblend.metadata import CacheFuseMetadata
from cacheblend.models.fingerprint import model_fingerprint
from cacheblend.models.loading import end_of_sequence_ids, load_model, load_tokenizer
from cacheblend.models.support import require_supported
from cacheblend.plan import BlendPlan, Policy, full_prefill_plan, require_fits, require_known
from cacheblend.protocols import BlendReport, FinishReason, PrefillHints, StepOutput
from cacheblend.recipes import LayerKV, plan_from_old_kvs
from cacheblend.reference.blend import BlendedPrefill
from cacheblend.reference.collect import ChunkCollector
from cacheblend.reference.forward import RowsForward
from cacheblend.reference.hack_kv import publish_hack_kv
from cacheblend.reference.rows import RowBatch, SequenceRows
from cacheblend.reference.sequence import RunningSequence, SequenceState
from cacheblend.reference.stopping import StopConditions
from cacheblend.reference.token_sampler import TokenSampler
from cacheblend.sampling_params import SamplingParams
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.store import ChunkStore


class ReferenceRunner:
    """Runs a transformers model with blended prefill; implements `cacheblend.protocols.ModelRunner`.

    Args:
        model: a loaded, supported `*ForCausalLM`; the runner takes it over.
        store: where chunk KV is kept; without one nothing can be collected or reused.
        tokenizer: only used to look for stop strings.
        folder: the folder the weights came from; None gives chunk keys that die with the process.

    Raises:
        UnsupportedModelError: for a model or RoPE variant the gates do not cover.
        BlendError: for a model without a folder over a store that writes to disk.
    """

    def __init__(
        self,
        model: Any,
        store: ChunkStore | None = None,
        tokenizer: Any | None = None,
        folder: Path | None = None,
    ) -> None:
        require_supported(model.config)
        if folder is None and store is not None and store.disk is not None:
            raise BlendError(
                "A model without a folder cannot be recognised by another process, so its KV must not reach a disk; "
                "save the model and name its folder, or use a store in memory: ChunkStore(None, ...)."
            )
        self._forward = RowsForward(model)
        self._store = store
        self._blend = BlendedPrefill(self._forward, store)
        self._collector = ChunkCollector(self._forward)
        self._sampler = TokenSampler()
        self._stopping = StopConditions(end_of_sequence_ids(model), tokenizer)
        self._sequences: dict[str, RunningSequence] = {}
        self._aborted: set[str] = set()
        self._steps = 0
        self._cache_fuse_metadata = CacheFuseMetadata()
        dtype_name = str(self._forward.dtype).removeprefix("torch.")
        self._fingerprint = model_fingerprint(model.config, dtype_name, folder)
        self.old_kvs: Sequence[LayerKV] | None = None

    @classmethod
    def from_folder(
        cls, folder: Path, store: ChunkStore | None = None, dtype: str = "float32", device: str = "cpu"
    ) -> ReferenceRunner:
        """Load the model in `folder`.

        Args:
            folder: a Hugging Face model folder.
            store: where chunk KV is kept.
            dtype: "float32" (the faster one on most CPUs) or "bfloat16".
            device: a torch device.

        Raises:
            BlendError: if the folder holds no loadable, supported model or the dtype is unknown.
        """
        return cls(load_model(folder, dtype, device), store, load_tokenizer(folder), folder)

    @property
    def fingerprint(self) -> str:
        """See `ModelRunner.fingerprint`."""
        return self._fingerprint

    @property
    def max_model_len(self) -> int:
        """See `ModelRunner.max_model_len`."""
        return int(self._forward.model.config.max_position_embeddings)

    @property
    def cache_fuse_metadata(self) -> CacheFuseMetadata:
        """CacheBlend's switches; see `CacheFuseMetadata`."""
        return self._cache_fuse_metadata

    @property
    def layers(self) -> Any:
        """The model's decoder layers; `layers[i].self_attn.hack_kv` is [k, v] of the last collected prompt."""
        return self._forward.layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV one row takes."""
        forward = self._forward
        return forward.num_layers * 2 * forward.kv_heads * forward.head_dim * forward.dtype.itemsize

    @property
    def schedules_kv(self) -> bool:
        """See `ModelRunner.schedules_kv`."""
        return False

    def collect(self, chunks: Sequence[Sequence[int]], prefix: Sequence[int]) -> list[ChunkKey]:
        """See `ModelRunner.collect`."""
        if self._store is None:
            raise BlendError("Chunks cannot be collected without a store; give the runner one.")
        for chunk in chunks:
            self._require_collectable(chunk, prefix)
        identities = [ChunkIdentity(self._fingerprint, tuple(prefix), tuple(chunk)) for chunk in chunks]
        by_key = {identity.key: identity for identity in identities}
        with self._store.claim(list(by_key)) as claim:
            self._compute([by_key[key] for key in claim.mine], self._store)
            # What another asker computes is waited for, and taken over where it fails.
            while taken_over := claim.wait():
                self._compute([by_key[key] for key in taken_over], self._store)
        return [identity.key for identity in identities]

    def prefill(
        self,
        prompt: BlendPlan | Sequence[int],
        sampling: SamplingParams | None = None,
        sequence_id: str | None = None,
        policy: Policy = Policy.BLEND,
        hints: PrefillHints | None = None,
    ) -> str:
        """See `ModelRunner.prefill`; the plan says all about blending, whatever the policy was."""
        sampling = sampling or SamplingParams()
        sequence_id = sequence_id or uuid.uuid4().hex
        if sequence_id in self._sequences:
            raise BlendError(f"Sequence id '{sequence_id}' is in use; release it first or choose another.")
        if sampling.stop and not self._stopping.knows_text:
            raise BlendError("Stop strings need a tokenizer, and this model folder has none; use stop_token_ids.")
        sequence = self._sequence(sequence_id, prompt, sampling)
        self._require_servable(sequence)
        self._sequences[sequence_id] = sequence
        return sequence_id

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """See `ModelRunner.step`."""
        self._steps += 1
        finished = dict.fromkeys(self._aborted, FinishReason.ABORT)
        self._aborted.clear()
        decoding = self._in_state(SequenceState.DECODING)
        waiting = self._in_state(SequenceState.WAITING)
        tokens: dict[str, tuple[int, ...]] = {}
        for sequence, logits in [*self._decode(decoding), *self._prefill_waiting(waiting)]:
            token = self._sampler.draw(sequence.id, logits, sequence.sampling)
            sequence.generated.append(token)
            sequence.state = SequenceState.DECODING
            tokens[sequence.id] = (token,)
            reason = self._stopping.reason(sequence)
            if reason is not None:
                sequence.state = SequenceState.FINISHED
                finished[sequence.id] = reason
        return StepOutput(self._steps, tokens, finished)

    def report(self, sequence_id: str) -> BlendReport:
        """See `ModelRunner.report`."""
        return self._sequences[sequence_id].report

    def abort(self, sequence_id: str) -> None:
        """See `ModelRunner.abort`."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.state is not SequenceState.FINISHED:
            sequence.state = SequenceState.FINISHED
            self._aborted.add(sequence_id)

    def release(self, sequence_id: str) -> None:
        """See `ModelRunner.release`."""
        self._sequences.pop(sequence_id, None)
        self._aborted.discard(sequence_id)
        self._sampler.forget(sequence_id)

    def close(self) -> None:
        """See `ModelRunner.close`: memory of what was not released."""
        for sequence_id in list(self._sequences):
            self.release(sequence_id)
        self._collector.close()

    def generate(self, token_ids: Sequence[int], sampling: SamplingParams | None = None) -> list[int]:
        """Run one prompt to its end under `cache_fuse_metadata`: CacheBlend's recipes in one call.

        Returns:
            The new token ids.
        """
        sequence_id = self.prefill(token_ids, sampling)
        sequence = self._sequences[sequence_id]
        try:
            while sequence.state is not SequenceState.FINISHED:
                self.step()
        finally:
            self.release(sequence_id)
        return sequence.generated

    def score(self, plan: BlendPlan, answer: Sequence[int] = ()) -> tuple[torch.Tensor, BlendReport]:
        """Log-probabilities along a forced answer (teacher forcing).

        Args:
            plan: the prompt.
            answer: ids that follow it.

        Returns:
            [1 + len(answer), vocabulary] float32: after the prompt, and after each id of the answer; and the
            report of the prefill.
        """
        sequence = RunningSequence("score", plan, SamplingParams(max_tokens=1), forced=tuple(answer))
        (logits,) = self._blend.run([sequence])
        return logits.log_softmax(-1), sequence.report

    @property
    def _vocabulary(self) -> int:
        return int(self._forward.model.config.vocab_size)

    def _sequence(
        self, sequence_id: str, prompt: BlendPlan | Sequence[int], sampling: SamplingParams
    ) -> RunningSequence:
        if isinstance(prompt, BlendPlan):
            return RunningSequence(sequence_id, prompt, sampling)
        if not self._cache_fuse_metadata["check"]:
            return RunningSequence(sequence_id, full_prefill_plan(prompt), sampling)
        plan, chunk = plan_from_old_kvs(
            self._forward, self._cache_fuse_metadata, prompt, self.old_kvs, self._fingerprint
        )
        return RunningSequence(sequence_id, plan, sampling, provided={chunk.identity.key: chunk})

    def _prefill_waiting(self, waiting: list[RunningSequence]) -> Iterator[tuple[RunningSequence, torch.Tensor]]:
        if not waiting:
            return
        for sequence, logits in zip(waiting, self._blend.run(waiting), strict=True):
            if self._cache_fuse_metadata["collect"]:
                publish_hack_kv(self._forward, sequence)
            yield sequence, logits[-1]

    def _decode(self, decoding: list[RunningSequence]) -> Iterator[tuple[RunningSequence, torch.Tensor]]:
        if not decoding:
            return
        ends = [torch.tensor([len(s) - 1], device=self._forward.device) for s in decoding]
        rows = RowBatch([SequenceRows(s, end) for s, end in zip(decoding, ends, strict=True)])
        logits = self._forward.logits(self._forward.run(rows), torch.arange(len(decoding)))
        yield from zip(decoding, logits, strict=True)

    def _in_state(self, state: SequenceState) -> list[RunningSequence]:
        return [s for s in self._sequences.values() if s.state is state]

    def _compute(self, missing: Sequence[ChunkIdentity], store: ChunkStore) -> None:
        for chunk in self._collector.collect(missing):
            store.put(chunk)

    def _require_servable(self, sequence: RunningSequence) -> None:
        """Refuse, while it concerns this prompt alone, what would fail in the middle of a step."""
        plan = sequence.plan
        require_fits(plan.length, sequence.sampling.max_tokens, self.max_model_len)
        require_known(plan.token_ids, self._vocabulary)
        if plan.selector is not None:
            plan.selector.shares(self._forward.num_layers)

    def _require_collectable(self, chunk: Sequence[int], prefix: Sequence[int]) -> None:
        if not chunk:
            raise BlendError("A chunk has no tokens; leave it out.")
        require_known((*prefix, *chunk), self._vocabulary)
        if len(prefix) + len(chunk) > self.max_model_len:
            raise BlendError(
                f"A chunk of {len(chunk)} tokens behind a prefix of {len(prefix)} does not fit the model's context "
                f"of {self.max_model_len}; use smaller chunks."
            )
