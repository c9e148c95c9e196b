"""`alignment up`, `status`, `down`, `env`: the local stack."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from deployments.cli import panels
from deployments.cli.documents.set_up import Environment, Port, Service, StackStatus
from deployments.cli.output import Printed, printing
from deployments.stack.environment import stack_environment
from rlhf_core.errors import StackError

if TYPE_CHECKING:
    from deployments.stack.ports import ListeningPort

app = typer.Typer()


@app.command(rich_help_panel=panels.SET_UP)
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


@printing(app, panels.SET_UP)
def status() -> Printed[StackStatus]:
    """Show the state, address and log of each service of the local stack.

    The exit code is 1 if a service does not work.
    """
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
    ports = control.ports()
    document = StackStatus(
        [
            Service(line.name, line.state, line.problem, line.good, line.pid, line.uptime, line.url, line.log)
            for line in lines
        ],
        [Port(port.address, port.port, port.name or port.process, port.protection) for port in ports],
    )
    failing = [line.name for line in lines if not line.good]
    error = StackError(f"{', '.join(failing)}: not working; start with `alignment up`, or see the log")
    return Printed(document, [table, _ports(ports)], error if failing else None)


def _ports(ports: Sequence[ListeningPort]) -> Table:
    table = Table("port", "of", "protected by", box=None)
    for port in ports:
        table.add_row(f"{port.address}:{port.port}", port.name or port.process, port.protection)
    return table


@app.command(rich_help_panel=panels.SET_UP)
def down() -> None:
    """Stop the local stack, but keep its artifacts, ports and credentials for the next `up`."""
    from deployments.stack import control

    control.down(report=typer.echo)


@printing(app, panels.SET_UP)
def env() -> Printed[Environment]:
    """Print the stack's environment variables for a shell: `eval "$(alignment env)"`."""
    variables = stack_environment()
    return Printed(Environment(variables), [f"export {name}={shlex.quote(v)}" for name, v in variables.items()])
