"""`clawstream demo`: the whole loop with simulated people, and the policy's scores on the way."""

import asyncio
import json
import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from clawstream.cli.learning.progress import shown
from clawstream.cli.process import Context, hide_torch, log_to_stderr
from clawstream.config import Settings
from clawstream.local.servers.jars import refuse_what_is_missing
from clawstream.resources import own_checkout

if TYPE_CHECKING:
    from clawstream.simulation.runs.figures import Figures


DemoMethod = Literal["combined", "binary", "opd", "topk"]


def demo(
    context: typer.Context,
    method: Annotated[
        DemoMethod,
        typer.Option(help="Which signals train: verdicts, hints (opd; topk: by whole distributions), or both."),
    ] = "combined",
    updates: Annotated[int, typer.Option(help="Weight updates to make.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of students, sampling and training.", min=0)] = 0,
    score_every: Annotated[int, typer.Option(help="Updates between two scores.", min=1)] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.", metavar="FILE")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot here; by default into the run's folder.")] = None,
) -> None:
    """Let simulated students talk to a tiny policy, and watch it learn what they want.

    It takes about three minutes. All its data stays in a folder of its own, which `clawstream sql` can query.
    """
    settings = Context.of(context).settings()
    log_to_stderr("demo", level=30)
    refuse_what_is_missing(Settings(data_dir=settings.data_dir, cache_dir=settings.cache_dir, environment=False))
    hide_torch()
    from clawstream.simulation.learn.plot import plot_scores
    from clawstream.simulation.policy.recipe import LEARNING_RATE, base_policy
    from clawstream.simulation.runs.people import people_of
    from clawstream.simulation.runs.run import SCENARIO, TEMPERATURE, Plan, demonstrate

    console = Console(stderr=True)
    folder = settings.data_dir / "demos" / f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-seed{seed}"
    (folder / "logs").mkdir(parents=True)
    plan = Plan(
        people=people_of(SCENARIO, folder / "problems"),
        method=method,
        updates=updates,
        seed=seed,
        score_every=score_every,
        temperature=TEMPERATURE,
        training={"learning_rate": LEARNING_RATE},
        base=base_policy(settings.cache_dir),
        folder=folder,
        cache_dir=settings.cache_dir,
    )
    with shown(console, updates) as tell:
        figures = asyncio.run(demonstrate(plan, tell=partial(tell, "")))
    picture = plot or folder / "scores.png"
    plot_scores(figures, picture)
    written = json.dumps(figures.as_json(), indent=1)
    (folder / "demo.json").write_text(written)
    if json_file is not None:
        json_file.write_text(written)
    console.print()
    Console().print(_scores(figures), _facts(figures), sep="\n\n")
    _what_next(console, folder, picture)


def _scores(figures: "Figures") -> Table:
    table = Table(title=f"Right and in the wanted style, of {figures.problems} held-out problems", title_justify="left")
    for name in ("update", "score", "95 % interval"):
        table.add_column(name, justify="right")
    for score in figures.scores:
        table.add_row(str(score.update), f"{score.score:.2f}", f"{score.low:.2f} - {score.high:.2f}")
    table.add_section()
    table.add_row("hint in the prompt", f"{figures.ceiling_score:.2f}", "what update 0 could do")
    return table


def _facts(figures: "Figures") -> Table:
    gap_ms = figures.max_stream_gap_ms_during_swap
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("people", f"{figures.sessions} sessions, {figures.turns} turns, {figures.samples} samples"),
        ("requests", f"{figures.requests}, {figures.requests_failed} failed"),
        ("weights", f"{figures.policy_versions} versions; samples {figures.versions_behind_mean:.1f} versions old"),
        ("longest gap in a stream during a weight change", "none seen" if gap_ms is None else f"{gap_ms:.0f} ms"),
        ("first token", f"{figures.ttft_ms.p50:.0f} ms (p50), {figures.ttft_ms.p99:.0f} ms (p99)"),
        (
            "exchange to row",
            f"{figures.exchange_to_row_ms.p50:.0f} ms (p50), {figures.exchange_to_row_ms.p99:.0f} (p99)",
        ),
        ("took", f"{figures.wall_s:.0f} s, {figures.peak_mb:.0f} MB beside the JVM"),
    ):
        table.add_row(f"[dim]{name}[/]", value)
    return table


QUERIES = (
    "SELECT policy_version, num_samples, mean_reward, pause_ms, num_served, mean_score FROM policy_report ORDER BY 1",
    "SELECT request, answer, next_state, score, hint FROM trajectories WHERE pairing = 'paired' LIMIT 3",
    "SELECT DISTINCT policy_version, total_reward AS reward, answer, next_state FROM lineage ORDER BY 1 DESC LIMIT 3",
)


def _what_next(console: Console, folder: Path, picture: Path) -> None:
    words = f"\nPlot: {picture}\nThe run's log, database and weights stay in {folder}. Three queries to try:"
    console.print(words, soft_wrap=True)  # a path that is cut can't be copied
    checkout = own_checkout()
    run = "" if checkout is None else f"uv run --project {shlex.quote(str(checkout))} --extra local "
    for query in QUERIES:
        console.print(
            f'  {run}clawstream -c {shlex.quote(str(folder / "clawstream.toml"))} sql "{query}"',
            soft_wrap=True,
            highlight=False,
        )
