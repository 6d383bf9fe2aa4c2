"""The configuration that `init` writes: it is one, its values are the defaults, and no field is missing."""

import re

import pytest
import yaml

from gradwire import cli
from gradwire.bench.config import Dataset, Gradients, Training, experiment


def test_the_configuration_is_the_defaults_and_names_every_field(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    assert cli.main(["init", "--output", str(path), "--name", "mine"]) == 0
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    made = experiment(yaml.safe_load(text))
    assert (made.name, made.dataset, made.training) == ("mine", Dataset(), Training())
    assert [run.seed for run in made.asked() if run.compressor == "int8"] == [0, 1, 2]
    for model in (Dataset, Training, Gradients):
        for name, field in model.model_fields.items():
            assert field.description is None or re.search(
                rf"^[ #]*{name}:.*# {re.escape(field.description)}", text, re.M
            )
    rest, switched_off = text.split("# gradients:\n")
    loose = f"{rest}gradients:\n" + re.sub(r"(?m)^# ", "", switched_off)
    gradients = experiment(yaml.safe_load(loose)).gradients
    assert gradients == Gradients(compressors=("none",))


@pytest.mark.parametrize(
    ("words", "message"), [(["--name", "a b"], "name"), (["--name", "../up"], "name"), ([], "exists")]
)
def test_bad_input_is_one_message(words, message, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    if not words:
        path.write_text("kept")
    assert cli.main(["init", "--output", str(path), *words]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists() or path.read_text() == "kept"
