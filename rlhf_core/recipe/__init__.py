"""Recipes: YAML and overrides in, one frozen `Recipe` out, or every mistake with its place."""
