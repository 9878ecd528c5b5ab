"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["cosmos3_model", "kvstore", "nodes", "graph", "serving"]
BELOW = {
    "cosmos3_model": set(),
    "kvstore": set(),
    "nodes": {"cosmos3_model", "kvstore"},
    "graph": {"cosmos3_model", "kvstore", "nodes"},
    "serving": {"cosmos3_model", "kvstore", "nodes", "graph"},
}
MAY_USE_RAY = {"kvstore/actor.py", "nodes/actor.py"}
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
ALL = sorted(
    {*SOURCES, *(path for name in ("tests", "examples", "benchmarks") for path in (ROOT / name).rglob("*.py"))}
)


def imports(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward_and_ray_stays_at_the_walls(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    used = imports(path)
    assert used & set(ROOMS) <= BELOW[room] | {room}
    if room in ("cosmos3_model", "kvstore", "nodes") and str(path.relative_to(ROOT)) not in MAY_USE_RAY:
        assert "ray" not in used


def test_the_store_runs_without_torch() -> None:
    for name in ("store", "pool", "handle", "memory", "region", "local", "actor"):
        assert "torch" not in imports(ROOT / "kvstore" / f"{name}.py"), name


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_rooms_without_a_docstring_explain_nothing() -> None:
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_commands_in_the_documents_are_run_by_a_test_or_marked() -> None:
    """Every command of a fenced block is named here, where the test that runs it is named too."""
    tested = {
        "make demo": "test_examples.py and .ci/run",
        "make test": ".ci/run",
        "make lint": ".ci/run",
        "make bench": "test_benchmarks.py",
        ".venv/bin/python -m pytest": "make test, with every other",
        ".venv/bin/cosmoray snapshot": "test_cli.py",
        ".venv/bin/cosmoray generate": "test_cli.py, as they stand",
        ".venv/bin/cosmoray info": "test_info.py",
        ".venv/bin/cosmoray graph": "test_cli.py",
        ".venv/bin/cosmoray check": "test_cli.py",
        ".venv/bin/python examples/batch.py": "test_examples.py",
        ".venv/bin/python benchmarks/pipeline.py": "test_benchmarks.py",
    }
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for language, block in re.findall(r"```(\w*)\n(.*?)```", document.read_text(), re.S):
            if language not in ("sh", "bash"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split("#")[0].strip()
                known = not command or "needs a GPU" in line or any(command.startswith(name) for name in tested)
                assert known, f"{document.name}: nothing runs {command!r}"


def test_the_page_of_modes_is_made_from_the_code() -> None:
    from graph.document import modes_document

    page = (ROOT / "docs" / "modes.md").read_text()
    assert page == modes_document(), "run: python -m graph.document > docs/modes.md"


def test_tests_that_the_documents_name_exist() -> None:
    defined = {
        name for path in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    for document in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(test_\w+)`", document.read_text()):
            assert name in defined, f"{document.name} names {name}"


def test_nobody_uses_wait_for() -> None:
    """In Python 3.11 it can lose a cancellation, and did: `close` then waited for ever."""
    for path in SOURCES:
        assert "asyncio.wait_for(" not in path.read_text(), path
