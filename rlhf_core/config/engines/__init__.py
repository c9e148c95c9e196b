"""Settings of training engines, rollout engines and their placement."""
