"""The reference runner: transformers' own models, any rows of any sequences; the numerical oracle."""
