"""Quantization-aware training driven through transformers' public registries: attach once, then run forwards."""
