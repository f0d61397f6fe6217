"""The stage-times benchmark where ranks share micro-batches: steps put together, the simulated exchange, and texts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hf_wlb.sharding import ShardPlan, per_document
from hf_wlb.simulator.cluster import CLUSTERS, on_device
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.measured import read_measured
from hf_wlb.simulator.paper import shape_of
from hf_wlb.simulator.split import Split
from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload
from tests.unit.test_end_to_end_benchmark import text_of
from tests.unit.test_stage_times_benchmark import FOLDER, launch_row, lines

H200 = on_device(CLUSTERS["h100"], "NVIDIA H200")
TOKEN_BYTES = 2 * 2 * 4096  # a token's keys and values in a layer of 7B


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {"main": "stage_times", "report": "stage_times_report", "compose": "stage_times_compose"}
    names |= {"cases": "end_to_end_cases", "measured": "measured_report", "prices": "exchange_prices"}
    return SimpleNamespace(**{name: __import__(module) for name, module in names.items()})


@pytest.fixture
def compose(modules):
    return modules.compose


@pytest.fixture
def prices(modules):
    return modules.prices


def about_of(modules, name: str = "a", kernel: str = "flash-attn-2", **settings) -> dict:
    """PP2 CP2, a layer on either stage."""
    row = launch_row(modules, name, kernel, **{"pp_size": 2, "cp_size": 2, "layers": 2, **settings})
    return {**row, "stage_layers": [1, 1], "stage_of_rank": [0, 1], "exchange": {"cluster": "h100"}}


def local_plan(*owners: int, each: int = 1000) -> ShardPlan:
    """Documents of as many tokens, none of them cut."""
    edges = np.zeros((0, 5), dtype=np.int64)
    return ShardPlan(np.full(len(owners), each), 2, np.array(owners), edges, "by hand")


def step_of(compose, plans: list[ShardPlan], layer, head=0.0, **more) -> dict:
    """Times of ``[ranks][micro-batches]``; a backward takes twice as long as a forward."""
    shape = (2, len(plans))
    parts = {"layer": layer, "embedding": 0.0, "head": head}
    times = {
        f"{part}_{way}": [(factor * np.broadcast_to(np.array(seconds, dtype=np.float64), shape)).tolist()]
        for part, seconds in parts.items()
        for factor, way in ((1, "forward"), (2, "backward"))
    }
    lengths = [[plan.lengths.tolist() for plan in plans]]
    return {"times": times, "micro_batch_lengths": lengths, "shards": [[compose.plan_row(p) for p in plans]], **more}


# ---- composition ----


def test_the_slowest_rank_of_every_micro_batch_counts(modules, compose) -> None:
    """Layers take 2 and 3 s on the slower ranks, twice that in backward; two stages of one layer.

    Stage 0: F0 0-2, F1 -5; stage 1: F0 2-4, B0 -8, F1 -11, B1 -17; stage 0: B0 8-12, B1 17-23.
    """
    about, plans = about_of(modules), [local_plan(0, 1)] * 2
    layer = [[1.0, 3.0], [2.0, 1.0]]
    timeline = compose.compose(about, step_of(compose, plans, layer))
    assert timeline.seconds == pytest.approx(23.0)
    assert timeline.begins[1].tolist() == pytest.approx([2, 4, 8, 11])
    # Controls: of one rank alone, or with ranks in other places, steps take other times.
    for other in ([layer[0]] * 2, [layer[1]] * 2, np.mean([layer, layer[::-1]], axis=0)):
        assert compose.compose(about, step_of(compose, plans, other)).seconds != pytest.approx(23.0)


def test_embedding_and_head_are_of_their_own_slowest_rank(modules, compose) -> None:
    about, plans = about_of(modules), [local_plan(0, 1)]
    head = [[0.0], [0.5]]  # another rank than that with the slower layer
    found = compose.compose(about, step_of(compose, plans, [[2.0], [1.0]], head))
    assert found.seconds == pytest.approx(2 * 3 * 2.0 + 3 * 0.5)
    assert compose.compose(about, step_of(compose, plans, [[2.0], [1.0]])).seconds == pytest.approx(12.0)


def test_the_fullest_rank_s_tokens_are_handed_over(modules, compose) -> None:
    about = {**about_of(modules), "handover": {"cluster": "h100", "bytes_per_token": 4 * 4096}}
    once = compose.handover_seconds(about, 3000, 2)
    assert once == pytest.approx(15e-6 + 3000 * 4 * 4096 / 320e9)
    found = compose.compose(about, step_of(compose, [local_plan(0, 0, 1, 0)], [[1.0], [1.0]]))
    assert found.seconds == pytest.approx(6.0 + 2 * once)
    five = {**about, "stage_layers": [1] * 5}
    assert compose.handover_seconds(five, 3000, 2) > 3 * compose.handover_seconds(five, 3000)  # over the network


def test_plans_come_back_as_they_were(modules, compose) -> None:
    plan = per_document(np.array([4097, 900, 5]), 2)
    step = step_of(compose, [plan, local_plan(1, 0)], 1.0)
    for found, given in zip(compose.plans_of(about_of(modules), step, 0), (plan, local_plan(1, 0)), strict=True):
        found.check()
        assert found.tokens.tolist() == given.tokens.tolist() and found.strategy == given.strategy
        assert found.owner.tolist() == given.owner.tolist() and found.edges.tolist() == given.edges.tolist()


# ---- the exchange ----


def link_seconds(tokens: int) -> float:
    """Of keys and of values of all ranks, half of which comes from the other rank, by NVLink."""
    return 2 * 15e-6 + tokens * TOKEN_BYTES / 2 / 320e9


def test_an_exchange_that_nothing_hides_takes_the_links_time(modules, compose) -> None:
    """All documents cut, ranks alike: a gather in forward, a reduction in backward, with recomputation a gather more.

    No copies, which are in the measured times.
    """
    plan = per_document(np.array([65536, 65536]), 2)
    for recompute, backward in ((True, 2), (False, 1)):
        found = compose.exchange_seconds(about_of(modules, recompute=recompute), plan)
        np.testing.assert_allclose(found[0], link_seconds(131072), rtol=1e-3)
        np.testing.assert_allclose(found[1], backward * link_seconds(131072), rtol=1e-3)
    assert link_seconds(131072) == pytest.approx(0.00339, abs=1e-5)


def test_local_documents_hide_what_the_cluster_says(modules, compose) -> None:
    half = [0, 8192, 16384, 24576, 32768]
    lengths, owner = np.array([32768, 32768, 32768]), np.array([-1, 0, 1])
    plan = ShardPlan(lengths, 2, owner, np.array([half]), "by hand")
    # Bytes that are copied, over a token's: picking in both gathers, then adding, ordering and summing up.
    copied = TOKEN_BYTES * (2 * 2.5 + 3 * 3 / 8 + 2 + 1.5) / H200.memory_bytes_per_second * 32768
    links = 3 * link_seconds(32768)
    forward, backward = compose.exchange_seconds(about_of(modules), plan)
    assert H200.hidden_exchange == 0.4
    np.testing.assert_allclose(forward + backward, links - 0.4 * (links + copied), rtol=1e-3)
    bare = ShardPlan(lengths[:1], 2, owner[:1], plan.edges, "by hand")  # control: without local documents
    np.testing.assert_allclose(np.sum(compose.exchange_seconds(about_of(modules), bare), axis=0), links, rtol=1e-3)


def test_it_is_what_the_simulator_has_ranks_wait_for() -> None:
    """And the simulator's own step holds that very time."""
    model = StepModel.of(
        shape_of("7B"), Split(cp_size=2, pp_size=2), H200, context_length=131072, gradient_checkpointing=True
    )
    plan = per_document(np.array([65536, 65536]), 2)
    forward, backward = model.waiting(plan)
    cost, local = model.micro_batch(plan), replace(plan, owner=np.array([0, 1]), edges=plan.edges[:0])
    parts = model.rank_costs(plan)
    np.testing.assert_allclose(forward + backward, parts.waiting)
    assert not np.any(model.waiting(local))
    work = (parts.local + parts.chunks + parts.linear + parts.waiting).max()
    assert sum(cost.forward) + sum(cost.backward) == pytest.approx(work, rel=1e-6)
    assert work > (1 + 1e-3) * (work - parts.waiting.max())  # control: it is not too small to be missed


def test_an_exchange_makes_a_step_longer_and_local_documents_have_none(modules, compose) -> None:
    about = about_of(modules)
    cut = [per_document(np.array([65536, 65536]), 2)] * 2
    with_it = compose.compose(about, step_of(compose, cut, 0.1)).seconds
    step = step_of(compose, [local_plan(0, 1, each=65536)] * 2, 0.1)
    without = compose.compose(about, step).seconds
    forward, backward = (float(seconds.max()) for seconds in compose.exchange_seconds(about, cut[0]))
    # Two micro-batches on two stages: three forwards and three backwards one after the other.
    assert with_it == pytest.approx(without + 3 * (forward + backward))
    assert compose.part_seconds(about, step, 0)["layer_forward"].tolist() == [0.1, 0.1]


def test_other_kernels_and_devices_have_a_preset(prices) -> None:
    assert prices.exchange_row("flash-attn-4") == {"cluster": "h100-flash-attn-4"}
    assert prices.exchange_row("reference") == {"cluster": "h100"}
    assert prices.exchange_cluster("h100", "cpu") == prices.exchange_cluster("h100", None) == CLUSTERS["h100"]


# ---- what shards are planned by ----


def test_a_profile_learns_what_an_exchange_takes(prices) -> None:
    profile = ProfiledWorkload.load(FOLDER / "results" / "profile_7B_flash-attn-2.json")
    with pytest.raises(ValueError, match="holds no time of all_gather"):
        profile.exchange(1000, 2)
    found = prices.with_exchange(profile, 2, H200)
    model = StepModel.of(
        shape_of("7B"), Split(cp_size=2), H200, context_length=131072, gradient_checkpointing=True, profile=profile
    )
    layers = sum(count for count, _ in profile.profile.layers)
    for tokens in (1000, 65536, 131072):
        expected = model.workload.exchange(tokens, 2) * layers / 32
        assert replace(found, gradient_checkpointing=True).exchange(tokens, 2) == pytest.approx(expected, rel=0.01)
    assert ProfiledWorkload.from_dict(found.to_dict()).exchange(65536, 2) == found.exchange(65536, 2)
    assert found.profile.metadata["exchange"] == "simulated, h100"
    assert found.attention(5000) == profile.attention(5000)
    assert (
        prices.with_exchange(found, 2, CLUSTERS["h100"]) is found and prices.with_exchange(profile, 1, H200) is profile
    )
    analytic = AnalyticWorkload.from_crossover(20_000)
    assert prices.with_exchange(analytic, 2, H200) is analytic
    model_facts = {name: fact for name, fact in profile.profile.metadata["model"].items() if name != "kv_width"}
    nameless = replace(profile.profile, metadata={**profile.profile.metadata, "model": model_facts})
    with pytest.raises(ValueError, match=r"does not say how many numbers .* so the exchange of cp_size=2"):
        prices.with_exchange(replace(profile, profile=nameless), 2, H200)


# ---- figures and what is said ----


def rows(modules, kernel: str = "flash-attn-4", name: str = "c") -> list[dict]:
    """A launch of three rounds: Plain-4D cuts its documents, and WLB's stay whole."""
    plans = {
        "plain-4d": [per_document(np.array([65536, 65536]), 2)] * 8,
        "wlb": [local_plan(0, 1, each=65536)] * 8,
    }
    found = [{**about_of(modules, name, kernel), "exchange": modules.prices.exchange_row(kernel)}]
    for number in range(3):
        for variant, own in plans.items():
            row = {"kind": "step", "launch": name, "composed": True, "variant": variant, "round": number}
            row |= {"step": number, "seconds": 1.0, "predicted": 2.0, "tokens": 8 * 131072, "documents": 16}
            row |= {"longest": 65536, "flops": 1e15, "plan_seconds": 0.0, "shard_seconds": 0.01, "peak_gib": [30.0]}
            layer = [[0.1] * 8, [0.2 if variant == "plain-4d" else 0.11] * 8]
            found.append(step_of(modules.compose, own, layer, **row))
    return found


def test_a_launch_is_as_if_it_had_run_on_all_ranks(modules) -> None:
    text = text_of(*rows(modules))
    (launch,) = modules.report.read_launches(text)
    assert launch.label == "pp2cp2_128k_fa4" and launch.about["devices"] == 4
    figures = modules.report.summary([launch])["pp2cp2_128k_fa4"]
    wlb, plain = figures["wlb"], figures["plain-4d"]
    assert wlb["step_seconds"] == pytest.approx(9 * 3 * 0.11, abs=1e-4)
    assert wlb["tokens_per_second_per_gpu"] == pytest.approx(8 * 131072 / (9 * 3 * 0.11) / 4, rel=1e-4)
    forward, backward = modules.compose.exchange_seconds(launch.about, per_document(np.array([65536, 65536]), 2))
    waits = float(forward.max() + backward.max())
    assert plain["step_seconds"] == pytest.approx(9 * (0.6 + waits), abs=1e-4)
    assert plain["exchange"] == pytest.approx(waits / (0.6 + waits), abs=1e-4) and wlb["exchange"] == 0.0
    assert wlb["speedup"] == pytest.approx(24 / 16 * plain["step_seconds"] / wlb["step_seconds"], rel=1e-3)
    found = modules.report.result({"pp2cp2_128k_fa4": figures})
    assert found["composed_speedup_pp2cp2_128k_fa4"] == wlb["speedup"]
    (measured,) = read_measured(text)
    assert measured.split.label == "TP1 CP2 PP2 DP1"
    check, by = modules.report.checked(launch)
    assert check is not None and by.startswith("`profile_7B_flash-attn-4.json`")
    assert all(row["predicted_seconds"] > 0 for row in figures.values())


def test_tables_say_that_the_exchange_is_simulated(modules, tmp_path) -> None:
    launches = modules.report.read_launches(text_of(*lines(modules), *rows(modules)))
    text = modules.report.results_tables(launches)
    assert "**pp2cp2_128k_fa4**, 3 rounds, composed, the exchange simulated" in text
    assert "**The exchange of keys and values between ranks is simulated, not measured**" in text
    assert "| bubble | exchange | MFU |" in text and "| bubble | MFU |" in text
    assert "each shared by 2 context-parallel ranks" in text and "the clocks of 4 GPUs" in text
    measured = modules.measured
    shown = measured.summary(None, None, None, measured.composed_rows(measured.WlbSteps.of(launches)))
    assert "put together by 1F1B with a simulated exchange | " in shown
    assert "exchange of keys and values between ranks was not: it takes what the simulator says" in shown
    assert modules.report.draw(launches, tmp_path / "both.png").stat().st_size > 5_000
    # Without such launches nothing is said of it.
    alone = modules.report.read_launches(text_of(*lines(modules)))
    shown = measured.summary(None, None, None, measured.composed_rows(measured.WlbSteps.of(alone)))
    assert "simulated" not in shown and "exchange" not in modules.report.results_tables(alone)


# ---- the command line ----


def test_a_configuration_may_fix_its_split(modules, tmp_path) -> None:
    def splits(*words: str) -> list[tuple[int, int]]:
        options = modules.main.arguments([*words, "--output", str(tmp_path / "r.jsonl")])
        return [(job.settings.pp_size, job.settings.cp_size) for job in modules.main.jobs_of(options, tmp_path)]

    both = ("--configurations", "pp2cp2_128k_fa4", "pp4_128k_fa4")
    assert splits(*both) == [(2, 2), (4, 1)] and splits(*both, "--stage_layers", "") == [(2, 2), (4, 1)]
    assert splits("--configurations", "pp4_128k_fa4", "--cp_size", "2") == [(4, 2)]
    assert splits(*both[:2], "--cp_size", "2", "--pp_size", "2") == [(2, 2)]
    with pytest.raises(ValueError, match="pp2cp2_128k_fa4 has pp_size=2, but --pp_size 4 was given: leave that out"):
        splits(*both, "--pp_size", "4")
