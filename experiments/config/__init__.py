"""Turns the command line into one frozen, typed configuration of a run."""
