"""Environments that run a program of the user: agents behind an OpenAI API, executors of episodes."""
