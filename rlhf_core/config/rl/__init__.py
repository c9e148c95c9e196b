"""Settings of RL, and the table of RL algorithms."""
