"""A recipe's graph: its nodes, what each reads, and the key of each."""
