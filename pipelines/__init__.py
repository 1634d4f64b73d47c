"""What a user of the engine touches: the RAG pipeline, the commands, the server and the names of models."""
