"""The cost model on rows of a known law, closed forms against simulated messages, and the command predict.

Of `report/predict.py`, `tables/measurements.py`, `tables/predictions.py`, `collective_costs.py`.
"""

from __future__ import annotations

import math
import re
from itertools import product

import numpy as np
import pytest
from links_rows import ALPHA, COMPUTE, FACTOR, HOST, LABELS, PARAMETERS, RATES, STEPS, experiment, islands_row, row
from scipy.optimize import brentq

from gradwire.bench.report.tables import predictions
from gradwire.bench.report.tables.measurements import measurement_of
from gradwire.bench.report.tables.predictions import crossover_text, interval_text
from gradwire.bench.statistics.collective_costs import (
    Leg,
    Sends,
    collective,
    gradient_algorithms,
    hierarchical,
    two_levels,
)
from gradwire.bench.statistics.cost_model import GRID, Islands, Model, crossover, leave_one_link_out
from gradwire.cli import main


def measurements(noise=0.0, **fields):
    return tuple(measurement_of(one) for one in experiment(noise=noise, **fields))


@pytest.fixture(scope="module")
def exact():
    return Model(measurements())


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    """Intervals of 20 fits in place of 200."""
    monkeypatch.setattr(predictions, "RESAMPLES", 20)


def test_the_fit_finds_the_law(exact):
    fit = exact.fit
    assert fit.factor == pytest.approx(FACTOR, rel=0.01)
    assert fit.host == pytest.approx(HOST, rel=0.05)
    for (_, op), alpha in fit.alpha.items():
        assert alpha == pytest.approx(ALPHA[op], rel=0.05)
    assert set(fit.alpha) == {
        *product(["ddp"], ["all_reduce", "all_gather", "all_to_all"]),
        *product(["fsdp2"], ["reduce_scatter", "all_gather", "all_to_all"]),
    }


def test_a_step_of_local_updates_is_the_mean():
    """The median of a round's steps is one without communication."""
    times = {"step_time_ms_p50": 60.0, "step_time_ms_mean": 75.0}
    for optimizer, step in (("gradient", 60.0), ("onebit_adam", 60.0), ("diloco", 75.0)):
        config = {"method": "int8", "comm_optimizer": optimizer}
        assert measurement_of(row("ddp", "int8", "1gbit", **times, compress_config=config)).step == step / 1e3


def local_row(link, interval, streaming=None):
    """A row of local updates with int8: a message in every `interval`-th step, and a profile that missed them all."""
    every = row("ddp", "int8", link)
    sent = every.bytes_compressed_total / STEPS / 2 / interval
    per_byte = math.hypot(HOST["all_gather"], 8 * FACTOR["all_gather"] / RATES[link])
    each = ALPHA["all_gather"] / interval + sent * per_byte
    rounds = interval * (streaming or {}).get("fragments", 1)
    config = {"method": "int8", "comm_optimizer": "diloco", "H": rounds, "streaming": streaming}
    label = f"diloco-{rounds}-int8"
    return every.model_copy(
        update={
            "compressor": label,
            "run_name": every.run_name.replace("int8", label),
            "compress_config": config,
            "compression_ratio": every.compression_ratio * interval,
            "compression_ratio_steady": every.compression_ratio_steady * interval,
            "bytes_compressed_total": round(every.bytes_compressed_total / interval),
            "step_time_ms_mean": 1e3 * (COMPUTE + each),
            "comm_time_ms_by_op": {"all_reduce": 0.1},
            "exposed_comm_ms": 0.1,
        }
    )


LOCAL = [local_row(link, interval) for interval in (5, 10) for link in ("none", "1gbit", "100mbit")]


def test_local_updates_follow_the_law_with_a_message_in_every_hth_step():
    rows = [*experiment(("ddp",)), *LOCAL]
    model = Model(tuple(measurement_of(one) for one in rows))
    assert model.fit == Model(tuple(measurement_of(one) for one in experiment(("ddp",)))).fit  # they do not bend it
    for interval in (5, 10):
        predicted = model.predict(("ddp", f"diloco-{interval}-int8"), 2, 3e8, 0.0)
        assert predicted.step == pytest.approx(local_row("300mbit", interval).step_time_ms_mean / 1e3, rel=0.005)
        later = model.predict(("ddp", f"diloco-{interval}-int8"), 2, 3e8, 0.02)
        assert later.step - predicted.step == pytest.approx(0.02 / interval)
    found = [one for one in leave_one_link_out(model.measurements) if one.measurement.label.startswith("diloco")]
    assert len(found) == 4
    for one in found:
        assert abs(one.errors[0]) < 0.005 and math.isnan(one.errors[1])


def test_fragments_are_messages_of_their_own():
    streamed = measurement_of(local_row("1gbit", 5, streaming={"fragments": 3, "delay": 2}))
    assert streamed.interval == 5
    scheduled = row("ddp", "int8", "1gbit", compress_config={"method": "int8", "H": {"0": 1, "100": 20}})
    assert measurement_of(scheduled).interval == 20
    preset = row("ddp", "int8", "1gbit", compress_config={"method": "chunktopk+bins", "comm_optimizer": "sparseloco"})
    assert measurement_of(preset).interval == 30


def test_predict_has_no_communication_of_local_updates_to_compare_with(tmp_path, capsys):
    alone = [one for one in LOCAL if one.compressor == "diloco-5-int8"]
    words = write_rows(tmp_path / "links", [*experiment(("ddp",)), *LOCAL])
    assert main([*words, "100mbit", "--world_size", "64"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "diloco-5-int8" in line and "100mbit" in line]
    assert [part.strip() for part in lines[-1].strip("|").split("|")][6:9:2] == ["–", "–"]
    gathers = [one for one in experiment(("ddp",)) if one.compressor in ("none", "bf16-native")]
    words = write_rows(tmp_path / "lonely", [*gathers, *alone])  # nothing else gathers: no startup time
    assert main([*words, "100mbit", "--world_size", "2"]) == 0
    assert "diloco" not in capsys.readouterr().out


def test_a_slow_link_does_not_hide_the_rest_of_a_step():
    """A step that was measured 40 % too long on the slowest link changes those on fast links little."""
    slow = row("ddp", "int8", "100mbit")
    off = slow.model_copy(update={"step_time_ms_p50": 1.4 * slow.step_time_ms_p50})
    rows = [one for one in experiment(("ddp",)) if (one.compressor, one.link) != ("int8", "100mbit")]
    model = Model(tuple(measurement_of(one) for one in [*rows, off]))
    expected = row("ddp", "int8", "1gbit").step_time_ms_p50 / 1e3
    assert model.predict(("ddp", "int8"), 2, 1e9, 0.0).step == pytest.approx(expected, rel=0.1)


def test_one_odd_measurement_does_not_bend_the_fit():
    first, *others = measurements()
    odd = first.__class__(**vars(first) | {"gradients": first.gradients._replace(seconds=9 * first.gradients.seconds)})
    fit = Model((odd, *others)).fit
    assert fit.factor == pytest.approx(FACTOR, rel=0.05)


def test_a_left_out_link_is_predicted():
    found = leave_one_link_out(measurements())
    assert {one.measurement.link for one in found} == {"1gbit", "100mbit"}  # what has no rate cannot be predicted
    assert len(found) == 2 * 2 * len(LABELS)
    assert max(abs(error) for one in found for error in one.errors) < 0.03


def test_the_target_is_met_with_noise_and_missed_where_a_link_is_not_what_it_is_called():
    found = leave_one_link_out(measurements(noise=0.05))
    assert np.median([np.abs(one.errors) for one in found], axis=0).max() < 0.15
    slow = [
        one.__class__(**vars(one) | {"rate": one.rate / 2}) if one.link == "1gbit" else one for one in measurements()
    ]
    wrong = [abs(one.errors[1]) for one in leave_one_link_out(slow) if one.measurement.label == "none"]
    assert np.median(wrong) > 0.3


def test_at_the_measured_world_size_the_measured_steps_come_out(exact):
    for strategy, label, link in product(("ddp", "fsdp2"), ("none", "int8", "powersgd"), ("1gbit", "100mbit")):
        measured = measurement_of(row(strategy, label, link))
        names, steps, times = exact.steps((strategy, label), 2, np.array([RATES[link]]), 0.0)
        by_way = dict(zip(names, zip(steps[:, 0], times[:, 0], strict=True), strict=True))
        way = {"all_gather": "all-gather", "all_to_all": "all-to-all"}.get(measured.gradients.op, "ring")
        assert by_way[way] == pytest.approx((measured.step, measured.communication), rel=0.01), (strategy, label, link)
        assert not any("hierarchical" in name for name in names)


def test_hidden_communication_stays_hidden_and_does_not_go_below_nothing():
    own = [measurement_of(row("ddp", "none", link, exposed_comm_ms=max(0.0, ms))) for link, ms in (("1gbit", 5.0),)]
    (measured,) = own
    model = Model((measured, *measurements()[1:]))
    hidden = measured.communication - 0.005
    assert measured.hidden == pytest.approx(hidden)
    assert model.step(measured, 0.3) - model.step(measured, 0.2) == pytest.approx(0.1)
    assert model.step(measured, hidden / 2) == model.step(measured, 0.0)


def ring(size, world, laps):
    """Messages of a ring, moved one by one: what rank 0 sends in `laps` laps of W - 1 messages of a W-th each."""
    chunk = size / world
    return Sends(sum(chunk for _ in range(laps * (world - 1))), laps * (world - 1))


@pytest.mark.parametrize("world", [2, 3, 12])
def test_closed_forms_are_those_of_simulated_messages(world):
    size = 1260.0
    assert collective("reduce_scatter", size, world) == pytest.approx(ring(size, world, 1))
    assert collective("all_reduce", size, world) == pytest.approx(ring(size, world, 2))
    assert collective("all_gather", size, world) == pytest.approx(ring(size * world, world, 1))
    assert collective("all_to_all", size, world) == pytest.approx((size / world * (world - 1), world - 1))


@pytest.mark.parametrize("world", [6, 16, 30])
def test_an_all_to_all_in_two_levels_delivers_and_sends_what_is_counted(world):
    """Every rank's parts, first to the peer of their group who talks to their destination, then to that."""
    group, groups = two_levels(world)
    assert group * groups == world
    held = {rank: [(rank, to) for to in range(world)] for rank in range(world)}
    sent = messages = 0
    for within in (True, False):
        moved = {rank: [] for rank in range(world)}
        for rank, parts in held.items():
            for of, to in parts:
                by = rank // group * group + to % group if within else to
                moved[by].append((of, to))
                sent += rank == 0 and by != 0
        messages += (group if within else groups) - 1
        held = moved
    assert all(sorted(parts) == [(of, rank) for of in range(world)] for rank, parts in held.items())
    size = 840.0
    assert hierarchical("all_to_all", size, world) == pytest.approx((sent * size / world, messages))


def test_two_levels_send_the_same_bytes_in_fewer_messages():
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        flat, two = collective(op, 1000.0, 64), hierarchical(op, 1000.0, 64)
        assert two.bytes == flat.bytes
        assert two.messages == flat.messages * 14 / 63
    assert [two_levels(world) for world in (7, 64, 4096)] == [(1, 7), (8, 8), (64, 64)]


def carried(messages, ranks):
    """Bytes that leave each island, and bytes that each rank sends inside its own, from (from, to, bytes)."""
    between, inside = {}, {}
    for sender, to, size in messages:
        left = sender // ranks != to // ranks
        key, found = (sender // ranks, between) if left else (sender, inside)
        found[key] = found.get(key, 0) + size
    return set(between.values()), set(inside.values())


@pytest.mark.parametrize(("islands", "ranks"), [(2, 2), (2, 3), (4, 5)])
def test_what_islands_send_is_that_of_simulated_messages(exact, islands, ranks):
    """Every message of a float32 all-reduce, flat and in two levels, and of the exchange's two all-to-alls."""
    world, size = islands * ranks, 4.0 * PARAMETERS
    everyone = range(world)
    (_, (ring,), _), (_, (within, between), _) = (
        (algorithm.name, algorithm.legs, algorithm.op)
        for algorithm in gradient_algorithms(exact.by_label["ddp", "none"][0], world, islands)
    )
    laps = [(r, (r + 1) % world, size / world) for r in everyone for _ in range(2 * (world - 1))]
    (cable,), _ = carried(laps, ranks)
    assert (ring.links, ring.sharing, ring.sends) == ("ring", 1, pytest.approx((cable, 2 * (world - 1))))
    around = [(r, r // ranks * ranks + (r + 1) % ranks, size / ranks) for r in everyone for _ in range(2 * (ranks - 1))]
    across = [(r, (r + ranks) % world, size / world) for r in everyone for _ in range(2 * (islands - 1))]
    (cable,), (own,) = carried(around + across, ranks)
    assert (within.links, within.sends) == ("inside", pytest.approx((own, 2 * (ranks - 1))))
    assert (between.links, between.sharing) == ("between", ranks)
    assert between.sends == pytest.approx((cable / ranks, 2 * (islands - 1)))
    near, far = gradient_algorithms(exact.by_label["ddp", "exchange"][0], world, islands)[0].legs
    parts = [(r, to, 2 * size / world) for r in everyone for to in everyone if r != to]
    (cable,), (own,) = carried(parts, ranks)
    assert near == Leg(pytest.approx((own, 2 * (ranks - 1))), "inside")
    assert far == Leg(pytest.approx((cable / ranks, 2 * (world - ranks))), "between", ranks)


def law(op, *legs):
    """Seconds of a collective whose legs are (bytes, rate)."""
    return ALPHA[op] + sum(sent * math.hypot(HOST[op], 8 * FACTOR[op] / rate) for sent, rate in legs)


@pytest.mark.parametrize("slow", [1e8, 1e10])
def test_a_flat_step_on_islands_follows_the_law(exact, slow):
    """Four islands of three, two bandwidths and two latencies."""
    size, fast, late, soon = 4 * PARAMETERS, 2e9, 1e-3, 1e-5
    islands = Islands(4, fast, soon)
    names, steps, _ = exact.steps(("ddp", "none"), 12, np.array([slow]), late, islands)
    flat = law("all_reduce", (2 * 11 / 12 * size, min(slow, fast))) + 22 * late
    legs = (2 * 2 / 3 * size, fast), (2 * 3 / 4 * size / 3, slow / 3)
    two = law("all_reduce", *legs) + 2 * 2 * soon + 2 * 3 * late
    found = dict(zip(names, steps[:, 0] - COMPUTE, strict=True))
    assert found == pytest.approx({"ring": flat, "ring, hierarchical": two}, rel=0.03)
    assert exact.predict(("ddp", "none"), 12, slow, late, islands).step == steps.min()


@pytest.mark.parametrize("algorithm", ["all_gather", "all_to_all"])
def test_hsdp_on_other_islands_follows_the_law(algorithm):
    """Fitted at 2 x 2, on cables between islands and on each rank's; predicted at 4 x 3 and at the measured size."""
    links = ("none", "between-1gbit", "between-100mbit", "1gbit", "100mbit")
    rows = [islands_row(label, link, algorithm) for label in ("none", "int8") for link in links]
    model = Model(tuple(map(measurement_of, rows)))
    assert model.fit.factor == pytest.approx({op: FACTOR[op] for op in model.fit.factor}, rel=0.02)
    size, fast, slow, late, soon = 4 * PARAMETERS, 2e9, 2e8, 1e-3, 1e-5
    found = {
        label: model.predict(("hsdp", label), 12, slow, late, Islands(4, fast, soon)).communication
        for label in ("none", "int8")
    }
    inside = law("reduce_scatter", (2 / 3 * size, fast)) + 2 * soon
    gathers = (2 * 2 / 3 * size, fast)
    shard = size / 3
    none = inside + law("all_gather", gathers) + 2 * soon
    none += law("all_reduce", (2 * 3 / 4 * shard, slow / 3)) + 2 * 3 * late
    encoded = shard / LABELS["int8"][0]
    if algorithm == "all_gather":
        int8 = inside + law("all_gather", gathers, (3 * encoded, slow / 3)) + 2 * soon + 3 * late
    else:
        int8 = inside + law("all_gather", gathers) + 2 * soon
        int8 += law("all_to_all", (2 * 3 / 4 * encoded, slow / 3)) + 2 * 3 * late
    assert found["none"] == pytest.approx(none, rel=0.03)
    assert found["int8"] == pytest.approx(int8, rel=0.03)
    for one in rows:
        if one.link.startswith("between"):
            again = model.predict(
                ("hsdp", one.compressor), 4, RATES[one.link.removeprefix("between-")], 0.0, Islands(2)
            )
            assert again.step == pytest.approx((one.step_time_ms_p50 or 0) / 1e3, rel=0.02)
    assert max(abs(error) for one in leave_one_link_out(model.measurements) for error in one.errors) < 0.1


def test_crossovers_are_those_of_the_law(exact):
    """int8 against float32 under ddp at W = 2, by the law alone."""
    raw, codec = 4 * PARAMETERS, sum(LABELS["int8"][3:])

    def lead(log_rate):
        def seconds(op, sent):
            return ALPHA[op] + sent * math.hypot(HOST[op], 8 * FACTOR[op] / math.exp(log_rate))

        return codec + seconds("all_gather", raw / LABELS["int8"][0]) - seconds("all_reduce", raw)

    true = math.exp(brentq(lead, math.log(1e6), math.log(1e12)))
    own, base = (exact.fastest(("ddp", label), 2, 0.0) for label in ("int8", "none"))
    assert crossover(own, base) == pytest.approx(true, rel=0.1)
    noisy = Model(measurements(noise=0.01))
    drawn = [
        crossover(*(one.fastest(("ddp", label), 2, 0.0) for label in ("int8", "none"))) for one in noisy.resampled(60)
    ]
    assert min(drawn) < true < max(drawn)
    assert np.median(drawn) == pytest.approx(true, rel=0.5)


def test_always_and_never():
    flat = np.ones_like(GRID)
    assert crossover(flat, 2 * flat) == math.inf
    assert crossover(2 * flat, flat) == 0
    assert crossover(flat, flat) == 0
    assert crossover(np.log10(GRID), 8 * flat) == pytest.approx(1e8)
    assert [crossover_text(of) for of in (0, math.inf, 2.5e9)] == ["never", "always", "2.5gbit"]
    assert interval_text(0, 0) == "never"
    assert interval_text(1e9, math.inf) == "[1gbit, always]"


@pytest.mark.parametrize("world", [2, 3, 64, 4096])
def test_predictions_make_sense_at_every_size(exact, world):
    for key in exact.by_label:
        steps = [exact.predict(key, world, rate, 5e-5).step for rate in (1e7, 1e9, 1e11)]
        assert all(np.isfinite(steps))
        assert steps == sorted(steps, reverse=True)
        assert exact.predict(key, world, 1e9, 1e-3).step > exact.predict(key, world, 1e9, 0.0).step


def test_an_algorithm_that_was_chosen_by_hand_is_kept(exact):
    names, _, _ = exact.steps(("ddp", "exchange"), 64, np.array([1e9]), 0.0)
    assert names == ["all-to-all", "all-to-all, hierarchical"]


def test_many_ranks_scatter_encodings_instead_of_gathering_them(exact):
    key = "ddp", "int8"
    assert exact.predict(key, 2, 1e8, 0.0).algorithm == "all-gather"
    assert exact.predict(key, 64, 1e8, 0.0).algorithm.startswith("all-to-all")
    names, steps, _ = exact.steps(key, 64, np.array([math.inf]), 0.0)
    decode = LABELS["int8"][4]
    by_way = dict(zip(names, steps[:, 0], strict=True))
    expected = COMPUTE + LABELS["int8"][3] + 32 * decode + ALPHA["all_gather"]
    expected += 63 * 4 * PARAMETERS / LABELS["int8"][0] * HOST["all_gather"]
    assert by_way["all-gather"] == pytest.approx(expected, rel=0.05)


def write_rows(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in rows))
    return ["predict", "--results_dir", str(folder), "--bandwidth"]


def test_predict_prints_winners_crossovers_and_errors(tmp_path, capsys):
    rows = experiment(("ddp",), val_ppl=50.0)
    rows = [one.model_copy(update={"val_ppl": 60.0}) if one.compressor == "powersgd" else one for one in rows]
    alone = row("ddp", "none", "none", step_time_ms_p50=61.0)
    rows.append(alone.model_copy(update={"world_size": 1, "comm_time_ms_by_op": {}}))
    words = write_rows(tmp_path / "links", rows)
    with (tmp_path / "links/results.jsonl").open("a") as file:
        file.write("{cut off\n")
    assert main([*words, "100mbit", "--world_size", "2", "--latency", "0s", "--memory"]) == 0
    said = capsys.readouterr()
    assert f"line {len(rows) + 1} is left out" in said.err
    assert "Fastest: `powersgd`; within 1 %: `int4`; within 5 %: `int4`; within 20 %: `powersgd`." in said.out
    line = next(one for one in said.out.splitlines() if one.startswith("| int8"))
    step = row("ddp", "int8", "100mbit").step_time_ms_p50
    columns = [part.strip() for part in line.strip("|").split("|")]
    assert columns[1] == "all-gather"
    assert float(columns[2]) == pytest.approx(step, rel=0.02)
    assert float(columns[7]) == pytest.approx(2 * 61 / step, rel=0.02)
    assert columns[8:] == ["+0.0 %", "0.500"]
    assert re.search(r"\| exchange +\| +never \| +never \|", said.out)
    assert "Median relative error: " in said.out
    assert max(map(len, said.out.splitlines())) <= 140


def test_sharded_states_shrink_with_the_ranks(tmp_path, capsys):
    words = write_rows(tmp_path / "links", experiment(("fsdp2",)))
    assert main([*words, "1gbit", "--world_size", "64", "--memory"]) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("| none"))
    assert line.rstrip("| ").endswith(f"{0.5 - 16 * PARAMETERS / 1e9 * (1 / 2 - 1 / 64):.3f}")


def test_anchors_are_divided_as_parameters_are(tmp_path, capsys):
    rows = [islands_row("none", link) for link in ("between-1gbit", "between-100mbit")]
    rows = [one.model_copy(update={"mem_outer_gb": 0.06}) for one in rows]
    words = write_rows(tmp_path / "links", rows)
    assert main([*words, "200mbit", "--world_size", "12", "--islands", "4", "--memory"]) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("| none"))
    parameters = 16 * PARAMETERS / 1e9 * (1 / 3 - 1 / 2)
    assert line.rstrip("| ").endswith(f"{0.5 + parameters + 0.06 * (2 / 3 - 1):.3f}")


def test_predict_on_islands(tmp_path, capsys):
    links = ("between-1gbit", "between-100mbit")
    rows = [*experiment(("ddp",)), *(islands_row(label, link) for label in ("none", "int8") for link in links)]
    words = write_rows(tmp_path / "links", [one for one in rows if one.strategy == "hsdp"])
    asked = "200mbit --world_size 12 --islands 4 --inside 2gbit --latency_inside 10us --memory"
    assert main([*words, *asked.split()]) == 0
    said = capsys.readouterr()
    assert "# W = 12, 200mbit and 50us per message between 4 islands, 2gbit and 10us inside" in said.out
    line = next(one for one in said.out.splitlines() if one.startswith("| none"))
    assert line.rstrip("| ").endswith(f"{0.5 + 16 * PARAMETERS / 1e9 * (1 / 3 - 1 / 2):.3f}")
    write_rows(tmp_path / "links", [*experiment(("ddp",)), *rows[-2:]])
    assert main([*words, "200mbit", "--world_size", "12"]) == 0
    said = capsys.readouterr()
    assert said.err == "gradwire predict: left out 2 rows: hsdp has islands: add --islands N.\n"
    assert "## hsdp" not in said.out


UNPROFILED = [one.model_copy(update={"exposed_comm_ms": None}) for one in experiment(("ddp",))]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (experiment(("ddp",)), ["1gbit", "--world_size", "4", "--islands", "3"], "3 islands do not divide 4 ranks"),
        (experiment(("ddp",)), ["1gbit", "--world_size", "4", "--inside", "1gbit"], "add --islands N"),
        (experiment(("ddp",)), ["1gbit", "--world_size", "4", "--latency_inside", "1us"], "add --islands N"),
        (experiment(), ["1gbit", "--world_size", "4", "--islands", "2", "--inside", "fast"], "'fast'"),
        (experiment(), ["1gbit", "--world_size", "4", "--islands", "2", "--latency_inside", "soon"], "'soon'"),
        (None, ["1gbit", "--world_size", "4"], "results.jsonl does not exist: first run an experiment with `links:`"),
        (UNPROFILED, ["1gbit", "--world_size", "4"], "profiled cells on links of at least two rates, and has none"),
        (experiment(("ddp",))[3:], ["1gbit", "--world_size", "4"], "no cell `none` of ddp"),
        (experiment(("ddp",)), ["fast", "--world_size", "4"], "invalid rate 'fast'"),
        (experiment(("ddp",)), ["1gbit", "--world_size", "4", "--latency", "soon"], "invalid time 'soon'"),
        (experiment(("ddp",)), ["1gbit", "--world_size", "1"], "for 2 to 4096 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_bad_input(tmp_path, capsys, rows, words, message):
    given = write_rows(tmp_path / "links", rows or [])
    if rows is None:
        (tmp_path / "links/results.jsonl").unlink()
    assert main([*given, *words]) == 2
    assert message in capsys.readouterr().err
