"""Settings of datasets, and the table of data formats."""
