"""Reports of an evaluation: Markdown tables and plots, from one summary an arm."""
