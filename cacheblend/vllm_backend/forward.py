"""vLLM's own layers over any rows of any prompts.

No model code is copied: the embedding and the decoder layers are the loaded model's modules, called one after another
under a forward context of our own. On a GPU, passes of few rows replay CUDA graphs of the same modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import KVCacheConfig

from cacheblend.errors import UnsupportedModelError
from cacheblend.kernels.place_rows import LayersPages
from cacheblend.selectors.query import first_tallied_layer
from cacheblend.vllm_backend.attention import LayerRows, PassAttention, RowsAttention, RunsAttention
from cacheblend.vllm_backend.drift import PassDrift
from cacheblend.vllm_backend.eager import eager_kernels
from cacheblend.vllm_backend.hidden import Entering, Hidden
from cacheblend.vllm_backend.layer_graphs import LayerGraphs, RowsGraph
from cacheblend.vllm_backend.layer_passes import LayerPasses
from cacheblend.vllm_backend.model_identity import transformers_config
from cacheblend.vllm_backend.pages import LayerPages, PageLayout, layers_pages
from cacheblend.vllm_backend.pass_graphs import RECOMPUTE_SIZES, SCORING_SIZES, PassGraphs
from cacheblend.vllm_backend.pass_layers import PassLayers, Stack
from cacheblend.vllm_backend.pass_tables import MOVED_ROWS, PARTIAL_RESULTS, Heads, PassRoom, PassTables
from cacheblend.vllm_backend.rotary import RotaryTables
from cacheblend.vllm_backend.rows import PromptRows, RowBatch
from cacheblend.vllm_backend.scoring import QuestionTally

LONG_RUN = 1024
"""Rows of a run, on average, from which on the engine's own kernel is the faster one."""
MEASURED_ON_RUNS = "FLASH_ATTN"
"""The backend of which that is known."""


class _AttentionReached(Exception):
    """Ends a layer once its keys and values are known."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class LayersForward:
    """Runs the loaded model's layers over row batches.

    Args:
        vllm_config: the engine's.
        kv_cache_config: the engine's; one group of full attention.
        caches: the KV cache of each attention layer, by the layer's name.
        model: the loaded `*ForCausalLM`.
        kernel: `runs` or `rows`; `auto` is `rows` on a GPU, but for long runs of one prompt under FlashAttention.
        graph_rows: the largest pass that replays CUDA graphs; 0 for none.

    Raises:
        UnsupportedModelError: if the model's layers are not all attention layers of one kind.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        caches: Mapping[str, torch.Tensor],
        model: Any,
        kernel: str = "auto",
        graph_rows: int = 0,
    ) -> None:
        self._config = vllm_config
        self._model = model
        self._layers = list(model.model.layers)
        attention = [layer.self_attn.attn for layer in self._layers]
        self._attention = attention
        self.names = [module.layer_name for module in attention]
        missing = [name for name in self.names if name not in caches]
        if missing or len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModelError(
                f"The engine keeps {len(kv_cache_config.kv_cache_groups)} groups of KV caches; the connector blends "
                "models with one, of full attention."
            )
        first = caches[self.names[0]]
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.num_layers = len(self._layers)
        self.block_size: int = vllm_config.cache_config.block_size
        self.kv_heads: int = attention[0].num_kv_heads
        self.head_dim: int = attention[0].head_size
        layout = PageLayout(attention[0], first, self.block_size)
        self.pages = [LayerPages(a, caches[n], layout) for a, n in zip(attention, self.names, strict=True)]
        self._may_run_on = kernel == "auto" and attention[0].attn_backend.get_name() == MEASURED_ON_RUNS
        if kernel == "auto":
            kernel = "rows" if self.device.type == "cuda" and layout.strides is not None else "runs"
        if kernel == "rows" and layout.strides is None:
            raise UnsupportedModelError("The pages of this backend are packed; use `attention: runs`.")
        self.kernel = kernel
        longest = vllm_config.model_config.max_model_len
        self.rotary = RotaryTables(transformers_config(vllm_config), self.device, longest)
        self._builder = self._make_builder(kv_cache_config)
        self._graphs: LayerGraphs | None = None
        self._scoring_graphs: PassGraphs | None = None
        self._recompute_graphs: PassGraphs | None = None
        self._layer_passes: LayerPasses | None = None
        if self._can_replay and graph_rows:
            with self._layer_context(graph_rows, None, None), eager_kernels(self.device):
                self._graphs = self._capture_layers(graph_rows)
                capture = partial(self._capture_passes, graph_rows, self._graphs.pool)
                self._scoring_graphs = capture(SCORING_SIZES, partial_results=PARTIAL_RESULTS)
                self._recompute_graphs = capture(RECOMPUTE_SIZES, moved_rows=MOVED_ROWS)
                self._layer_passes = self._make_layer_passes(self._graphs)

    @property
    def _can_replay(self) -> bool:
        """Whether passes can replay graphs: with our own attention, and without ranks that talk within a layer."""
        alone = self._config.parallel_config.world_size == 1
        return self.device.type == "cuda" and self.kernel == "rows" and alone

    @cached_property
    def layers_pages(self) -> LayersPages:
        """The pages of all layers as one; only where they are strided views."""
        return layers_pages(self.pages)

    def attention(self, rows: RowBatch) -> PassAttention:
        """The attention of a pass over `rows`: our own but for long runs, where nothing is scattered."""
        if self.kernel == "rows" and not self._runs_on(rows):
            return RowsAttention(rows)
        return RunsAttention(rows, self._builder)

    def _runs_on(self, rows: RowBatch) -> bool:
        """Whether the engine's own kernel is the faster one: for long runs of one prompt that no graph takes."""
        if not self._may_run_on or not self._can_replay or len(rows.parts) > 1:
            return False
        in_graph = self._graphs is not None and self._graphs.for_rows(len(rows)) is not None
        return not in_graph and len(rows) >= LONG_RUN * len(rows.run_starts)

    def embed(self, rows: RowBatch) -> Hidden:
        """The rows' embeddings."""
        return Hidden(self._model.embed_input_ids(rows.token_ids), None)

    def run(
        self,
        first: int,
        last: int,
        hidden: Hidden,
        rows: RowBatch,
        attention: PassAttention,
        before_layer: Callable[[int], None] | None = None,
        *,
        attend_last: bool = False,
        drift: PassDrift | None = None,
    ) -> Hidden:
        """Layers `first` to `last` (exclusive).

        Args:
            first: index of a layer.
            last: index of a layer, or the number of layers.
            hidden: what enters layer `first`; overwritten.
            rows: the batch; each prompt's KV must be in its pages for every earlier position of its rows.
            attention: of this pass.
            before_layer: called with each layer's index before it runs.
            attend_last: attend in the model's last layer too; otherwise only its KV is written, since nothing reads
                the hidden states of rows before the question.
            drift: moves rows that are not in the batch, before the batch's KV is written.

        Returns:
            What enters layer `last`.
        """
        graph = self._graphs.for_rows(len(rows)) if self._graphs and attention.metadata is None else None
        if graph is not None:
            return self._replay(graph, first, last, hidden, rows, attention, before_layer, attend_last, drift)
        with self._context(rows, attention), eager_kernels(self.device):
            for index in range(first, last):
                if before_layer is not None:
                    before_layer(index)
                if index == self.num_layers - 1 and not attend_last:
                    keys, values = self._stop_at_attention(index, hidden, rows)
                    if drift is not None:
                        drift.apply(index, self.pages[index], keys, values)
                    self.pages[index].write(rows.slots, keys, values)
                    break
                with self._attending(index, attention), self._drifting(index, drift):
                    hidden = Hidden(*self._layers[index](rows.positions, hidden.states, hidden.residual))
        return hidden

    def score_few(self, rows: PromptRows, tally: QuestionTally, before_layer: Callable[[int], None]) -> bool:
        """All layers at once over few rows of one prompt, where that can be done without waiting for Python.

        Args:
            rows: the prompt's KV must be in its pages for every earlier position of these; a question's come last.
            tally: of the question: what its rows pay is added to it, and their KV goes to no page.
            before_layer: called with the index of each layer, or only of some, before it runs.

        Returns:
            Whether it was done.
        """
        return self._scoring_graphs is not None and self._scoring_graphs.score(rows, tally, before_layer)

    def recompute_alone(
        self,
        first: int,
        entering: Entering | None,
        rows: PromptRows,
        drift: PassDrift | None,
        before_layer: Callable[[int], None],
    ) -> bool:
        """Rows of one prompt from layer `first` to the last, where graphs take them; of the last only KV is written.

        Args:
            first: index of a layer.
            entering: what enters it; None before the model's first.
            rows: see `score_few`.
            drift: moves rows that are not among them, before their KV is written; None if nothing moves.
            before_layer: see `score_few`.

        Returns:
            See `score_few`.
        """
        if self._recompute_graphs is None or self._layer_passes is None:
            return False
        table = None if drift is None else drift.of_pass_alone
        if drift is not None and table is None:
            return False
        given = (first, entering, rows, table, before_layer)
        return self._recompute_graphs.recompute(*given) or self._layer_passes.recompute(*given)

    def keys_values(self, index: int, hidden: Hidden, rows: RowBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Only the rows' keys (rotated) and values of layer `index`, each [rows, kv_heads, head_dim].

        They are valid until the next call that runs layers.
        """
        graph = self._graphs.for_rows(len(rows)) if self._graphs else None
        if graph is not None:
            graph.enter(index, hidden, rows.positions)
            graph.layers[index].before.replay()
            layer = graph.layers[index]
            return layer.key[: len(rows)], layer.value[: len(rows)]
        with self._context(rows, None), eager_kernels(self.device):
            return self._stop_at_attention(index, hidden.copy(), rows)

    def _replay(
        self,
        graph: RowsGraph,
        first: int,
        last: int,
        hidden: Hidden,
        rows: RowBatch,
        attention: PassAttention,
        before_layer: Callable[[int], None] | None,
        attend_last: bool,
        drift: PassDrift | None,
    ) -> Hidden:
        """`run` by graphs."""
        count, slots = len(rows), rows.slots
        graph.enter(first, hidden, rows.positions)
        attended = graph.attended[:count].view(count, -1, self.head_dim)
        for index in range(first, last):
            if before_layer is not None:
                before_layer(index)
            layer, pages = graph.layers[index], self.pages[index]
            layer.before.replay()
            query, key, value = layer.query[:count], layer.key[:count], layer.value[:count]
            if drift is not None:
                drift.apply(index, pages, key, value)
            pages.write(slots, key, value)
            at_the_end = index == self.num_layers - 1
            if not at_the_end or attend_last:
                scale = self._attention[index].impl.scale
                attention.attend(LayerRows(index, pages, query, key, value, scale, attended))
            if at_the_end:
                return hidden
            layer.after.replay()
        return graph.layers[last - 1].leaving.take(slice(0, count)).copy()

    def _capture_layers(self, most_rows: int) -> LayerGraphs:
        hidden_size = self._config.model_config.get_hidden_size()
        graphs = LayerGraphs(self._layers, self._attention, hidden_size, most_rows, self.dtype, self.device)
        graphs.capture()
        return graphs

    def _capture_passes(self, most_rows: int, pool: Any, sizes: Sequence[int], **room: int) -> PassGraphs:
        fitting = [size for size in sizes if size <= most_rows]
        graphs = PassGraphs(*self._pass(max(fitting, default=0), **room), fitting, pool, self.device)
        graphs.capture()
        return graphs

    def _make_layer_passes(self, graphs: LayerGraphs) -> LayerPasses:
        passes = LayerPasses(graphs, *self._pass(graphs.most_rows, moved_rows=MOVED_ROWS))
        passes.warm_up()
        return passes

    def _pass(self, rows: int, **room: int) -> tuple[PassLayers, PassTables]:
        """The layers for passes of at most so many rows of one prompt, and the tables that they read."""
        heads = Heads(self._attention[0].num_heads, self.kv_heads, self.head_dim, self.dtype)
        of_pass = PassRoom(rows, self._config.model_config.max_model_len, **room)
        tables = PassTables(heads, of_pass, self.block_size, self.device)
        embed, tallied = self._model.embed_input_ids, first_tallied_layer(self.num_layers)
        stack = Stack(embed, self._layers, self._attention, self.pages, tallied, self.rotary.all)
        return PassLayers(stack, tables, self.device), tables

    def _stop_at_attention(self, index: int, hidden: Hidden, rows: RowBatch) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(rows), self.kv_heads, self.head_dim)

        def stop(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            raise _AttentionReached(args[1].view(shape), args[2].view(shape))

        handle = self._attention[index].register_forward_pre_hook(stop)
        try:
            self._layers[index](rows.positions, hidden.states, hidden.residual)
        except _AttentionReached as reached:
            return reached.keys, reached.values
        finally:
            handle.remove()
        raise AssertionError("the layer ended without attention")

    @contextmanager
    def _attending(self, index: int, attention: PassAttention) -> Any:
        """While it lasts, layer `index` attends as `attention` says."""
        if attention.metadata is not None:
            yield
            return
        module, pages = self._attention[index], self.pages[index]

        def replace(_module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            rows = output.shape[0]
            query, key, value = (x.view(rows, -1, self.head_dim) for x in args[:3])
            scale, attended = module.impl.scale, output.view(query.shape)
            attention.attend(LayerRows(index, pages, query, key, value, scale, attended))
            return output

        handle = module.register_forward_hook(replace)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _drifting(self, index: int, drift: PassDrift | None) -> Any:
        """While it lasts, rows move with those of the pass once layer `index` knows their keys and values."""
        if drift is None:
            yield
            return

        def move(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            keys, values = (x.view(x.shape[0], self.kv_heads, self.head_dim) for x in args[1:3])
            drift.apply(index, self.pages[index], keys, values)

        handle = self._attention[index].register_forward_pre_hook(move)
        try:
            yield
        finally:
            handle.remove()

    def _context(self, rows: RowBatch, attention: PassAttention | None) -> Any:
        return self._layer_context(len(rows), None if attention is None else attention.metadata, rows.slots)

    def _layer_context(self, rows: int, metadata: Any, slots: torch.Tensor | None) -> Any:
        return set_forward_context(
            dict.fromkeys(self.names, metadata),
            self._config,
            num_tokens=rows,
            slot_mapping=None if slots is None else dict.fromkeys(self.names, slots),
            skip_compiled=True,
        )

    def _make_builder(self, kv_cache_config: KVCacheConfig) -> Any:
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        spec = getattr(spec, "kv_cache_specs", {}).get(self.names[0], spec)
        with set_current_vllm_config(self._config):
            make = self._attention[0].attn_backend.get_builder_cls()
            return make(spec, self.names, self._config, self.device)
