"""vLLM's own server as a child process, for checks that talk HTTP."""
