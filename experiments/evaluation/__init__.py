"""Measures trained models: perplexity, zero-shot tasks, and probes of image features."""
