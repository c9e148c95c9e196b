"""Settings of rewards, judges and scorers, and the table of rewards."""
