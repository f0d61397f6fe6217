"""Marks by folder, one torch thread, skipping where there is no GPU, and the shared length files."""

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TIERS = ("unit", "numerics", "distributed", "gpu")
# The parts of hf_wlb that import no torch; their docstrings' examples belong to the unit tests.
TORCH_FREE = ("__init__", "workload", "lengths", "packing", "sharding", "staging", "simulator")


def tier_of(path: Path) -> str | None:
    """Name the tier of a test file, or of a module whose docstrings hold examples."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    if parts[0] == "hf_wlb":
        return "unit" if parts[1] in TORCH_FREE else "numerics"
    return parts[1] if parts[0] == "tests" and parts[1] in TIERS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = tier_of(item.path) if item.path.is_relative_to(REPOSITORY) else None
        if tier is not None:
            item.add_marker(tier)


def pytest_collection_finish() -> None:
    # What is imported by now stays. Trainer collects garbage after every training, which takes half a second if it
    # looks through all of that.
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries count what is left when Python ends


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _has_gpu():
        pytest.skip("needs a CUDA device, and this machine has none")
    torch = sys.modules.get("torch")  # never imported from here: the unit tests do without it
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("tests/gpu/" in report.nodeid for report in skipped)
    if count:
        why = "more GPUs or other kernels than this machine has" if _has_gpu() else "a CUDA device"
        terminalreporter.write_line(f"Skipped {count} gpu test{'s' * (count != 1)}: they need {why}.")


class SharedData:
    """The folder of length files beside the repository: `shared_data / name` is a path, or a skip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            pytest.skip(f"{name} is not here: it lies in ../shared/data, which this machine lacks")
        return path


@pytest.fixture(scope="session")
def shared_data() -> SharedData:
    """Give `../shared/data`, seen from the repository; a file that is absent there skips the test."""
    return SharedData(REPOSITORY.parent / "shared" / "data")
