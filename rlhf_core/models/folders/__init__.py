"""Model folders as files: configs, headers, adapters. Loads no torch."""
