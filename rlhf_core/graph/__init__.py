"""A recipe's graph: nodes, their inputs, their keys."""
