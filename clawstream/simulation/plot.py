"""The score by update as a picture: points with their 95 % intervals, between the start and the hinted ceiling."""

from pathlib import Path

from clawstream.simulation.figures import Figures


def plot_scores(figures: Figures, path: Path) -> None:
    """Write a PNG that says at a glance whether the policy learned."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    updates = [score.update for score in figures.scores]
    values = [score.score for score in figures.scores]
    below = [max(0.0, score.score - score.low) for score in figures.scores]
    above = [max(0.0, score.high - score.score) for score in figures.scores]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.axhline(figures.ceiling_score, color="#888888", linestyle="--", linewidth=1)
    axes.annotate(
        f"with the hint in the prompt: {figures.ceiling_score:.2f}", (0.01, figures.ceiling_score), xytext=(0, 4),
        xycoords=("axes fraction", "data"), textcoords="offset points", color="#555555", fontsize=9,
    )  # fmt: skip
    axes.errorbar(updates, values, yerr=[below, above], color="#1f6feb", marker="o", capsize=3, linewidth=2)
    axes.annotate(f"{values[0]:.2f}", (updates[0], values[0]), xytext=(6, -14), textcoords="offset points")
    axes.annotate(
        f"{values[-1]:.2f}", (updates[-1], values[-1]), xytext=(-4, -18), textcoords="offset points", ha="right"
    )
    axes.set(
        xlabel=f"weight updates (micro-batches; {figures.samples} samples in all)",
        ylabel="right and in the wanted style",
        title=f"{figures.method}, seed {figures.seed}: first answers to {figures.problems} held-out problems",
        ylim=(0, 1.05),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
