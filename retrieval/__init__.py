"""Retrieval: documents, token-exact chunks, sentence embeddings, a FAISS index and a retriever over it.

This room knows nothing of KV caches or language models: the chunker is handed a tokenizer. Import from the
modules, which keeps a caller that only chunks from loading an embedding library::

    from retrieval.chunking import TokenChunker
    from retrieval.embedding import SentenceEmbedder
    from retrieval.index import CorpusIndex
    from retrieval.readers import read_documents
    from retrieval.retriever import Retriever

    chunker = TokenChunker(tokenizer, size=512)
    index = CorpusIndex(SentenceEmbedder("path/to/all-minilm-l6-v2"))
    index.add([chunk for document in read_documents("corpus") for chunk in chunker.chunk(document)])
    index.save("corpus.index")
    result = Retriever(index).retrieve("Who built the lighthouse?", k=5)
"""
