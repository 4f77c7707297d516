"""Plans and makes the runs of tables and blocks, and keeps their records."""
