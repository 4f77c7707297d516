"""Evaluation of trained models: perplexity, zero-shot tasks, translations, and probes of image
features."""
