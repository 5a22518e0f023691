"""The picture of a replay: how long requests waited under each policy, and what the caches gave.

The one file that draws. Needs matplotlib, which the extra `plot` installs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from router.replay import PolicyRun
from router.replay_report import Slo
from shared.errors import ConfigError, OutputError


def require_plot(path: Path) -> None:
    """Raise `ConfigError` that says what to do where no picture could be drawn into `path` later."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot: needs matplotlib; install it with the extra `plot`: pip install 'kvroute[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ConfigError(f"--plot: {path} has no ending of a picture (choose from {', '.join(sorted(kinds))})")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot: {path.parent} is not a folder")


def draw(path: Path, runs: Sequence[PolicyRun], slo: Slo, title: str) -> None:
    """Draw all policies into one picture: the share of requests that had a token after each time, and the hit ratios.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    waits, hits = figure.subplots(1, 2, width_ratios=(2, 1))
    reports = [run.report for run in runs]
    for run in runs:
        # Requests without a token keep a curve below 1.
        shares = [(number + 1) / run.report.num_requests for number in range(len(run.ttfts_s))]
        waits.step(run.ttfts_s, shares, where="post", label=run.report.policy)
    waits.axvline(slo.ttft_s, color="grey", linestyle=":", label=f"service level, {slo.ttft_s:g} s")
    waits.set(xscale="log", ylim=(0, 1), xlabel="time to first token (s), simulated", ylabel="share of requests")
    waits.grid(alpha=0.3)
    waits.legend(loc="lower right")
    names = [found.policy.replace(":", "\n") for found in reports]
    bars = hits.bar(names, [found.hit_ratio for found in reports], color=[f"C{number}" for number in range(len(names))])
    hits.bar_label(bars, [f"{found.hit_ratio:.1%}" for found in reports])
    hits.set(ylabel="hit ratio of prompt tokens, simulated")
    hits.tick_params(axis="x", labelsize="small")
    bounds = [found.hit_ratio / found.hit_share_of_bound for found in reports if found.hit_share_of_bound]
    if bounds:
        hits.axhline(max(bounds), color="grey", linestyle=":")
        hits.annotate("endless cache", (0.01, max(bounds)), xycoords=("axes fraction", "data"), va="bottom")
    hits.margins(y=0.15)
    figure.suptitle(title, fontsize="medium")
    try:
        # Without a date in it the same run gives the same bytes.
        figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
    except OSError as error:
        raise OutputError(f"--plot: cannot write {path}: {error.strerror}") from None
