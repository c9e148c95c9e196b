"""A flow over a few quick nodes of a recipe, through the same code as the shipped flows."""

from prefect import flow

from flows.running import Row, run_recipe, stop_jobs


@flow(name="few", on_cancellation=[stop_jobs])
def few(recipe: str, nodes: list[str]) -> list[Row]:
    return run_recipe(recipe, [], only=nodes)
