"""Every generated table and picture of README.md and docs/, and the figures as one line, from the committed results.

    python recipes/benchmarks/report.py           # renews them; the last line printed is RESULT and JSON
    python recipes/benchmarks/report.py --check   # writes nothing; exit code 1 if a page shows anything else, or a
                                                  # picture is not there

Nothing is measured or simulated here: what no results are committed for is null in RESULT, and said in a sentence each
before it and on the pages. Pictures have to be there but are not compared: their bytes depend on Matplotlib's version.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import composition_report
import context_parallel_report
import contexts_report
import convergence_report
import end_to_end_report
import measured_report
import packing
import packing_report
import pilot_report
import simulated_paper
import stage_times
import stage_times_report
import trainer_report
from readme_table import REPOSITORY, between_marks, marks
from report_parts import (
    convergence_figures,
    draw_convergence,
    draw_stage_times,
    draw_timelines,
    end_to_end_figures,
    packing_pictures,
    paper_pictures,
    read_sharding,
    read_trainer,
    stage_times_figures,
    stored,
)

from hf_wlb.analysis.simulation_pictures import draw_all

RESULTS = Path("recipes") / "benchmarks" / "results"
README, PAGE = "README.md", "docs/results.md"
SUMMARY, COMPOSITION = "measured-summary", "composition-table"
RENEW = "python recipes/benchmarks/report.py"


@dataclass(frozen=True)
class Benchmark:
    """What is made of one results file.

    Attributes:
        file: In the results folder; it need not be there.
        command: What makes it.
        tables: (page, name of the marks on it, Markdown from the results).
        figures: The benchmark's part of RESULT from the results; None if it has none.
        keys: What RESULT holds in any case, and the options with which the command measures it.
        read: The results from the file's text.
        draw: Renews its pictures in a folder.
        pictures: Names of the pictures that have to be there, from the results.
    """

    file: str
    command: str
    tables: Sequence[tuple[str, str, Callable[[Any], str]]]
    figures: Callable[[Any], Mapping[str, Any]] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], Any] = json.loads
    draw: Callable[[Any, Path], object] | None = None
    pictures: Callable[[Any], Sequence[str]] = lambda found: ()

    @property
    def script(self) -> str:
        """The command's program, without its folder."""
        return next(Path(word).name for word in self.command.split() if word.endswith(".py"))

    def absent(self) -> str:
        """What stands on the pages without results."""
        return f"No `{self.file}`, the results of `{self.script}`, is committed in this version."

    @contextmanager
    def damage_named(self) -> Iterator[None]:
        """Around whatever reads the results: what fails there becomes one sentence.

        Raises:
            ValueError: Names the file and the command that renews it.
        """
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration) as error:
            said = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
            raise ValueError(
                f"{(RESULTS / self.file).as_posix()} is damaged or not what {self.script} writes ({said}): restore it, "
                f"or remove it and renew it with `{self.command}`"
            ) from error

    def read_file(self, file: Path) -> Any:
        """The results.

        Raises:
            ValueError: If it holds none.
        """
        with self.damage_named():
            text = file.read_text(encoding="utf-8")
            if not text.strip():
                raise ValueError("it is empty")
            found = self.read(text)
            if not found:
                raise ValueError("it holds no results")
            return found

    def result(self, found: Any | None) -> dict[str, Any]:
        """Its part of RESULT: figures that are there, and None for those of ``keys`` that are not."""
        figures: Mapping[str, Any] = {}
        if found is not None and self.figures is not None:
            with self.damage_named():
                figures = self.figures(found)
        return {**dict.fromkeys(self.keys), **{key: value for key, value in figures.items() if value is not None}}


END_TO_END, PILOT, STAGE_TIMES = "end_to_end.jsonl", "end_to_end_pilot.jsonl", "stage_times.jsonl"
TRAINER, CONVERGENCE = "trainer.json", "convergence.json"
_SHARDING = "torchrun --nproc_per_node 4 recipes/benchmarks/context_parallel.py --lengths FILE"
_SHARDING_KEYS = (
    *("share_8kv_short", "share_8kv_long", "share_32kv_short", "share_32kv_long", "regret_max", "choice_agreement"),
    *("choice_regret_max", "token_skew", "speedup_over_per_sequence", "speedup_over_per_document", "memory_ratio"),
    *("error_ratio", "memory_ratio_gathered_again", "memory_ratio_kept"),
)
_COMPOSED = {f"composed_speedup_{name}": f"--configurations {name}" for name in stage_times.DEFAULT}
_WHOLE_STEPS = {f"speedup_{label}": options for label, options in measured_report.LAUNCHES.items()}

#: Every results file. A new benchmark has its entry here, and marks on its pages.
BENCHMARKS = (
    Benchmark(
        "packing.json",
        "python recipes/benchmarks/packing.py",
        (
            (README, "packing-summary", packing_report.readme_table),
            (PAGE, "packing-table", packing_report.results_tables),
        ),
        draw=packing.draw,
        pictures=packing_pictures,
    ),
    Benchmark(
        "context_parallel.json",
        _SHARDING,
        (
            (README, "context-parallel-summary", context_parallel_report.readme_table),
            (PAGE, "context-parallel-table", context_parallel_report.results_tables),
            (PAGE, "context-parallel-contexts-table", contexts_report.contexts_table),
        ),
        figures=stored,
        keys=dict.fromkeys(_SHARDING_KEYS, ""),
        read=read_sharding,
    ),
    Benchmark(
        END_TO_END,
        "python recipes/benchmarks/end_to_end.py --lengths FILE",
        (
            (PAGE, "end-to-end-table", end_to_end_report.results_tables),
            (PAGE, "prediction-table", pilot_report.whole_table),
        ),
        figures=end_to_end_figures,
        keys={**_WHOLE_STEPS, **dict.fromkeys(("speedup_vs_concat_cut", "mfu", "planning_share"), "")},
        read=end_to_end_report.read_launches,
        draw=draw_timelines,
    ),
    Benchmark(
        PILOT,
        f"python recipes/benchmarks/end_to_end.py --lengths FILE --output {(RESULTS / PILOT).as_posix()}",
        ((PAGE, "pilot-table", pilot_report.results_table),),
        figures=pilot_report.figures,
        keys=dict.fromkeys(("pilot_planning_share", "prediction_error", "schedule_error"), ""),
        read=pilot_report.read_checks,
    ),
    Benchmark(
        STAGE_TIMES,
        "python recipes/benchmarks/stage_times.py --lengths FILE",
        ((PAGE, "stage-times-table", stage_times_report.results_tables),),
        figures=stage_times_figures,
        keys={**_COMPOSED, **dict.fromkeys(("composed_prediction_error", "composed_ranks_equal"), "")},
        read=stage_times_report.read_launches,
        draw=draw_stage_times,
        pictures=lambda found: ("stage_times.png",),
    ),
    Benchmark(
        TRAINER,
        "python recipes/benchmarks/trainer.py",
        ((PAGE, "trainer-table", trainer_report.results_table),),
        figures=stored,
        keys={"mfu_best": "", "overhead": ""},
        read=read_trainer,
    ),
    Benchmark(
        CONVERGENCE,
        "python recipes/benchmarks/convergence.py",
        ((PAGE, "convergence-table", convergence_report.results_table),),
        figures=convergence_figures,
        keys={"convergence_diff": ""},
        draw=draw_convergence,
        pictures=lambda found: ("convergence.png",),
    ),
    Benchmark(
        "simulated_paper.json",
        "python recipes/benchmarks/simulated_paper.py",
        (
            (README, "paper-summary", simulated_paper.readme_summary),
            (PAGE, "paper-table", simulated_paper.results_tables),
        ),
        draw=draw_all,
        pictures=paper_pictures,
    ),
)


def load(folder: Path) -> dict[str, Any]:
    """The results that are there, by file.

    Raises:
        ValueError: If one is not what its benchmark writes.
    """
    return {
        benchmark.file: benchmark.read_file(folder / benchmark.file)
        for benchmark in BENCHMARKS
        if (folder / benchmark.file).is_file()
    }


def generated(
    results: Mapping[str, Any], compared: Sequence[composition_report.Pair] = ()
) -> dict[str, dict[str, str]]:
    """What belongs between the marks: name of the marks -> Markdown, by page.

    Args:
        results: By file, as ``load`` gives them.
        compared: See ``composition``.
    """
    pages: dict[str, dict[str, str]] = {}
    for benchmark in BENCHMARKS:
        found = results.get(benchmark.file)
        for page, name, table in benchmark.tables:
            with benchmark.damage_named():
                pages.setdefault(page, {})[name] = benchmark.absent() if found is None else table(found)
    pages.setdefault(PAGE, {})[COMPOSITION] = composition_report.table(compared)
    pages.setdefault(README, {})[SUMMARY] = summary(results, compared)
    return pages


def composition(results: Mapping[str, Any]) -> list[composition_report.Pair]:
    """The steps that were measured whole and in parts, of several benchmarks."""
    with _of(PILOT).damage_named():
        whole = [launch for launch, _ in results.get(PILOT, ())]
    with _of(END_TO_END).damage_named():
        whole += pilot_report.with_documents(results.get(END_TO_END, ()))
    with _of(STAGE_TIMES).damage_named():
        return composition_report.pairs(whole, results.get(STAGE_TIMES, ()))


def _of(file: str) -> Benchmark:
    return next(one for one in BENCHMARKS if one.file == file)


def summary(results: Mapping[str, Any], compared: Sequence[composition_report.Pair] = ()) -> str:
    """README's part on whole training steps, of several benchmarks.

    Args:
        results: By file, as ``load`` gives them.
        compared: See ``composition``.
    """
    convergence = results.get(CONVERGENCE)
    figures = None
    if convergence is not None:
        with _of(CONVERGENCE).damage_named():
            figures = convergence_report.summary(convergence)
    composed = results.get(STAGE_TIMES)
    with _of(STAGE_TIMES).damage_named():
        stages = measured_report.WlbSteps.of(composed or ())
        rows, planned = measured_report.composed_rows(stages), measured_report.composed_planning_rows(stages)
    return measured_report.summary(
        results.get(END_TO_END),
        results.get(TRAINER),
        figures,
        rows,
        planned,
        composition_report.sentence(compared),
    )


def page_text(root: Path, page: str) -> str:
    """The text of a page.

    Raises:
        ValueError: If it is not there.
    """
    file = root / page
    if not file.is_file():
        raise ValueError(f"{page} is missing: restore it, for only what stands between its marks is generated")
    return file.read_text(encoding="utf-8")


def renewed(text: str, tables: Mapping[str, str], page: str) -> str:
    """A page's text with its tables as they belong there.

    Raises:
        ValueError: If the page lacks marks, or has some that nothing is generated for.
    """
    unknown = set(re.findall(r"<!-- (\S+):begin -->", text)) - set(tables)
    if unknown:
        raise ValueError(f"{page} has marks that nothing is generated for: {', '.join(sorted(unknown))}")
    for name, table in tables.items():
        text = between_marks(text, table, *marks(name), page)
    return text


def differences(root: Path, tables_of: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The tables that are not what the committed results give: a sentence for every page with any.

    Args:
        root: The repository's folder.
        tables_of: By page, as ``generated`` gives them.
    """
    sentences = []
    for page, tables in tables_of.items():
        text = page_text(root, page)
        if renewed(text, tables, page) != text:
            wrong = [name for name, table in tables.items() if between_marks(text, table, *marks(name), page) != text]
            sentences.append(f"{page} differs from {RESULTS.as_posix()} in {', '.join(wrong)}: run {RENEW}")
    return sentences


def missing_pictures(root: Path, results: Mapping[str, Any]) -> list[str]:
    """A sentence for every picture that results are there for and that is not.

    Args:
        root: The repository's folder.
        results: By file, as ``load`` gives them.
    """
    sentences = []
    for file, found in results.items():
        benchmark = _of(file)
        with benchmark.damage_named():
            pictures = benchmark.pictures(found)
        sentences += [
            f"{(RESULTS / picture).as_posix()}, drawn from {file}, is missing: run {RENEW}"
            for picture in pictures
            if not (root / RESULTS / picture).is_file()
        ]
    return sentences


def renew(root: Path, results: Mapping[str, Any], tables_of: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Writes pages and pictures; returns the pages that changed.

    Args:
        root: The repository's folder.
        results: By file, as ``load`` gives them.
        tables_of: By page, as ``generated`` gives them.
    """
    texts = {page: page_text(root, page) for page in (README, PAGE)}
    pages = {page: renewed(texts[page], tables, page) for page, tables in tables_of.items()}
    for page, text in pages.items():
        (root / page).write_text(text, encoding="utf-8")
    for benchmark in BENCHMARKS:
        if benchmark.draw is not None and benchmark.file in results:
            with benchmark.damage_named():
                benchmark.draw(results[benchmark.file], root / RESULTS)
    return [page for page, text in pages.items() if text != texts[page]]


def result(results: Mapping[str, Any], compared: Sequence[composition_report.Pair] = ()) -> dict[str, Any]:
    """The RESULT line.

    Args:
        results: By file, as ``load`` gives them.
        compared: See ``composition``.

    Raises:
        ValueError: If two benchmarks call a figure the same.
    """
    line: dict[str, Any] = {}
    for benchmark in BENCHMARKS:
        part = benchmark.result(results.get(benchmark.file))
        twice = sorted(set(part) & set(line))
        if twice:
            raise ValueError(f"{benchmark.file} and another results file both have {', '.join(twice)}: rename one")
        line |= part
    return line | composition_report.figures(compared)


def not_measured(line: Mapping[str, Any]) -> list[str]:
    """A sentence for every figure that is not there."""
    return [
        f"not measured: {key}; `{' '.join([benchmark.command, *options.split()])}` measures it"
        for benchmark in BENCHMARKS
        for key, options in benchmark.keys.items()
        if line[key] is None
    ]


def main(given: Sequence[str] | None = None, root: Path = REPOSITORY) -> int:
    """Renews or checks; 1 if a page differs or a picture is missing, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if a page differs or a picture is missing"
    )
    options = parser.parse_args(given)
    try:
        results = load(root / RESULTS)
        compared = composition(results)
        tables_of = generated(results, compared)
        if options.check:
            found = [*differences(root, tables_of), *missing_pictures(root, results)]
        else:
            found = [f"renewed: {page}" for page in renew(root, results, tables_of)]
        line = result(results, compared)
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*found, *not_measured(line)]))
    print("RESULT", json.dumps(line), flush=True)
    return int(options.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
