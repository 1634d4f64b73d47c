"""Deciding which chunks are where, and guessing which will be wanted. Imports no torch."""
