"""Evaluation of trained models: perplexity, zero-shot tasks, translations, image features."""
