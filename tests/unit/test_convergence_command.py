"""The convergence benchmark's settings, files, documents and command, without training."""

import os
import signal
import sys
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from hf_wlb.lengths import RandomOrder
from hf_wlb.packing import ArraySource, PackingConfig, StepPlanner, measure
from tests.support.source_tree import REPOSITORY


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "recipes" / "benchmarks"))
    import convergence
    import convergence_cases
    import convergence_documents
    import convergence_processes

    return SimpleNamespace(
        main=convergence,
        cases=convergence_cases,
        documents=convergence_documents,
        processes=convergence_processes,
    )


# ---- settings, files ----


def test_settings_that_cannot_be_are_refused(modules) -> None:
    with pytest.raises(ValueError, match="lower --warmup"):
        modules.cases.Settings(steps=100)
    with pytest.raises(ValueError, match="evaluations must be at least 1, got 0"):
        modules.cases.Settings(evaluations=0)
    with pytest.raises(ValueError, match="base_steps must be at least 1, or 0 for runs from scratch, got -1"):
        modules.cases.Settings(base_steps=-1)
    with pytest.raises(ValueError, match=r"leaves none of 50 \(base_steps\)"):
        modules.cases.Settings(base_steps=50)
    with pytest.raises(ValueError, match=r"base_context_length must be 4 to 8192, .* got 9000"):
        modules.cases.Settings(base_context_length=9_000)
    assert modules.cases.Settings(base_steps=0, base_context_length=9_000).shortest_context == 8_192


def test_layers_are_compiled_on_the_gpu_alone_unless_that_is_given(modules) -> None:
    def compiled(*words):
        return modules.main.settings_of(modules.main.arguments(words)).compiled

    assert compiled() and not compiled("--use-cpu") and not compiled("--quick")
    assert compiled("--use-cpu", "--compiled", "true") and not compiled("--compiled", "False")
    with pytest.raises(SystemExit):
        compiled("--compiled", "perhaps")


def test_an_unknown_run_is_refused(modules) -> None:
    cases = modules.cases
    chosen, scratch = cases.chosen_runs, cases.Settings(base_steps=0)
    assert [run.name for run in chosen([], cases.Settings())][:3] == ["sequential", "steady", "wlb"]
    assert [run.order_offset for run in chosen(["wlb", "sequential, order 2"], cases.Settings())] == [0, 2]
    assert [run.seed_offset for run in chosen(["wlb", "sequential, seed 2"], scratch)] == [0, 2]
    assert chosen(["base"], cases.Settings()) == []
    with pytest.raises(ValueError, match="There is no run 'greedy'; there are base; sequential; steady"):
        chosen(["greedy"], cases.Settings())
    with pytest.raises(ValueError, match="There is no run 'base'; there are sequential; steady; wlb; sequential, seed"):
        chosen(["base"], scratch)


def test_files_of_other_settings_or_documents_are_refused(modules, tmp_path) -> None:
    cases = modules.cases
    settings, file = cases.QUICK, tmp_path / "steady.json"
    cases.write_json(file, {"schema": cases.SCHEMA, "settings": asdict(settings), "fingerprint": "a"})
    assert cases.read_json(file, settings, "a")["fingerprint"] == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["steady.json"]
    with pytest.raises(ValueError, match=r"other settings: steps 20 there, 30 now\. Remove it .* another --folder"):
        cases.read_json(file, replace(settings, steps=30), "a")
    with pytest.raises(ValueError, match="trained other documents"):
        cases.read_json(file, settings, "b")
    assert cases.read_json(file, replace(settings, steps=30))  # documents for other steps may suffice
    with pytest.raises(ValueError, match=r"vocabulary 512 there, 600 now.*another --documents"):
        cases.read_json(file, replace(settings, vocabulary=600))
    with pytest.raises(ValueError, match="started from other weights"):
        cases.read_json(file, settings, "a", "weights")
    file.write_text('{"schema": "something else"}')
    with pytest.raises(ValueError, match="not a file of this benchmark's version"):
        cases.read_json(file, settings, "a")
    file.write_text(file.read_text()[:9])
    with pytest.raises(ValueError, match="cannot be read"):
        cases.read_json(file, settings, "a")


def test_a_base_goes_with_runs_of_other_lengths_and_learning_rates(modules, tmp_path) -> None:
    cases = modules.cases
    settings, file = cases.QUICK, tmp_path / "base.json"
    found = {"schema": cases.SCHEMA, "settings": asdict(settings), "fingerprint": "a", "run": asdict(cases.BASE)}
    cases.write_json(file, found)
    assert cases.read_json(file, replace(settings, steps=30, learning_rate=1e-4, compiled=True), "a")
    with pytest.raises(ValueError, match=r"other settings: base_learning_rate 0.003 there, 0.001 now"):
        cases.read_json(file, replace(settings, base_learning_rate=1e-3), "a")
    with pytest.raises(ValueError, match="trained other documents"):
        cases.read_json(file, settings, "b")


# ---- documents ----


def test_documents_come_back_as_they_were_written(modules, tmp_path) -> None:
    written = [np.arange(n, dtype=np.uint16) + n for n in (3, 1, 5)]
    assert modules.documents.Documents.save(written, tmp_path / "new") == 9
    read = modules.documents.Documents(tmp_path / "new")
    assert len(read) == 3 and [row["length"] for row in read] == [3, 1, 5]
    assert all((row["input_ids"] == document).all() for row, document in zip(read, written, strict=True))
    part = modules.documents.Documents(tmp_path / "new", 1, 4)
    assert [row["input_ids"].tolist() for row in part] == [[1], [5, 6, 7]] and part.place == [1, 4]
    assert len(modules.documents.Documents(tmp_path / "new", 1, 1)) == 1
    assert len(modules.documents.Documents(tmp_path / "new", 3, 5)) == 0
    assert modules.documents.Documents(tmp_path / "new", 2, 99).tokens == 5


def made_up_pool(modules, folder, tokens, seed=1):
    """Documents of random lengths, each of one token of its own, and what is known of them."""
    lengths = np.maximum(np.random.default_rng(seed).lognormal(4.0, 1.0, 4_000), 1).astype(np.int64)
    rows = int(np.searchsorted(np.cumsum(lengths), tokens)) + 1
    written = [np.full(length, row, dtype=np.uint16) for row, length in enumerate(lengths[:rows])]
    return {"tokens": modules.documents.Documents.save(written, folder), "all_taken": False}


def test_no_document_is_in_two_parts_and_the_base_does_not_depend_on_the_runs(modules, tmp_path) -> None:
    settings = modules.cases.QUICK
    pool = made_up_pool(modules, tmp_path, settings.tokens_needed + 20_000)
    about = modules.documents.chosen_documents(tmp_path, pool, settings)
    assert (about["tokens"], about["base"][1], about["held_out"][1]) == (20 * 2_048, 12 * 512, 4_000)
    parts = {
        name: {int(row["input_ids"][0]) for row in modules.documents.Documents(tmp_path, *place)}
        for name, place in about["places"].items()
    }
    assert parts.pop("held_out_of_base") < parts["held_out"] and about["places"]["held_out_of_base"] == [0, 2_000]
    assert all(parts.values()) and len(set.union(*parts.values())) == sum(map(len, parts.values()))
    fewer = modules.documents.chosen_documents(tmp_path, pool, replace(settings, steps=15))
    assert fewer["base_fingerprint"] == about["base_fingerprint"] and fewer["fingerprint"] != about["fingerprint"]
    scratch = modules.documents.chosen_documents(tmp_path, pool, replace(settings, base_steps=0))
    assert scratch["base"] == [0, 0] and "base_context" not in scratch


def test_too_few_documents_are_refused_unless_there_is_no_more_text(modules, tmp_path) -> None:
    settings = modules.cases.QUICK
    pool = made_up_pool(modules, tmp_path, settings.tokens_needed)
    longer = replace(settings, steps=40)
    with pytest.raises(ValueError, match="too few for these settings, and there is more text: remove it"):
        modules.documents.chosen_documents(tmp_path, pool, longer)
    pool["all_taken"] = True
    assert 18 <= modules.documents.chosen_documents(tmp_path, pool, longer)["steps"] <= 20
    with pytest.raises(ValueError, match=r"the warm-up alone takes 25\. Name folders with more text"):
        modules.documents.chosen_documents(tmp_path, pool, replace(longer, warmup=25, base_steps=30))


def test_the_base_and_the_runs_make_about_the_steps_that_were_asked_for(modules, tmp_path) -> None:
    settings = replace(modules.cases.QUICK, base_steps=60, steps=40)
    about = modules.documents.chosen_documents(
        tmp_path, made_up_pool(modules, tmp_path, settings.tokens_needed + 9_000), settings
    )
    base = modules.documents.Documents(tmp_path, *about["places"]["base"])

    def steps(context):
        config = PackingConfig(context, 1, packer="next-fit", max_document_tokens=256)
        order = RandomOrder(len(base), settings.seed, 0)
        return sum(1 for _ in StepPlanner(ArraySource(base.lengths, order), settings.workload, config))

    assert 57 <= steps(about["base_context"]) <= 60 < 62 <= steps(512)


def test_strings_to_be_copied_have_the_same_targets_twice(modules) -> None:
    found = modules.documents.copied_strings(modules.cases.Settings())
    assert [len(strings) for strings in found.values()] == [8, 8]
    for first, second in zip(found["copy_first"], found["copy_second"], strict=True):
        assert (first["input_ids"] == second["input_ids"]).all() and len(first["input_ids"]) == 1_024
        learned = [strings["labels"][strings["labels"] != -100] for strings in (first, second)]
        assert len(learned[0]) == 511 and (learned[0] == learned[1]).all()
        assert (first["labels"][512:] == -100).all() and (second["labels"][:513] == -100).all()
    short = modules.documents.copied_strings(modules.cases.Settings(base_steps=0, context_length=64))
    assert len(short["copy_first"][0]["input_ids"]) == 64


def test_sequential_packing_gets_room_for_as_many_tokens_a_step(modules) -> None:
    settings = replace(modules.cases.Settings(base_steps=0), context_length=512, crossover=96.0)
    lengths = np.maximum(np.random.default_rng(1).lognormal(4.5, 1.5, 4_000), 1).astype(np.int64)
    steps = int(lengths.sum()) // settings.tokens_per_step

    def tokens_per_step(packer, context):
        config = PackingConfig(context, settings.micro_batches, packer=packer, pp_size=4, max_document_tokens=512)
        order = RandomOrder(len(lengths), settings.seed, 0)
        return measure(StepPlanner(ArraySource(lengths, order), settings.workload, config))

    context = modules.documents.matched_context(lengths, settings, steps)
    matched, steady = tokens_per_step("next-fit", context), tokens_per_step("steady", 512)
    assert matched.tokens_per_step == pytest.approx(steady.tokens_per_step, rel=0.01)
    assert tokens_per_step("next-fit", 512).tokens_per_step < 0.97 * steady.tokens_per_step
    assert matched.delay == 0 and steady.delay > 0 and tokens_per_step("wlb", 512).delay > 0


# ---- the command ----


def test_the_shown_command_says_file_for_files_and_folder_for_folders(modules) -> None:
    given = ["--text", "/a/b", "c", "--output", "/d/e.json", "--folder=/f/g", "--doc", "h/i", "--out=x/y", "--quick"]
    shown = "--text FOLDER c --output FILE --folder=FOLDER --doc FOLDER --out=FILE --quick"
    assert " ".join(modules.main.shown_words(given)) == shown
    assert modules.main.shown_words(["--commit", "fix/it", "--use-cpu"]) == ["--commit", "fix/it", "--use-cpu"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_are_a_sentence_and_end_the_runs(
    modules, tmp_path, monkeypatch, capsys, number, code
) -> None:
    main, processes = modules.main, modules.processes
    script = tmp_path / "endless.py"
    script.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1] + '.on').touch()\ntime.sleep(60)\n")
    monkeypatch.setattr(processes, "RUN", script)
    about = {"fingerprint": "x", "base_fingerprint": "y", "steps": 20, "tokens": 1}
    monkeypatch.setattr(main, "documents", lambda *given: about)
    monkeypatch.setattr(main, "environment", lambda *given: {"commit": "abc"})
    started = []
    start = processes.start
    monkeypatch.setattr(processes, "start", lambda *given: started.append(start(*given)) or started[-1])
    folder = tmp_path / "runs"

    def interrupt() -> None:
        for _ in range(600):
            if len(list(folder.glob("*.on"))) == 2:
                break
            threading.Event().wait(0.05)
        os.kill(os.getpid(), number)

    words = ["--quick", "--use-cpu", "--gpus", "2", "--base_steps", "0", "--folder", str(folder)]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words])
    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
    handler = signal.getsignal(signal.SIGTERM)
    try:
        thread.start()
        assert main.main(words) == code
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) == handler
    printed = capsys.readouterr()
    assert printed.err == "interrupted; the same command goes on\n" and "RESULT" not in printed.out
    assert len(started) == 2 and all(one.process.returncode == -signal.SIGTERM for one in started)


def test_sigterm_ends_forked_processes_as_always(modules) -> None:
    with modules.processes.sigterm_interrupts():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3)  # not reached: Terminated would be an exception of its own in the child
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_documents_that_would_be_lost_are_not_prepared(modules) -> None:
    with pytest.raises(SystemExit):
        modules.main.arguments(["--quick", "--prepare"])
    assert modules.main.arguments(["--quick", "--prepare", "--folder", "a"]).prepare


def test_no_runs_start_where_the_base_fails(modules, tmp_path, monkeypatch) -> None:
    main = modules.main
    about = {"fingerprint": "x", "base_fingerprint": "y", "steps": 20, "tokens": 1}
    monkeypatch.setattr(main, "documents", lambda *given: about)
    monkeypatch.setattr(main, "environment", lambda *given: {"commit": "abc"})
    asked = []
    monkeypatch.setattr(main, "run_all", lambda jobs, *given: asked.append([job.run.name for job in jobs]) or ["base"])
    words = ["--quick", "--use-cpu", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words])
    assert main.main(words) == 1 and asked == [["base"]]


def test_what_a_quick_call_without_a_folder_did_is_lost(modules, monkeypatch, capsys) -> None:
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(modules.main, "benchmark", interrupted)
    assert modules.main.main(["--quick"]) == 130
    assert "begins anew (--folder keeps the runs that are finished)" in capsys.readouterr().err
