"""``hf-wlb shard``: ways to share one micro-batch out over context-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_wlb.analysis import choose_workload
from hf_wlb.analysis.sharding import (
    DEFAULT_HARDWARE,
    DEFAULT_MODEL,
    ShardAnalysis,
    analyze_shards,
    read_micro_batch,
    work_in_unit,
)
from hf_wlb.analysis.sharding_tables import shard_tables, strategy_headings, work_unit
from hf_wlb.cli.base import Checkpointing, Crossover, Model, ProfileFile, app, check_folders, user_errors, write_json

Lengths = Annotated[
    str | None,
    typer.Option(
        help="Tokens of the micro-batch's documents, such as 90000,12000,800; or a file of lengths or "
        "documents, as of analyze, to draw them from. Absent: the built-in sampler of lengths.",
        show_default=False,
    ),
]
Cp = Annotated[int, typer.Option(help="Context-parallel ranks.")]
Context = Annotated[int, typer.Option(help="Tokens of documents to draw from a file or the sampler.")]
Seed = Annotated[int, typer.Option(help="Of the drawing.")]
Hardware = Annotated[str, typer.Option(help="With --model, or without any: h100, h100-flash-attn-4 or cpu.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of a rank that fit into memory.")]
MaxSkew = Annotated[float, typer.Option(help="How far placed sharding may leave an even share of the tokens.")]


@app.command("shard")
@user_errors
def shard_command(
    lengths: Lengths = None,
    cp: Cp = 4,
    context: Context = 131_072,
    seed: Seed = 0,
    model: Model = None,
    crossover: Crossover = None,
    profile: ProfileFile = None,
    hardware: Hardware = DEFAULT_HARDWARE,
    gradient_checkpointing: Checkpointing = False,
    max_tokens_per_shard: MaxTokens = None,
    max_token_skew: MaxSkew = 0.05,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw who holds what under each strategy.")] = None,
) -> None:
    """Share one micro-batch out by every strategy: who holds what, and how long the slowest rank works."""
    check_folders(json_file, png)
    assumed = model is None and crossover is None and profile is None
    source = read_micro_batch(lengths, context, seed)
    _check_room(int(source.lengths.sum()), cp, max_tokens_per_shard)
    workload, priced_by = choose_workload(
        model=DEFAULT_MODEL if assumed else model,
        crossover=crossover,
        profile=profile,
        hardware=hardware,
        gradient_checkpointing=gradient_checkpointing,
    )
    if assumed:
        priced_by += ", an assumption (--model or --profile say better)"
    analysis = analyze_shards(
        source.lengths, workload, cp, max_tokens_per_shard=max_tokens_per_shard, max_token_skew=max_token_skew
    )
    console = Console()
    for part in shard_tables(analysis, source.description, priced_by):
        console.print(part)
    if json_file is not None:
        write_json(json_file, {"source": source.description, "workload": priced_by, **analysis.to_dict()})
    if png is not None:
        _draw(analysis, png)


def _check_room(tokens: int, cp: int, max_tokens_per_shard: int | None) -> None:
    if max_tokens_per_shard is not None and cp >= 1 and cp * max_tokens_per_shard < tokens:
        raise ValueError(
            f"A micro-batch of {tokens:,} tokens does not fit {cp} ranks of at most {max_tokens_per_shard:,} tokens "
            "each. Raise --max-tokens-per-shard or --cp, or give a shorter micro-batch (--lengths, --context)."
        )


def _draw(analysis: ShardAnalysis, path: Path) -> None:
    from hf_wlb.plots import ShardPanel, plot_shard_plans

    scale, unit = work_unit(analysis)
    panels = [
        ShardPanel(title, result_text, result.plan, work_in_unit(result, scale))
        for title, result_text, result in strategy_headings(analysis)
    ]
    plot_shard_plans(
        panels,
        path,
        ideal=analysis.ideal * scale,
        unit=unit,
        title=f"Who holds what of one micro-batch: {analysis.summary}",
    )
