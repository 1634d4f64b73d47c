"""What a running server tells of its chunks: `vllm:cacheblend_*` in the text of its `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pipelines.cli.output import on_one_line
from pipelines.errors import PipelineError

PREFIX = "vllm:cacheblend_"

GAUGES = ("tier_bytes", "tier_budget_bytes", "transfers_in_flight", "pins")
COUNTERS = (
    "requests",
    "hits",
    "misses",
    "fallbacks",
    "bytes_loaded",
    "transfers",
    "transfer_bytes",
    "evictions",
)
"""What is shown, by the names that the connector gives."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """One look at a server.

    Attributes:
        counters: by (name, labels), since the server started.
        gauges: the same, of this moment.
    """

    counters: Mapping[tuple[str, Labels], float]
    gauges: Mapping[tuple[str, Labels], float]

    def since(self, earlier: ServerMetrics) -> ServerMetrics:
        """What was counted since an earlier look; all of it by a server that was started anew in between."""
        anew = any(self.counters.get(name, 0) < value for name, value in earlier.counters.items())
        before = {} if anew else earlier.counters
        return ServerMetrics({name: n - before.get(name, 0) for name, n in self.counters.items()}, self.gauges)

    def total(self, name: str) -> float:
        """A metric over all its labels."""
        return sum(value for (its_name, _), value in self._all() if its_name == name)

    def by(self, name: str, label: str, **only: str) -> dict[str, float]:
        """A metric by the values of one label, summed over all other labels, engines among them.

        Args:
            name: of the metric.
            label: whose values are told apart.
            only: values that other labels must have.
        """
        sums: dict[str, float] = {}
        for (its_name, labels), value in self._all():
            values = dict(labels)
            if its_name == name and only.items() <= values.items():
                value_name = on_one_line(values.get(label, ""))
                sums[value_name] = sums.get(value_name, 0.0) + value
        return sums

    def _all(self) -> list[tuple[tuple[str, Labels], float]]:
        return [*self.counters.items(), *self.gauges.items()]


def parse_metrics(text: str, url: str) -> ServerMetrics:
    """Read the text of `/metrics`.

    Args:
        text: in Prometheus's text format.
        url: where it came from, for the sentence that says what is wrong.

    Raises:
        PipelineError: it is in another format, or tells nothing of chunks.
    """
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise PipelineError(f"{url} answers no Prometheus text; give the address of vLLM's /metrics.") from error
    if not any(family.name.startswith(PREFIX) for family in families):
        raise PipelineError(
            f"{url} has no metrics of cacheblend; is it the address of /metrics, and does vLLM run CacheBlendConnector?"
        )
    samples = [sample for family in families for sample in family.samples]
    return ServerMetrics(
        _named(samples, {f"{PREFIX}{name}_total": name for name in COUNTERS}),
        _named(samples, {f"{PREFIX}{name}": name for name in GAUGES}),
    )


def _named(samples: list[Any], names: Mapping[str, str]) -> dict[tuple[str, Labels], float]:
    return {
        (names[sample.name], tuple(sorted(sample.labels.items()))): sample.value
        for sample in samples
        if sample.name in names
    }
