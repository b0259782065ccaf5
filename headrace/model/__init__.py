"""Reference models in plain PyTorch, their checkpoints, tokenizers, KV cache and sampling."""
