"""CacheBlend inside vLLM: a KV connector that blends, and the runner that drives an engine with it."""
