"""Sources of rows: files, the hub, generators and the user's functions."""
