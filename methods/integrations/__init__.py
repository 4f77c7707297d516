"""Methods in the training loops of other libraries, which are imported there alone."""
