"""Measurements that the README and the issues quote: `python -m tests.bench NAME --json FILE`."""

import typer

from tests.bench.gateway import gateway
from tests.bench.rebuild import rebuild
from tests.bench.replay import replay
from tests.bench.replicas import replicas
from tests.bench.restart import restart
from tests.bench.swap import swap
from tests.bench.ttft import ttft

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure; figures go to stdout, and to a file as JSON."""


app.command()(ttft)
app.command()(gateway)
app.command()(swap)
app.command()(replicas)
app.command()(rebuild)
app.command()(replay)
app.command()(restart)

if __name__ == "__main__":
    app()
