"""What a trained model is measured by: perplexity, zero-shot tasks, probes of features."""
