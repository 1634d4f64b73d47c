"""Times to first token side by side in one run, what they cost at the least, and their results read for plots."""
