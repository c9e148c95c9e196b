"""Commands for a model outside of runs: generate, chat, serve, merge."""
