"""The doctor on this machine."""

from __future__ import annotations

import socket

from gradwire import cli


def test_two_ranks_collect_and_every_row_is_proven(capsys):
    assert cli.main(["doctor", "--multi_gpu", "--launcher", "spawn"]) == 0
    told = capsys.readouterr().out
    assert "torch" in told and "processors" in told
    assert told.count("ok  ") == 4 and "failed" not in told


def test_a_port_in_use_is_told(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["doctor", "--multi_gpu", "--master_port", str(port)]) == 1
    captured = capsys.readouterr()
    assert "failed       2 ranks collect 16 gradients" in captured.out
    assert str(port) in captured.err
