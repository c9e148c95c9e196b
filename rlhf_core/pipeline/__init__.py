"""From recipe to graph: nodes, keys, the plan, and the checks made before anything runs. Imports no torch."""
