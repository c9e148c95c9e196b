"""From prompts to trajectories: episodes of one or many turns, side by side over the engines."""
