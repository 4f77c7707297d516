"""Opens, compares and draws finished runs."""
