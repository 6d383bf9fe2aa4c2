"""No module imports itself, light commands stay light, and a source digest follows the imports; layers: `make lint`.

Of `base/source_digest.py`.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from gradwire.base.errors import BadInput
from gradwire.base.extras import EXTRAS
from gradwire.base.source_digest import PACKAGE, closure, imports, module_file, source_digest
from gradwire.cli import COMMANDS

PACKAGES = {"yaml": "pyyaml", "pydantic_core": "pydantic"}  # by the name that is imported
HEAVY = ("torch", "transformers", "pandas", "pyarrow", "datasets", "tokenizers", "matplotlib", "tensorboard")
MAKERS = {  # of tensors, by torch's default type and device unless they are given
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
COMMANDS_HERE = sorted(name for name, command in COMMANDS.items() if module_file(command.module))


def rooms_of(package: Path) -> dict[Path, str]:
    """Every file of the package with its room, such as `comm/compressors`; the package's own `__init__` is in none."""
    files = {file: file.relative_to(package).with_suffix("") for file in package.rglob("*.py")}
    return {file: "/".join(path.parts[:2]) for file, path in files.items() if path.parts[0] != "__init__"}


def external(room: str) -> set[str]:
    """The modules that the files of a room import, at any depth of their functions."""
    return {name for file, found in rooms_of(PACKAGE).items() if found == room for name in imports(file.read_bytes())}


def in_python(script: str, *args: str) -> dict:
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def modules(package: Path) -> dict[str, set[str]]:
    """The imports of every module from the package; a package counts only where a name that it defines is imported."""

    def imported(file: Path) -> set[str]:
        found = {name: module_file(name, package) is not None for name in imports(file.read_bytes())}
        parts = {name: [other for other in found if other.rpartition(".")[0] == name] for name in found}
        return {name for name, here in found.items() if here and not (parts[name] and all(map(found.get, parts[name])))}

    names = {file: ".".join(file.relative_to(package.parent).with_suffix("").parts) for file in rooms_of(package)}
    return {name.removesuffix(".__init__"): imported(file) for file, name in names.items()}


def circles(package: Path) -> list[str]:
    """Every module that imports itself by way of others."""

    def reached(name: str) -> set[str]:
        seen, pending = set[str](), {name}
        while pending:
            pending = {target for one in pending for target in graph.get(one, ())} - seen
            seen |= pending
        return seen

    graph = modules(package)
    return [name for name in graph if name in reached(name)]


def test_no_module_imports_itself_by_way_of_others():
    assert circles(PACKAGE) == []


def test_a_circle_would_be_seen(tmp_path):
    package = tmp_path / "gradwire"
    for name, text in (
        ("a", "from gradwire.room import b"),
        ("b", "def f():\n    import gradwire.room.c"),
        ("c", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gradwire.room.a import x"),
        ("d", "from gradwire.room import a"),
    ):
        (package / "room").mkdir(parents=True, exist_ok=True)
        (package / "room" / f"{name}.py").write_text(text)
    assert sorted(circles(package)) == [f"gradwire.room.{name}" for name in "abc"]


def declared() -> set[str]:
    """The packages that pyproject.toml asks for, in its dependencies and its extras."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    wanted = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    return packages(wanted)


def packages(wanted: Iterable[str]) -> set[str]:
    """Names of requirements, without versions; extras of gradwire itself are left out."""
    return {normal(re.match(r"[\w.-]+", name)[0]) for name in wanted} - {"gradwire"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_declared():
    names = {name.split(".")[0] for file in rooms_of(PACKAGE) for name in imports(file.read_bytes())}
    found = {normal(PACKAGES.get(name, name)) for name in names - sys.stdlib_module_names}
    assert {"torch", "pyyaml", "safetensors", "triton"} <= found
    assert found - declared() == {"gradwire"}
    assert "accelerate" in declared()  # examples/trainer.py: transformers' Trainer imports it


def test_a_message_names_the_extra_that_has_the_package():
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    brought = {extra: packages(names) - {"transformers"} for extra, names in project["optional-dependencies"].items()}
    brought["attribution"].add("transformers")  # which the trainer's extra has too
    named = {extra: {normal(PACKAGES.get(name, name)) for name in names} for extra, names in EXTRAS.items()}
    assert named == {extra: names for extra, names in brought.items() if extra != "dev"}


def test_what_is_declared_is_locked():
    root = PACKAGE.parents[1]
    asked, locked = {}, {}
    for what in ("requirements", "requirements-dev"):
        asked[what] = {normal(name) for name in re.findall(r"^[\w.-]+", (root / f"{what}.in").read_text(), re.M)}
        entries = re.findall(r"^([\w.-]+)==.*((?:\n +.*)*)", (root / f"{what}.lock").read_text(), re.M)
        locked[what] = {name for name, _ in entries}
        wanted = {name for name, below in entries if f"-r {what}.in" in below}
        assert asked[what] - wanted <= (locked["requirements"] if what == "requirements-dev" else set())
    assert declared() - asked["requirements"] - asked["requirements-dev"] == {"torch"}  # the Makefile pins it
    assert not locked["requirements"] & locked["requirements-dev"]


def test_the_lock_for_runs_has_what_the_benchmark_asks_for_and_no_tool():
    root = PACKAGE.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = set(re.findall(r"^([\w.-]+)==", (root / "requirements.lock").read_text(), re.M))
    assert packages([*project["dependencies"], *extras["attribution"], *extras["bench"]]) - locked == {"torch"}
    assert not packages(extras["dev"]) & locked


def test_imports_are_absolute():
    assert not [(file, name) for file in rooms_of(PACKAGE) for name in imports(file.read_bytes()) if name[0] == "."]


def test_compressors_send_nothing():
    assert not {name for name in external("comm/compressors") if name.startswith("torch.distributed")}


def by_default(source: str) -> list[str]:
    """The calls that make a tensor of torch's default type or on its default device, which a user may set."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg for keyword in call.keywords}
        numbers = [ast.unparse(each) for each in call.args[1:] if isinstance(each, ast.Constant | ast.Attribute)]
        if name.removeprefix("torch.") in MAKERS and name.startswith("torch.") and not {"dtype", "device"} <= given:
            found.append(ast.unparse(call))
        if name in ("torch.Tensor", "torch.get_default_dtype") or (name == "torch.where" and len(numbers) == 2):
            found.append(ast.unparse(call))
    return found


def test_comm_makes_no_tensor_by_the_default_type_or_device():
    made = {file: by_default(file.read_text()) for file in (PACKAGE / "comm").rglob("*.py")}
    assert len(made) > 50
    assert {str(file): calls for file, calls in made.items() if calls} == {}


def test_a_tensor_by_default_would_be_seen():
    right = "torch.zeros(3, dtype=kind, device=device); torch.where(x, y, 0.0); torch.zeros_like(x); x.new_zeros(3)"
    assert by_default(right) == []
    for wrong in (
        "torch.zeros(3)",
        "torch.tensor([1], device=device)",
        "torch.arange(3, dtype=torch.int64)",
        "torch.where(x, 1.0, math.nan)",
        "torch.Tensor(3)",
    ):
        assert by_default(f"y = {wrong}") == [wrong]


def test_importing_the_config_and_the_reading_rooms_loads_no_torch():
    names = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for file, room in rooms_of(PACKAGE).items()
        if room in ("bench/config", "bench/statistics", "bench/trace", "bench/report")
    ]
    script = "import importlib, json, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    assert "torch" not in in_python(f"{script}; print(json.dumps(list(sys.modules)))", *names)


def test_help_imports_the_standard_library_only():
    script = "from gradwire import cli; cli.main(['--help']); import json, sys; print(json.dumps(list(sys.modules)))"
    loaded = {name.split(".")[0] for name in in_python(script)}
    assert not loaded & {*HEAVY, "numpy", "pydantic", "yaml"}


@pytest.fixture(scope="module")
def helped() -> dict[str, tuple[int, list[str]]]:
    """For every command: the exit code of its `--help`, and the heavy modules that it was the first to load."""
    script = """if True:
        import json, sys
        from gradwire import cli
        commands, heavy = map(json.loads, sys.argv[1:])
        found = {}
        for command in commands:
            before = set(sys.modules)
            try:
                code = cli.main([*command.split(), "--help"])
            except SystemExit as end:
                code = end.code
            found[command] = code, [name for name in heavy if name in sys.modules and name not in before]
        print(json.dumps(found))
        """
    return in_python(script, json.dumps(COMMANDS_HERE), json.dumps(HEAVY))


@pytest.mark.parametrize("command", COMMANDS_HERE)
def test_help_of_every_command_is_light(helped, command):
    assert helped[command] == [0, []]


def python_imports(module: str) -> set[str]:
    """The modules of gradwire that Python loads for an import of the module: at most its closure, by another route."""
    script = "import importlib, json, sys; importlib.import_module(sys.argv[1]); print(json.dumps(list(sys.modules)))"
    return {name for name in in_python(script, module) if name.split(".")[0] == "gradwire"}


def test_the_closure_holds_what_python_loads():
    roots = ["gradwire.bench.launch.launch", "gradwire.bench.config", "gradwire.comm.collectives.world"]
    for root in roots:
        assert python_imports(root) <= set(closure((root,)))


def test_imports_inside_functions_count():
    source = b"import a.b\ndef f():\n    from c import d\n    def g():\n        import e as h\n    from .. import i"
    assert imports(source) == {"a.b", "c", "c.d", "e", "..", "...i"}


def test_only_statements_are_imports():
    quoted = b'"""A text, and \\"""\nimport quoted\n"""\nX = "import e"\n# import f\n'
    statements = b"from a import (  # of a line\n    b,\n    c as d,\n)\nif X:\n\timport g, h.i\n"
    assert imports(quoted + statements) == {"a", "a.b", "a.c", "g", "h.i"}


def test_the_imports_of_every_file_are_those_of_its_syntax_tree():
    for file in PACKAGE.rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        assert imports(file.read_bytes()) == names, file


def edited(package: Path, file: str) -> Path:
    path = package / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n# edited\n")
    return package


@pytest.fixture
def copy(tmp_path) -> Path:
    """A small package of the same name: train imports the loop, and the loop imports files inside a function."""
    files = {
        "__init__.py": "",
        "base/__init__.py": "",
        "base/files.py": "X = 1",
        "bench/__init__.py": "",
        "bench/training/__init__.py": "",
        "bench/training/train.py": "from gradwire.bench.training import loop",
        "bench/training/loop.py": "def f():\n    from gradwire.base.files import X",
        "comm/compressors/__init__.py": "",
        "comm/compressors/methods/int8.py": "import gradwire.base.files",
        "bench/report/__init__.py": "",
        "bench/report/table.py": "import gradwire.bench.training.train",
    }
    for name, text in files.items():
        path = tmp_path / "gradwire" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "gradwire"


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("bench/report/table.py", {"bench.report.table"}),
        ("comm/compressors/methods/int8.py", {"comm.compressors.methods.int8"}),
        ("bench/training/loop.py", {"bench.training.train", "bench.report.table"}),
        ("bench/training/__init__.py", {"bench.training.train", "bench.report.table"}),
        ("base/files.py", {"bench.training.train", "bench.report.table", "comm.compressors.methods.int8"}),
        ("bench/training/unused.py", set()),
    ],
)
def test_an_edit_changes_the_digests_that_depend_on_it(copy, file, changed):
    roots = ["bench.training.train", "bench.report.table", "comm.compressors.methods.int8"]
    before = {root: source_digest(f"gradwire.{root}", package=copy) for root in roots}
    edited(copy, file)
    after = {root: source_digest(f"gradwire.{root}", package=copy) for root in roots}
    assert {root for root in roots if before[root] != after[root]} == changed


def test_training_does_not_depend_on_the_report_or_on_methods_it_does_not_name(tmp_path):
    package = shutil.copytree(PACKAGE, tmp_path / "gradwire")
    roots = [name for name in ("gradwire.bench.training.train", "gradwire.comm.parallel") if module_file(name)]
    before = [source_digest(root, package=package) for root in roots]
    named = source_digest(*roots, "gradwire.comm.compressors.methods.int8", package=package)
    machinery = {package / "comm/compressors/methods" / name for name in ("__init__.py", "none.py")}  # it has float32
    for room in ("bench/report", "bench/statistics", "bench/trace", "comm/compressors/methods"):
        for file in set((package / room).glob("*.py")) - machinery:
            edited(package, str(file.relative_to(package)))
    assert [source_digest(root, package=package) for root in roots] == before
    assert source_digest(*roots, "gradwire.comm.compressors.methods.int8", package=package) != named


def test_a_digest_of_nothing_is_refused():
    with pytest.raises(BadInput, match=r"no module 'gradwire.trainnig'"):
        source_digest("gradwire.trainnig")
