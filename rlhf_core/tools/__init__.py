"""What commands do with a model outside of runs: sample from it, chat with it, serve it, merge an adapter into it."""
