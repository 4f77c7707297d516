"""What runs are to be made for a table, and how they are made."""
