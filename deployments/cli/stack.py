"""`alignment up`, `status`, `down`, `env`: the local stack."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from deployments.stack.environment import stack_environment

if TYPE_CHECKING:
    from deployments.stack.ports import ListeningPort

app = typer.Typer()


@app.command()
def up() -> None:
    """Start the S3 server, Ray, Prefect and its worker on this machine, unless they are running."""
    from deployments.stack import control

    stack = control.up(report=typer.echo)
    if "prefect" in stack.owned:
        typer.echo(f"Prefect UI     {stack.url('prefect')}")
        typer.echo(
            "               (its login is one field: `alignment:PASSWORD`, with the prefect_password of "
            f"{stack.folder}/credentials.json)"
        )
    if "ray" in stack.owned:
        typer.echo(
            f"Ray dashboard  {stack.url('ray_dashboard')}  (asks for the ray_token of {stack.folder}/credentials.json)"
        )
    typer.echo(f"logs           {stack.folder / 'logs'}")


@app.command()
def status() -> None:
    """Show the state, address and log of each service. The exit code is 1 if one does not work."""
    from deployments.cli.console import console
    from deployments.stack import control

    lines = control.status()
    table = Table("service", "state", "pid", "up for", "address", "log", box=None)
    for line in lines:
        minutes, seconds = divmod(int(line.uptime), 60)
        table.add_row(
            line.name,
            f"{line.state}: {line.problem}" if line.problem else line.state,
            str(line.pid or ""),
            f"{minutes} min {seconds} s" if line.pid else "",
            line.url,
            str(line.log or ""),
        )
    console.print(table)
    console.print(_ports(control.ports()))
    if not all(line.good for line in lines):
        raise typer.Exit(1)


def _ports(ports: Sequence[ListeningPort]) -> Table:
    table = Table("port", "of", "protected by", box=None)
    for port in ports:
        table.add_row(f"{port.address}:{port.port}", port.name or port.process, port.protection)
    return table


@app.command()
def down() -> None:
    """Stop the local stack; artifacts, ports and credentials are kept for the next `up`."""
    from deployments.stack import control

    control.down(report=typer.echo)


@app.command()
def env() -> None:
    """Print the stack's variables for a shell: eval "$(alignment env)"."""
    for name, value in stack_environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}")
