"""The rules of the house that no linter knows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shiplap
from shiplap.families import FAMILIES
from shiplap.overlap import registry

SOURCE = Path(shiplap.__file__).parent
ROOT = SOURCE.parents[1]
FILES = sorted(SOURCE.rglob("*.py"))


def test_public_names_are_sorted_and_exist() -> None:
    assert shiplap.__all__ == sorted(shiplap.__all__)
    assert all(hasattr(shiplap, name) for name in shiplap.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_small_and_in_packages(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert (path.parent / "__init__.py").exists()
    assert not {"utils", "common", "helpers"} & {part.removesuffix(".py") for part in path.parts[len(SOURCE.parts) :]}


def test_no_line_asks_for_a_family() -> None:
    """What is particular to a family stands in its file; others ask what a model has."""
    names = "|".join(FAMILIES)
    asks = re.compile(rf"""(==|!=|in) [(]?["']({names})["']""")
    for path in FILES:
        if path.parent.name != "families":
            assert not asks.search(path.read_text()), path


def test_the_changelog_knows_this_version() -> None:
    assert f"## {shiplap.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{shiplap.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_importing_does_nothing() -> None:
    """No logging set-up and no environment writes at import."""
    for path in FILES:
        for line in path.read_text().splitlines():
            assert not re.match(r"(logging\.basicConfig|os\.environ\[|torch\.set_|torch\.manual_seed)", line), path


def test_the_table_of_methods_is_the_registry_s() -> None:
    assert registry.markdown_table() in (ROOT / "docs" / "tensor_parallel.md").read_text()


def test_no_file_but_its_own_names_a_method() -> None:
    """What a collective is called, and how messages travel, are other things of the same name."""
    names = {kind.name for kind in registry.kinds()}
    for path in set(FILES) - set((SOURCE / "overlap").glob("*.py")) - {SOURCE / "dist" / "collectives.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.partition(":")[0] not in names, f"{path}:{node.lineno}: {node.value}"


def test_the_file_map_is_that_of_the_files() -> None:
    check = subprocess.run([sys.executable, ROOT / "scripts" / "file_map.py", "--check"], check=False)
    assert check.returncode == 0, "run scripts/file_map.py"


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
