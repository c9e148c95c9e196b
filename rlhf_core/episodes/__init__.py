"""From prompts to trajectories: episodes of one or many turns, played concurrently on the engines."""
