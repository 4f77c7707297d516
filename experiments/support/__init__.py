"""What every part uses: errors in one line, progress, whole files, hashes, results."""
