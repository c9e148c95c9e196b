"""Recipes: YAML and overrides are parsed into one frozen `Recipe`, or every mistake is reported with its place."""
