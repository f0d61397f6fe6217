"""How the convergence benchmark is shown: the RESULT line, the table of docs/results.md, the picture. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from readme_table import between_marks

BEGIN, END = "<!-- convergence-table:begin -->", "<!-- convergence-table:end -->"
PLAIN, DEFAULT, PAPER = "sequential", "steady", "wlb"
LAST_SHARE = 0.1  # of the tokens, that the final training loss is a mean over
POINTS = 120  # of a smoothed curve, each the mean over as many tokens
ALLOWED = 0.005

#: What the results hold, in words; in the JSON file too.
COLUMNS = {
    "loss": "a value a step: the mean loss over its tokens",
    "tokens": "a value a step: tokens trained in it",
    "evaluations": "steps done, tokens trained by then, mean loss over the tokens of the held-out documents, which are "
    "packed in the same way for all runs; the base's are the first of them, split at its own longest document",
    "copying": "steps done, tokens trained by then, mean loss on strings of random tokens, and on their repetitions "
    "right behind them (the copy loss): a model that copies any string from its context knows these",
    "base": "the run whose weights all others start from, with the settings that it had; null for runs from scratch",
    "packing": "the run's PackingReport, steps after the end of the data left out: delay is in steps a token, "
    "token_variation the standard deviation of the tokens per step over their mean",
    "delayed_share": "of the tokens trained, those whose document waited for at least one step",
    "convergence_diff": "how far the held-out loss at the end is from that of the sequential run, as a share of it; "
    "convergence_change: the same with its sign, negative where it is lower",
    "noise": "the same for two further sequential runs, the larger one: with the documents in other orders where all "
    "start from a base, else from other initial weights",
    "copy_loss": "of the base and of the sequential run at their ends",
}

#: What is the same for all runs, by where it goes.
_REPEATED = ("schema", "settings", "fingerprint", "base")

Figures = NDArray[np.float64]


def without_repetition(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's file without what the results say once for all runs."""
    return {name: value for name, value in run.items() if name not in _REPEATED}


def json_text(results: Mapping[str, Any]) -> str:
    """The results as JSON, a line for every run, the base and every other part.

    >>> print(json_text({"schema": "1", "runs": {"a": {"loss": [1.0]}}}))
    {
     "schema": "1",
     "runs": {
      "a": {"loss": [1.0]}
     }
    }
    """
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in results.get("runs", {}).items())
    parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in results.items() if name != "runs"]
    return "{\n" + ",\n".join([*parts, ' "runs": {\n' + runs + "\n }"]) + "\n}"


# ---- figures ----


def held_out_loss(run: Mapping[str, Any]) -> float:
    """At the end."""
    return float(run["evaluations"][-1][2])


def training_loss(run: Mapping[str, Any]) -> float:
    """Mean over the last tenth of the tokens trained."""
    tokens, losses = np.array(run["tokens"], dtype=float), np.array(run["loss"], dtype=float)
    last = np.cumsum(tokens) > (1 - LAST_SHARE) * tokens.sum()
    return float(np.average(losses[last], weights=tokens[last]))


def copy_losses(run: Mapping[str, Any]) -> tuple[float, float]:
    """(Loss on random strings, on their repetitions), at the end."""
    first, again = run["copying"][-1][2:]
    return float(first), float(again)


def is_noise(name: str) -> bool:
    """Whether a run is a plain one from other initial weights, or with the documents in another order."""
    return name.startswith(f"{PLAIN}, ")


def difference(runs: Mapping[str, Any], name: str, loss: Any = held_out_loss) -> float | None:
    """A run's loss over that of the plain run, minus 1; None where one of them is not there."""
    if name not in runs or PLAIN not in runs:
        return None
    return float(loss(runs[name]) / loss(runs[PLAIN]) - 1)


def noise(runs: Mapping[str, Any], loss: Any = held_out_loss) -> float | None:
    """The largest difference, either way, of the further plain runs; None without any."""
    found = [abs(value) for name in runs if is_noise(name) and (value := difference(runs, name, loss)) is not None]
    return max(found, default=None)


def noise_words(results: Mapping[str, Any]) -> str:
    """How far the further plain runs are from the first, at the end and before; "" without any.

    The end alone says too little: runs that were percents apart may meet there.
    """
    runs = results["runs"]
    largest = noise(runs)
    if largest is None:
        return ""
    names = [name for name in runs if is_noise(name)]
    before = max(float(np.abs(differences(runs, name)[1]).max()) / 100 for name in names)
    other = "other initial weights" if results.get("base") is None else "the documents in other orders"
    what = f"{len(names)} sequential run{'s' * (len(names) > 1)} with {other}"
    return f"{what}: up to {largest:.2%} off the first at the end, up to {before:.1%} on the way"


def is_complete(results: Mapping[str, Any]) -> bool:
    """Whether the table can be made: the plain run and one to compare it with are there."""
    return PLAIN in results["runs"] and any(name in results["runs"] for name in (DEFAULT, PAPER))


def result(results: Mapping[str, Any]) -> dict[str, Any]:
    """The RESULT line; None for what is not there yet."""
    runs = results["runs"]

    def change(name: str, loss: Any = held_out_loss) -> float | None:
        found = difference(runs, name, loss)
        return None if found is None else round(found, 6)

    def apart(name: str, loss: Any = held_out_loss) -> float | None:
        found = change(name, loss)
        return None if found is None else abs(found)

    def packing(name: str, figure: str) -> float | None:
        return runs[name]["packing"][figure] if name in runs else None

    largest, largest_training = noise(runs), noise(runs, training_loss)
    found: dict[str, Any] = {
        "convergence_diff": apart(DEFAULT),
        "convergence_diff_wlb": apart(PAPER),
        "convergence_change": change(DEFAULT),
        "convergence_change_wlb": change(PAPER),
        "noise": None if largest is None else round(largest, 6),
        "convergence_diff_training": apart(DEFAULT, training_loss),
        "convergence_diff_training_wlb": apart(PAPER, training_loss),
        "noise_training": None if largest_training is None else round(largest_training, 6),
    }
    for label, name in (("", DEFAULT), ("_wlb", PAPER)):
        found |= {
            f"delay_mean{label}": packing(name, "delay"),
            f"delay_worst{label}": packing(name, "delay_worst"),
            f"delayed_share{label}": runs[name]["delayed_share"] if name in runs else None,
            f"token_variation{label}": packing(name, "token_variation"),
            f"imbalance{label}": packing(name, "imbalance"),
        }
    return {
        **found,
        "token_variation_sequential": packing(PLAIN, "token_variation"),
        "imbalance_sequential": packing(PLAIN, "imbalance"),
        "steps": len(runs[PLAIN]["loss"]) if PLAIN in runs else None,
        "tokens": sum(runs[PLAIN]["tokens"]) if PLAIN in runs else None,
        "loss_sequential": round(held_out_loss(runs[PLAIN]), 5) if PLAIN in runs else None,
        "loss_start": start_loss(runs[PLAIN]) if PLAIN in runs else None,
        "copy_loss_sequential": copy_losses(runs[PLAIN])[1] if PLAIN in runs else None,
        **_of_base(results.get("base")),
        "runs": len(runs),
    }


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """What README says: ``changes`` of the held-out loss at the end by packer, and in words what may be chance."""
    runs = results["runs"]
    changes = {name: value for name in (DEFAULT, PAPER) if (value := difference(runs, name)) is not None}
    device = next(iter(runs.values()))["device"] if runs else ""
    return {"changes": changes, "noise": noise_words(results), "on": f"1 x {device} a run"}


def start_loss(run: Mapping[str, Any]) -> float | None:
    """Held-out loss of the weights that a run starts from, split as for the run; None where it is not known."""
    return next((round(float(loss), 5) for step, _, loss in run["evaluations"] if not step), None)


def _of_base(base: Mapping[str, Any] | None) -> dict[str, Any]:
    names = ("base_steps", "base_tokens", "loss_base", "copy_loss_base", "copy_loss_base_string")
    if base is None:
        return dict.fromkeys(names)
    string, again = copy_losses(base)
    figures = (len(base["loss"]), sum(base["tokens"]), round(held_out_loss(base), 5), again, string)
    return dict(zip(names, figures, strict=True))


def smoothed(run: Mapping[str, Any], points: int = POINTS) -> list[tuple[float, float]]:
    """(tokens trained, mean loss over the tokens around), of so many parts of about as many tokens.

    >>> smoothed({"tokens": [10, 10, 10, 10], "loss": [4.0, 2.0, 2.0, 1.0]}, points=2)
    [(20.0, 3.0), (40.0, 1.5)]
    """
    tokens, losses = np.array(run["tokens"], dtype=float), np.array(run["loss"], dtype=float)
    ends = np.cumsum(tokens)
    part = np.minimum(((ends - tokens / 2) / ends[-1] * points).astype(int), points - 1)
    return [
        (float(ends[part == number].max()), float(np.average(losses[part == number], weights=tokens[part == number])))
        for number in range(points)
        if (part == number).any()
    ]


def differences(runs: Mapping[str, Any], name: str) -> tuple[Figures, Figures]:
    """(tokens, held-out loss over the plain run's at as many tokens, minus 1, in percent), at every evaluation.

    Between its own evaluations the plain run's loss is taken to change as a straight line over the logarithm of tokens.
    Evaluations before the first step are left out: the weights are the same.
    """
    own, plain = (np.array([row for row in runs[run]["evaluations"] if row[1]], dtype=float) for run in (name, PLAIN))
    expected = np.interp(np.log(own[:, 1]), np.log(plain[:, 1]), plain[:, 2])
    return own[:, 1], 100 * (own[:, 2] / expected - 1)


# ---- shown ----


def count_text(count: float) -> str:
    """A number of tokens or parameters: in full below a million.

    >>> [count_text(count) for count in (512, 40_960, 999_999, 49_152_000, 2_345_000_000)]
    ['512', '40,960', '999,999', '49.2M', '2,345.0M']
    """
    return f"{count:,.0f}" if count < 1e6 else f"{count / 1e6:,.1f}M"


def apart_text(value: float) -> str:
    """A difference as a share, in words.

    >>> [apart_text(value) for value in (-0.0022, 0.01, 0.00001)]
    ['0.22% below', '1.00% above', 'level with']
    """
    shown = f"{abs(value):.2%}"
    if shown == "0.00%":
        return "level with"
    return f"{shown} {'below' if value < 0 else 'above'}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2%}"


def _row(name: str, runs: Mapping[str, Any]) -> str:
    run = runs[name]
    packing = run["packing"]
    other = name != PLAIN
    cells = (
        name,
        f"{len(run['loss']):,}",
        count_text(sum(run["tokens"])),
        f"{packing['delay']:.2f}",
        f"{packing['delay_worst']:.0f}",
        f"{run['delayed_share']:.0%}",
        f"{packing['token_variation']:.1%}",
        f"{packing['imbalance']:.2f}",
        f"{training_loss(run):.4f}",
        f"{held_out_loss(run):.4f}",
        _signed(difference(runs, name)) if other else "",
    )
    return f"| {' | '.join(cells)} |"


def results_table(results: Mapping[str, Any]) -> str:
    """The table of docs/results.md and what it says.

    Raises:
        ValueError: If the plain run, or any to compare it with, is not there.
    """
    runs, settings, texts, about = (results[part] for part in ("runs", "settings", "documents", "environment"))
    if not is_complete(results):
        raise ValueError(f"The results hold no run {PLAIN!r} with another to compare: run the benchmark first.")
    machine = runs[PLAIN]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "| run | steps | tokens | mean delay, steps | longest | tokens delayed | tokens per step, variation | "
        "imbalance | training loss, last 10% | held-out loss | against sequential |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(name, runs) for name in runs),
        "",
        f"A Llama of {count_text(machine['parameters'])} parameters, one pass over {texts['documents']:,} Python "
        f"source files ({count_text(texts['tokens'])} tokens of a byte-level BPE of {settings['vocabulary']:,}; median "
        f"file {texts['median']:,} tokens, longest {texts['longest']:,}: lengths of files have a long tail by nature), "
        f"{texts['held_out'][0]:,} other files held out. {settings['micro_batches']} micro-batches a step of "
        f"{settings['context_length']:,} tokens on average, longer files split; packed as for {settings['pp_size']} "
        f"pipeline stages, with attention as costly as the rest at {settings['crossover']:,.0f} tokens, so that a "
        "document of a whole micro-batch weighs as much as one of 128K tokens does in a 7B model. Sequential packing "
        f"fills micro-batches of up to {texts['sequential_context']:,} tokens, which gives the same "
        "tokens a step. All runs train the same documents once, with the same learning rate over the run (at most "
        f"{settings['learning_rate']:g}).",
        "",
        *([] if results.get("base") is None else [_of_start(results), ""]),
        _verdict(results),
        "",
        "![Loss curves over each other, and held-out losses against sequential](../recipes/benchmarks/results/"
        "convergence.png)",
        "",
        f"{machine['device']}, attention kernel `{machine['attention_kernel']}`. {versions}; {about['date']}, commit "
        f"{about['commit']}; `{about['command']}`.",
    ]
    return "\n".join(lines)


def _of_start(results: Mapping[str, Any]) -> str:
    """What all runs start from, and how well it and they copy."""
    runs, base = results["runs"], results["base"]
    settings, (string, again) = base["settings"], copy_losses(base)
    files = results["documents"]["base"][0]
    curve = ", ".join(f"{loss:.2f} ({count_text(tokens)})" for _, tokens, loss in base["evaluations"])
    start = start_loss(runs[PLAIN])
    last = round(held_out_loss(base), 4)
    known = start is None or round(start, 4) == last  # the same documents, split alike
    longer = "" if known else f" Of all of them, as long as runs have them, it is {start:.4f} before the first step."
    part = "" if known and start is not None else ", of a part of the documents held out"
    ends = sorted(copy_losses(run)[1] for run in runs.values())
    ended = f"{ends[0]:.2f}" if f"{ends[0]:.2f}" == f"{ends[-1]:.2f}" else f"{ends[0]:.2f} to {ends[-1]:.2f}"
    return (
        f"All runs start from the same weights, with optimizers of their own: a base of {len(base['loss']):,} steps "
        f"from scratch over {files:,} other files ({count_text(sum(base['tokens']))} tokens, about "
        f"{settings['base_tokens_per_step']:,} a step, documents of up to {settings['base_context_length']:,}, "
        f"learning rate at most {settings['base_learning_rate']:g}). Its held-out loss by tokens trained{part}: "
        f"{curve}.{longer} "
        f"Copy loss, on the repetition of a string of random tokens: {again:.2f} at the base's end, where the string "
        f"itself has {string:.2f}; {ended} at the ends of the runs."
    )


def _verdict(results: Mapping[str, Any]) -> str:
    runs = results["runs"]
    found = [(name, value) for name in (DEFAULT, PAPER) if (value := difference(runs, name)) is not None]
    shown = " and ".join(f"`{name}` {apart_text(value)}" for name, value in found)
    against = f"; {words}" if (words := noise_words(results)) else ""
    beyond = [
        f"`{name}` is {'worse' if value > 0 else 'better'} by more" for name, value in found if abs(value) > ALLOWED
    ]
    verdict = f"the aim is at most {ALLOWED:.1%} either way, {' and '.join(beyond) or 'which is kept'}"
    return f"The held-out loss at the end: {shown} that of sequential packing; {verdict}{against}."


def with_table(page: str, table: str) -> str:
    """The text of docs/results.md with another table."""
    return between_marks(page, table, BEGIN, END)


def draw(results: Mapping[str, Any], png: str | Path) -> Path:
    """Draws the loss curves over each other, and how far held-out losses are from those of the plain run.

    Raises:
        ValueError: If the plain run, or any to compare it with, is not there.
    """
    from hf_wlb.plots.style import GREY, INK, new_figure, packer_colours, save

    runs = results["runs"]
    if not is_complete(results):
        raise ValueError(f"The results hold no run {PLAIN!r} with another to compare: run the benchmark first.")
    names = [name for name in (PLAIN, PAPER, DEFAULT) if name in runs]
    colours = packer_colours(names)
    figure, (left, right) = new_figure(10.6, 4.8, 2, "The same documents, in order and delayed: what a model learns")
    begins = _begin(results)
    trained = max(sum(run["tokens"]) for run in runs.values())
    unit, word = (1e6, "millions") if trained >= 1e6 else (1e3, "thousands")
    since = " since the runs part" if begins else ""
    for axes, most, what in ((left, begins + trained, ""), (right, trained, since)):
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
        axes.set_xlabel(f"tokens trained{what}, {word}", fontsize=10.5)
        axes.set_xlim(0, 1.02 * most / unit)  # losses are evaluated later than trained
    _draw_losses(left, results, names, colours, unit)
    right.axhline(0, color=colours[PLAIN], linewidth=1.9, label=PLAIN, zorder=2)
    seeds = [name for name in runs if is_noise(name)]
    if seeds:
        _draw_noise(right, [differences(runs, name) for name in seeds], unit, f"{PLAIN}, {_short(results)}")
    for name in names[1:]:
        tokens, values = differences(runs, name)
        right.plot(tokens / unit, values, "o-", color=colours[name], linewidth=1.9, ms=4, label=name, zorder=3)
    for limit in (-100 * ALLOWED, 100 * ALLOWED):
        right.axhline(limit, color=GREY, linestyle="--", linewidth=1.0, zorder=1)
    right.set_ylabel("held-out loss against sequential, %", fontsize=10.5)
    right.set_title(f"Held-out loss; dashed: {ALLOWED:.1%} either way", fontsize=11, color=INK)
    for axes in (left, right):  # below the panels, where no line is covered
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9.5)
    return save(figure, png)


def _begin(results: Mapping[str, Any]) -> int:
    """Tokens that the base trained."""
    return 0 if results.get("base") is None else sum(results["base"]["tokens"])


def _short(results: Mapping[str, Any]) -> str:
    return "other initial weights" if results.get("base") is None else "other orders"


def _draw_losses(
    axes: Any, results: Mapping[str, Any], names: Sequence[str], colours: Mapping[str, str], unit: float
) -> None:
    """Training losses: the base's up to where the runs part, then theirs."""
    from hf_wlb.plots.style import GREY, INK

    runs, begins = results["runs"], _begin(results)
    if begins:
        axes.plot(*_curve(results["base"], unit), color=GREY, linewidth=1.6, label="base, for all runs", zorder=2)
        axes.axvline(begins / unit, color=GREY, linestyle=":", linewidth=1.0, zorder=1)
    for number, name in enumerate(name for name in runs if is_noise(name)):
        label = f"{PLAIN}, {_short(results)}" if number == 0 else None
        axes.plot(*_curve(runs[name], unit, begins), color="#B8B8B8", linewidth=1.2, label=label, zorder=2)
    for name, style in zip(names, ("-", "--", ":"), strict=False):
        delay = runs[name]["packing"]["delay"]
        text = name if name == PLAIN else f"{name}, mean delay {delay:.2f} steps"
        axes.plot(*_curve(runs[name], unit, begins), color=colours[name], ls=style, linewidth=1.9, label=text, zorder=3)
    axes.set_ylabel("training loss", fontsize=10.5)
    axes.set_title("Training loss, smoothed", fontsize=11, color=INK)


def _curve(run: Mapping[str, Any], unit: float, begins: int = 0) -> tuple[list[float], list[float]]:
    points = smoothed(run)
    return [(begins + tokens) / unit for tokens, _ in points], [loss for _, loss in points]


def _draw_noise(axes: Any, found: Sequence[tuple[Figures, Figures]], unit: float, label: str) -> None:
    """A band as wide as the further plain runs are apart from the first, either way."""
    tokens = found[0][0]
    widest = np.max([np.abs(np.interp(tokens, *pair)) for pair in found], axis=0)
    axes.fill_between(tokens / unit, -widest, widest, color="#D8D8D8", linewidth=0, label=label, zorder=0)
