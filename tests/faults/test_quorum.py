"""Groups that are killed and that join, as processes of their own: what they did against a simulation, bit for bit.

Of `optimizers/quorum.py`.
"""

from __future__ import annotations

import copy
import multiprocessing
import time

import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed")

from protocols import Protocol, by_rows
from quorum_group import OUTER, H, loss_of, model, rate, train
from torchft.coordination import LighthouseServer

from gradwire.comm.compressors import build

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
FORKED = multiprocessing.get_context("forkserver")  # groups that start in milliseconds
FORKED.set_forkserver_preload(["quorum_group", "torchft"])
STEPS, KILLED = 24, 8  # optimizer steps, and the last one of the round in which group 2 is killed
POINTS = ("step", "encoding", "exchange", "second exchange", "agreement", "quorum")


@pytest.fixture
def lighthouse():
    """The address of a lighthouse of two groups or more; it takes a group for lost after a second without heartbeat."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000, heartbeat_timeout_ms=1000)
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


class Run:
    """Groups as processes, which a test starts in any order."""

    def __init__(self, folder, lighthouse, **given):
        self.folder, self.given = folder, {"lighthouse": lighthouse, "steps": STEPS, **given}
        self.started = []

    def start(self, number, **given):
        given = {**self.given, "number": number, "go": str(self.folder / "go"), **given}
        for rank in range(given.get("ranks", 1)):
            out = self.folder / f"{len(self.started) - rank}.{rank}.pt"
            process = FORKED.Process(target=train, kwargs={**given, "out": str(out), "rank": rank}, daemon=True)
            process.start()
            self.started.append((number, process, out))

    def together(self, *numbers, **given):
        """Start groups that begin the run together; ``given`` has what one of them gets, by number."""
        for number in numbers:
            self.start(number, **given.get(f"group_{number}", {}))
        while len(list(self.folder.glob("*.ready"))) < len(self.started):
            assert all(group.is_alive() for _, group, _ in self.started), "a group could not start"
            time.sleep(0.1)
        (self.folder / "go").touch()

    def refused(self, index):
        """The message of a group that ended with an error, and is then no longer one of the run's."""
        _, group, out = self.started[index]
        group.join(900)
        assert group.exitcode == 1
        self.started[index] = None
        return out.with_suffix(".log").read_text()

    def ended(self):
        """The output of each rank, in the order of their starts; None for those of a group that lost one."""
        started = [*filter(None, self.started)]
        for _, rank, _ in started:
            rank.join(900)
        killed = {start_of(out) for _, rank, out in started if rank.exitcode == -9}
        results = []
        for number, rank, out in started:
            lost = start_of(out) in killed
            assert lost or rank.exitcode == 0, f"group {number}: {out.with_suffix('.log').read_text()}"
            results.append((number, None if lost else torch.load(out)))
        return results


def start_of(out):
    """The number of a group's start, by the name of one of its files."""
    return out.name.split(".")[0]


class Simulated:
    """All groups in one process, each by torch's own AdamW; the rounds, and who joins from whom, are given.

    What several ranks of a group have are rows of every parameter, as `torch.chunk` cuts it.
    """

    def __init__(self, compressor, algorithm, ranks):
        self.anchors = {name: p.detach().clone() for name, p in model().named_parameters()}
        self.outer_parameters = {name: torch.nn.Parameter(p.clone()) for name, p in self.anchors.items()}
        self.outer = torch.optim.SGD(self.outer_parameters.values(), **OUTER, nesterov=True)
        self.compressor, self.algorithm, self.ranks = build(compressor), algorithm, ranks
        self.models, self.inner, self.residuals, self.generators = {}, {}, {}, {}

    def join(self, number, sources=()):
        """A group begins at the anchors; each rank has the moments of one that it joined from, and nothing else."""
        self.models[number] = model()
        self.inner[number] = torch.optim.AdamW(self.models[number].parameters(), betas=(0.8, 0.9))
        if sources:
            states = [self.inner[sources[rank]].state_dict() for rank in range(self.ranks)]
            joined = copy.deepcopy(states[0])
            for place, kept in joined["state"].items():
                for key in ("exp_avg", "exp_avg_sq"):
                    parts = [state["state"][place][key].chunk(self.ranks)[rank] for rank, state in enumerate(states)]
                    kept[key] = torch.cat(parts)
            self.inner[number].load_state_dict(joined)
        mine = [(number, rank) for rank in range(self.ranks)]
        self.residuals = {key: kept for key, kept in self.residuals.items() if key[0] not in mine}
        self.generators = {key: kept for key, kept in self.generators.items() if key[0] not in mine}
        self.settle(number)

    def settle(self, number):
        with torch.no_grad():
            for name, p in self.models[number].named_parameters():
                p.copy_(self.anchors[name])

    def train(self, number, steps):
        for step in steps:
            for group in self.inner[number].param_groups:
                group["lr"] = rate(step)
            for rank in range(self.ranks):
                (loss_of(self.models[number], number, step, rank) / self.ranks).backward()
            self.inner[number].step()
            self.inner[number].zero_grad()

    def average(self, groups):
        """The outer step by the mean of what these groups changed; each rank averages what it has."""
        parts = [self.mean([(number, rank) for number in groups], rank) for rank in range(self.ranks)]
        for name, p in self.outer_parameters.items():
            p.grad = torch.cat([means[name].flatten() for means in parts]).view(p.shape)
        self.outer.step()
        self.anchors = {name: p.detach().clone() for name, p in self.outer_parameters.items()}

    def mean(self, members, rank):
        """The mean of the ranks of this place in their groups; one alone sends nothing."""
        deltas = [
            {
                name: (self.anchors[name] - p.detach()).chunk(self.ranks)[rank]
                for name, p in self.models[number].named_parameters()
            }
            for number, _ in members
        ]
        if len(members) == 1:
            return deltas[0]
        shapes = {name: tuple(delta.shape) for name, delta in deltas[0].items()}
        protocol = Protocol(self.compressor, by_rows(shapes, len(members)), shapes, len(members), seed=0)
        self.lend(protocol, members)
        means = protocol.reduce(self.algorithm, "all_reduce", deltas)
        self.take_back(protocol, members)
        return means

    def lend(self, protocol, members):
        """Each member's residuals, cut for these; where a member has none of a part, zeros."""
        for place, member in enumerate(members):
            for name, shards in protocol.cut.items():
                for part in shards:
                    for phase in ("scatter", "gather"):
                        kept = self.residuals.get((member, phase, name))
                        if kept is not None:
                            cut = kept[part.at : part.at + part.numel].clone()
                            protocol.residuals[place, phase, name, part.at] = cut
        protocol.generators = {
            (members.index(member), phase, name): kept
            for (member, phase, name), kept in self.generators.items()
            if member in members
        }
        seeded = Protocol(self.compressor, {}, {}, 0, seed=0)
        draws = [number * self.ranks + rank for number, rank in members]
        protocol.generator = lambda place, phase, name: (
            protocol.generators[place, phase, name]
            if (place, phase, name) in protocol.generators
            else protocol.generators.setdefault((place, phase, name), seeded.generator(draws[place], phase, name))
        )

    def take_back(self, protocol, members):
        """Residuals of whole parts of parameters; what a member keeps of means is of the rows that it owns now."""
        for place, member in enumerate(members):
            for name, shape in protocol.shapes.items():
                for phase in ("scatter", "gather"):
                    kept = torch.zeros(torch.Size(shape).numel())
                    for part in protocol.cut[name]:
                        if phase == "scatter" or part.row == place:
                            key = place, phase, name, part.at
                            kept[part.at : part.at + part.numel] = protocol.residuals.get(key, torch.zeros(part.numel))
                    self.residuals[member, phase, name] = kept
        for (place, phase, name), generator in protocol.generators.items():
            self.generators[members[place], phase, name] = generator


def simulated(results, compressor="onebit", algorithm="exchange", ranks=1, steps=STEPS):
    """The anchors after each round of a run, from the rounds and the joins that its groups noted."""
    rounds, joins = {}, {}
    for number, result in results:
        for step, groups, *_ in result["rounds"] if result else ():
            if groups:
                assert rounds.setdefault(step, groups) == groups, "groups disagree on who closed a round"
        for step, source in result["joined"] if result else ():
            joins.setdefault(step, {}).setdefault(number, {})[result["rank"]] = source
    run = Simulated(compressor, algorithm, ranks)
    anchors = {0: run.anchors}
    everyone = {number for number, _ in results}
    for number in everyone:
        run.join(number)
    for last in range(H - 1, steps, H):
        for number, sources in joins.get(last + 1 - H, {}).items() if last + 1 > H else ():
            run.join(number, sources)
        for number in everyone:
            run.train(number, range(last + 1 - H, last + 1))
        run.average(rounds[last])
        for number in everyone:
            run.settle(number)
        anchors[last + 1] = run.anchors
    return anchors, rounds


def assert_simulated(results, ranks=1, **given):
    """Every group has the simulation's anchors after each round that it closed; return the rounds."""
    anchors, rounds = simulated(results, ranks=ranks, **given)
    for number, result in results:
        for step, found in result["anchors"].items() if result else ():
            for name, anchor in found.items():
                expected = anchors[step][name].chunk(ranks)[result["rank"]]
                assert torch.equal(anchor, expected), f"group {number}, {name}, after step {step}"
    ends = [result for _, result in results if result]
    assert all(STEPS in result["anchors"] for result in ends)
    return rounds


@pytest.mark.parametrize("point", POINTS)
def test_a_group_that_is_killed_leaves_a_mean_of_the_others(tmp_path, lighthouse, point):
    run = Run(tmp_path, lighthouse, options={"algorithm": "exchange"})
    run.together(*range(4), group_2={"kill": (point, KILLED)})
    results = run.ended()
    assert [result is None for _, result in results] == [False, False, True, False]
    rounds = assert_simulated(results)
    late = point in ("agreement", "quorum")  # all had the mean
    assert rounds[KILLED] == ((0, 1, 2, 3) if late else (0, 1, 3))
    assert rounds[KILLED + H] == (0, 1, 3)


@pytest.mark.parametrize("point", ["step", "exchange", "quorum"])
def test_ranks_of_a_group_average_their_shards(tmp_path, lighthouse, point):
    run = Run(tmp_path, lighthouse, options={"algorithm": "exchange"}, ranks=2)
    run.together(*range(3), group_1={"kill": (point, KILLED, 1)})  # only the second rank
    results = run.ended()
    assert [result is None for _, result in results] == [False, False, True, True, False, False]
    rounds = assert_simulated(results, ranks=2)
    assert rounds[KILLED] == ((0, 1, 2) if point == "quorum" else (0, 2))
    assert rounds[KILLED + H] == (0, 2)


def test_a_group_of_several_ranks_that_hold_the_model_whole_ends_with_a_message(tmp_path, lighthouse):
    run = Run(tmp_path, lighthouse, ranks=2, whole=True)
    run.together(0)
    for index in (0, 1):
        assert "a group of 2 ranks trains one model: call fully_shard on it" in run.refused(index)


def test_a_group_of_several_ranks_returns(tmp_path, lighthouse):
    held = {"hold": (KILLED + 2, str(tmp_path / "6.1.ready"))}
    run = Run(tmp_path, lighthouse, options={"algorithm": "exchange", "compressor": "natural"}, ranks=2, **held)
    run.together(*range(3), group_1={"kill": ("second exchange", KILLED)})
    run.started[3][1].join()
    run.start(1)
    results = run.ended()
    rounds = assert_simulated(results, ranks=2, compressor="natural")
    for _, result in results[-2:]:
        ((joined, _),) = result["joined"]
        assert joined > KILLED and rounds[joined - 1] == (0, 2) and rounds[joined + H - 1] == (0, 1, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_whose_state_does_not_arrive_asks_for_it_again(tmp_path, lighthouse, ranks):
    run = Run(tmp_path, lighthouse, options={"algorithm": "exchange"}, ranks=ranks)
    run.together(*range(3), group_1={"kill": ("transfer", KILLED, ranks - 1)})  # it arrives at the other rank
    results = run.ended()
    rounds = assert_simulated(results, ranks=ranks)
    assert rounds[STEPS - 1] == (0, 1, 2)
    for number, result in results:
        missed = [step for step, groups, *_ in result["rounds"] if not groups]
        assert bool(missed) == (number == 1), "only this group missed an average"


def test_groups_begin_at_the_same_anchors_if_their_source_is_killed_while_they_join(tmp_path, lighthouse):
    run = Run(tmp_path, lighthouse)
    weights = {f"group_{number}": {"options": {"model": {"seed": number + 5}}} for number in range(3)}
    run.together(*range(3), **weights | {"group_0": {"kill": ("join", 0)}})
    results = run.ended()
    assert [result is None for _, result in results] == [True, False, False]
    for step, anchors in results[1][1]["anchors"].items():
        for name, anchor in anchors.items():
            assert torch.equal(anchor, results[2][1]["anchors"][step][name]), f"{name}, after step {step}"


def test_groups_that_do_not_fit_end_with_a_message_and_the_others_train_on(tmp_path, lighthouse):
    held = {"hold": (KILLED + 2, str(tmp_path / "3.0.ready"))}
    run = Run(tmp_path, lighthouse, **held)
    run.together(0, 1)
    run.start(2, options={"compressor": "int8"})
    run.start(1)
    assert "group 2 does not fit the run that it joins: compressor is" in run.refused(2)
    assert "another group 1 trains already: give each group a replica_id with another number." in run.refused(3)
    results = run.ended()
    assert {groups for _, result in results for _, groups, *_ in result["rounds"]} == {(0, 1)}
    assert_simulated(results, algorithm="gather")


def test_groups_whose_anchors_differ_end_with_a_message(tmp_path, lighthouse):
    run = Run(tmp_path, lighthouse)
    run.together(0, 1, group_1={"kill": ("anchor", KILLED)})
    for index in (0, 1):
        assert "groups 0, 1 began the round at different anchors" in run.refused(index)


def test_a_group_that_returns_trains_the_next_round_with_the_others(tmp_path, lighthouse):
    held = {"hold": (KILLED + 2, str(tmp_path / "3.0.ready"))}  # in a step until it is there
    run = Run(tmp_path, lighthouse, options={"algorithm": "exchange", "compressor": "natural"}, **held)
    run.together(*range(3), group_1={"kill": ("second exchange", KILLED)})
    run.started[1][1].join()
    run.start(1)
    results = run.ended()
    rounds = assert_simulated(results, compressor="natural")
    ((joined, _),) = results[3][1]["joined"]
    assert joined > KILLED and rounds[joined - 1] == (0, 2) and rounds[joined + H - 1] == (0, 1, 2)
