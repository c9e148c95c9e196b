"""The groups of commands in `alignment --help`."""

SET_UP = "Set up"
RUNS = "Plan, run and follow"
RESULTS = "Runs and results"
MODELS = "Models"
STORE = "Store"
