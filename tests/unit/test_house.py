"""The rules of the house that no linter knows."""

import re
from pathlib import Path

import pytest

import shiplap

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


def test_models_are_wiring() -> None:
    for path in (SOURCE / "models").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path


def test_the_changelog_knows_this_version() -> None:
    assert f"## {shiplap.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{shiplap.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_importing_does_nothing() -> None:
    """No logging set-up and no environment writes at import."""
    for path in FILES:
        for line in path.read_text().splitlines():
            assert not re.match(r"(logging\.basicConfig|os\.environ\[|torch\.set_|torch\.manual_seed)", line), path
