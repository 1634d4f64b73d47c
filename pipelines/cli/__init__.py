"""The commands `cacheblend` and `precompute-chunk-cache`: results on stdout, everything else on stderr."""
