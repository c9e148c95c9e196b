"""Environments whose program is the user's: agents behind an OpenAI API, executors of episodes."""
