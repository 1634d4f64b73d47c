"""Models: which are supported, how they are loaded, and what identifies their KV."""
