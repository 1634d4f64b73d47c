"""Has the engine collect chunks: requests of their own, many at once, in vLLM's batches."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from vllm.config import VllmConfig
from vllm.outputs import RequestOutput

from cacheblend.errors import BlendError
from cacheblend.sampling_params import SamplingParams
from cacheblend.vllm_backend.engine_chunks import EngineChunks
from cacheblend.vllm_backend.engine_process import EngineProcess
from cacheblend.vllm_backend.request_format import PARAMS_KEY, CollectParams, as_transfer_params
from cacheblend.vllm_backend.sampling import vllm_sampling
from kvstore.key import ChunkIdentity


def collect_tokens(config: VllmConfig) -> int:
    """New tokens of a request that collects: what became of its chunk is told one step after its prompt's.

    Under speculation it is told two steps after, and a step may bring several tokens.
    """
    speculation = config.speculative_config
    return 2 if speculation is None else 3 + int(speculation.num_speculative_tokens)


class Collection:
    """Collects chunks while other requests go on.

    Args:
        process: the engine.
        new_tokens: of each request, from `collect_tokens`.
        chunks: what is known of its chunks; told what becomes of new ones.
        pass_on: takes each step's outputs, those of other requests among them.
    """

    def __init__(
        self,
        process: EngineProcess,
        new_tokens: int,
        chunks: EngineChunks,
        pass_on: Callable[[list[RequestOutput]], None],
    ) -> None:
        self._process = process
        self._sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        self._chunks = chunks
        self._pass_on = pass_on

    def run(self, identities: Sequence[ChunkIdentity]) -> None:
        """Collect these chunks and wait for all of them.

        Raises:
            BlendError: if vLLM refuses one or ends its prefill early; nothing of them is left running then.
        """
        pending = {f"collect-{uuid.uuid4().hex}": identity for identity in identities}
        try:
            for request_id, identity in pending.items():
                transfer = as_transfer_params(CollectParams(collect=identity.base_position))
                token_ids = (*identity.prefix_ids, *identity.token_ids)
                self._process.add(request_id, token_ids, vllm_sampling(self._sampling, (), transfer))
            while pending:
                outputs = self._process.step()
                self._pass_on([output for output in outputs if output.request_id not in pending])
                for output in outputs:
                    if output.finished and output.request_id in pending:
                        self._take(pending.pop(output.request_id), output)
        finally:
            if pending:
                self._process.abort(list(pending))

    def _take(self, identity: ChunkIdentity, output: RequestOutput) -> None:
        account = (output.kv_transfer_params or {}).get(PARAMS_KEY, {})
        if "key" not in account:
            raise BlendError(
                f"vLLM ended the prefill of a chunk of {len(identity.token_ids)} tokens before its KV was taken "
                f"({output.outputs[0].finish_reason}); collect it again."
            )
        self._chunks.take(identity, account)
