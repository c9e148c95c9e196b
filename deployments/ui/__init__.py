"""The browser of the store: `alignment ui`."""
