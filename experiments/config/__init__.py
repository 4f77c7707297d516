"""From the command line to one frozen, typed configuration of a run."""
