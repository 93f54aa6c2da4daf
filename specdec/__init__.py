"""Lossless speculative decoding for Hugging Face causal language models."""
