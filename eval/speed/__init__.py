"""Time to first token, full prefill and blended arms side by side in one run."""
