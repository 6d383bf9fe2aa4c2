"""Groups that are killed and that join, as processes of their own: what they did against a simulation, bit for bit."""

from __future__ import annotations

import copy
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from protocols import Protocol, by_rows
from quorum_group import OUTER, SHAPES, H, loss_of, model, rate, train

from gradwire.comm.compressors import build

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
FORKED = multiprocessing.get_context("forkserver")  # groups that start in milliseconds
FORKED.set_forkserver_preload(["quorum_group", "torchft"])
STEPS, KILLED = 24, 8  # optimizer steps, and the last one of the round in which group 2 is killed
POINTS = ("step", "encoding", "exchange", "second exchange", "agreement", "quorum")


SERVED = """
import sys, torchft.coordination
server = torchft.coordination.LighthouseServer("127.0.0.1:0", int(sys.argv[1]), 20000, None, 1000)
print(server.address(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lighthouse():
    """The address of a lighthouse of two groups or more; it takes a group for lost after a second without heartbeat."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVED, "2"], **pipes) as server:
        yield f"http://127.0.0.1:{server.stdout.readline().strip().rsplit(':', 1)[1]}"
        server.kill()


class Run:
    """Groups as processes, which a test starts in any order."""

    def __init__(self, folder, lighthouse, **given):
        self.folder, self.given = folder, {"lighthouse": lighthouse, "steps": STEPS, **given}
        self.started = []

    def start(self, number, **given):
        out = str(self.folder / f"{len(self.started)}.pt")
        given = {**self.given, "number": number, "out": out, "go": str(self.folder / "go"), **given}
        group = FORKED.Process(target=train, kwargs=given)
        group.start()
        self.started.append((number, group, Path(out)))
        return group

    def together(self, *numbers, **given):
        """Start groups that begin the run together; ``given`` has what one of them gets, by number."""
        for number in numbers:
            self.start(number, **given.get(f"group_{number}", {}))
        while len(list(self.folder.glob("*.ready"))) < len(numbers):
            assert all(group.is_alive() for _, group, _ in self.started), "a group could not start"
            time.sleep(0.1)
        (self.folder / "go").touch()

    def refused(self, index):
        """What a group said that ended with an error, and is then no longer one of the run's."""
        _, group, out = self.started[index]
        group.join(900)
        assert group.exitcode == 1
        self.started[index] = None
        return out.with_suffix(".log").read_text()

    def ended(self):
        """What each group wrote, in the order of their starts; None for one that was killed."""
        results = []
        for number, group, out in filter(None, self.started):
            group.join(900)
            assert group.exitcode in (0, -9), f"group {number}: {out.with_suffix('.log').read_text()}"
            results.append((number, torch.load(out) if group.exitcode == 0 else None))
        return results


class Simulated:
    """All groups in one process, each by torch's own AdamW; the rounds, and who joins from whom, are given."""

    def __init__(self, compressor, algorithm):
        self.anchors = {name: p.detach().clone() for name, p in model().named_parameters()}
        self.outer_parameters = {name: torch.nn.Parameter(p.clone()) for name, p in self.anchors.items()}
        self.outer = torch.optim.SGD(self.outer_parameters.values(), **OUTER, nesterov=True)
        self.compressor, self.algorithm = build(compressor), algorithm
        self.models, self.inner, self.residuals, self.generators = {}, {}, {}, {}

    def join(self, number, source=None):
        """A group begins at the anchors, with the moments of the group that it joined from and nothing else."""
        self.models[number] = model()
        self.inner[number] = torch.optim.AdamW(self.models[number].parameters(), betas=(0.8, 0.9))
        if source is not None:
            self.inner[number].load_state_dict(copy.deepcopy(self.inner[source].state_dict()))
        self.residuals = {key: kept for key, kept in self.residuals.items() if key[0] != number}
        self.generators = {key: kept for key, kept in self.generators.items() if key[0] != number}
        self.settle(number)

    def settle(self, number):
        with torch.no_grad():
            for name, p in self.models[number].named_parameters():
                p.copy_(self.anchors[name])

    def train(self, number, steps):
        for step in steps:
            for group in self.inner[number].param_groups:
                group["lr"] = rate(step)
            loss_of(self.models[number], number, step).backward()
            self.inner[number].step()
            self.inner[number].zero_grad()

    def average(self, groups):
        """The outer step by the mean of what these groups changed; a group alone sends nothing."""
        deltas = [
            {name: self.anchors[name] - p.detach() for name, p in self.models[number].named_parameters()}
            for number in groups
        ]
        if len(groups) == 1:
            means = deltas[0]
        else:
            protocol = Protocol(self.compressor, by_rows(SHAPES, len(groups)), SHAPES, len(groups), seed=0)
            self.lend(protocol, groups)
            means = protocol.reduce(self.algorithm, "all_reduce", deltas)
            self.take_back(protocol, groups)
        for name, p in self.outer_parameters.items():
            p.grad = means[name].view(p.shape)
        self.outer.step()
        self.anchors = {name: p.detach().clone() for name, p in self.outer_parameters.items()}

    def lend(self, protocol, groups):
        """Each rank's residuals, cut for these ranks; where a rank has none of a part, zeros."""
        for rank, number in enumerate(groups):
            for name, pieces in protocol.cut.items():
                for part in pieces:
                    for phase in ("scatter", "gather"):
                        kept = self.residuals.get((number, phase, name))
                        if kept is not None:
                            cut = kept[part.at : part.at + part.numel].clone()
                            protocol.residuals[rank, phase, name, part.at] = cut
        protocol.generators = {
            (groups.index(number), phase, name): kept
            for (number, phase, name), kept in self.generators.items()
            if number in groups
        }
        seeded = Protocol(self.compressor, {}, SHAPES, 0, seed=0)
        protocol.generator = lambda rank, phase, name: (
            protocol.generators[rank, phase, name]
            if (rank, phase, name) in protocol.generators
            else protocol.generators.setdefault((rank, phase, name), seeded.generator(groups[rank], phase, name))
        )

    def take_back(self, protocol, groups):
        """Residuals as whole parameters; what a rank keeps of means is of the rows that it owns now."""
        for rank, number in enumerate(groups):
            for name, shape in SHAPES.items():
                for phase in ("scatter", "gather"):
                    kept = torch.zeros(torch.Size(shape).numel())
                    for part in protocol.cut[name]:
                        if phase == "scatter" or part.row == rank:
                            key = rank, phase, name, part.at
                            kept[part.at : part.at + part.numel] = protocol.residuals.get(key, torch.zeros(part.numel))
                    self.residuals[number, phase, name] = kept
        for (rank, phase, name), generator in protocol.generators.items():
            self.generators[groups[rank], phase, name] = generator


def simulated(results, compressor="onebit", algorithm="exchange", steps=STEPS):
    """The anchors after each round of a run, from the rounds and the joins that its groups noted."""
    rounds, joins = {}, {}
    for number, result in results:
        for step, groups, *_ in result["rounds"] if result else ():
            if groups:
                assert rounds.setdefault(step, groups) == groups, "groups disagree on who closed a round"
        for step, source in result["joined"] if result else ():
            joins.setdefault(step, []).append((number, source))
    run = Simulated(compressor, algorithm)
    anchors = {0: run.anchors}
    everyone = {number for number, _ in results}
    for number in everyone:
        run.join(number)
    for last in range(H - 1, steps, H):
        for number, source in joins.get(last + 1 - H, ()) if last + 1 > H else ():
            run.join(number, source)
        for number in everyone:
            run.train(number, range(last + 1 - H, last + 1))
        run.average(rounds[last])
        for number in everyone:
            run.settle(number)
        anchors[last + 1] = run.anchors
    return anchors, rounds


def assert_simulated(results, **given):
    """Every group has the simulation's anchors after each round that it closed; return the rounds."""
    anchors, rounds = simulated(results, **given)
    for number, result in results:
        for step, found in result["anchors"].items() if result else ():
            for name, anchor in found.items():
                assert torch.equal(anchor, anchors[step][name]), f"group {number}, {name}, after step {step}"
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


def test_a_group_whose_state_does_not_arrive_asks_for_it_again(tmp_path, lighthouse):
    run = Run(tmp_path, lighthouse, options={"algorithm": "exchange"})
    run.together(*range(3), group_1={"kill": ("transfer", KILLED)})
    results = run.ended()
    rounds = assert_simulated(results)
    assert rounds[STEPS - 1] == (0, 1, 2)
    assert any(not groups for _, groups, *_ in results[1][1]["rounds"]), "it missed an average"


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
    held = {"hold": (KILLED + 2, str(tmp_path / "3.ready"))}
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
    held = {"hold": (KILLED + 2, str(tmp_path / "3.ready"))}  # in a step until it is there
    run = Run(tmp_path, lighthouse, options={"algorithm": "exchange", "compressor": "natural"}, **held)
    run.together(*range(3), group_1={"kill": ("second exchange", KILLED)})
    run.started[1][1].join()
    run.start(1)
    results = run.ended()
    rounds = assert_simulated(results, compressor="natural")
    ((joined, _),) = results[3][1]["joined"]
    assert joined > KILLED and rounds[joined - 1] == (0, 2) and rounds[joined + H - 1] == (0, 1, 2)
