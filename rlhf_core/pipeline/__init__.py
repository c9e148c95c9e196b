"""From a recipe to prepared nodes: plan, specs, estimates, the record of a run."""
