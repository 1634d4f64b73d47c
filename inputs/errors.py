"""The one error that this room raises for bad input."""


class DatasetError(ValueError):
    """A data set file cannot be used; the message names the file, the place in it and the remedy."""
