"""Caching and prefetching tried on traces: requests that name their documents, without a model and without a GPU."""
