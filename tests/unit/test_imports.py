"""The structure of hf_wlb: imports point one way, policy needs no torch, one place talks to other processes.

Each check returns the offences it finds, and each is shown to find one in a made-up tree.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_tree import REPOSITORY, imports_of, place, python_files, write_tree

# Documents flow down this list; a module imports from its own part or from earlier rows. Parts of one row may
# use one another too, as long as they do not go round in a circle.
ORDER = (
    ("workload", "lengths", "presets"),
    ("packing",),
    ("sharding",),
    ("staging",),
    ("simulator",),
    ("attention", "loss"),
    ("parallel",),
    ("data",),
    ("profiling", "compilation", "accounting", "argument_names", "training_args", "callbacks", "plots"),
    ("analysis",),
    ("trainer",),
    ("cli",),
)
ROW = {part: row for row, parts in enumerate(ORDER) for part in parts}
POLICY = ("workload", "lengths", "packing", "sharding", "staging", "simulator")
HEAVY = ("torch", "transformers", "accelerate", "datasets", "deepspeed")


def part_edges(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (importing part, imported part or name, where) for every import of hf_wlb inside it."""
    package = root / "hf_wlb"
    for path in python_files(package):
        if path == package / "__init__.py":
            continue  # the export table, held by its own test; its look-ups happen at first use
        part = path.relative_to(package).with_suffix("").parts[0]
        for found in imports_of(path, root):
            names = found.target.split(".")
            if names[0] == "hf_wlb":
                yield part, names[1] if len(names) > 1 else "", found.where


def wrong_directions(root: Path) -> list[str]:
    """Name every part without a place in the order, and every import against it."""
    offences = []
    for path in sorted((root / "hf_wlb").iterdir()):
        is_part = path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
        if is_part and path.stem not in ROW and path.stem != "__init__":
            offences.append(f"{path.relative_to(root)} has no place in the order of parts")
    for part, target, where in part_edges(root):
        if part not in ROW or target == "__version__":
            continue
        if target not in ROW:
            what = target or "hf_wlb itself"
            offences.append(f"{where}: imports {what}, which is no part of the order")
        elif ROW[target] > ROW[part]:
            offences.append(f"{where}: {part} imports the later {target}")
    return offences + circles(root)


def circles(root: Path) -> list[str]:
    """Name the parts of one row that import one another in a circle."""
    uses: dict[str, set[str]] = {}
    for part, target, _ in part_edges(root):
        if target != part and part in ROW and ROW.get(target) == ROW[part]:
            uses.setdefault(part, set()).add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for target in uses.get(ahead.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    ahead.append(target)
        return seen

    round_trip = sorted(part for part in uses if part in reached(part))
    return [f"these parts import one another in a circle: {', '.join(round_trip)}"] if round_trip else []


def heavy_modules_loaded_by_policy(root: Path) -> str:
    """Import hf_wlb and every submodule of its policy parts in a fresh process; say what heavy came along."""
    script = f"""
import importlib, importlib.util, pkgutil, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
sys.path.insert(0, {str(root)!r})
import hf_wlb
loaded = ["hf_wlb"]
for name in {[f"hf_wlb.{part}" for part in POLICY]!r}:
    if importlib.util.find_spec(name) is None:
        continue
    module = importlib.import_module(name)
    loaded.append(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
        loaded.append(found.name)
heavy = [name for name in {HEAVY!r} if name in sys.modules]
print("; ".join(f"importing {{', '.join(loaded)}} loads {{name}}" for name in heavy))
"""
    # -P, an unrelated folder and only Python's own finders (an editable installation brings one that adds what the
    # tree lacks): what is imported is the tree under `root`, nothing that lies around.
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def talk_outside_parallel(root: Path) -> list[str]:
    """Name the code outside hf_wlb/parallel that uses torch.distributed or DeepSpeed; prose may name both."""
    package = root / "hf_wlb"
    offences = []
    for path in python_files(package):
        if path.is_relative_to(package / "parallel"):
            continue
        offences += [
            f"{found.where}: imports {found.target}" for found in imports_of(path, root) if _talks(found.target)
        ]
        for node in ast.walk(ast.parse(path.read_text())):
            used = _used(node)
            if used is not None and _talks(used):
                offences.append(f"{place(path, node, root)}: uses {used}")
    return offences


def _talks(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in ("torch.distributed", "deepspeed"))


def _used(node: ast.AST) -> str | None:
    """Spell `torch.distributed` where it is an attribute, and the text of import_module("deepspeed")."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__"):
            return str(node.args[0].value)
    return None


def export_table(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read `_EXPORTS` and the TYPE_CHECKING imports of hf_wlb/__init__.py, both as name -> module."""
    table: dict[str, str] = {}
    typed: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_EXPORTS" and node.value:
            table = ast.literal_eval(node.value)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for found in node.body:
                assert isinstance(found, ast.ImportFrom)
                typed |= {alias.asname or "": found.module or "" for alias in found.names}
    return table, typed


def test_imports_point_backwards_along_the_flow_of_documents() -> None:
    assert wrong_directions(REPOSITORY) == []


def test_policy_loads_no_torch() -> None:
    assert heavy_modules_loaded_by_policy(REPOSITORY) == ""


def test_only_parallel_talks_to_other_processes() -> None:
    assert talk_outside_parallel(REPOSITORY) == []


def test_type_checkers_see_exactly_the_lazy_names() -> None:
    table, typed = export_table(REPOSITORY / "hf_wlb" / "__init__.py")
    assert table and table == typed


def test_a_lazy_name_is_the_one_in_its_module() -> None:
    import hf_wlb
    from hf_wlb.packing import StepPlanner

    assert hf_wlb.StepPlanner is StepPlanner
    assert vars(hf_wlb)["StepPlanner"] is StepPlanner  # kept after its first use


def test_an_unknown_name_is_an_attribute_error_as_from_any_module() -> None:
    import hf_wlb

    assert not hasattr(hf_wlb, "NoSuchName")
    with pytest.raises(AttributeError, match="module 'hf_wlb' has no attribute 'NoSuchName'"):
        _ = hf_wlb.NoSuchName


# ---- negative controls: each check finds what it is there to find ----


@pytest.mark.parametrize(
    ("files", "offence"),
    [
        (
            {"hf_wlb/packing/steady.py": "def f():\n    from hf_wlb.trainer import WLBTrainer\n"},
            "hf_wlb/packing/steady.py:2: packing imports the later trainer",
        ),
        (
            {"hf_wlb/packing/sub/steady.py": "from ...data.collator import x\n"},
            "hf_wlb/packing/sub/steady.py:1: packing imports the later data",
        ),
        (
            {"hf_wlb/workload.py": "from . import sharding\n"},
            "hf_wlb/workload.py:1: workload imports the later sharding",
        ),
        (
            {"hf_wlb/workload.py": "import hf_wlb.cli as c\n"},
            "hf_wlb/workload.py:1: workload imports the later cli",
        ),
        ({"hf_wlb/extras.py": ""}, "hf_wlb/extras.py has no place in the order of parts"),
        (
            {"hf_wlb/data/x.py": "from hf_wlb import StepPlanner\n"},
            "hf_wlb/data/x.py:1: imports StepPlanner, which is no part of the order",
        ),
        (
            {"hf_wlb/accounting.py": "import hf_wlb.plots\n", "hf_wlb/plots.py": "import hf_wlb.accounting\n"},
            "these parts import one another in a circle: accounting, plots",
        ),
    ],
)
def test_control_a_wrong_direction_is_found(tmp_path: Path, files: dict[str, str], offence: str) -> None:
    good = {"hf_wlb/__init__.py": "", "hf_wlb/trainer.py": "from hf_wlb.packing import steady\n"}
    assert wrong_directions(write_tree(tmp_path, good)) == []
    assert wrong_directions(write_tree(tmp_path, files)) == [offence]


@pytest.mark.parametrize("place", ["hf_wlb/__init__.py", "hf_wlb/packing/deep/reader.py"])
def test_control_a_torch_import_in_policy_is_found(tmp_path: Path, place: str) -> None:
    packages = ("hf_wlb", "hf_wlb/packing", "hf_wlb/packing/deep")
    good = {f"{package}/__init__.py": "" for package in packages} | {"torch.py": "", "hf_wlb/lengths.py": ""}
    assert heavy_modules_loaded_by_policy(write_tree(tmp_path, good)) == ""
    write_tree(tmp_path, {place: "import torch\n"})
    assert heavy_modules_loaded_by_policy(tmp_path).endswith("loads torch")


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch; rank = torch.distributed.get_rank()",
        "import deepspeed",
        "from deepspeed.pipe import PipelineModule",
        "import importlib; deepspeed = importlib.import_module('deepspeed.pipe')",
    ],
)
def test_control_talk_outside_parallel_is_found(tmp_path: Path, line: str) -> None:
    good = {"hf_wlb/parallel/mesh.py": line, "hf_wlb/accounting.py": '"""DeepSpeed or torch.distributed."""\n'}
    assert talk_outside_parallel(write_tree(tmp_path, good)) == []
    write_tree(tmp_path, {"hf_wlb/trainer.py": line})
    offences = talk_outside_parallel(tmp_path)
    assert offences and all(offence.startswith("hf_wlb/trainer.py:1: ") for offence in offences)


def test_control_a_name_that_type_checkers_miss_is_found(tmp_path: Path) -> None:
    text = '_EXPORTS: dict[str, str] = {"A": "hf_wlb.a"}\nif TYPE_CHECKING:\n    from hf_wlb.b import A as A\n'
    table, typed = export_table(write_tree(tmp_path, {"__init__.py": text}) / "__init__.py")
    assert (table, typed) == ({"A": "hf_wlb.a"}, {"A": "hf_wlb.b"})
