"""What is to be run and shown: the tables of the papers and their published values."""
