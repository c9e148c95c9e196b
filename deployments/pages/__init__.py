"""The documentation's site and its generated pages."""
